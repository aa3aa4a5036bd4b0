"""Ranks and hosts that are slower than the others: named, and left out of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from validate.samples import Sample, by_key

MIN_RANKS = 3  # of two that differ nobody can say which is wrong
MIN_SLOW = 0.10  # relative
SPREADS = 4.0
SHARED = frozenset(
    {"collective", "collective_burst", "collective_issue", "overlap", "fsdp2_group", "pair", "rail"}
)  # everybody waits for the slowest: no rank's own speed


def slow_ranks(samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """(host, rank) -> median time over its peers', for those far off: more than 10 % and four spreads of the others."""
    logs: dict[tuple[str, int], list[float]] = {}
    for same in by_key(s for s in samples if s.kind not in SHARED).values():
        if len({(s.host, s.rank) for s in same}) < MIN_RANKS:
            continue
        middle = float(np.median([np.log(s.time_s) for s in same]))
        for s in same:
            logs.setdefault((s.host, s.rank), []).append(float(np.log(s.time_s)) - middle)
    if len(logs) < MIN_RANKS:
        return {}
    medians = {who: float(np.median(found)) for who, found in logs.items()}
    values = np.array(list(medians.values()))
    center = float(np.median(values))
    width = max(1.4826 * float(np.median(np.abs(values - center))), 0.005)
    return {
        who: float(np.exp(value - center))
        for who, value in sorted(medians.items())
        if value - center > max(SPREADS * width, np.log(1 + MIN_SLOW))
    }


def named(slow: Mapping[tuple[str, int], float], samples: Sequence[Sample]) -> list[str]:
    """Who is slow, in words: a rank, or a host where all of its ranks are."""
    hosts: dict[str, set[int]] = {}
    for s in samples:
        hosts.setdefault(s.host, set()).add(s.rank)
    slow_hosts = [h for h, ranks in hosts.items() if h and all((h, rank) in slow for rank in ranks)]
    lines = []
    for host in slow_hosts:
        ratio = float(np.median([slow[host, rank] for rank in hosts[host]]))
        count = sum(s.host == host for s in samples)
        lines.append(f"host {host}: {ratio:.2f} × its peers' time in the median; {count} samples left out")
    for (host, rank), ratio in slow.items():
        if host not in slow_hosts:
            count = sum((s.host, s.rank) == (host, rank) for s in samples)
            where = f"rank {rank}" + (f" of {host}" if host else "")
            lines.append(f"{where}: {ratio:.2f} × its peers' time in the median; {count} samples left out")
    return lines
