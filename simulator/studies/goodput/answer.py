"""The answer: the days of a run, the share that is training, the cost, and the checkpoint interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import InputError
from simulator.base.sums import summed
from simulator.base.units import format_duration
from simulator.predict import Prediction, Source
from simulator.predict.energy import RunEnergy
from simulator.spec.cluster import Cluster
from simulator.spec.prices import AtPrice, Prices
from simulator.studies.goodput.checkpoint_interval import daly_s, expected_s
from simulator.studies.goodput.failures import DAY_S, JobSize
from simulator.studies.goodput.run import ASSUMED, LongRun
from simulator.studies.goodput.spreads import slowest
from simulator.studies.goodput.timeline import PARTS, Conditions, SimulatedRun, expected_interruptions, play
from simulator.work.checkpoint import Saving

Progress = Callable[[int, int], None]  # runs played, runs in all

_LEVELS: Final = (5.0, 50.0, 95.0)
MAX_INTERRUPTIONS: Final = 50_000_000  # of all runs together: more than a minute
_USUAL: Final = 2_000_000  # interruptions of all runs that are played where nobody says how many: some seconds
_LEAST_RUNS: Final = 20
_MANY: Final = 1_000_000  # of one run: one every minute for two years
_TRIED: Final = (0.5, 1.0, 2.0)  # of the interval, played beside it with the same failures
_Z90: Final = NormalDist().inv_cdf(0.95)  # half a 90 % interval, in sigmas


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the runs played: its ends hold 90 % of them."""

    p5: float
    p50: float
    p95: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Mean seconds of a run that a part takes, and its share of the whole."""

    part: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Training between checkpoints, and the goodput of the runs played with it."""

    interval_s: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost(AtPrice):
    """What the run costs at one price of the user's file; GPUs are paid for whether they train, wait or stand by."""

    cost: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A long run. days, dollars and costs: with the step's own uncertainty. goodput: training that counts over wall-clock.

    step_s, steps: predicted, and to take. mtbf_s: mean time between interruptions of the whole job; None: none strike.
    interval_s: training between checkpoints, chosen by Daly's formula (interval_is_optimal) or given. expected_days: the
    closed form, where hosts are neither short nor slow; it takes every interruption for an unannounced one.
    interruptions: mean number by cause.
    """

    model: str
    cluster: str
    num_devices: int
    tokens: int
    steps: int
    step_s: float
    mtbf_s: float | None
    interval_s: float
    interval_is_optimal: bool
    saving: Saving
    restart_s: float
    days: Spread
    goodput: Spread
    dollars: Spread | None
    costs: tuple[RunCost, ...]
    parts: tuple[Share, ...]
    interruptions: tuple[tuple[str, float], ...]
    intervals: tuple[Interval, ...]
    expected_days: float | None
    replicas: int
    seed: int
    sources: tuple[Source, ...]
    energy: RunEnergy | None = None  # of the mean run, where it was asked for


def goodput(
    prediction: Prediction,
    run: LongRun,
    saving: Saving,
    load_s: float,
    *,
    cluster: Cluster,
    prices: Prices | None = None,
    progress: Progress | None = None,
) -> Goodput:
    """Simulate a run of these steps. saving: one checkpoint; load_s: time to read it back.

    Raises InputError where the cluster has no price, or where interruptions leave next to no time to train.
    """
    if prices is not None:
        prices.of(cluster)  # an error now, not after all runs
    size = JobSize.of(cluster, prediction.num_devices)
    tokens = run.tokens if run.tokens is not None else (run.steps or 0) * prediction.tokens_per_step
    steps = -(-tokens // prediction.tokens_per_step)
    late, late_sigma = slowest(run.jitter, size.hosts)
    step_s = float(prediction.step_s)
    work_s = steps * step_s * (1 + late)
    conditions = _conditions(run, saving, load_s, size=size, step_s=step_s, work_s=work_s)
    rate = summed(each for _, each in conditions.causes)
    mtbf_s, pauses = 1 / rate if rate else inf, (conditions.interval_s, conditions.restart_s)
    run = _in_seconds(conditions, run)
    _refuse_endless(conditions, run)
    played, tried = _played(conditions, run, step_s, progress)
    days = _days(played, prediction, run.seed, late_sigma / (1 + late) / sqrt(steps))
    hourly = run.price_per_gpu_hour
    device_hours = np.array(days) * 24 * (prediction.num_devices + run.spare_hosts * cluster.gpus_per_node)
    simple = run.repair_s == 0 and run.straggler_mtbf_s is None
    return Goodput(
        model=prediction.model,
        cluster=prediction.cluster,
        num_devices=prediction.num_devices,
        tokens=tokens,
        steps=steps,
        step_s=step_s,
        mtbf_s=mtbf_s if rate else None,
        interval_s=conditions.interval_s,
        interval_is_optimal=run.checkpoint_interval_s is None,
        saving=saving,
        restart_s=conditions.restart_s,
        days=_spread(days),
        goodput=_spread([work_s / (1 + late) / each.total_s for each in played]),
        dollars=None if hourly is None else _spread(device_hours * hourly),
        costs=_costs(prices, cluster, device_hours) if prices is not None else (),
        parts=_parts(played, late),
        interruptions=_interruptions(played),
        intervals=tuple(replace(one, goodput=one.goodput / (1 + late)) for one in tried),
        expected_days=expected_s(work_s, mtbf_s, saving.blocking_s, *pauses) / DAY_S if simple else None,
        replicas=run.replicas,
        seed=run.seed,
        sources=_sources(run, load_s),
    )


def _conditions(
    run: LongRun, saving: Saving, load_s: float, *, size: JobSize, step_s: float, work_s: float
) -> Conditions:
    """The conditions of the run. work_s: all its steps, without interruptions."""
    causes = tuple((cause, cause.rate_per_s(size)) for cause in run.causes)
    return Conditions(
        work_s=work_s,
        interval_s=_interval_s(run, saving, summed(each for _, each in causes), step_s, work_s),
        blocking_s=saving.blocking_s,
        written_s=saving.total_s,
        restart_s=_restart_s(run, load_s),
        causes=causes,
        spare_hosts=run.spare_hosts,
        repair_s=run.repair_s,
        straggler_rate=size.hosts / run.straggler_mtbf_s if run.straggler_mtbf_s is not None else 0.0,
        straggler_slowdown=run.straggler_slowdown,
        straggler_detect_s=run.straggler_detect_s,
    )


def expected_run_s(
    run: LongRun,
    saving: Saving,
    load_s: float,
    *,
    step_s: float,
    tokens_per_step: int,
    size: JobSize,
    mtbf_factor: float = 1.0,
) -> float:
    """Wall-clock of a run by Daly's closed form: hosts neither short nor slow, every interruption unannounced.

    mtbf_factor: times as long between failures as `run` says. Infinite where failures strike faster than restarts.
    """
    tokens = run.tokens if run.tokens is not None else (run.steps or 0) * tokens_per_step
    work_s = -(-tokens // tokens_per_step) * step_s * (1 + slowest(run.jitter, size.hosts)[0])
    rate = summed(cause.rate_per_s(size) for cause in run.causes) / mtbf_factor
    restart_s = _restart_s(run, load_s)
    interval_s = _interval_s(run, saving, rate, step_s, work_s)
    try:
        return expected_s(work_s, 1 / rate if rate else inf, saving.blocking_s, interval_s, restart_s)
    except OverflowError:
        return inf


def _restart_s(run: LongRun, load_s: float) -> float:
    return run.detect_s + run.reschedule_s + (load_s if run.load_s is None else run.load_s) + run.warmup_s


def _interval_s(run: LongRun, saving: Saving, rate: float, step_s: float, work_s: float) -> float:
    """The given interval, or Daly's; at most one checkpoint per step, and none before the last one is written.

    Daly's cost of a checkpoint is the time that writing it takes, also where training goes on meanwhile: what a write takes
    from the steps beside it is not known, so all of it is counted. That one is not begun before the last one is written is
    a bound in Wang et al. too (Gemini, SOSP 2023, section 2).
    """
    given = run.checkpoint_interval_s
    if given is None:
        given = daly_s(1 / rate, saving.total_s) if rate else work_s
    return min(max(given, step_s, saving.total_s), work_s)


def _played(
    conditions: Conditions, run: LongRun, step_s: float, progress: Progress | None
) -> tuple[list[SimulatedRun], tuple[Interval, ...]]:
    """All runs with the interval, and the goodput of fewer with half and twice of it: the same failures strike each."""
    fewer = max(run.replicas // 4, 1)
    total = run.replicas + fewer * (len(_TRIED) - 1)
    tried: list[Interval] = []
    done = 0
    played: list[SimulatedRun] = []
    for factor in _TRIED:
        here = _with_interval(conditions, factor, step_s)
        found: list[SimulatedRun] = []
        for replica in range(run.replicas if factor == 1 else fewer):
            found.append(play(here, (run.seed, replica)))
            done += 1
            if progress is not None:
                progress(done, total)
        counted = found[:fewer]
        share = conditions.work_s * len(counted) / summed(each.total_s for each in counted)
        tried.append(Interval(interval_s=here.interval_s, goodput=share))
        played = found if factor == 1 else played
    return played, tuple(tried)


def _with_interval(conditions: Conditions, factor: float, step_s: float) -> Conditions:
    interval_s = max(conditions.interval_s * factor, conditions.written_s, step_s)
    return replace(conditions, interval_s=min(interval_s, conditions.work_s))


def _in_seconds(conditions: Conditions, run: LongRun) -> LongRun:
    """Where nobody says how many runs are played: as many as take seconds. The answer says how many they were."""
    most = int(_USUAL / max(1.0, expected_interruptions(conditions)))
    if "replicas" in run.model_fields_set or not _LEAST_RUNS <= most < run.replicas:
        return run
    return run.model_copy(update={"replicas": most})


def _refuse_endless(conditions: Conditions, run: LongRun) -> None:
    """Raises InputError where the runs would be interrupted more often than can be played."""
    count = expected_interruptions(conditions)
    if count * run.replicas * 1.5 <= MAX_INTERRUPTIONS:  # half as many are played again at other intervals
        return
    rate = summed(each for _, each in conditions.causes) + conditions.straggler_rate
    often = f"the job is interrupted every {format_duration(1 / rate)}"
    lasts = f"a restart takes {format_duration(conditions.restart_s)}"
    times = f"some {float(f'{count:.2g}'):,.0f} times" if count < 1e15 else "without end"
    problem = f"{often}, and {lasts}: a run would be interrupted {times}"
    remedy = "fewer hosts, a longer time between failures, or faster restarts"
    raise InputError.at("run", problem, remedy if count > _MANY else "fewer --replicas")


def _costs(prices: Prices, cluster: Cluster, device_hours: NDArray[np.float64]) -> tuple[RunCost, ...]:
    listed = prices.of(cluster)
    return tuple(RunCost(**prices.told(price), cost=_spread(device_hours * price.gpu_hour)) for price in listed)


def _days(played: Sequence[SimulatedRun], prediction: Prediction, seed: int, jitter: float) -> list[float]:
    """Days of each run at a step time drawn from the prediction's own interval, the same for all its steps.

    Lognormal on either side of the middle, each as wide as the interval's end there. jitter: one sigma of the mean of all steps.
    """
    step_s, low, high = (float(one) for one in (prediction.step_s, prediction.low_s, prediction.high_s))
    down, up = (hypot(log(s / step_s) / _Z90, jitter) if s * step_s > 0 else jitter for s in (low, high))
    drawn = np.random.default_rng((seed, 2**32)).standard_normal(len(played)).tolist()
    days: list[float] = []
    for each, z in zip(played, drawn, strict=True):
        training = each.seconds["training"]
        days.append((each.total_s + training * (exp((up if z > 0 else down) * z) - 1)) / DAY_S)
    return days


def _spread(values: Sequence[float] | NDArray[np.float64]) -> Spread:
    p5, p50, p95 = (float(v) for v in np.percentile(np.array(values), _LEVELS))
    return Spread(p5=p5, p50=p50, p95=p95, mean=float(np.mean(np.array(values))))


def _parts(played: Sequence[SimulatedRun], late: float) -> tuple[Share, ...]:
    """late: what the slowest host of every step adds to it; of training, its part is listed apart."""
    total = summed(each.total_s for each in played)
    sums = {part: summed(each.seconds[part] for each in played) for part in PARTS}
    trained = sums["training"] / (1 + late)
    sums |= {"training": trained, "jitter": sums["training"] - trained if late else 0.0}
    return tuple(Share(part=p, seconds=s / len(played), share=s / total) for p, s in sums.items() if s)


def _interruptions(played: Sequence[SimulatedRun]) -> tuple[tuple[str, float], ...]:
    names = dict.fromkeys(name for each in played for name in each.interruptions)
    means = {name: summed(each.interruptions.get(name, 0) for each in played) / len(played) for name in names}
    return tuple(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def _sources(run: LongRun, load_s: float) -> tuple[Source, ...]:
    found = []
    if run.failures.preset == "llama3":
        detail = "rates of Llama 3's 16,384 H100 in 54 days, by part (arXiv 2407.21783, table 5)"
        found.append(Source(what="failures", kind="published", detail=detail))
    if run.spot_mtbf_s is not None:
        words = f"one host every {run.spot_mtbf_s / 3600:g} h, {run.spot_notice_s:g} s before"
        found.append(Source(what="spot preemption", kind="given", detail=words))
    if run.failures.causes:
        found.append(Source(what="failures", kind="given", detail=f"{len(run.failures.causes)} causes of the study"))
    given = run.model_fields_set
    for name in ASSUMED:
        kind = "given" if name in given else "assumed"
        found.append(Source(what=name.removesuffix("_s"), kind=kind, detail=f"{getattr(run, name):g} s"))
    if run.load_s is None:
        detail = f"{format_duration(load_s)}: the state at the rate at which the hosts' storage reads"
        found.append(Source(what="load", kind="assumed", detail=detail))
    return tuple(found)
