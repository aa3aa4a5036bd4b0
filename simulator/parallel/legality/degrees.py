"""Degrees: what is sharded over which ranks, in which order, and that they fill the cluster."""

from __future__ import annotations

from math import isqrt
from typing import Final

from simulator.base.units import counted
from simulator.parallel.legality.rule import ClusterRule, OnCluster, PlanRule
from simulator.spec.plan import AXES, Plan
from simulator.spec.plan.order import ordered


def _left_out(plan: Plan) -> list[str]:
    """Axes above 1 that the order does not name."""
    names = ordered(plan.rank_order)
    return [axis for axis in (*AXES[::-1], "ep") if axis not in names and getattr(plan, axis) > 1]


def _left_out_equation(plan: Plan) -> str:
    degrees = ", ".join(f"{axis} = {getattr(plan, axis)}" for axis in _left_out(plan))
    return f"{plan.rank_order} does not say where {degrees} stands"


def _misplaced_experts(plan: Plan) -> str:
    """Where an order puts experts if not inside data parallelism: "outside dp_shard", "inside tp", or nowhere else."""
    names = ordered(plan.rank_order)
    inside = [name for name in names[: names.index("ep")] if name.startswith("dp") or name == "pp"]
    if inside:
        return f"outside {inside[0]}"
    return "inside tp" if "tp" in names[names.index("ep") :] else ""


def _reshards(plan: Plan) -> bool:
    """Where parameters stay gathered among a number of ranks, it divides the shard group."""
    ranks = plan.fsdp.reshard_after_forward
    return ranks is None or isinstance(ranks, bool) or (ranks >= 1 and plan.dp_shard % ranks == 0)


def _uneven(plan: Plan) -> bool:
    return plan.fsdp.shard_sizes != "equal"


def _plain_shards(plan: Plan) -> bool:
    """One shard group of all ranks, with nothing beside it that cuts, moves or narrows parts."""
    alone = plan.dp_replicate * plan.cp * plan.tp * plan.pp * plan.ep == 1
    return alone and not plan.offload.any and not plan.peft.any and not plan.precision.fp8_all_gather


_UNEVEN: Final = (
    PlanRule(
        where="shard_sizes",
        applies=_uneven,
        holds=lambda plan: plan.traits.hooks_modules and plan.zero >= 2,
        equation=lambda plan: (
            f"{plan.implementation} with zero = {plan.zero} cuts its states into equal parts alone; uneven shards are modelled of FSDP"
        ),
        remedy='data_parallel = "fsdp1" or "fsdp2", zero = 3',
    ),
    PlanRule(
        where="shard_sizes",
        applies=_uneven,
        holds=_plain_shards,
        equation="uneven shards beside replicas, other parallelism, offload, adapters or fp8 gathers are not modelled",
        remedy="dp_shard = all devices, without the others; or shard_sizes = equal",
    ),
    PlanRule(
        where="shard_share",
        applies=lambda plan: plan.fsdp.shard_share != 1,
        holds=_uneven,
        equation="a rank's part is an equal one",
        remedy='shard_sizes = "by_memory"',
    ),
)

