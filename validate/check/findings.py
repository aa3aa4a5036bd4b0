"""What is wrong with a machine, as findings: a slow rank, a regression, a drift, a part that is missing or throttled."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from scipy.stats import theilslopes

from validate.check.components import Component, Measured, against_baseline, against_peers, measured, pooled, worker_of
from validate.check.judged import Judged, corrected, judge, scale_of
from validate.samples import SampleFile

THRESHOLD: Final = 0.05  # two cards of one kind differ by less, and so do two runs of one card on an idle machine
SURE: Final = 0.001  # after correction; measurements of one run are not quite independent
SPREADS: Final = 4.0  # of the healthy ranks' own differences
_HARDWARE: Final = ("hardware slowdown", "hardware thermal", "power brake")
DRIFT_SURE: Final = 0.01
_FEWEST_RUNS: Final = 4  # a slope of three points has no interval
Kind = Literal["slow", "regression", "improvement", "drift", "missing", "failed", "throttled", "ok"]
BAD: Final = frozenset({"slow", "regression", "drift", "missing", "failed", "throttled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part of the machine and what was found. confidence: 1 - p, corrected for how many parts were looked at."""

    kind: Kind
    component: Component
    judged: Judged | None = None
    confidence: float = 1.0
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in BAD

    @property
    def line(self) -> str:
        """The finding in one line."""
        if self.judged is None:
            return f"{self.kind}: {self.component}: {self.detail}"
        j = self.judged
        than = f"{j.ratio:.3f} x {self.detail} ({j.low:.3f} to {j.high:.3f}, {j.count} measurements)"
        return f"{self.kind}: {self.component}: {than}, confidence {100 * self.confidence:.4g} %"

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "kind": self.kind,
            "what": self.component.what,
            "who": self.component.who,
            "category": self.component.category,
        }
        if self.judged is not None:
            one = self.judged
            data |= {"ratio": one.ratio, "low": one.low, "high": one.high, "count": one.count}
        return data | {"confidence": self.confidence, "detail": self.detail}


def check(new: SampleFile, baselines: Sequence[SampleFile], threshold: float = THRESHOLD) -> list[Finding]:
    """Everything that was found of `new`, bad or not, in the order of its parts. baselines: earlier files, oldest first."""
    latest, earlier = measured(new), [measured(one) for one in baselines]
    found = [*slow(latest, threshold), *failures(new)]
    if earlier:
        before = pooled(earlier)
        found += [*_changed(latest, before, threshold), *_missing(latest, before)]
        if len(earlier) + 1 >= _FEWEST_RUNS:
            found += _drifts([*earlier, latest], threshold)
    return sorted(found, key=lambda one: (one.component, one.kind))


def _judged(logs: Mapping[Component, Sequence[float]]) -> dict[Component, Judged]:
    """Every part with enough measurements; what is usual of a category's spread is the median of its parts'."""
    logs = {**logs, **_whole_ranks(logs)}
    spreads: dict[tuple[str, str], list[float]] = {}
    for part, values in logs.items():
        spreads.setdefault((part.what, part.category), []).append(scale_of(values))
    usual = {who: statistics.median(found) for who, found in spreads.items()}
    judged = {part: judge(values, usual[part.what, part.category]) for part, values in logs.items()}
    return {part: one for part, one in judged.items() if one is not None}


def _whole_ranks(logs: Mapping[Component, Sequence[float]]) -> dict[Component, list[float]]:
    """All of a rank's own work together: a card that is slow in everything is surer found so than in each part."""
    found: dict[Component, list[float]] = {}
    for part, values in logs.items():
        if part.is_own:
            found.setdefault(Component(part.what, part.who, "all work"), []).extend(values)
    return found


