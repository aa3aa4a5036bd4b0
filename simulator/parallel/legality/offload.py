"""Offload: FSDP2 all states to the host or none; DeepSpeed the optimizer, in stage 3 parameters too."""

from __future__ import annotations

from functools import partial
from typing import Final

from simulator.parallel.legality.rule import PlanRule, Run, RunRule
from simulator.spec.plan import Plan


def _offloads(plan: Plan) -> bool:
    """States leave the device, or their update is delayed."""
    offload = plan.offload
    return offload.optimizer != "none" or offload.parameters != "none" or offload.delayed


def _by_deepspeed(plan: Plan) -> bool:
    return _offloads(plan) and plan.traits.zero_engine


PLAN: Final = (
    PlanRule(
        where="offload",
        applies=lambda plan: _offloads(plan) and plan.traits.offloads_units,
        holds=lambda plan: plan.offload.optimizer == "host" and plan.offload.parameters == "host",
        equation="FSDP2 offloads parameters, gradients and optimizer together, to the host",
        remedy='offload.optimizer = "host" and offload.parameters = "host"',
    ),
    PlanRule(
        where="offload",
        applies=_by_deepspeed,
        holds=lambda plan: plan.zero > 0,
        equation="ZeRO stage 0 cannot offload anything",
        remedy="zero = 1, 2 or 3",
    ),
    PlanRule(
        where="offload",
        applies=lambda plan: _by_deepspeed(plan) and plan.zero in (1, 2),
        holds=lambda plan: plan.offload.parameters == "none" and plan.offload.optimizer != "nvme",
        equation=lambda plan: f"ZeRO stage {plan.zero} can offload only the optimizer, and only to the host",
        remedy='zero = 3, or offload.optimizer = "host" and no offload.parameters',
    ),
    PlanRule(
        where="offload",
        applies=_offloads,
        holds=lambda plan: plan.traits.offloads_units or plan.traits.zero_engine,
        equation=lambda plan: f"{plan.implementation} cannot offload states",
        remedy='data_parallel = "deepspeed", "fsdp1" or "fsdp2"',
    ),
    PlanRule(
        where="offload: delayed",
        applies=lambda plan: plan.offload.delayed,
        holds=lambda plan: plan.offload.optimizer == "host" and plan.traits.zero_engine,
        equation="only DeepSpeed's optimizer in host memory can update late",
        remedy='data_parallel = "deepspeed", offload.optimizer = "host"; or offload.delayed = false',
    ),
    PlanRule(
        where="optimizer",
        applies=lambda plan: plan.offload.optimizer != "none",
        holds=lambda plan: plan.optimizer.kind in ("adam", "adamw"),
        equation=lambda plan: f"a CPU {plan.optimizer.kind} has no measured speed",
        remedy='optimizer = "adamw"',
    ),
)


def _offloading(run: Run) -> bool:
    return run.plan.offload.any


def _no_peers(run: Run) -> str:
    cluster = run.cluster
    if cluster.idle_gpus:
        return f"the {cluster.idle_gpus} idle GPUs of {cluster.name} are reached through the host, not over NVLink"
    return f"{cluster.name} has no idle GPUs"


_offload_rule = partial(RunRule, where="offload", applies=_offloading)
MODELLED: Final = (
    _offload_rule(
        holds=lambda run: run.model.experts is None or run.plan.ep == 1,
        equation="offload with expert parallelism is not modelled",
        remedy="ep = 1, or leave offload out",
    ),
    _offload_rule(
        holds=lambda run: run.plan.pp == 1,
        equation="offload with pipeline parallelism is not modelled",
        remedy="pp = 1, or leave offload out",
    ),
)

HOSTS: Final = (
    _offload_rule(
        holds=lambda run: run.cluster.host_tier is not None,
        equation=lambda run: f"{run.cluster.name} has no host memory that its GPUs reach",
        remedy="add a [host] link to the cluster file",
    ),
    RunRule(
        where="offload.activations",
        applies=lambda run: run.plan.offload.activations == "peer",
        holds=lambda run: run.cluster.lent_bytes > 0,
        equation=_no_peers,
        remedy='set idle_gpus in the cluster file, or offload.activations = "host"',
    ),
)
# reported at the cluster
EVEN_NODES: Final = RunRule(
    where="exceptions",
    at="cluster",
    applies=_offloading,
    holds=lambda run: not run.cluster.exceptions,
    equation="offload on nodes that differ is not modelled",
    remedy="leave offload out of the plan, or exceptions out of the cluster",
)
