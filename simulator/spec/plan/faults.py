"""What contradicts itself inside a plan; what needs the model or the cluster is checked where they meet."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from simulator.base.errors import Fault
from simulator.spec.plan.order import AXES, ordered
from simulator.spec.plan.precision_faults import precision_faults
from simulator.spec.plan.traffic_faults import traffic_faults

if TYPE_CHECKING:
    from simulator.spec.plan.plan import Plan

_LEGAL_ZERO: dict[str, tuple[int, ...]] = {
    "ddp": (0,),
    "fsdp1": (0, 2, 3),
    "fsdp2": (2, 3),
    "zero_redundancy": (1,),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1, 3),  # 3: Megatron-FSDP with optim_grads_params
}


def plan_faults(plan: Plan, place: str) -> list[Fault]:
    """Every contradiction."""
    return [
        *_implementation_faults(plan, place),
        *_order_faults(plan, place),
        *_option_faults(plan, place),
        *_expert_faults(plan, place),
        *_offload_faults(plan, place),
        *traffic_faults(plan, place),
        *precision_faults(plan, place),
        *_graph_faults(plan, place),
    ]


def _implementation_faults(plan: Plan, place: str) -> list[Fault]:
    legal = plan.traits.zero_stages
    if plan.zero in legal:
        return []
    stages = " or ".join(map(str, legal))
    return [
        Fault(
            place=f"{place}: zero",
            problem=f"{plan.implementation} has no ZeRO stage {plan.zero}",
            remedy=f"zero = {stages}, or another data_parallel",
        )
    ]


def _graph_faults(plan: Plan, place: str) -> list[Fault]:
    """Scopes of CUDA graphs that go together only, or not at all."""
    found, where = set(plan.cuda_graphs), f"{place}: cuda_graphs"
    faults: list[Fault] = []
    if "full_iteration" in found and len(found) > 1:
        problem = "full_iteration holds all others"
        faults.append(Fault(place=where, problem=problem, remedy='cuda_graphs = ["full_iteration"]'))
    if "moe_preprocess" in found and "moe_router" not in found:
        problem = "moe_preprocess is captured with the router only"
        faults.append(Fault(place=where, problem=problem, remedy="add moe_router"))
    if "moe" in found and "moe_router" in found:
        faults.append(Fault(place=where, problem="moe holds moe_router", remedy="one of them"))
    return faults


def _order_faults(plan: Plan, place: str) -> list[Fault]:
    """Axes that the order leaves out, and experts anywhere but inside data parallelism."""
    names, where = ordered(plan.rank_order), f"{place}: rank_order"
    left = [axis for axis in (*AXES[::-1], "ep") if axis not in names and getattr(plan, axis) > 1]
    if left:
        degrees = ", ".join(f"{axis} = {getattr(plan, axis)}" for axis in left)
        problem = f"{plan.rank_order} does not say where {degrees} stands"
        return [Fault(place=where, problem=problem, remedy="tp-cp-ep-dp-pp in any order")]
    if plan.ep == 1:
        return []
    inside = [name for name in names[: names.index("ep")] if name.startswith("dp") or name == "pp"]
    outside = [name for name in names[names.index("ep") :] if name == "tp"]
    if not inside and not outside:
        return []
    problem = (
        f"{plan.rank_order} puts experts {'outside ' + inside[0] if inside else 'inside tp'}, which is not modelled"
    )
    return [Fault(place=where, problem=problem, remedy="ep behind tp, before dp and pp: tp-cp-ep-dp-pp")]


def _option_faults(plan: Plan, place: str) -> list[Fault]:
    faults: list[Fault] = []
    if plan.zero > 0 and plan.dp_shard == 1 and plan.dp_replicate > 1:
        faults.append(
            Fault(
                place=f"{place}: dp_shard",
                problem=f"zero = {plan.zero} shards over dp_shard, which is 1, while dp_replicate = {plan.dp_replicate}",
                remedy=f"dp_shard = {plan.dp_replicate}, dp_replicate = 1; or zero = 0",
            )
        )
    if plan.zero == 0 and plan.dp_shard > 1:
        faults.append(
            Fault(
                place=f"{place}: dp_shard",
                problem=f"zero = 0 shards nothing, yet dp_shard = {plan.dp_shard}",
                remedy=f"dp_replicate = {plan.dp_shard * plan.dp_replicate}, dp_shard = 1",
            )
        )
    if plan.seq_len % (2 * plan.cp if plan.cp > 1 else 1):
        faults.append(
            Fault(
                place=f"{place}: seq_len",
                problem=f"seq_len {plan.seq_len} is not a multiple of 2 × cp = {2 * plan.cp} (causal balance)",
                remedy=f"seq_len = {-(-plan.seq_len // (2 * plan.cp)) * 2 * plan.cp}",
            )
        )
    if plan.sequence_parallel and plan.seq_len // plan.cp % plan.tp:
        parts = plan.tp * plan.cp
        faults.append(
            Fault(
                place=f"{place}: sequence_parallel",
                problem=f"the {plan.seq_len // plan.cp} tokens of a rank do not divide by tp = {plan.tp}",
                remedy=f"seq_len = {-(-plan.seq_len // (2 * parts)) * 2 * parts}, or sequence_parallel = false",
            )
        )
    reshard = plan.reshard_after_forward
    if isinstance(reshard, int) and not isinstance(reshard, bool) and (reshard < 1 or plan.dp_shard % reshard):
        faults.append(
            Fault(
                place=f"{place}: reshard_after_forward",
                problem=f"{reshard} does not divide dp_shard = {plan.dp_shard}",
                remedy="a divisor of dp_shard, true or false",
            )
        )
    return faults


def _expert_faults(plan: Plan, place: str) -> list[Fault]:
    """Degrees that do not fit, and what no implementation does. What needs the model is checked on meeting it."""
    faults: list[Fault] = []
    ranks, group = plan.num_expert_ranks, plan.ep * plan.etp
    if ranks % group:
        inside = "dp_shard × cp × tp" if plan.zero else "dp_replicate × dp_shard × cp × tp"
        problem = f"ep × etp = {plan.ep} × {plan.etp} does not divide {inside} = {ranks}"
        fits = ranks % plan.etp == 0
        remedy = f"ep = {gcd(ranks // plan.etp, plan.ep)}" if fits else "ep = 1, etp = 1"
        faults.append(Fault(place=f"{place}: ep", problem=problem, remedy=remedy))
    if plan.etp not in (1, plan.tp):
        problem = f"etp = {plan.etp} is neither 1 nor tp = {plan.tp}"
        faults.append(
            Fault(
                place=f"{place}: etp", problem=problem, remedy=" or ".join(f"etp = {n}" for n in sorted({1, plan.tp}))
            )
        )
    if group > 1 and plan.implementation not in ("megatron", "fsdp2"):
        problem = f"{plan.implementation} has no expert parallelism here"
        faults.append(Fault(place=f"{place}: ep", problem=problem, remedy='data_parallel = "megatron" or "fsdp2"'))
    faults += _overlap_faults(plan, place) if plan.expert_overlap else ()
    if plan.expert_capacity_factor is not None and (plan.expert_imbalance, plan.expert_imbalance_sigma) != (
        1.0,
        0.0,
    ):
        problem = "experts padded to a capacity take the same rows on every rank"
        remedy = "expert_imbalance = 1, expert_imbalance_sigma = 0; or no expert_capacity_factor"
        faults.append(Fault(place=f"{place}: expert_imbalance", problem=problem, remedy=remedy))
    return faults


def _overlap_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """What exchanges beside another micro-batch need (Megatron-LM, arguments.py: overlap_moe_expert_parallel_comm)."""
    where, again = f"{place}: expert_overlap", plan.recompute in ("full", "every_k")
    off = "or expert_overlap = false"
    if plan.ep == 1:
        yield Fault(place=where, problem="ep = 1 exchanges nothing", remedy=f"ep = 2 or more, {off}")
    if plan.dispatcher == "all_gather":
        problem = "it hides all-to-alls, and the dispatcher gathers"
        yield Fault(place=where, problem=problem, remedy=f'dispatcher = "all_to_all" or "deep_ep", {off}')
    if again or (plan.recompute == "selective" and "moe" in plan.recompute_modules):
        problem = "recomputation would run the exchanges again"
        yield Fault(place=where, problem=problem, remedy=f'recompute = "none", or modules without moe, {off}')
    if plan.pp > 1 and plan.pipeline_schedule not in ("interleaved", "dualpipe", "dualpipe_v"):
        problem = f"{plan.pipeline_schedule} has no forward and backward of different micro-batches at once"
        yield Fault(place=where, problem=problem, remedy=f'virtual_stages = 2 or more, schedule = "dualpipe_v", {off}')
    if plan.gathers:
        problem = "beside sharded parameters it is not modelled"
        yield Fault(place=where, problem=problem, remedy=f"zero = 0 or 1, {off}")


def _offload_faults(plan: Plan, place: str) -> list[Fault]:
    """Who can offload what: FSDP2 all states to the host or none; DeepSpeed the optimizer, in stage 3 parameters too."""
    states, parameters = plan.offload.optimizer, plan.offload.parameters
    if states == parameters == "none" and not plan.offload.delayed:
        return []
    where = f"{place}: offload"
    faults: list[Fault] = []
    match plan.implementation:
        case "fsdp2" if states != "host" or parameters != "host":
            both = "FSDP2 offloads parameters, gradients and optimizer together, to the host"
            faults.append(Fault(place=where, problem=both, remedy='optimizer = "host", parameters = "host"'))
        case "fsdp2":
            pass
        case "deepspeed" if plan.zero == 0:
            faults.append(Fault(place=where, problem="stage 0 offloads nothing", remedy="zero = 1, 2 or 3"))
        case "deepspeed" if plan.zero < 3 and (parameters != "none" or states == "nvme"):
            problem = f"stage {plan.zero} offloads the optimizer to the host and nothing else"
            faults.append(Fault(place=where, problem=problem, remedy='zero = 3, or optimizer = "host" alone'))
        case "deepspeed":
            pass
        case other:
            remedy = 'data_parallel = "deepspeed" or "fsdp2"'
            faults.append(Fault(place=where, problem=f"{other} cannot offload states", remedy=remedy))
    if plan.offload.delayed and (states != "host" or plan.implementation != "deepspeed"):
        problem = "a delayed update is of DeepSpeed's optimizer in host memory"
        remedy = 'data_parallel = "deepspeed", offload.optimizer = "host"; or delayed = false'
        faults.append(Fault(place=f"{where}: delayed", problem=problem, remedy=remedy))
    if states != "none" and plan.optimizer not in ("adam", "adamw"):
        problem = f"a CPU {plan.optimizer} has no measured speed"
        faults.append(Fault(place=f"{place}: optimizer", problem=problem, remedy='optimizer = "adamw"'))
    return faults
