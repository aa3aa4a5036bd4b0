"""Which ops of a block are captured in CUDA graphs: the host launches those as one.

Megatron-LM, docs/user-guide/features/cuda_graph.md and core/transformer/cuda_graphs.py: `attn` captures _forward_attention
(norm, attention, residual), `mlp` the rest of a layer without experts, `moe` of one with them, `moe_router` that up to the
router with its norm and the shared experts, `moe_preprocess` the dispatcher's counts behind it, `mamba` a state-space layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from simulator.spec.plan import CudaGraph
from simulator.work.ops.core import Block, Op


def with_graphs(block: Block, graphs: Collection[CudaGraph]) -> Block:
    """The block with its captured ops marked; itself where nothing of it is."""
    if not graphs or "full_iteration" in graphs:
        return block
    names = tuple(op.name for op in block.ops)
    ops = tuple(_marked(op) if _scopes(block.name, names, i) & set(graphs) else op for i, op in enumerate(block.ops))
    return replace(block, ops=ops)


def _scopes(kind: str, names: tuple[str, ...], number: int) -> set[CudaGraph]:
    """The scopes that an op is part of."""
    if names[number].startswith("mtp."):
        return set()
    if number <= _place(names, "residual_1"):
        return {"mamba"} if kind == "mamba" else {"attn"}
    if number > _place(names, "residual_2"):
        return set()
    if number > _place(names, "choose"):
        return {"moe"} if "choose" in names else {"mlp"}
    return {"moe", "moe_preprocess"} if names[number] == "choose" else {"moe", "moe_router"}


def _place(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


def _marked(op: Op) -> Op:
    return replace(
        op,
        captured=True,
        forward_exchanges=tuple(replace(e, captured=True) for e in op.forward_exchanges),
        backward_exchanges=tuple(replace(e, captured=True) for e in op.backward_exchanges),
    )
