"""Memory of a step, and the time and memory of each kind of GPU on a cluster with different GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.base.fit import Fit
from simulator.base.sums import summed
from simulator.memory import MemoryUse, simulate_memory
from simulator.parallel.model_shard import shard_shares
from simulator.play.lower import Lowering
from simulator.predict.play import SimulatedStep
from simulator.predict.prediction import KindUse
from simulator.predict.verdict import cause_of, compute_s, waiting_s
from simulator.spec.cluster.gpu_kinds import GpuKind
from simulator.work.trace import MemoryTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of a step over time, and whether it fits. by_device: the same for each device, if they differ.

    device: whose this is, where they differ: that which fits least.
    """

    memory: MemoryUse
    trace: MemoryTrace
    cause: str
    device: str = ""
    by_device: Mapping[str, StepMemory] = field(default_factory=dict)

    @property
    def verdict(self) -> Fit:
        return self.memory.fit


def memory_by_device(lowering: Lowering) -> dict[str, StepMemory]:
    """Of each device, by what is free of it, the rank that holds most among the stages that have ranks on it."""
    rank_classes = lowering.rank_classes
    assert rank_classes is not None
    stages: dict[str, tuple[GpuKind, set[int]]] = {}
    for rank_class in rank_classes.classes:
        kind = rank_classes.kind(rank_class.rank)
        stages.setdefault(kind.holder, (kind, set()))[1].add(rank_class.stage)
    found: dict[str, StepMemory] = {}
    shares = shard_shares(lowering.plan, rank_classes.kinds)
    for name, (kind, used) in stages.items():
        plan = lowering.plan.copy_with(shard_share=shares[kind.holder]) if shares else lowering.plan
        inputs = (lowering.model, plan, lowering.stack, lowering.blocks, rank_classes.kinds.memory_of(kind))
        memory, trace = simulate_memory(*inputs, stages=sorted(used))
        found[name] = StepMemory(memory=memory, trace=trace, cause=cause_of(memory), device=kind.device)
    return found


def worst_fit(by_device: Mapping[str, StepMemory]) -> tuple[str, StepMemory]:
    """The device of the worst verdict; among equal ones that with the least room left."""
    return min(
        by_device.items(),
        key=lambda item: (-item[1].verdict.rank, item[1].memory.capacity_bytes - item[1].memory.used_bytes),
    )


def kind_uses(lowering: Lowering, played: SimulatedStep, by_device: Mapping[str, StepMemory]) -> tuple[KindUse, ...]:
    """Every kind, the usual one first; none where all GPUs are equal."""
    if lowering.rank_classes is None:
        return ()
    kinds = lowering.rank_classes.kinds
    counts = Counter(kinds.of_rank.values())
    counts[0] = lowering.plan.num_devices - counts.total()
    return tuple(
        KindUse(
            kind=kinds.kinds[number].unlike(kinds.kinds[0]),
            device=kinds.kinds[number].device,
            num_devices=counts[number],
            compute_s=compute_s(seconds),
            waiting_s=waiting_s(seconds),
            memory=one.memory,
            cause=one.cause,
        )
        for number, seconds in played.kinds.items()
        for one in (by_device[kinds.kinds[number].holder],)
    )


def mean_peak_flop_per_s(lowering: Lowering) -> float:
    """Data-sheet peak of a device, the mean over all of them."""
    precision, rank_classes = lowering.plan.product_dtype, lowering.rank_classes
    if rank_classes is None:
        return lowering.device.peak(precision)
    peaks = [rank_classes.kinds.devices[kind.device].peak(precision) for kind in rank_classes.kinds.kinds]
    others = summed(peaks[number] for number in rank_classes.kinds.of_rank.values())
    return (
        others + peaks[0] * (lowering.plan.num_devices - len(rank_classes.kinds.of_rank))
    ) / lowering.plan.num_devices
