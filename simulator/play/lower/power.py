"""A step's use of the tensor cores, on which each kernel's speed under the board's power cap depends.

The driver holds the mean power of some tenths of a second at the cap by the clock of all SMs. Streams over memory draw less
than products, so a step with many of them runs its products faster than a loop of products would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simulator.base.kernels import Kernel
from simulator.play.lower.work import Clock
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks, optimizer_kernels, recompute_ops
from simulator.work.script import communication, pieces, stepped_numel

_ROUNDS = 2  # the use is a mean over times that depend on it, weakly: the second round moves it by less than 0.01


def clock_of(clock: Clock, kernels: Iterable[tuple[Kernel, float]]) -> Clock:
    """The clock under which these kernels, each so many times a step, share the power cap."""
    if not clock.depends_on_use:
        return clock
    kernels = list(kernels)
    for _ in range(_ROUNDS):
        clock = clock.under(_mean_use(clock, kernels))
    return clock


def _mean_use(clock: Clock, kernels: Iterable[tuple[Kernel, float]]) -> float:
    used_s = whole_s = 0.0
    for kernel, times in kernels:
        seconds = times * clock.seconds(kernel)
        whole_s += seconds
        used_s += seconds * clock.tensor_use(kernel)
    return used_s / whole_s if used_s else 1.0


def step_kernels(
    model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks, *, without: tuple[str, ...] = ()
) -> list[tuple[str, Kernel, float]]:
    """(category of the breakdown, kernel, times it runs in one micro-batch) of a rank; what runs once a step, in parts.

    model: the rank's part of it. without: ends of the model that the rank does not hold.
    """
    return [*block_kernels(model, plan, stack, blocks, without=without), *around_kernels(model, plan)]


def block_kernels(
    model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks, *, without: tuple[str, ...] = ()
) -> list[tuple[str, Kernel, float]]:
    """Those of the blocks."""
    found: list[tuple[str, Kernel, float]] = []
    counts, every = Counter(model.body), plan.recompute.every if plan.recompute.mode == "every_k" else 1
    for block in blocks.kinds:
        if block.name in without:
            continue
        times = 1 if block in (blocks.embedding, blocks.head) else counts[block.name]  # type: ignore[index]
        found += [(op.category, kernel, times) for op in block.ops for kernel in (*op.forward, *op.backward)]
    for block in blocks.body:
        again = counts[block.name] / every  # type: ignore[index]
        found += [("recompute", kernel, again) for op in recompute_ops(block, plan, stack) for kernel in op.forward]
    return found


def around_kernels(model: Model, plan: Plan) -> list[tuple[str, Kernel, float]]:
    """Those around the blocks: copies of what is communicated, and the optimizer."""
    found: list[tuple[str, Kernel, float]] = []
    first = 1 / plan.num_micro_batches
    syncs = 1 if plan.syncs_every_micro_batch else first
    for unit in communication(model, plan):
        found += [("copies", kernel, 1) for kernel in (*unit.gather_forward_kernels, *unit.gather_backward_kernels)]
        found += [("copies", kernel, syncs) for kernel in unit.gradient_kernels]
        found += [("copies", kernel, syncs) for hop in unit.hops for kernel in hop.kernels]
        found += [("copies", kernel, first) for kernel in unit.keep_kernels]
        found += [("copies", kernel, 1 - first) for kernel in unit.add_kernels]
    if plan.offload.optimizer == "none":
        numel = stepped_numel(model, plan)
        parts = pieces(model, plan)
        update = optimizer_kernels(numel, sum(len(shapes) for _, shapes in parts), plan, parts)
        found += [("optimizer", kernel, first) for kernel in update]
    return found
