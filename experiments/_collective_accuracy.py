"""Collectives in docs/accuracy.md: the published sweeps by machine, and what is predicted of scales and GPUs not fitted."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from simulator.backtest.collectives import SIZE_CLASSES, CollectiveGroup, CollectivesReport, run
from simulator.backtest.text import percent
from validate.fit.link_classes import NETWORKS, PORTS, Array, network_class, port_class
from validate.fit.nccl import errors, fit_network, fit_port, fit_ports
from validate.fit.sweeps import Sample, band, read_samples

HERE = Path(__file__).resolve().parent
TABLE = HERE / "measured" / "collectives.csv.gz"
NOTES = HERE / "collective_notes.toml"
TARGETS = dict(zip(SIZE_CLASSES, (0.20, 0.12, 0.06), strict=True))
_P90 = 2  # the 90th percentile may be twice the median's target

HEAD = """
## Collectives

Predicted against measured times of `experiments/measured/collectives.csv.gz`, by [the rules](reference/collectives-table.md),
`shardwise backtest` on it. A cell is n: median / 90th percentile of |predicted / measured − 1|, then the median difference
of repeats where there are some (the noise floor). Targets: median ≤ 20 %, 12 %, 6 %, 90th percentile at most twice that;
**bold** misses one. Ports and networks are fitted on most of these rows; what a fit says of machines, scales and GPUs it
has not seen stands below.
"""
SCALES = """
### What the fit has not seen

Each line: coefficients fitted on the first set alone, errors on the second (median / 90th percentile of |log(predicted /
measured)|).

