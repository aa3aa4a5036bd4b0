"""The data-parallel collectives of one unit: its parameters gathered, its gradients reduced, its update gathered."""

from __future__ import annotations

from simulator.play.lower.builder import Builder
from simulator.play.lower.hops import Hopping
from simulator.play.lower.stage import ScheduledUnit, StageStep


def all_gather(
    build: Builder, step: StageStep, unit: ScheduledUnit, label: str, *after: int | None, again: bool
) -> int | None:
    """A unit's parameters; again: from where they are after the first forward. In two stages if the plan says so."""
    plan, comm = step.plan, unit.comm
    size = comm.all_gather_backward_bytes if again else comm.all_gather_forward_bytes
    if plan.deepspeed.hierarchical_gather:
        far = build.collective(f"{label} between nodes", "all_gather", "shard_far", build.far_part(size), *after)
        return build.collective(label, "all_gather", "shard_near", size, *(after if far is None else (far,))) or far
    role = "reshard" if again and plan.reshard_ranks is not None else "shard"
    return build.collective(label, "all_gather", role, size, *after, count=comm.num_gathers)


def reduce_gradient(
    build: Builder, step: StageStep, unit: ScheduledUnit, index: int, after: int, hopping: Hopping, *, final: bool
) -> int | None:
    """The last op of a unit's reduction; reductions of several hops overlap with later units."""
    copied = build.compute(f"copy-in {unit.name} mb{index}", unit.gradient, after) if unit.gradient.parts else after
    if unit.hops:
        return hopping.begin(f"{unit.name} mb{index}", unit.hops, copied)
    label, size, count = f"{unit.name} mb{index}", unit.comm.reduce_scatter_bytes, unit.comm.num_buckets
    scatter = build.collective(f"reduce-scatter {label}", "reduce_scatter", "shard", size, copied, count=count)
    if unit.comm.late_all_reduce and not final:
        return scatter
    reduced = _all_reduce(build, step, unit, index, scatter if scatter is not None else copied) or scatter
    experts = unit.comm.experts
    if experts is None:
        return reduced
    label, ready = f"{unit.name} mb{index} experts", copied if reduced is None else reduced
    size = experts.reduce_scatter_bytes
    scatter = build.collective(f"reduce-scatter {label}", "reduce_scatter", "expert_shard", size, ready)
    ready, size = (ready if scatter is None else scatter), experts.all_reduce_bytes
    return build.collective(f"all-reduce {label}", "all_reduce", "expert_replicate", size, ready) or scatter or reduced


def _all_reduce(build: Builder, step: StageStep, unit: ScheduledUnit, index: int, after: int) -> int | None:
    """Between replicas: at once, or joined with the units before it until they hold enough (the last unit has all)."""
    size = build.combined(unit.comm.all_reduce_bytes, last=unit is step.units[0])
    label, count = f"all-reduce {unit.name} mb{index}", unit.comm.num_buckets
    return build.collective(label, "all_reduce", "replicate", size, after, count=count)


def gather_updated(build: Builder, unit: ScheduledUnit, *after: int) -> None:
    """A unit's parameters that each rank updated a shard of; or each owner broadcasts its own."""
    for place, (part, count) in enumerate(unit.comm.broadcasts):
        label = f"broadcast {unit.name}{' vectors' if place else ''}"
        build.collective(label, "broadcast", "shard", part, *after, count=count)
    if unit.comm.broadcasts:
        return
    size = unit.comm.parameter_gather_bytes
    gather = build.collective(f"all-gather {unit.name}", "all_gather", "shard", size, *after)
    if unit.comm.experts is not None:
        size = unit.comm.experts.parameter_gather_bytes
        ready = after if gather is None else (gather,)
        label = f"all-gather {unit.name} experts"
        gather = build.collective(label, "all_gather", "expert_shard", size, *ready) or gather
    if gather is not None:
        build.compute(f"copy-out {unit.name}", unit.gather_forward, gather)
