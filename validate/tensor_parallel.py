"""A plan's tensor parallelism in torch's own styles: products by columns and rows, tokens, vocabulary.

As torchtitan lays it out: a region's input is brought to whole tokens once, its products are split by columns and then by
rows, and its result leaves as whole tokens or, under sequence parallelism, as this rank's part of them. Parameters that
every rank holds and that see a part of the work only (norms under sequence parallelism, norms of heads) become replicated
DTensors, so that their gradients are summed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from simulator.spec.plan import Plan
from validate.models import Block, Decoder

_INTO, _OUT = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.out", "mlp.down")
_TOKENS, _HEADS = 1, 1  # dims of [b, s, D] and of [b, H, s, C]


def split(module: Decoder, plan: Plan, mesh: DeviceMesh) -> None:
    """Cut the modules over the ranks of `mesh`, in place. Their tables follow the heads and tokens that stay here."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for block in module.layers:
        _split_block(block, mesh, sequence=plan.sequence_parallel)
    _split_ends(module, plan, mesh)
    if module.is_tied:
        module.lm_head.weight = module.embedding.weight  # each end was cut on its own
    heads = module.model.num_heads // ranks
    module.heads = range(rank * heads, (rank + 1) * heads)
    if plan.sequence_parallel:
        module.first_token = rank * (plan.seq_len // plan.cp // ranks)
    with torch.device("meta"):
        module.register_tables()


def split_loss(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """Around a loss of logits that are split by vocabulary, and around its backward."""
    return loss_parallel() if plan.tp > 1 and plan.vocab_parallel else contextlib.nullcontext()


def _split_block(block: Block, mesh: DeviceMesh, *, sequence: bool) -> None:
    between = Shard(_TOKENS) if sequence else Replicate()
    styles: dict[str, Any] = {
        "attention": _whole_tokens(between, others=3),
        "mlp": _whole_tokens(between),
        **{name: ColwiseParallel() for name in _INTO},
        **{name: RowwiseParallel(output_layouts=between) for name in _OUT},
        **{f"attention.{name}": _part_norm(_HEADS) for name in ("q_norm", "k_norm")},
    }
    if sequence:
        styles |= {f"norm_{number}": _part_norm(_TOKENS) for number in range(1, 5)}
    there = {name for name, _ in block.named_modules()}
    parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in there})


def _split_ends(module: Decoder, plan: Plan, mesh: DeviceMesh) -> None:
    """Embedding, positions, final norm, LM head."""
    between = Shard(_TOKENS) if plan.sequence_parallel else Replicate()
    styles: dict[str, Any] = {}
    if plan.vocab_parallel:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        styles["lm_head"] = ColwiseParallel(input_layouts=between, use_local_output=False)
    elif plan.sequence_parallel:
        styles["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
        styles["lm_head"] = _whole_tokens(between, local=True)
    if plan.sequence_parallel:
        styles["norm"] = _part_norm(_TOKENS)
        if hasattr(module, "positions"):
            styles["positions"] = _part_norm(0)
    here = {name for name, _ in module.named_children()}
    if styles := {name: style for name, style in styles.items() if name in here}:
        parallelize_module(module, mesh, styles)


def _whole_tokens(between: Replicate | Shard, *, others: int = 0, local: bool = False) -> PrepareModuleInput:
    """Enter a region: gather the tokens, or, where they are whole, sum the gradients of all that use them at once."""
    rest = (None,) * others
    return PrepareModuleInput(
        input_layouts=(between, *rest), desired_input_layouts=(Replicate(), *rest), use_local_output=local
    )


def _part_norm(dim: int) -> SequenceParallel:
    """A module whose parameters all ranks hold, on a part of its input."""
    return SequenceParallel(sequence_dim=dim, use_local_output=True)
