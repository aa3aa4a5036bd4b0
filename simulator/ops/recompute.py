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


def _end(block: Block) -> int:
    """Index after the last op that must run so that all saved tensors exist."""
    last = max((i for i, op in enumerate(block.ops) if op.saved), default=-1)
    if last < 0:
        return 0
    return last if block.ops[last].saves_only_inputs else last + 1
