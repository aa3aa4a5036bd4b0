"""Legality of a plan for a model and cluster: degrees, heads, experts, layers; faults name the nearest legal value."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Final, Protocol

from simulator.base.errors import Fault, PlanError
from simulator.base.units import counted
from simulator.parallel.pipeline import faults as pipeline_faults
from simulator.spec.cluster import Cluster
from simulator.spec.model.experts import Experts
from simulator.spec.model.hybrid import Mamba
from simulator.spec.plan import AXES, Plan


class Heads(Protocol):
    """The properties of a model that decide whether a plan can split it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def experts(self) -> Experts | None: ...
    @property
    def mamba(self) -> Mamba | None: ...
    @property
    def layer_kinds(self) -> tuple[str, ...]: ...


def check(plan: Plan, model: Heads, cluster: Cluster) -> None:
    """Raise PlanError with every way in which plan, model and cluster do not fit together.

    Ring attention splits the sequence (which the plan checks), never the heads; an all-to-all splits both.
    """
    faults = [*degree_faults(plan, cluster), *model_faults(plan, model)]
    if faults:
        raise PlanError(faults)


def model_faults(plan: Plan, model: Heads) -> list[Fault]:
    """Every way in which the model cannot be split as the plan says, whatever the cluster."""
    faults = [
        *_split_faults(plan, model),
        *_swap_faults(plan, model),
        *_mamba_faults(plan, model),
        *_ends_faults(plan, model),
        *_expert_faults(plan, model),
    ]
    counts = model.num_layers, plan.pp, plan.num_micro_batches, plan.virtual_stages
    return [*faults, *pipeline_faults(plan.pipeline_schedule, *counts, split=plan.split)]


def degree_faults(plan: Plan, cluster: Cluster) -> list[Fault]:
    """The product of the degrees is not the cluster's number of devices."""
    if plan.num_devices == cluster.num_devices:
        return []
    equation = " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)
    layout = f"{cluster.num_nodes} × {cluster.gpus_per_node} of {cluster.name}"
    return [
        Fault(
            place="plan: degrees",
            problem=f"{equation} = {plan.num_devices}, the cluster has {counted(cluster.num_devices, 'device')} ({layout})",
            remedy=_nearest_degrees(plan, cluster),
        )
    ]


def _nearest_degrees(plan: Plan, cluster: Cluster) -> str:
    """The data-parallel degree that fills the cluster, else a number of nodes that the plan fills."""
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


def _split_faults(plan: Plan, model: Heads) -> list[Fault]:
    tp, kv, shared = plan.tp, model.num_kv_heads, shares_kv_heads(plan)
    kinds = set(model.layer_kinds)
    counts = {"heads": model.num_heads, "key-value heads": kv} if kinds != {"mamba"} else {}
    if kinds & {"dense_layer", "mlp"} or (model.experts is None and "layer" in kinds):
        counts["columns of the MLP"] = model.d_ff
    if model.mamba is not None:
        counts |= {"Mamba heads": model.mamba.num_heads, "Mamba groups": model.mamba.num_groups}
    if model.experts is not None and model.experts.shared_d_ff:
        counts["columns of the shared experts"] = model.experts.shared_d_ff

    def splits(name: str, degree: int) -> bool:
        return counts[name] % degree == 0 or (name == "key-value heads" and shared and degree % kv == 0)

    if all(splits(name, tp) for name in counts):
        return []
    legal = [
        degree for degree in _divisors(next(iter(counts.values()))) if all(splits(name, degree) for name in counts)
    ]
    near = min(legal, key=lambda degree: (abs(degree - tp), degree))
    return [
        Fault(
            place="plan: tp",
            problem=f"tp = {tp} does not divide the model's {count} {name}"
            + (", nor is it a multiple of them" if shared and name == "key-value heads" else ""),
            remedy=f"tp = {near}",
        )
        for name, count in counts.items()
        if not splits(name, tp)
    ]


def shares_kv_heads(plan: Plan) -> bool:
    """Several ranks of tp may attend to one key-value head.

    Megatron-Core deals the joint product of Q, K and V out evenly and gathers what it made (core/transformer/attention.py,
    num_query_groups < world_size). torch's and DeepSpeed's styles view whole heads of what a rank has.
    """
    return plan.implementation == "megatron"


