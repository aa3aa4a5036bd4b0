"""What torch itself can play of context parallelism, experts and pipelines."""

from __future__ import annotations

from functools import partial
from typing import Final

from simulator.parallel.legality.rule import Played, PlayRule
from simulator.parallel.schedule_traits import splits_backward
from simulator.spec.plan import NOTHING_OFFLOADED, Plan


def _pipelined(played: Played) -> bool:
    return played.plan.pp > 1


def _mixture(played: Played) -> bool:
    return played.model.experts is not None


def _rings(played: Played) -> bool:
    return played.plan.cp > 1 and played.plan.cp_exchange == "ring"


def _masked(played: Played) -> bool:
    model = played.model
    return model.positions == "alibi" or (
        model.sliding_window is not None and model.sliding_window < played.plan.seq_len
    )


def _rounds(plan: Plan) -> int:
    """Into which torch cuts a step's micro-batches (torch 2.13, pipelining/schedules.py)."""
    return max(1, plan.num_micro_batches // plan.pp)


def _rows(played: Played) -> int:
    """(Token, expert) pairs of a rank and micro-batch."""
    assert played.model.experts is not None
    return played.plan.micro_batch_size * played.plan.seq_len // played.plan.cp * played.model.experts.top_k


_pipeline_rule = partial(PlayRule, where="pp", applies=_pipelined)
SPREAD: Final = (
    PlayRule(
        where="cp",
        applies=_rings,
        holds=lambda played: not _masked(played) and played.stack.attention.kernel != "math",
        equation="torch's ring attention is causal: it takes no mask, no window and no two products",
        remedy='cp_exchange = "all_to_all", or cp = 1',
    ),
    PlayRule(
        where="schedule",
        applies=_pipelined,
        holds=lambda played: played.plan.pipeline_schedule != "dualpipe",
        equation="torch has no dualpipe, whose ranks hold two stages' parameters each",
        remedy='schedule = "dualpipe_v"',
    ),
    PlayRule(
        where="schedule",
        applies=lambda played: _pipelined(played) and splits_backward(played.plan.pipeline_schedule),
        holds=lambda played: played.plan.traits.shards_rows or played.plan.dp_replicate * played.plan.dp_shard == 1,
        equation=lambda played: (
            f"torch's {played.plan.pipeline_schedule} finds gradients of weights past DDP's hooks, so that replicas never sum them"
        ),
        remedy='schedule = "1f1b", or one replica',
    ),
    PlayRule(
        where="recompute",
        applies=lambda played: _pipelined(played) and splits_backward(played.plan.pipeline_schedule),
        holds=lambda played: played.plan.recompute.mode != "selective",
        equation="torch goes back only once through what selective checkpointing kept, and halves of backwards go twice",
        remedy='recompute = "none", or schedule = "1f1b"',
    ),
    PlayRule(
        where="num_micro_batches",
        applies=lambda played: _pipelined(played) and played.plan.pipeline_schedule in ("interleaved", "zb_h1"),
        holds=lambda played: played.plan.num_micro_batches % _rounds(played.plan) == 0,
        equation=lambda played: (
            f"torch's {played.plan.pipeline_schedule} runs equal rounds of at least {played.plan.pp} micro-batches, "
            f"and {played.plan.num_micro_batches} are not {_rounds(played.plan)} of them"
        ),
        remedy=lambda played: f"num_micro_batches = {_rounds(played.plan) * played.plan.pp}",
    ),
    PlayRule(
        where="num_micro_batches",
        applies=lambda played: _pipelined(played) and played.plan.pipeline_schedule == "dualpipe_v",
        holds=lambda played: played.plan.num_micro_batches >= 2 * played.plan.pp,
        equation=lambda played: f"torch's dualpipe_v wants as many micro-batches as stages, {2 * played.plan.pp}",
        remedy=lambda played: f"num_micro_batches = {2 * played.plan.pp}",
    ),
    _pipeline_rule(
        holds=lambda played: not played.model.tied_embeddings,
        equation=lambda played: (
            f"{played.model.name} ties its tables, and torch's pipelines do not sum their gradients"
        ),
        remedy="pp = 1, or a model whose tables are not tied",
    ),
    PlayRule(
        where="sync_every_micro_batch",
        applies=lambda played: _pipelined(played) and played.plan.traits.shards_rows,
        holds=lambda played: (
            not played.plan.syncs_every_micro_batch
            and (played.plan.zero == 2 or played.plan.fsdp.reshard_after_forward is False)
        ),
        equation="torch's pipelines keep what FSDP2 gathers through the step, and reduce after the last backward",
        remedy="sync_every_micro_batch = false and reshard_after_forward = false",
    ),
    _pipeline_rule(
        holds=lambda played: played.plan.offload == NOTHING_OFFLOADED,
        equation="offloaded states are not played in a pipeline",
        remedy="leave offload out, or pp = 1",
    ),
    _pipeline_rule(
        holds=lambda played: played.plan.ddp.comm_hook.kind == "none",
        equation="hooks of DDP are not played in a pipeline",
        remedy='comm_hook.kind = "none", or pp = 1',
    ),
    PlayRule(
        where="dispatcher",
        applies=_mixture,
        holds=lambda played: played.plan.ep == 1 or played.plan.experts.dispatcher == "all_to_all",
        equation=lambda played: f"the dispatcher {played.plan.experts.dispatcher} is not torch's own",
        remedy='dispatcher = "all_to_all"',
    ),
    PlayRule(
        where="expert_imbalance",
        applies=_mixture,
        holds=lambda played: (
            played.plan.experts.imbalance == 1
            and played.plan.experts.capacity_factor is None
            and not played.plan.experts.overlap
        ),
        equation="experts get equal rows, none dropped, padded or overlapped",
        remedy="expert_imbalance = 1, without expert_capacity_factor and expert_overlap",
    ),
    PlayRule(
        where="etp",
        applies=_mixture,
        holds=lambda played: played.plan.tp == 1,
        equation="a mixture is not played with tp",
        remedy="tp = 1",
    ),
    PlayRule(
        where="micro_batch_size",
        applies=_mixture,
        holds=lambda played: played.model.experts is None or _rows(played) % played.model.experts.num_experts == 0,
        equation=lambda played: f"{_rows(played)} rows do not come out even over the model's experts",
        remedy="a micro_batch_size whose tokens × top_k the number of experts divides",
    ),
)
