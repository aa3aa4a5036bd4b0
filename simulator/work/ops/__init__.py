"""Ops: what a block computes, one autograd node each, with the storages it makes and keeps.

An `Op` is the meeting point of time and memory: its kernels cost time, its tensors cost bytes. A block is a list of
ops in forward order; the backward runs them reversed. Which ops a block has depends on the software `Stack`
(eager or fused, which norm, which attention), so `build_blocks` takes (Model, Stack, Plan).

Legend: T tokens of one micro-batch on one rank, D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary.
"""

from simulator.work.ops.build import build_blocks
from simulator.work.ops.core import Block, Category, Exchange, ModelBlocks, Op, num_launches
from simulator.work.ops.op_context import uses_autocast
from simulator.work.ops.optimizer import clip_kernels, optimizer_kernels
from simulator.work.ops.quantise import reduces_maxima
from simulator.work.ops.recompute import cached_tensors, recompute_ops

__all__ = [
    "Block", "Category", "Exchange", "ModelBlocks", "Op", "build_blocks", "cached_tensors", "clip_kernels",
    "num_launches", "optimizer_kernels", "recompute_ops", "reduces_maxima", "uses_autocast",
]  # fmt: skip
