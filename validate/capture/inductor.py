"""Inductor, as far as it goes without a GPU or Triton: a region's forward and backward, the kernels of each, their buffers.

A graph is partitioned, lowered and scheduled as Inductor would, up to the point where code would be written
(`torch._inductor.scheduler`, torch 2.13).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from simulator.work.captured.cost import KernelCost
from validate.capture.mode import described

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(slots=True)
class Step:
    """A kernel of a compiled region. signature: as the log keeps operators; None: no kernel. makes: buffers -> bytes; ends: those not needed on.

    collective: (its node in the graph, operator, arguments, result); waits: the node of the one that is waited for.
    """

    signature: tuple[Any, ...] | None
    cost: KernelCost | None
    makes: dict[str, int] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    collective: tuple[str, Any, Any, Any] | None = None
    waits: str = ""


def partitioned(joint: Any, inputs: Any, **how: Any) -> Any:
    """Forward and backward of a region: what is cheap is made again in the backward and not saved.

    Of Inductor's passes over both together, those that need no measurement: a loss's gradient is no scatter into zeros, and
    random numbers are drawn inside of the kernels that use them. Checkpoints draw them again (attention may) by a generator's
    state on the host, which nobody has here and no kernel shows.
    """
    from torch._functorch import partitioners
    from torch._inductor.fx_passes.joint_graph import pass_patterns
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    for patterns in pass_patterns:
        patterns.apply(joint.graph)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        replace_random_passes(joint)
    with mock.patch.object(partitioners, "functionalize_rng_ops", lambda _, *both: both[:2]):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **how)


def scheduled(graph: Any, inputs: Sequence[Any], fake: Any) -> tuple[list[Step], list[str], list[str]]:
    """The kernels that Inductor would launch for a graph, in order, and the names of its inputs and results."""
    from torch._inductor import scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    scheduler.has_triton = lambda *_: True  # no code is written
    own = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    with _disable_current_modes(), V.set_fake_mode(fake):
        post_grad_passes(own, is_inference=False)
        lowering = GraphLowering(own, example_inputs=list(inputs))
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            steps = list(_steps(scheduler.Scheduler(lowering.operations)))
            return steps, list(lowering.graph_input_names), list(lowering.get_output_names())


def _steps(order: Any) -> Iterator[Step]:
    from torch._inductor import ir, scheduler

    for node in order.nodes:
        ends = tuple(sorted(node.last_usage))  # what only its own parts read, a fused kernel keeps in registers
        sizes = {one.get_name(): _bytes(one.node) for one in node.get_outputs()}
        makes = {name: size for name, size in sizes.items() if size and name not in ends}
        if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            yield Step(None, None, makes, ends)  # a part of what a kernel before made, or nothing
            continue
        if node.is_extern():
            yield _exchange(node, makes, ends) or Step(*_extern(node), makes, ends)
            continue
        size = int(node.get_read_write_buffers_sizes())
        count = len(list(node.get_nodes()))
        yield Step(
            ("inductor.fused.default", ((count, size), ()), ()), KernelCost(bytes=size, category="fused"), makes, ends
        )


def _bytes(buffer: Any) -> int:
    layout: Any = getattr(buffer, "layout", None)
    if getattr(layout, "dtype", None) is None:  # a handle of other buffers
        return 0
    size: int = prod(int(one) for one in layout.size) * layout.dtype.itemsize
    return size


def _exchange(node: Any, makes: dict[str, int], ends: tuple[str, ...]) -> Step | None:
    """A functional collective, or the wait for one. A collective's buffer says the wait as its origin, too."""
    origins = [one for one in (node.node.get_origin_node(), *node.node.get_origins()) if one is not None]
    named = [one for one in origins if getattr(one.target, "namespace", "") == "_c10d_functional"]
    for one in named:
        if (one.target is not _WAIT) == (type(node.node).__name__ != "_WaitKernel"):
            if one.target is _WAIT:
                made = one.args[0].args[0] if one.args[0].target is operator.getitem else one.args[0]
                return Step(None, None, makes, ends, waits=made.name)
            args, found = torch.fx.node.map_arg((one.args, one), lambda each: each.meta.get("val"))
            return Step(None, None, makes, ends, collective=(one.name, one.target, args, found))
    return None


def _extern(node: Any) -> tuple[tuple[Any, ...] | None, KernelCost | None]:
    """A library's kernel as ATen names it, with the arguments that the graph gives it; else by its bytes; a view is none."""
    origins = [node.node.get_origin_node(), *node.node.get_origins()]
    for one in origins:
        if one is not None and isinstance(one.target, torch._ops.OpOverload) and one.target.is_view:
            return None, None
        if one is not None and one.op == "call_function" and "val" in one.meta and _is_library(one.target):
            args, kwargs = torch.fx.node.map_arg((one.args, one.kwargs), lambda each: each.meta.get("val"))
            return (str(one.target), described((args, kwargs)), described(one.meta["val"])), None
    size = max(1, int(node.get_read_write_buffers_sizes()))
    return ("inductor.extern.default", ((size,), ()), ()), KernelCost(bytes=size, category="fused")


def _is_library(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target.is_view
