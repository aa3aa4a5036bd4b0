"""How far the host runs ahead of the device, in passes of a layer."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

from simulator.base.sums import summed
from simulator.play.lower.calls import issued_s
from simulator.play.lower.work import BlockWork
from simulator.spec.software.records import HOST_SIGMA
from simulator.work.collectives import link_capacities
from simulator.work.ops import num_launches
from simulator.work.script.instructions import LAUNCH_QUEUE

if TYPE_CHECKING:
    from simulator.play.lower import Lowering


def passes_ahead(lowering: Lowering) -> int:
    """Passes of a layer that are launched and not yet run, where that decides what the allocator may reuse; else 0.

    A host that is slower than the device has none; one that is faster is soon ahead by all that the queue holds. Which of the two it
    is hangs on times that are known to HOST_SIGMA, and differ between the hosts that a collective waits for: the lead is the mean
    over such hosts. Where stages send in turn, the first one launches the forwards that fill the pipeline while the device still
    waits for the next stage to receive: all but the first, which finds it ready, and the last, which begins the backwards.
    """
    plan, stack = lowering.plan, lowering.stack
    if plan.tp == 1 or not stack.overlap.records_streams:
        return 0
    layers = [unit.work for unit in lowering.step.units if unit.name not in ("embedding", "head")]
    if not layers:
        return 0
    host_s, device_s = _paces(lowering, layers[0])
    most = LAUNCH_QUEUE // num_launches(lowering.blocks.layer, "forward")
    passes = len(lowering.step.units)  # of a forward of the first stage: the embedding's is one
    filling = min(most, max(plan.pp - 2, 0) * passes) if plan.traits.messages_in_turn else 0
    faster = NormalDist(sigma=HOST_SIGMA).cdf(math.log(device_s / host_s)) if host_s else 1.0
    return round(filling + faster * (most - filling))


def _paces(lowering: Lowering, layer: BlockWork) -> tuple[float, float]:
    """Seconds of host and of device that a layer takes, forward and backward."""
    segments = [*layer.forward.segments, *layer.backward.segments]
    works = [work for one in segments for work in (one.work, one.beside)]
    exchanges = [exchange for one in segments for exchange in one.exchanges]
    host_s = summed(work.host_s for work in works) + summed(issued_s(one, lowering.fabric) for one in exchanges)
    capacities = link_capacities(lowering.cluster, lowering.curves)
    device_s = summed(work.duration_s for work in works)
    for one in exchanges:
        cost, _ = lowering.fabric.exchanged(one)
        moves_s = max((float(size / capacities[link]) for link, size in cost.link_bytes.items()), default=0.0)
        device_s += float(cost.latency_s) + moves_s
    return host_s, device_s
