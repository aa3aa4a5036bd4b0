"""What is said of a layer's modules, and which software has them: CUDA graphs, recomputation, copies beside products."""

from __future__ import annotations

from typing import Final

from simulator.parallel.legality.rule import PlanRule, Run, RunRule
from simulator.parallel.schedule_traits import splits_backward

PLAN: Final = (
    PlanRule(
        where="cuda_graphs",
        holds=lambda plan: "full_iteration" not in plan.cuda_graphs or len(set(plan.cuda_graphs)) == 1,
        equation="full_iteration already includes all others",
        remedy='cuda_graphs = ["full_iteration"]',
    ),
    PlanRule(
        where="cuda_graphs",
        holds=lambda plan: "moe_preprocess" not in plan.cuda_graphs or "moe_router" in plan.cuda_graphs,
        equation="moe_preprocess is captured only together with moe_router",
        remedy='add "moe_router" to cuda_graphs',
    ),
    PlanRule(
        where="cuda_graphs",
        holds=lambda plan: "moe" not in plan.cuda_graphs or "moe_router" not in plan.cuda_graphs,
        equation="moe already includes moe_router",
        remedy='leave "moe" or "moe_router" out of cuda_graphs',
    ),
)

MODULES: Final = (
    RunRule(
        where="recompute_modules",
        applies=lambda run: run.plan.recompute.mode == "selective" and run.plan.recompute.modules != ("core_attn",),
        holds=lambda run: run.stack.traits.recomputes_modules,
        equation=lambda run: f"{run.stack.name} recomputes by operator, not by module",
        remedy='stack = "megatron-core-2025", or leave recompute_modules out',
    ),
    RunRule(
        where="cuda_graphs",
        applies=lambda run: bool(run.plan.cuda_graphs),
        holds=lambda run: run.stack.traits.graphs_modules,
        equation=lambda run: f"CUDA graphs of modules are Megatron's, and {run.stack.name} has none",
        remedy='stack = "megatron-core-2025", or leave cuda_graphs out',
    ),
)

WHOLE_BACKWARDS: Final = RunRule(
    where="schedule",
    applies=lambda run: run.plan.gathers,
    holds=lambda run: not splits_backward(run.plan.pipeline_schedule),
    equation=lambda run: (
        f"{run.plan.pipeline_schedule} delays the weights' gradients, which sharded parameters do not allow"
    ),
    remedy='zero = 0 or 1, or schedule = "1f1b"',
)


def _reads_peers(run: Run) -> bool:
    """Symmetric memory of torch is read over NVLink: it has no other way to a peer."""
    plan = run.plan
    symmetric = plan.tp > 1 and plan.sequence_parallel and run.stack.overlap.tp == "symmetric_memory"
    return symmetric and plan.num_devices == run.cluster.num_devices


NEAR_PEERS: Final = RunRule(
    where="tp",
    applies=_reads_peers,
    holds=lambda run: not run.tensor_group().spans_domain,
    equation=lambda run: (
        f"asynchronous tensor parallelism reads its peers' memory over NVLink, and tp = {run.plan.tp} leaves the domain"
    ),
    remedy=lambda run: f"tp = {run.tensor_group().ranks_per_node}, or a stack whose overlap.tp is not symmetric_memory",
)