PLAN: Final = (
    *_UNEVEN,
    PlanRule(
        where="virtual_stages",
        applies=lambda plan: plan.pp > 1 and plan.pipeline_schedule == "gpipe" and plan.traits.own_model_code,
        holds=lambda plan: plan.pipeline.virtual_stages == 1,
        equation="only torch's pipelines (ScheduleLoopedBFS) run gpipe over several chunks a stage",
        remedy='virtual_stages = 1, or schedule = "interleaved"',
    ),
    PlanRule(
        where="zero",
        holds=lambda plan: plan.zero in plan.traits.zero_stages,
        equation=lambda plan: f"{plan.implementation} has no ZeRO stage {plan.zero}",
        remedy=lambda plan: f"zero = {' or '.join(map(str, plan.traits.zero_stages))}, or another data_parallel",
    ),
    PlanRule(
        where="rank_order",
        holds=lambda plan: not _left_out(plan),
        equation=_left_out_equation,
        remedy='name each of them, as rank_order = "tp-cp-ep-dp-pp" does; any order will do',
    ),
    PlanRule(
        where="rank_order",
        applies=lambda plan: plan.ep > 1 and not _left_out(plan),
        holds=lambda plan: not _misplaced_experts(plan),
        equation=lambda plan: f"{plan.rank_order} puts experts {_misplaced_experts(plan)}, which is not modelled",
        remedy='put ep after tp, and before dp and pp: rank_order = "tp-cp-ep-dp-pp"',
    ),
    PlanRule(
        where="dp_shard",
        holds=lambda plan: plan.zero == 0 or plan.dp_shard > 1 or plan.dp_replicate <= 1,
        equation=lambda plan: (
            f"zero = {plan.zero} shards over dp_shard, which is 1, while dp_replicate = {plan.dp_replicate}"
        ),
        remedy=lambda plan: f"dp_shard = {plan.dp_replicate}, dp_replicate = 1; or zero = 0",
    ),
    PlanRule(
        where="dp_shard",
        holds=lambda plan: plan.zero > 0 or plan.dp_shard <= 1,
        equation=lambda plan: f"zero = 0 shards nothing, but dp_shard = {plan.dp_shard}",
        remedy=lambda plan: f"dp_replicate = {plan.dp_shard * plan.dp_replicate}, dp_shard = 1",
    ),
    PlanRule(
        where="seq_len",
        holds=lambda plan: plan.cp == 1 or plan.seq_len % (2 * plan.cp) == 0,
        equation=lambda plan: f"seq_len {plan.seq_len} is not a multiple of 2 × cp = {2 * plan.cp} (causal balance)",
        remedy=lambda plan: f"seq_len = {-(-plan.seq_len // (2 * plan.cp)) * 2 * plan.cp}",
    ),
    PlanRule(
        where="sequence_parallel",
        holds=lambda plan: not plan.sequence_parallel or plan.seq_len // plan.cp % plan.tp == 0,
        equation=lambda plan: f"the {plan.seq_len // plan.cp} tokens of a rank are not divisible by tp = {plan.tp}",
        remedy=lambda plan: (
            f"seq_len = {-(-plan.seq_len // (2 * plan.tp * plan.cp)) * 2 * plan.tp * plan.cp}, "
            "or sequence_parallel = false"
        ),
    ),
    PlanRule(
        where="reshard_after_forward",
        holds=_reshards,
        equation=lambda plan: f"{plan.fsdp.reshard_after_forward} does not divide dp_shard = {plan.dp_shard}",
        remedy="reshard_after_forward = true, false, or a number that divides dp_shard",
    ),
)


def _product(on: OnCluster) -> str:
    plan, cluster = on.plan, on.cluster
    equation = " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)
    layout = f"{cluster.num_nodes} × {cluster.gpus_per_node} of {cluster.name}"
    return f"{equation} = {plan.num_devices}, the cluster has {counted(cluster.num_devices, 'device')} ({layout})"


def _nearest_degrees(on: OnCluster) -> str:
    """The data-parallel degree that fills the cluster, else a number of nodes that the plan fills."""
    plan, cluster = on.plan, on.cluster
    axis = "dp_shard" if plan.zero or plan.dp_shard > 1 else "dp_replicate"
    rest = plan.num_devices // getattr(plan, axis)
    remedies = []
    if cluster.num_devices % rest == 0:
        remedies.append(f"{axis} = {cluster.num_devices // rest}")
    else:
        near = max(cluster.num_devices // rest, 1)
        remedies.append(f"{axis} = {near} fills {near * rest} devices")
    if plan.num_devices % cluster.gpus_per_node == 0:
        remedies.append(f"num_nodes = {plan.num_devices // cluster.gpus_per_node}")
    return ", or ".join(remedies)


FILLS: Final = ClusterRule(
    where="degrees",
    holds=lambda on: on.plan.num_devices == on.cluster.num_devices,
    equation=_product,
    remedy=_nearest_degrees,
)
CLUSTER: Final = (FILLS,)


def divisors(number: int) -> list[int]:
    """Of a number, ascending."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is next to `wanted`, of two the smaller."""
    return min(divisors(number), key=lambda d: (abs(d - wanted), d))
