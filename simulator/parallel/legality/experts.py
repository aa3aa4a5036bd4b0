"""Expert parallelism: degrees, who has it, and what its exchanges run beside."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Final

from simulator.parallel.legality.degrees import nearest_divisor
from simulator.parallel.legality.rule import ModelRule, OfModel, PlanRule, Run, RunRule
from simulator.spec.model.experts import Experts, cuts_rows
from simulator.spec.plan import Plan


def _undivided(plan: Plan) -> str:
    inside = "dp_shard × cp × tp" if plan.zero else "dp_replicate × dp_shard × cp × tp"
    return f"ep × etp = {plan.ep} × {plan.experts.etp} does not divide {inside} = {plan.num_expert_ranks}"


def _dividing(plan: Plan) -> str:
    ranks = plan.num_expert_ranks
    return f"ep = {gcd(ranks // plan.experts.etp, plan.ep)}" if ranks % plan.experts.etp == 0 else "ep = 1, etp = 1"


def _runs_again(plan: Plan) -> bool:
    """Recomputation covers the experts."""
    if plan.recompute.mode in ("full", "every_k"):
        return True
    return plan.recompute.mode == "selective" and "moe" in plan.recompute.modules


_OFF: Final = "or expert_overlap = false"

_DEGREES: Final = (
    PlanRule(
        where="ep",
        holds=lambda plan: plan.num_expert_ranks % (plan.ep * plan.experts.etp) == 0,
        equation=_undivided,
        remedy=_dividing,
    ),
    PlanRule(
        where="etp",
        holds=lambda plan: plan.experts.etp in (1, plan.tp),
        equation=lambda plan: f"etp = {plan.experts.etp} is neither 1 nor tp = {plan.tp}",
        remedy=lambda plan: " or ".join(f"etp = {n}" for n in sorted({1, plan.tp})),
    ),
    PlanRule(
        where="ep",
        holds=lambda plan: plan.ep * plan.experts.etp == 1 or plan.traits.expert_groups,
        equation=lambda plan: f"{plan.implementation} has no expert parallelism here",
        remedy='data_parallel = "megatron", "fsdp2" or "deepspeed"',
    ),
    PlanRule(
        where="dispatcher",
        applies=lambda plan: plan.ep > 1 and plan.traits.masks_rows,
        holds=lambda plan: plan.experts.dispatcher == "all_to_all",
        equation=lambda plan: f"{plan.implementation}'s layer exchanges rows by all-to-alls",
        remedy='dispatcher = "all_to_all"',
    ),
)

_overlap_rule = partial(PlanRule, where="expert_overlap", applies=lambda plan: plan.experts.overlap)
_OVERLAP: Final = (  # Megatron-LM, arguments.py: overlap_moe_expert_parallel_comm
    _overlap_rule(
        holds=lambda plan: plan.ep > 1,
        equation="with ep = 1 there is nothing to exchange",
        remedy=f"ep = 2 or more, {_OFF}",
    ),
    _overlap_rule(
        holds=lambda plan: plan.experts.dispatcher != "all_gather",
        equation="it hides all-to-alls, and this dispatcher uses all-gathers",
        remedy=f'dispatcher = "all_to_all" or "deep_ep", {_OFF}',
    ),
    _overlap_rule(
        holds=lambda plan: not _runs_again(plan),
        equation="recomputation would run the exchanges again",
        remedy=f'recompute = "none", or leave "moe" out of recompute_modules, {_OFF}',
    ),
    _overlap_rule(
        holds=lambda plan: plan.pp == 1 or plan.pipeline_schedule in ("interleaved", "dualpipe", "dualpipe_v"),
        equation=lambda plan: (
            f"{plan.pipeline_schedule} has no forward and backward of different micro-batches at once"
        ),
        remedy=f'virtual_stages = 2 or more, schedule = "dualpipe_v", {_OFF}',
    ),
    _overlap_rule(
        holds=lambda plan: not plan.gathers,
        equation="it is not modelled with sharded parameters",
        remedy=f"zero = 0 or 1, {_OFF}",
    ),
)

PLAN: Final = (
    *_DEGREES,
    *_OVERLAP,
    PlanRule(
        where="expert_imbalance",
        holds=lambda plan: (
            plan.experts.capacity_factor is None or (plan.experts.imbalance, plan.experts.imbalance_sigma) == (1.0, 0.0)
        ),
        equation="experts padded to a capacity take the same rows on every rank",
        remedy="expert_imbalance = 1 and expert_imbalance_sigma = 0, or leave expert_capacity_factor out",
    ),
)


def _experts(of: OfModel) -> Experts:
    """The model's experts; the rules that ask for them apply where there are some."""
    if of.model.experts is None:
        raise LookupError
    return of.model.experts


