"""The pool of device memory: what of its settings contradicts another, and where its tiers are modelled."""

from __future__ import annotations

from typing import Final

from simulator.parallel.legality.rule import PlanRule, Run, RunRule

_OF_TORCH: Final = ("caching", "expandable", "first_fit", "checkpoint_buffer")

MOST_BUFFERED: Final = 100_000  # micro-batches of chunks: two buffers each, played once for every remedy


def _tiered(run: Run) -> bool:
    return run.plan.memory.tiered


PLAN: Final = (
    PlanRule(
        where="memory_policy",
        applies=lambda plan: plan.memory.tiered,
        holds=lambda plan: not plan.offload.any,
        equation=lambda plan: f"the policy {plan.memory.policy} chooses what leaves HBM, and so does offload",
        remedy="one of the two",
    ),
    PlanRule(
        where="alloc_conf",
        applies=lambda plan: bool(plan.memory.alloc_conf),
        holds=lambda plan: plan.memory.policy in _OF_TORCH,
        equation=lambda plan: (
            f"the policy {plan.memory.policy} is not PyTorch's allocator, whose settings alloc_conf holds"
        ),
        remedy=f"memory_policy = {', '.join(_OF_TORCH[:-1])} or {_OF_TORCH[-1]}, or no alloc_conf",
    ),
    PlanRule(
        where="alloc_conf",
        applies=lambda plan: plan.memory_fraction < 1.0,
        holds=lambda plan: plan.memory.conf.memory_fraction in (None, plan.memory_fraction),
        equation=lambda plan: (
            f"per_process_memory_fraction:{plan.memory.conf.memory_fraction:g} is not memory_fraction = "
            f"{plan.memory_fraction:g}"
        ),
        remedy="give one of the two",
    ),
    PlanRule(
        where="alloc_conf",
        applies=lambda plan: plan.memory.policy in ("expandable", "first_fit"),
        holds=lambda plan: plan.memory.conf.expandable_segments in (None, plan.memory.policy == "expandable"),
        equation=lambda plan: f"alloc_conf says of expandable_segments what the policy {plan.memory.policy} is not",
        remedy="give one of the two",
    ),
    PlanRule(
        where="num_micro_batches",
        applies=lambda plan: plan.pp > 1 and plan.traits.uses_torch_pipelines,
        holds=lambda plan: plan.num_micro_batches * plan.pipeline.virtual_stages <= MOST_BUFFERED,
        equation=lambda plan: (
            f"torch's pipelines keep buffers of each micro-batch and chunk, {plan.num_micro_batches * plan.pipeline.virtual_stages:,} "
            f"here; at most {MOST_BUFFERED:,} are modelled"
        ),
        remedy=lambda plan: f"num_micro_batches = {max(MOST_BUFFERED // plan.pipeline.virtual_stages, 1)} or fewer",
    ),
)

MODELLED: Final = (
    RunRule(
        where="memory_policy",
        applies=_tiered,
        holds=lambda run: run.plan.pp == 1,
        equation="tiers below HBM with pipeline parallelism are not modelled",
        remedy='pp = 1, or memory_policy = "expandable"; `shardwise place --tensors own --evict lru` plays one stage',
    ),
    RunRule(
        where="memory_policy",
        applies=_tiered,
        holds=lambda run: run.cluster.host_tier is not None,
        equation=lambda run: f"{run.cluster.name} has no host memory that its GPUs reach",
        remedy="add a [host] link to the cluster file",
    ),
    RunRule(
        where="exceptions",
        at="cluster",
        applies=_tiered,
        holds=lambda run: not run.cluster.exceptions,
        equation="tiers below HBM on nodes that differ are not modelled",
        remedy='memory_policy = "expandable", or no exceptions in the cluster',
    ),
)
