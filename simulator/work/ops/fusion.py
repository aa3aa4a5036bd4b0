"""What a compiler fuses: residual sums into the norms beside them, and the sums of gradients into norm backwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from simulator.base.kernels import Kernel
from simulator.work.ops.core import Block, Op
from simulator.work.ops.graph import stream


def fuse_residuals(block: Block, size: int) -> Block:
    """The block's norms as inductor runs them. `size`: bytes of one [T, D] tensor.

    Forward: a residual sum and the norm after it are one kernel that reads both addends and writes the sum and the
    normalised rows. Backward: one kernel reads the gradients of all the norm's users, the norm's input and the
    residual's gradient, and writes their sum; another reads them again for the weight's column sums.
    """
    users = _users(block)
    ops = list(block.ops)
    for i, op in enumerate(ops):
        if op.category != "norm" or op.grad_inputs[0].num_bytes != size:
            continue
        ops[i] = replace(op, backward=_backward(op, users, size))
        if i > 0 and ops[i - 1].outputs and ops[i - 1].outputs[0].name == op.inputs[0] and ops[i - 1].grad_aliases:
            ops[i - 1], ops[i] = _joined(ops[i - 1], ops[i])
    return replace(block, ops=tuple(ops))


def _users(block: Block) -> Counter[str]:
    """Tensor -> how many ops make a gradient of it."""
    return Counter(name for op in block.ops for name in (*(t.name for t in op.grad_inputs), *op.grad_aliases))


def _backward(op: Op, users: Counter[str], size: int) -> tuple[Kernel, ...]:
    gradients, others = max(1, users[op.outputs[0].name]), users[op.inputs[0]] - 1
    return (
        stream("norm_backward", (gradients + 1 + others) * size, size),
        stream("norm_backward", (gradients + 1) * size, 0, 2),
    )


def _joined(residual: Op, norm: Op) -> tuple[Op, Op]:
    """The sum's kernel goes into the norm's: it reads the addends and writes both results."""
    total = sum(kernel.num_bytes for kernel in (*residual.forward, *norm.forward))
    written = sum(t.num_bytes for op in (residual, norm) for t in op.outputs)
    read = total - written - residual.outputs[0].num_bytes  # the norm need not read the sum
    return replace(residual, forward=()), replace(norm, forward=(stream("norm_forward", read, written),))
