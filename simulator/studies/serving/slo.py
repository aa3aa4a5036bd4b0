"""Slo: what percentiles of a request's times may be, in seconds or as people write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from simulator.base.errors import ArgumentError, Fault
from simulator.base.units import UnitError, format_seconds, parse_seconds

Figure = Literal["ttft", "tpot", "latency"]
FIGURES: Final[tuple[Figure, ...]] = ("ttft", "tpot", "latency")
USUAL_PERCENTILE: Final = 99.0  # of a limit that names none
_EXAMPLE: Final = "500ms, or percentiles as p95=500ms"

Times = float | Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a percentile of a figure may be at most."""

    name: Figure
    percentile: float
    limit_s: float

    @property
    def words(self) -> str:
        """As "ttft p95"."""
        return f"{self.name} p{self.percentile:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits on a request's time to first token, time per output token, and whole latency; None: no limit.

    A number of seconds limits the 99th percentile; {95: 0.5, 50: 0.2} limits those percentiles.
    Raises ArgumentError with every limit that is no time, every unknown percentile and every contradiction.
    """

    ttft_s: Times | None = None
    tpot_s: Times | None = None
    latency_s: Times | None = None

    def __post_init__(self) -> None:
        faults = [
            Fault(place=f"Slo({name}_s=)", problem=problem)
            for name in FIGURES
            for problem in problems(_by_percentile(getattr(self, f"{name}_s")))
        ]
        ArgumentError.raise_for(faults)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All of them: ttft, tpot, latency; low percentiles first."""
        return tuple(
            Limit(name=name, percentile=percentile, limit_s=limit_s)
            for name in FIGURES
            for percentile, limit_s in sorted(_by_percentile(getattr(self, f"{name}_s")).items())
        )

    @property
    def any(self) -> bool:
        return bool(self.limits)


def _by_percentile(times: Times | None) -> dict[float, float]:
    if times is None:
        return {}
    return dict(times) if isinstance(times, Mapping) else {USUAL_PERCENTILE: times}


def problems(times: Mapping[float, float]) -> list[str]:
    """What is wrong with the limits of one figure, by percentile."""
    found = []
    for percentile, limit_s in times.items():
        if not 0 < percentile < 100:
            found.append(f"p{percentile:g} is no percentile: above 0 and below 100, as p95")
        if not (limit_s > 0 and math.isfinite(limit_s)):
            found.append(f"a limit must be a time above zero; p{percentile:g} is {limit_s:g} s")
    for (low, low_s), (high, high_s) in pairwise(sorted(times.items())):
        if 0 < high_s < low_s:
            contradiction = (
                f"p{high:g} within {format_seconds(high_s)} contradicts p{low:g} within {format_seconds(low_s)}"
            )
            found.append(f"{contradiction}: a higher percentile is never lower")
    return found


def read_times(text: str) -> dict[float, float]:
    """Limits by percentile from "500ms" (the 99th) or "p50=200ms,p95=1s". Raises UnitError with every fault."""
    found: dict[float, float] = {}
    wrong: list[str] = []
    remedy = _EXAMPLE
    for part in text.split(","):
        name, equals, time = (piece.strip() for piece in part.partition("="))
        percentile = _percentile(name) if equals else USUAL_PERCENTILE
        if percentile is None:
            wrong.append(f"{name!r} is no percentile, as p95")
            continue
        if percentile in found:
            wrong.append(f"p{percentile:g} is given twice")
        time = time if equals else name
        if time.startswith("-"):
            wrong.append(f"a limit must be above zero; it is {time}")
            continue
        try:
            found[percentile] = parse_seconds(time)
        except UnitError as exc:
            wrong.append(exc.problem)
            remedy = exc.remedy if "," not in text else remedy
    wrong += problems(found)
    if wrong:
        raise UnitError("; ".join(wrong), remedy)
    return found


def _percentile(name: str) -> float | None:
    try:
        return float(name[1:]) if name[:1] in ("p", "P") else None
    except ValueError:
        return None
