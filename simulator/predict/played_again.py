"""What a step says that is played again: parts of its interval, and how much of it hangs on the network between nodes."""

from __future__ import annotations

import math
from typing import Final

from simulator.base.errors import InputError
from simulator.base.units import format_seconds
from simulator.memory import MemoryUse
from simulator.play.lower import Lowering, lower
from simulator.predict.confidence import QUEUE, SHEET, WAITING, Z90
from simulator.predict.play import SimulatedStep, play, step_seconds
from simulator.predict.prediction import NetworkShare
from simulator.spec.calibration.networks import carrier_of, slow_network
from simulator.spec.plan import Plan

_EXCHANGE: Final = "all_to_all"
_FREE: Final = 1e6  # times as fast: what is left of a collective is its latency
_TENTH_LESS: Final = 0.9


def replayed(lowering: Lowering, step_s: float, alone: SimulatedStep, *, fold: bool) -> dict[str, float]:
    """Parts of the interval that a step played again says. alone: the step without what memory adds to it."""
    alone_s = float(alone.step_s)
    imbalance = _imbalance_sigma(lowering, step_s, fold=fold)
    found = {"imbalance": imbalance} if imbalance else {}
    learned, plan = lowering.calibration.learned, lowering.plan
    if learned is None and plan.experts.overlap and plan.tp * plan.cp > 1:
        serial = play(_changed(lowering, plan.copy_with(expert_overlap=False)), fold=fold)
        hidden_s = serial.communication[_EXCHANGE][0] - alone.communication[_EXCHANGE][0]
        found[QUEUE] = math.log1p(max(0.0, hidden_s) / step_s) / Z90
    if learned is None and lowering.may_wait_s:
        waiting_s = max(0.0, step_seconds(lowering.waiting(), fold=fold) - alone_s)
        found[WAITING] = math.log1p(waiting_s / step_s) / Z90
    if lowering.network_by_sheet and (
        learned is None or "network" not in learned.values
    ):  # else the runs have shown it
        slower = max(0.0, slow_s(lowering, fold=fold) - alone_s)
        found[SHEET] = math.log1p(slower / step_s) / Z90
    return found


def _imbalance_sigma(lowering: Lowering, step_s: float, *, fold: bool) -> float:
    """The relative effect on the step of one sigma more rows on the busiest rank of experts."""
    plan = lowering.plan
    if plan.experts.imbalance_sigma == 0 or lowering.model.experts is None:
        return 0.0
    more = plan.experts.imbalance * (1 + plan.experts.imbalance_sigma)
    return step_seconds(_changed(lowering, plan.copy_with(expert_imbalance=more)), fold=fold) / step_s - 1


def _changed(lowering: Lowering, plan: Plan) -> Lowering:
    """The same with another plan."""
    inputs = (lowering.full_cluster, lowering.given_stack, lowering.calibration, lowering.curves)
    return lower(lowering.model, plan, *inputs)


def network_share(lowering: Lowering, step_s: float, *, fold: bool = True) -> NetworkShare | None:
    """What `step_s`, the step as played, would lose and gain; None where no network joins the plan's devices."""
    if not lowering.over_nodes:
        return None
    free_s, slower_s = (step_seconds(lowering.on_network(speed), fold=fold) for speed in (_FREE, _TENTH_LESS))
    return NetworkShare(hangs_s=max(0.0, step_s - free_s), tenth_less_s=max(0.0, slower_s - step_s))


def inside_nodes(lowering: Lowering, memory: MemoryUse, step_s: float) -> str:
    """What shards inside nodes, replicated over them, would do for the step: nothing where they do not fit or are no quicker."""
    plan, nodes = lowering.plan, lowering.cluster.num_nodes
    more_bytes = memory.resident_bytes * (nodes - 1)
    if nodes == 1 or plan.dp_shard % nodes or memory.used_bytes + more_bytes > memory.capacity_bytes:
        return ""
    degrees = {"dp_replicate": nodes, "dp_shard": plan.dp_shard // nodes}
    inputs = (lowering.full_cluster, lowering.given_stack, lowering.calibration, lowering.curves)
    try:
        found_s = step_seconds(lower(lowering.model, plan.copy_with(**degrees), *inputs))
    except InputError:
        return ""
    words = ", ".join(f"{name} = {degree}" for name, degree in degrees.items())
    return f"{words} shards inside a node, a step of {format_seconds(found_s)}; or " if found_s < step_s else ""


def slow_s(lowering: Lowering, *, fold: bool = True) -> float:
    """The step on a network at the slow end of published ones (`spec.calibration.networks`): what is hidden may show there."""
    slow = slow_network()
    cluster = lowering.cluster
    assert cluster.inter is not None
    more = slow.beyond(cluster.num_devices // cluster.nvlink_domain_size)
    carrier = carrier_of(cluster.inter.kind)
    slower = lowering.on_network(1 / (slow.slow_bytes[carrier] * more), slow.slow_waits[carrier] * more)
    return step_seconds(slower, fold=fold)
