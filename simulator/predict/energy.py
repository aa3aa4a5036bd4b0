"""Energy of a step: watts by class of work, joules a token, kWh and CO2 of a run, and the effect of a lower power cap.

Kernels draw by their use u of the tensor cores, ref · y · (u + d (1 − u)), with d and the law of the clock from the
calibration's `Power`: under the cap the driver raises the clock until the mean of the kernels is the cap (y = x), or the
clock is at its end (y = loop_clock ** (−1 / clock_exponent)). What no board was measured at is a prior, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final

from pydantic import Field

from simulator.base.errors import Fault, InputError
from simulator.base.schema import Strict
from simulator.base.sums import summed
from simulator.base.units import Count
from simulator.play.lower import lower
from simulator.predict.confidence import Z90
from simulator.predict.prediction import Prediction, Source
from simulator.predict.rank_work import RankWork, rank_works
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

STREAM_DRAW: Final = 0.56  # of a product's draw: the H200's memory_draw (docs/background/kernels.md)
# Of the cap, with the clock up and no kernel running: median 127 W of 700 W, experiments/measured/h200-2026-11-20/clocks-kernels.csv
IDLE_SHARE: Final = 0.18
# Of the cap, while a collective runs and no kernel beside it. Prior: half way between idle and a stream over memory
COMMUNICATION_SHARE: Final = 0.37
# Of the GPUs' caps, all else in a node. Prior: a DGX H100's 10.2 kW and a DGX A100's 6.5 kW (NVIDIA's data sheets, not
# re-read) leave 0.82 and 1.03 of the GPUs' caps for everything else at most; half of that, and twice as wide as it is long
HOST_SHARE: Final = 0.45
# One sigma, relative, of each power. Products at the cap of a measured board; its relatives take its law
_SIGMA: Final = {"kernels": 0.08, "kernels, no law": 0.2, "communication": 0.35, "waiting": 0.35, "hosts": 0.5}
_DATA: Final = "exposed:data loading"  # no kernel of NCCL's runs meanwhile
JOULES_PER_KWH: Final = 3.6e6


class Energy(Strict):
    """`[energy]`: power data besides the device's own cap."""

    host_w: float | None = Field(
        ge=0, default=None, description="what a node draws beside its GPUs; not set: 0.45 of its GPUs' caps, a prior"
    )
    idle_share: float = Field(
        ge=0, le=1, default=IDLE_SHARE, description="of the cap, that a GPU draws while it waits; an H200's"
    )
    communication_share: float = Field(
        ge=0, le=1, default=COMMUNICATION_SHARE, description="of the cap, while a collective runs alone; a prior"
    )
    pue: float = Field(ge=1, le=5, default=1.0, description="energy of the building over that of the machines")
    co2_g_per_kwh: float | None = Field(ge=0, le=5000, default=None, description="of the grid: adds the run's CO2")
    tokens: Count | None = Field(gt=0, default=None, description="of a run: adds its kWh")
    caps_w: Annotated[tuple[float, ...], Field(strict=False)] = Field(
        default=(), description="power caps to try instead of the device's"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One class of work: seconds of a step (mean of the ranks), watts of one GPU meanwhile, joules of all."""

    name: str
    seconds: float
    watts: float
    joules: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyUse:
    """Energy of a step. gpu_w: mean of one GPU. joules_per_token with its 90 % interval, building included."""

    step_s: float
    tokens_per_step: int
    parts: tuple[Drawn, ...]
    num_devices: int
    sigma: float
    energy: Energy
    sources: tuple[Source, ...] = ()
    caps: tuple[tuple[float, EnergyUse], ...] = ()

    @property
    def gpu_joules(self) -> float:
        return summed(part.joules for part in self.parts if part.name != "hosts")

    @property
    def gpu_w(self) -> float:
        return self.gpu_joules / (self.num_devices * self.step_s)

    @property
    def step_joules(self) -> float:
        """Joules of GPUs and hosts, times the building's PUE."""
        return self.energy.pue * summed(part.joules for part in self.parts)

    @property
    def joules_per_token(self) -> float:
        return self.step_joules / self.tokens_per_step

    @property
    def interval(self) -> tuple[float, float]:
        """90 %, of joules_per_token."""
        reach = math.exp(Z90 * self.sigma)
        return self.joules_per_token / reach, self.joules_per_token * reach

    @property
    def run_kwh(self) -> float | None:
        """Of a run of that many tokens, without failures."""
        tokens = self.energy.tokens
        return None if tokens is None else tokens * self.joules_per_token / JOULES_PER_KWH

    @property
    def run_co2_kg(self) -> float | None:
        kwh, grams = self.run_kwh, self.energy.co2_g_per_kwh
        return None if kwh is None or grams is None else kwh * grams / 1000

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        low, high = self.interval
        of_caps = "step_s", "gpu_w", "joules_per_token", "run_kwh"
        return {
            "gpu_w": self.gpu_w,
            "step_joules": self.step_joules,
            "joules_per_token": self.joules_per_token,
            "low_joules_per_token": low,
            "high_joules_per_token": high,
            "parts": [asdict(part) for part in self.parts],
            "pue": self.energy.pue,
            "run_tokens": self.energy.tokens,
            "run_kwh": self.run_kwh,
            "run_co2_kg": self.run_co2_kg,
            "caps": [{"cap_w": cap} | {name: getattr(one, name) for name in of_caps} for cap, one in self.caps],
            "sources": [asdict(source) for source in self.sources],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnergy:
    """A run with its failures: steps as predicted, and all other time at the draw of waiting GPUs. co2_kg: with the grid's factor."""

    kwh: float
    training_kwh: float
    co2_kg: float | None


def energy_of_run(use: EnergyUse, device: Device, steps: int, total_s: float) -> RunEnergy:
    """total_s: of the whole run, of which that many steps are training."""
    hosts_w = summed(part.joules for part in use.parts if part.name == "hosts") / use.step_s
    idle_w = use.energy.pue * (use.num_devices * use.energy.idle_share * device.power_w + hosts_w)
    training = steps * use.step_joules / JOULES_PER_KWH
    kwh = training + max(total_s - steps * use.step_s, 0.0) * idle_w / JOULES_PER_KWH
    grams = use.energy.co2_g_per_kwh
    return RunEnergy(kwh=kwh, training_kwh=training, co2_kg=None if grams is None else kwh * grams / 1000)


def energy_of(
    energy: Energy,
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
) -> EnergyUse:
    """The energy of a predicted step, and at each cap. Raises InputError with every impossible cap."""
    calibration = calibration or Calibration.for_device(cluster.device)
    faults = list(_cap_faults(energy, cluster.device, calibration))
    InputError.raise_for(faults)
    inputs = (model, plan, calibration, stack or Stack.of(plan))
    return replace(
        _drawn(energy, prediction, cluster, cluster.device.power_w, *inputs),
        sources=tuple(_sources(energy, cluster.device, calibration)),
        caps=tuple((cap, _what_if(energy, cap, cluster, *inputs)) for cap in energy.caps_w),
    )


def _cap_faults(energy: Energy, device: Device, calibration: Calibration) -> Iterator[Fault]:
    for index, cap in enumerate(energy.caps_w):
        where = f"energy.caps_w[{index}]"
        least_w = max(1.0, energy.idle_share * device.power_w)  # what it draws when it waits, no cap takes away
        if not least_w <= cap <= device.power_w:
            problem = (
                f"{cap:g} W; {device.name} has a cap of {device.power_w:g} W and draws {least_w:g} W when it waits"
            )
            yield Fault(place=where, problem=problem, remedy="a number of watts between them")
        elif calibration.power is None:
            problem = f"how {device.name} slows under a lower cap is not known"
            yield Fault(place=where, problem=problem, remedy="a calibration with a power law, or no caps")


def _what_if(
    energy: Energy, cap_w: float, cluster: Cluster, model: Model, plan: Plan, calibration: Calibration, stack: Stack
) -> EnergyUse:
    """The step predicted again under another cap, which lowers what kernels draw: no less is drawn by hosts, or waiting."""
    from simulator.predict import predict

    device = cluster.device.model_copy(update={"power_w": cap_w})
    capped = cluster.model_copy(update={"device": device})
    prediction = predict(model, plan, capped, calibration, stack)
    return _drawn(energy, prediction, capped, cluster.device.power_w, model, plan, calibration, stack)


def _drawn(
    energy: Energy,
    prediction: Prediction,
    cluster: Cluster,
    sheet_w: float,
    model: Model,
    plan: Plan,
    calibration: Calibration,
    stack: Stack,
) -> EnergyUse:
    works = rank_works(lower(model, plan, cluster, stack, calibration, calibration.links or default_curves()))
    ranks, totals = plan.num_devices, dict[str, tuple[float, float]]()
    for work in works:
        for name, (seconds, watts) in _rank_draws(
            work, prediction, energy, cluster.device, sheet_w, calibration
        ).items():
            before_s, before_j = totals.get(name, (0.0, 0.0))
            part_s = work.program.num_ranks * seconds
            totals[name] = before_s + part_s, before_j + part_s * watts
    nodes, caps_w = -(-ranks // cluster.gpus_per_node), min(ranks, cluster.gpus_per_node) * sheet_w
    host_w = HOST_SHARE * caps_w if energy.host_w is None else energy.host_w
    totals["hosts"] = nodes * prediction.step_s, nodes * prediction.step_s * host_w
    parts = [
        Drawn(name=name, seconds=s / (nodes if name == "hosts" else ranks), watts=j / s, joules=j)
        for name, (s, j) in totals.items()
        if s
    ]
    return EnergyUse(
        step_s=prediction.step_s,
        tokens_per_step=plan.tokens_per_step,
        parts=tuple(sorted(parts, key=lambda part: -part.joules)),
        num_devices=ranks,
        sigma=_sigma(parts, prediction, energy, known=calibration.power is not None),
        energy=energy,
    )


def _rank_draws(
    work: RankWork, prediction: Prediction, energy: Energy, device: Device, sheet_w: float, calibration: Calibration
) -> Mapping[str, tuple[float, float]]:
    """Class of work -> (seconds of one rank's step, watts). Time without kernels is divided as in the simulated step.

    sheet_w: the device's own cap, of which waiting takes its share under a lower one, too.
    """
    kernels = {name: one for name, one in work.by_category.items() if one.seconds and not _waits(name)}
    known = [one for one in kernels.values() if one.kernels_s]
    use = summed(one.seconds * one.tensor_use for one in known) / (summed(one.seconds for one in known) or 1.0)
    watts = _kernel_watts(device, calibration, use)
    found = {name: (one.seconds, watts(one.tensor_use if one.kernels_s else use)) for name, one in kernels.items()}
    busy_s = summed(seconds for seconds, _ in found.values())
    gaps = {
        name: float(s) for name, s in prediction.timeline.breakdown(work.program.name).items() if name not in kernels
    }
    idle_w = energy.idle_share * sheet_w
    over_idle_w = (energy.communication_share - energy.idle_share) * device.power_w
    without_kernels = {"communication": idle_w + over_idle_w, "waiting": idle_w}
    scale = (prediction.step_s - busy_s) / (summed(gaps.values()) or 1.0)
    for name, seconds in gaps.items():
        kind = "interference" if name == "interference" else _kind(name)
        spent, _ = found.get(kind, (0.0, 0.0))
        found[kind] = spent + scale * seconds, without_kernels.get(kind, watts(use))
    return found


def _waits(category: str) -> bool:
    return category.startswith(("exposed:", "wait:")) or category in (
        "host",
        "idle",
        "bubble",
        "slow_peer",
        "launch gaps",
    )


def _kind(category: str) -> str:
    return "communication" if category.startswith("exposed:") and category != _DATA else "waiting"


def _kernel_watts(device: Device, calibration: Calibration, use: float) -> Callable[[float], float]:
    """Watts of a kernel by its use of the tensor cores, in a step whose kernels have this mean use."""
    power = calibration.power
    if power is None:
        return lambda u: device.power_w * (u + STREAM_DRAW * (1 - u))
    d = power.memory_draw
    x = device.power_w / power.reference_w / (use + d * (1 - use))
    most = power.loop_clock ** (-1 / power.clock_exponent) if power.clock_exponent else math.inf
    return lambda u: power.reference_w * min(x, most) * (u + d * (1 - u))


def _sigma(parts: list[Drawn], prediction: Prediction, energy: Energy, *, known: bool) -> float:
    """Errors of the powers, weighed by their energy, beside the step's own."""
    weights: dict[str, float] = {}
    for part in parts:
        other = part.name in ("communication", "waiting", "hosts")
        name = part.name if other else "kernels" if known else "kernels, no law"
        weights[name] = weights.get(name, 0.0) + part.joules
    if energy.host_w is not None:
        weights.pop("hosts", None)
    total = summed(part.joules for part in parts)
    step = math.log(prediction.high_s / prediction.step_s) / Z90
    return math.hypot(step, *(_SIGMA[name] * joules / total for name, joules in weights.items()))


def _sources(energy: Energy, device: Device, calibration: Calibration) -> Iterator[Source]:
    law = "kernels by use of tensor cores under the cap: the calibration's power law, of an H200's clock and power"
    prior = f"no power law: products at the cap, streams at {STREAM_DRAW} of it as on an H200"
    kind, detail = ("fitted", law) if calibration.power else ("assumed", prior)
    yield Source(what="power of kernels", kind=kind, detail=detail)
    yield Source(what="power cap", kind="datasheet", detail=f"{device.power_w:g} W, {device.name}")
    given = {name for name in energy.model_fields_set if getattr(energy, name) is not None}
    for topic, field, detail in (
        ("power while waiting", "idle_share", f"{energy.idle_share:g} of the cap: logged on an H200 without kernels"),
        (
            "power of communication",
            "communication_share",
            f"{energy.communication_share:g} of the cap: a prior, ± 35 %",
        ),
        ("power of hosts", "host_w", f"{HOST_SHARE:g} of the GPUs' caps: a prior, ± 50 %"),
    ):
        stated = f"{getattr(energy, field):g} (energy.{field})" if field in given else ""
        yield Source(what=topic, kind="given" if stated else "assumed", detail=stated or detail)
