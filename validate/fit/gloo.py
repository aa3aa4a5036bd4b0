"""Fits of gloo's collectives on one machine: a mode for each kind, t = base + steps · hop + port bytes / speed.

What is fitted are means. Even on idle cores some calls that usually take 0.2 ms take 4 ms more, as long as a tick of the
scheduler at 250 Hz: threads of gloo that are woken wait for a core. No median shows it, and a step takes the sum of its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from simulator.base.errors import CalibrationError
from simulator.spec.calibration.collective_curves import LinkCurves, Mode, PortCurves, Quality
from simulator.work.collectives.volumes import KINDS, POINT_TO_POINT, Kind, volume
from validate.fit.line import refuse_few
from validate.fit.robust import Array, kept, rounded, spread
from validate.samples import Sample

PORT = "loopback"
_MID_BYTES, _LARGE_BYTES = 64 * 2**10, 64 * 2**20  # where bands of residuals begin
_SMALL_BYTES, _LARGEST = 64 * 2**10, 4  # the base is of calls up to this, the speed of sizes from the largest over this
_NO_TIME = np.array([0.0, 0.0, 1e-13])  # 10 TB/s: no loopback is faster
_BURST_BYTES = 2**20  # broadcasts in a row of at least this show their speed
_DEFAULT_SHARE = 0.5  # of compute lost beside a collective where that was not measured: two threads on one core


@dataclass(frozen=True, slots=True)
class GlooResult:
    """The machine's links, how sure their times are, what was left out and what was refused."""

    links: LinkCurves | None
    port_bytes_per_s: float
    sigma: float
    outliers: tuple[Sample, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    mode: Mode
    speed: float  # port bytes a second
    sigma: float
    residuals: dict[str, list[float]]
    sizes: tuple[float, float]
    count: int


def fit_gloo(samples: Sequence[Sample], source: str) -> GlooResult:
    """Modes of every kind that was measured at enough sizes; the others take all-reduce's."""
    found: dict[Kind, _Kind] = {}
    outliers: list[Sample] = []
    refused: list[str] = []
    for kind in KINDS:
        mine = [s for s in samples if s.kind == "collective" and s["op"] == kind and s["num_ranks"] > 1]
        try:
            if mine:
                found[kind], left_out = _fit(kind, mine)
                found[kind] = _in_bursts(found[kind], kind, samples)
                outliers += left_out
        except CalibrationError as exc:
            refused += [f"{fault.place}: {fault.problem} ({fault.remedy})" for fault in exc.faults]
    if "all_reduce" not in found:
        return GlooResult(None, 0.0, 0.0, tuple(outliers), tuple(refused))
    best = max(one.speed for one in found.values())
    share = _share(samples)
    links = LinkCurves(
        name="gloo",
        library="gloo",
        compute_share=rounded(share if share is not None else _DEFAULT_SHARE, 3),
        ports=(_port(found, best, source),),
    )
    sigma = float(np.median([one.sigma for one in found.values()]))
    return GlooResult(links, best, sigma, tuple(outliers), tuple(refused))


def _fit(kind: Kind, samples: Sequence[Sample]) -> tuple[_Kind, list[Sample]]:
    size = np.array([float(s["size_bytes"]) for s in samples])
    refuse_few(size, f"gloo {kind}")
    forms = [volume(kind, POINT_TO_POINT.get(kind, "ring"), int(s["num_ranks"]), 1) for s in samples]
    rows = np.array([(1.0, float(form.local_steps), float(form.port) * s) for form, s in zip(forms, size, strict=True)])
    time = np.array([s.expected_s for s in samples])
    large = size >= size.max() / _LARGEST
    small = ~large & (size <= max(_SMALL_BYTES, size.min()))
    used = np.ones(size.shape, dtype=bool)
    first = np.log(rows @ _law(rows, time, small, large) / time)
    for some in (small, large):
        used[some] = kept(first[some])
    law = _law(rows, time, small & used, large & used)
    residuals = np.round(np.log(rows @ law / time), 9)
    bands: dict[str, list[float]] = {}
    for one, residual in zip(size[used], residuals[used], strict=True):
        bands.setdefault(_band(float(one)), []).append(abs(float(residual)))
    mode = Mode(efficiency=1.0, base_s=rounded(law[0]), hop_s=rounded(law[1]))
    left_out = [s for s, inside in zip(samples, used, strict=True) if not inside]
    sizes = float(size.min()), float(size.max())
    return _Kind(mode, 1 / law[2], spread(residuals[used]), bands, sizes, int(used.sum())), left_out


def _law(rows: Array, time: Array, small: NDArray[np.bool_], large: NDArray[np.bool_]) -> Array:
    """(base, hop, seconds a byte): the base as calls take it that move next to nothing, the speed as the largest do.

    What lies between travels in a core's caches, and is faster than the units and buckets of a model. Weights must not
    follow a sample's own time, or quick calls would count for more than slow ones, and the mean would be lost.
    """
    moved = rows[:, 2]
    weight = np.zeros(time.shape)
    weight[small] = 1 / (time[small].mean() * np.sqrt(small.sum()))
    weight[large] = 1 / ((time[large] / moved[large]).mean() * moved[large] * np.sqrt(large.sum()))
    columns = rows if len(set(rows[:, 1])) > 1 else rows * (1.0, 0.0, 1.0)
    scale = np.array([1e-4, 1e-5, 1e-9])
    found, _ = nnls(weight[:, None] * columns * scale, weight * time)
    law: Array = np.maximum(found * scale, _NO_TIME)
    return law


def _in_bursts(one: _Kind, kind: Kind, samples: Sequence[Sample]) -> _Kind:
    """Floor and speed as training meets them: ZeRO-1 sends its broadcasts in a row and waits for the last one only.

    A call that is waited for at once also pays for waking both sides. The caller's own part is the stack's.
    """
    burst = [s for s in samples if s.kind == "collective_burst" and s["op"] == kind]
    issue = [s.time_s for s in samples if s.kind == "collective_issue" and s["op"] == kind]
    if not burst or not issue:
        return one
    smallest = min(s["size_bytes"] for s in burst)
    each = float(np.mean([s.expected_s for s in burst if s["size_bytes"] == smallest]))
    floor = max(0.0, each - float(np.median(issue)))
    mode = one.mode.model_copy(update={"base_s": rounded(floor)})
    large = [s for s in burst if s["size_bytes"] >= _BURST_BYTES]
    longer = float(np.mean([s.expected_s for s in large])) - each if large else 0.0
    return replace(one, mode=mode, speed=large[0]["size_bytes"] / longer if longer > 0 else one.speed)


def _band(size: float) -> str:
    return "small" if size < _MID_BYTES else "mid" if size < _LARGE_BYTES else "large"


def _port(found: Mapping[Kind, _Kind], best: float, source: str) -> PortCurves:
    """Efficiencies are of the fastest kind's speed: a loopback has no data sheet."""
    modes: dict[str, Mode] = {}
    for kind in KINDS:
        one = found.get(kind, found["all_reduce"])
        name = f"{POINT_TO_POINT.get(kind, 'ring')}/{kind}"
        modes[name] = one.mode.model_copy(update={"efficiency": rounded(one.speed / best)})
    modes["ring/simple"] = modes["ring/all_reduce"]
    bands = {
        name: [r for one in found.values() for r in one.residuals.get(name, [])] for name in ("small", "mid", "large")
    }
    every = [r for band in bands.values() for r in band]
    numbers: dict[str, float] = {}
    for name, residuals in bands.items():
        for p in (50, 95):
            numbers[f"{name}_p{p}"] = rounded(float(np.percentile(residuals or every, p)))
    return PortCurves(
        name=PORT,
        family="host",
        bytes_per_s=rounded(best),
        num_channels=1,
        modes=modes,
        source=source,
        machines={},
        priors=tuple(f"{POINT_TO_POINT.get(k, 'ring')}/{k}" for k in KINDS if k not in found),
        quality=Quality(
            **numbers,
            between_machines=0.0,
            num_samples=sum(one.count for one in found.values()),
            min_bytes=int(min(one.sizes[0] for one in found.values())),
            max_bytes=int(max(one.sizes[1] for one in found.values())),
        ),
    )


def _share(samples: Sequence[Sample]) -> float | None:
    """Share of compute lost beside a collective: the pair took `both`, compute alone `work`, the collective alone `c`.

    The engine slows compute by the share while the collective lasts: work done beside it is (1 − share) · c, so
    both = c + work − (1 − share) · c, and share = (both − work) / c, at most 0.9 (the engine's limit).
    """
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    for s in samples:
        if s.kind == "overlap":
            cells.setdefault((s["op"], s["size_bytes"], s.rank), {})[s["what"]] = s.expected_s
    shares = [
        (cell["both"] - cell["compute"]) / cell["collective"]
        for cell in cells.values()
        if {"both", "compute", "collective"} <= cell.keys()
    ]
    return min(0.9, max(0.0, float(np.median(shares)))) if shares else None
