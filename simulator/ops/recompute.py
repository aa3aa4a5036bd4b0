"""Which ops run again in the backward of a checkpointed block."""

from __future__ import annotations

from simulator.ops.core import Block, Op
from simulator.plan import Plan
from simulator.stack import Stack


def recompute_ops(block: Block, plan: Plan, stack: Stack) -> tuple[Op, ...]:
    """Ops of `block` that run again before its backward, in order; the caller decides which blocks are checkpointed.

    full, every_k: the whole block; with `early_stop` (non-reentrant checkpoints) it ends once every saved tensor
    exists, so the last product and the residual sum after it do not run. selective: hand-fused stacks (Megatron)
    recompute the core of attention only, which is nothing where the kernel is tiled; others keep the outputs of
    products and of attention, and run the rest.
    """
    if plan.recompute == "none":
        return ()
    if plan.recompute == "selective" and stack.blocks == "fused":
        return tuple(op for op in block.ops if op.category == "attention" and not op.selective_save)
    ops = block.ops[: _end(block)] if stack.early_stop else block.ops
    if plan.recompute == "selective":
        return tuple(op for op in ops if not op.selective_save)
    return ops


def cached_tensors(block: Block, again: tuple[Op, ...], plan: Plan, stack: Stack) -> frozenset[str]:
    """Outputs that the selective policy keeps beside what ops save for their backward.

    Eagerly the policy keeps all that it names, as it does not know who will ask. A compiler sees both passes, and
    keeps what the backward or the recomputation reads: not the result of the block's last product.
    """
    if plan.recompute != "selective" or stack.blocks == "fused":
        return frozenset()
    kept = {tensor.name for op in block.ops if op.selective_save for tensor in op.outputs}
    if stack.blocks == "compiled":
        kept &= {name for op in block.ops for name in op.saved} | {name for op in again for name in op.inputs}
    return frozenset(kept)


def _end(block: Block) -> int:
    """Index after the last op that must run so that all saved tensors exist."""
    last = max((i for i, op in enumerate(block.ops) if op.saved), default=-1)
    if last < 0:
        return 0
    return last if block.ops[last].saves_only_inputs else last + 1