def _swap_faults(plan: Plan, model: Heads) -> Iterator[Fault]:
    if plan.cp_exchange != "all_to_all" or plan.cp == 1:
        return
    heads = {"heads": model.num_heads, "key-value heads": model.num_kv_heads}
    for name, count in heads.items():
        if count % (plan.cp * plan.tp):
            among = f"cp × tp = {plan.cp} × {plan.tp} ranks" if plan.tp > 1 else f"cp = {plan.cp} ranks"
            problem = f"an all-to-all deals the model's {count} {name} out to {among}, which does not come out even"
            yield Fault(place="plan: cp_exchange", problem=problem, remedy='cp_exchange = "ring", or a smaller cp')


_NARROW_MULTIPLE: Final = 16  # columns that fp8 products come in (Megatron-LM, core/ssm/mamba_mixer.py)


def _ends_faults(plan: Plan, model: Heads) -> Iterator[Fault]:
    ends = plan.first_layers_bf16 + plan.last_layers_bf16
    if ends > model.num_layers:
        sizes = f"{plan.first_layers_bf16} + {plan.last_layers_bf16}"
        problem = f"{sizes} layers in bf16, and the model has {model.num_layers}"
        yield Fault(place="plan: first_layers_bf16", problem=problem, remedy=f"{model.num_layers} together at most")


def _mamba_faults(plan: Plan, model: Heads) -> Iterator[Fault]:
    """Mixers swap heads for tokens under context parallelism (Megatron-LM, core/ssm/mamba_context_parallel.py)."""
    if model.mamba is None:
        return
    if plan.implementation != "megatron" and plan.tp * plan.cp > 1:
        problem = f"{plan.implementation} splits no Mamba mixers, and tp × cp = {plan.tp} × {plan.cp}"
        yield Fault(place="plan: tp", problem=problem, remedy='tp = 1, cp = 1, or data_parallel = "megatron"')
    if plan.narrow and model.mamba.projected % _NARROW_MULTIPLE:
        problem = (
            f"the {model.mamba.projected} columns of a Mamba mixer's product are no multiple of {_NARROW_MULTIPLE}"
        )
        yield Fault(
            place="plan: precision", problem=problem, remedy='precision = "bf16", or other heads, groups or states'
        )
    parts = plan.cp * plan.tp
    if plan.cp == 1 or model.mamba.num_heads % plan.tp or model.mamba.num_groups % plan.tp:
        return  # nothing to swap; or told of already
    if model.mamba.num_heads % parts:
        problem = f"cp × tp = {plan.cp} × {plan.tp} does not divide the model's {model.mamba.num_heads} Mamba heads"
        yield Fault(place="plan: cp", problem=problem, remedy=f"cp = {gcd(model.mamba.num_heads // plan.tp, plan.cp)}")
    groups = model.mamba.num_groups // plan.tp
    if groups % plan.cp and plan.cp % groups:
        problem = f"cp = {plan.cp} is neither a divisor nor a multiple of a rank's {groups} Mamba groups"
        yield Fault(place="plan: cp", problem=problem, remedy=f"cp = {gcd(groups, plan.cp)} or {groups}")


def _expert_faults(plan: Plan, model: Heads) -> Iterator[Fault]:
    experts = model.experts
    if experts is None:
        if plan.ep > 1:
            yield Fault(place="plan: ep", problem="the model has no experts", remedy="ep = 1")
        return
    if experts.num_experts % plan.ep:
        problem = f"ep = {plan.ep} does not divide the model's {experts.num_experts} experts"
        remedy = f"ep = {nearest_divisor(experts.num_experts, plan.ep)}"
        yield Fault(place="plan: ep", problem=problem, remedy=remedy)
    if plan.experts_apart and plan.implementation not in ("megatron", "fsdp2"):
        problem = f"{plan.implementation} has no groups of their own for experts"
        remedy = f'ep = 1, etp = {plan.tp}; or data_parallel = "megatron" or "fsdp2"'
        yield Fault(place="plan: ep", problem=problem, remedy=remedy)
    if experts.d_ff % plan.etp:
        problem = f"etp = {plan.etp} does not divide the {experts.d_ff} columns of an expert"
        yield Fault(place="plan: etp", problem=problem, remedy="etp = 1")
    if plan.tp > plan.etp and not plan.sequence_parallel:
        problem = f"whole experts (etp = 1) on tp = {plan.tp} ranks that all hold the same tokens"
        yield Fault(place="plan: etp", problem=problem, remedy=f"sequence_parallel = true, or etp = {plan.tp}")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is next to `wanted`, of two the smaller."""
    return min(_divisors(number), key=lambda d: (abs(d - wanted), d))