| fitted on | predicted | < 64 KiB | 64 KiB – 64 MiB | ≥ 64 MiB |
|---|---|--:|--:|--:|"""


def section() -> Iterator[str]:
    """Lines of the page."""
    report = run(TABLE)
    assert isinstance(report, CollectivesReport)
    yield HEAD
    yield "| size | rows | median | p90 | bias | repeats |"
    yield "|---|--:|--:|--:|--:|--:|"
    for group in report.totals:
        s = group.score
        cells = (str(s.n), percent(s.median_abs_error), percent(s.p90_abs_error), percent(s.bias, signed=True))
        yield f"| {group.size_class} | {' | '.join(cells)} | {percent(group.noise_floor)} |"
    reached = sum(not _missed(group) for group in report.groups)
    yield f"\n{reached} of {len(report.groups)} groups reach both targets.\n"
    yield from _machines(report)
    yield from _left_out(report)
    yield SCALES
    yield from _unseen([sample for sample, _ in read_samples(TABLE) if sample is not None])


def _missed(group: CollectiveGroup) -> bool:
    limit = TARGETS[group.size_class]  # type: ignore[index]  # a group's class is one of them
    return (group.score.median_abs_error or 0) > limit or (group.score.p90_abs_error or 0) > _P90 * limit


def _machines(report: CollectivesReport) -> Iterator[str]:
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for group in report.groups:
        source = group.source.split("@")[0].removeprefix("github:").removeprefix("https://github.com/")
        s = group.score
        text = f"{s.n}: {percent(s.median_abs_error)} / {percent(s.p90_abs_error)}"
        text += f" ({percent(group.noise_floor)})" if group.noise_floor is not None else ""
        cell = f"**{text}**" if _missed(group) else text
        rows.setdefault((source, group.machine, group.collective), {})[group.size_class] = cell
    yield f"| source | machine | collective | {' | '.join(SIZE_CLASSES)} |"
    yield "|---|---|---|--:|--:|--:|"
    for key, cells in rows.items():
        yield f"| {' | '.join(key)} | {' | '.join(cells.get(name, '') for name in SIZE_CLASSES)} |"


def _left_out(report: CollectivesReport) -> Iterator[str]:
    logged, agree = report.logged
    yield f"\nThe algorithm agrees with the log in {agree} of the {logged} rows whose log names it.\n"
    flagged: dict[str, int] = {}
    for outcome in report.outcomes:
        if outcome.degraded:
            flagged[outcome.degraded] = flagged.get(outcome.degraded, 0) + 1
    yield "Flagged as no error of the model, neither fitted nor scored:\n"
    yield from (f"- {count} rows: {reason}." for reason, count in flagged.items())
    yield "\nWhat misses, and why:\n"
    notes = tomllib.loads(NOTES.read_text(encoding="utf-8"))["note"]
    yield from (f"- **{note['what']}**: {note['why']}" for note in notes)


Pick = Callable[[Sample], bool]


def _unseen(samples: Sequence[Sample]) -> Iterator[str]:
    for fitted, predicted, train, test in _splits():
        seen, unseen = [s for s in samples if train(s)], [s for s in samples if test(s)]
        yield _line(fitted, predicted, _errors(samples, seen, unseen), unseen)
    parts = {n: [s for s in samples if not s.network and port_class(s.call) == n] for n in PORTS}
    for name, relative in (("nvlink4", "nvlink3 and nvlink5"), ("nvlink5", "nvlink4")):
        tables = fit_ports({n: part if n != name else [] for n, part in parts.items()})
        yield _line(f"{relative}, scaled by the data sheet", name, errors(parts[name], tables[name]), parts[name])


def _splits() -> Iterator[tuple[str, str, Pick, Pick]]:
    """(fitted on, predicted, who is fitted, who is predicted)."""
    alone = "one node of H100 and H200"
    yield (
        f"{alone}, 2 and 4 GPUs",
        "8 GPUs",
        lambda s: _port(s, "nvlink4") and s.call.place.num_ranks < 8,
        lambda s: _port(s, "nvlink4") and s.call.place.num_ranks == 8,
    )
    for first, second, port in (("H100", "H200", "nvlink4"), ("B200", "B300", "nvlink5"), ("B200", "GB200", "nvlink5")):
        yield (
            f"{first}, one node",
            second,
            lambda s, g=first, p=port: _port(s, p) and s.gpu.startswith(g),  # type: ignore[misc]
            lambda s, g=second, p=port: _port(s, p) and s.gpu.startswith(g),  # type: ignore[misc]
        )
    for name in ("infiniband", "slingshot", "slingshot-software", "sockets"):
        yield (
            f"{name}, 2 nodes",
            "4 to 10 nodes",
            lambda s, n=name: _net(s, n) and s.call.place.num_domains == 2,  # type: ignore[misc]
            lambda s, n=name: _net(s, n) and s.call.place.num_domains > 2,  # type: ignore[misc]
        )


def _port(sample: Sample, name: str) -> bool:
    return not sample.network and port_class(sample.call) == name


def _net(sample: Sample, name: str) -> bool:
    return bool(sample.network) and network_class(sample.call) == name


def _errors(every: Sequence[Sample], seen: Sequence[Sample], unseen: Sequence[Sample]) -> Array:
    """Of `unseen`, by a fit on `seen`; a network's fit holds the ports, which all single nodes give."""
    if not seen[0].network:
        return errors(unseen, fit_port(seen, port_class(seen[0].call)))
    ports = fit_ports({n: [s for s in every if _port(s, n)] for n in PORTS})
    name = network_class(seen[0].call)
    assert name in NETWORKS
    return errors(unseen, fit_network(seen, name, ports), ports)


def _line(fitted: str, predicted: str, error: Array, samples: Sequence[Sample]) -> str:
    cells = []
    for name in ("small", "mid", "large"):
        part = np.abs([e for e, s in zip(error, samples, strict=True) if band(s.call.size_bytes) == name])
        n = part.size
        cells.append(f"{percent(float(np.median(part)))} / {percent(float(np.percentile(part, 90)))}" if n else "")
    return f"| {fitted} | {predicted} | {' | '.join(cells)} |"