def _has_experts(of: OfModel) -> bool:
    return of.model.experts is not None


MODEL: Final = (
    ModelRule(
        where="ep",
        applies=lambda of: of.model.experts is None,
        holds=lambda of: of.plan.ep <= 1,
        equation="the model has no experts",
        remedy="ep = 1",
    ),
    ModelRule(
        where="ep",
        applies=_has_experts,
        holds=lambda of: _experts(of).num_experts % of.plan.ep == 0,
        equation=lambda of: f"ep = {of.plan.ep} does not divide the model's {_experts(of).num_experts} experts",
        remedy=lambda of: f"ep = {nearest_divisor(_experts(of).num_experts, of.plan.ep)}",
    ),
    ModelRule(
        where="ep",
        applies=_has_experts,
        holds=lambda of: not of.plan.experts_apart or of.plan.traits.expert_groups,
        equation=lambda of: f"{of.plan.implementation} has no separate groups for experts",
        remedy=lambda of: f'ep = 1, etp = {of.plan.tp}; or data_parallel = "megatron" or "fsdp2"',
    ),
    ModelRule(  # DeepSpeed, runtime/engine.py: "MoE not supported with Stage 3"; pipe/engine.py knows no groups of experts
        where="ep",
        applies=lambda of: _has_experts(of) and of.plan.experts_apart and of.plan.traits.masks_rows,
        holds=lambda of: of.plan.zero < 3 and of.plan.tp == of.plan.pp == 1,
        equation=lambda of: (
            f"{of.plan.implementation} deals experts to ranks in stages 0 to 2, without pipelines, and here without tp"
        ),
        remedy=lambda of: f'zero = 2, tp = 1, pp = 1; or ep = 1, etp = {of.plan.tp}; or data_parallel = "megatron"',
    ),
    ModelRule(
        where="etp",
        applies=_has_experts,
        holds=lambda of: _experts(of).d_ff % of.plan.experts.etp == 0,
        equation=lambda of: f"etp = {of.plan.experts.etp} does not divide the {_experts(of).d_ff} columns of an expert",
        remedy="etp = 1",
    ),
    ModelRule(
        where="etp",
        applies=_has_experts,
        holds=lambda of: of.plan.tp <= of.plan.experts.etp or of.plan.sequence_parallel,
        equation=lambda of: f"etp = 1 keeps experts whole, and all tp = {of.plan.tp} ranks hold the same tokens",
        remedy=lambda of: f"sequence_parallel = true, or etp = {of.plan.tp}",
    ),
)


def _shards(plan: Plan) -> int:
    """Ranks over which FSDP2 cuts an expert's weights."""
    inside = plan.ep * plan.experts.etp
    return max(1, plan.num_expert_ranks // inside) if plan.experts_apart else plan.dp_shard * plan.cp


def _cuts_stacked_rows(run: Run) -> bool:
    """FSDP2 cuts dim 1 of weights that stack all experts."""
    how, plan, experts = run.stack.kernels.expert_shards, run.plan, run.model.experts
    if experts is None or how == "rows" or not plan.traits.shards_rows:
        return False
    return cuts_rows(how, shards=_shards(plan), experts=experts.num_experts // plan.ep, ep=plan.ep)


def _rows(run: Run) -> tuple[int, int]:
    """Rows of an expert's weights: into the hidden layer, and out of it."""
    experts = _experts(OfModel(run.plan, run.model))
    return experts.d_ff // run.plan.experts.etp, experts.latent_dim or run.model.d_model


RUN: Final = (
    RunRule(  # torch 2.13, fsdp/_fully_shard/_fsdp_param.py: no uneven sharding but on dim 0
        where="dp_shard",
        applies=_cuts_stacked_rows,
        holds=lambda run: not any(rows % _shards(run.plan) for rows in _rows(run)),
        equation=lambda run: (
            f"{run.stack.name} cuts {_rows(run)[0]:,} and {_rows(run)[1]:,} rows of experts into {_shards(run.plan):,} "
            "shards, which FSDP2 refuses as uneven"
        ),
        remedy=lambda run: (
            f"{gcd(*_rows(run), _shards(run.plan)):,} shards: raise ep, or lower dp_shard and raise dp_replicate"
        ),
    ),
)