def slow(run: Measured, threshold: float) -> Iterator[Finding]:
    """Ranks that are slower than their peers in this file: by the threshold, by the healthy ones' spread, and surely."""
    judged = _judged(against_peers(run))
    p = corrected({part: one.p_slower for part, one in judged.items()})
    for part, one in judged.items():
        peers = [np.log(other.ratio) for who, other in judged.items() if who.category == part.category and who != part]
        spread = scale_of(peers) if peers else 0.0
        bad = np.log(one.ratio) > max(np.log(1 + threshold), SPREADS * spread) and p[part] < SURE
        yield Finding(
            kind="slow" if bad else "ok", component=part, judged=one, confidence=1 - p[part], detail="its peers"
        )


def _changed(run: Measured, before: Measured, threshold: float) -> Iterator[Finding]:
    judged = _judged(against_baseline(run, before))
    slower = corrected({part: one.p_slower for part, one in judged.items()})
    faster = corrected({part: one.p_faster for part, one in judged.items()})
    for part, one in judged.items():
        if one.ratio > 1 + threshold and slower[part] < SURE:
            yield Finding(
                kind="regression", component=part, judged=one, confidence=1 - slower[part], detail="the baseline"
            )
        elif one.ratio < 1 / (1 + threshold) and faster[part] < SURE:
            yield Finding(
                kind="improvement", component=part, judged=one, confidence=1 - faster[part], detail="the baseline"
            )
        else:
            sure = 1 - min(slower[part], faster[part])
            yield Finding(kind="ok", component=part, judged=one, confidence=sure, detail="the baseline")


def _missing(run: Measured, before: Measured) -> Iterator[Finding]:
    for part in before.keys() - run.keys():
        yield Finding(kind="missing", component=part, detail="in the baseline, and not measured now")


def failures(new: SampleFile) -> list[Finding]:
    """What could not be measured, and GPUs that their hardware held back."""
    return [*_failed(new), *_throttled(new)]


def _failed(new: SampleFile) -> Iterator[Finding]:
    for row in new.failures:
        who = _who(row) if "rank" in row else "run"
        part = Component(worker_of(new), who, str(row["kind"]))
        yield Finding(kind="failed", component=part, detail=str(row["error"])[:200])


def _throttled(new: SampleFile) -> Iterator[Finding]:
    """GPUs that their own hardware held back: cooling or power supply. A power cap is no fault."""
    for row in new.sections:
        why = [name for name in str(row.get("throttled_by", "")).split(", ") if name in _HARDWARE]
        if why:
            detail = (
                f"{', '.join(why)} at {row.get('temperature_c', '?')} °C, {row.get('lowest_sm_clock_mhz', '?')} MHz"
            )
            yield Finding(kind="throttled", component=Component("gpu", _who(row), str(row.get("name"))), detail=detail)


def _who(row: Mapping[str, Any]) -> str:
    return f"rank {row.get('rank', 0)}" + (f" on {row['host']}" if row.get("host") else "")


def _drifts(runs: Sequence[Measured], threshold: float) -> Iterator[Finding]:
    """Parts that become slower run by run: Theil and Sen's slope over the runs, whose whole interval must be above nought."""
    for part in runs[-1]:
        levels = [level(run, runs[-1], part) for run in runs]
        known = [(index, level) for index, level in enumerate(levels) if level is not None]
        if len(known) < _FEWEST_RUNS:
            continue
        numbers, values = zip(*known, strict=True)
        slope, _, low, high = theilslopes(values, numbers, 1 - DRIFT_SURE)
        span = numbers[-1] - numbers[0]
        if low > 0 and slope * span > np.log(1 + threshold):
            ratio, edges = float(np.exp(slope * span)), [float(np.exp(one * span)) for one in (low, high)]
            judged = Judged(
                ratio=ratio, low=edges[0], high=edges[1], p_slower=DRIFT_SURE, p_faster=1.0, count=len(known)
            )
            yield Finding(
                kind="drift", component=part, judged=judged, confidence=1 - DRIFT_SURE, detail=f"{len(known)} runs"
            )


def level(run: Measured, last: Measured, part: Component) -> float | None:
    """The median of what this run and the last one have both measured, against the last."""
    logs = [log - last[part][key] for key, log in run.get(part, {}).items() if key in last[part]]
    return statistics.median(logs) if logs else None
