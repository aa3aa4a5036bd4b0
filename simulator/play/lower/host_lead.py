"""How far the host runs ahead of the device, in passes of a layer."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean
from typing import Final, Protocol

from simulator.base.sums import summed
from simulator.play.lower.fabric import MeshFabric, issued_s
from simulator.play.lower.stage import StageStep
from simulator.play.lower.work import BlockWork
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.calibration.intervals import HOST_SIGMA
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.collectives import link_capacities
from simulator.work.ops import ModelBlocks, num_launches
from simulator.work.script.instructions import LAUNCH_QUEUE

# By how much hosts of the same kind differ from what is known of them: so many equally likely factors on their time
_HOSTS: Final = tuple(math.exp(one) for one in NormalDist(sigma=HOST_SIGMA).quantiles(n=33))
# By how much the slowest host of a group is slower than another of its kind: a prior. Both runs of nanotron with tp 8 on one node,
# whose host sets the pace (its calibration), reserve what a full queue of launches holds, which takes 0.5 % or more.
_SLOWEST: Final = 0.03


class Lowered(Protocol):
    """What a lead depends on of a plan made concrete (`Lowering`)."""

    @property
    def plan(self) -> Plan: ...
    @property
    def stack(self) -> Stack: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def curves(self) -> LinkCurves: ...
    @property
    def blocks(self) -> ModelBlocks: ...
    @property
    def step(self) -> StageStep: ...
    @property
    def fabric(self) -> MeshFabric: ...


def passes_ahead(lowering: Lowered) -> int:
    """Passes of a layer that are launched and not yet run, where that decides what the allocator may reuse; else 0.

    A host gains on its device what that takes longer for a layer: for its kernels, or because a collective waits for the group's
    slowest host, unless each call waits for all hosts before it is issued. On one stage it gains from the step's start, where it
    has read the last step's loss, to the last forward's end; at most what the queue holds. A host's time is known to
    HOST_SIGMA: the lead is the mean over such hosts. Stages wait for messages, and gain anew. Where they send in turn, the
    first one launches the forwards that fill the pipeline while the device still waits for the next stage to receive: all but
    the first, which finds it ready, and the last, which begins the backwards.
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
    alone = plan.pp == 1
    launched = passes * (2 * plan.num_micro_batches - 1) if alone else math.inf
    least = _SLOWEST if alone and not lowering.fabric.rank_wait_s else 0.0
    gains = (max(1 - host_s * factor / device_s, least) for factor in _HOSTS)
    return round(filling + fmean(min(most - filling, gain and gain * launched) for gain in gains))


def _paces(lowering: Lowered, layer: BlockWork) -> tuple[float, float]:
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
