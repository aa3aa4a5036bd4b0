"""Where a step ends: with the optimizer's step. One is recorded, after those that make its state and warm it up."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from simulator.base.units import format_bytes
from simulator.work.captured.capture import LAYOUT, NODE, WRAP, Kind, Phase
from validate.capture.graphs import Graph
from validate.capture.log import Log
from validate.capture.modules import Modules
from validate.capture.storages import Storages
from validate.capture.streams import Recorder

_UNLIKE = 0.2  # by how much the allocations of two steps of a kind differ at most
_GRAPH_WARM_UP = 11  # iterations beside the default stream before a graph is made, as torch's notes want them for DDP
# autograd functions in Python of torch.distributed.tensor (torch 2.13: _api.py, _redistribute.py)
_OF_DTENSOR = {"_FromTorchTensorBackward": WRAP, "_ToTorchTensorBackward": WRAP, "RedistributeBackward": LAYOUT}


class Steps:
    """Counts an optimizer's steps; ends the program behind the recorded one."""

    def __init__(
        self,
        log: Log,
        storages: Storages,
        modules: Modules,
        finished: type[BaseException],
        warm_up: int,
        tell: Callable[[str], None],
    ) -> None:
        self._log, self._storages, self._modules = log, storages, modules
        self._finished, self._warm_up, self._tell = finished, warm_up, tell
        self._first: object = None
        self._made, self._stepped, self._aside = weakref.WeakSet[Any](), list[Any](), 0
        self.count, self.begin, self.done = 0, 0, False
        self._last = 0  # the event that the last step ended at
        self._before = 0, 0  # what the one before it allocated
        Graph.stepped = self._ended
        _count_nodes(log)
        _unconverged(log, warm_up)
        optimizer = torch.optim.Optimizer
        original, patched = optimizer.profile_hook_step, optimizer._patch_step_function

        def _patch_step_function(one: Any) -> None:
            self._made.add(one)
            patched(one)

        optimizer._patch_step_function = _patch_step_function

        def profile_hook_step(function: Any) -> Any:
            return self._wrapped(original(function))

        optimizer.profile_hook_step = staticmethod(profile_hook_step)
        for each in _subclasses(optimizer):
            if "step" in vars(each):
                setattr(each, "step", self._wrapped(vars(each)["step"]))  # noqa: B010  mypy knows no step of a type

    def _wrapped(self, step: Any) -> Any:
        @wraps(step)
        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._modules.updating:  # within another one's, which holds no state of its own: ZeroRedundancyOptimizer
                found = step(optimizer, *args, **kwargs)
                self._storages.owners(optimizer)
                return found
            self._storages.owners(optimizer)
            self._modules.updating += 1
            try:
                found = step(optimizer, *args, **kwargs)
            finally:
                self._modules.updating -= 1
            self._storages.owners(optimizer)
            self._first = self._first or optimizer
            if Graph.recording is not None:
                Graph.recording.steps += optimizer is self._first
                self._made.discard(optimizer)  # steps whenever the graph does
            else:
                self._stepped.append(optimizer)
                if optimizer is self._first and not self._before_a_graph():
                    self._ended()
            return found

        setattr(run, "hooked", True)  # noqa: B010  torch wraps what has no such mark
        return run

    def _before_a_graph(self) -> bool:
        """Steps on a stream beside the default one warm up for a CUDA graph, unless there are more than that takes."""
        self._aside += Recorder.stack[-1].number > 0
        return Recorder.stack[-1].number > 0 and self._aside <= _GRAPH_WARM_UP

    def _idle(self) -> int:
        """Optimizers of other parameters that have not stepped within the recorded step."""
        stepped = {id(one) for optimizer in self._stepped for one in _parameters(optimizer)}
        return sum(stepped.isdisjoint(map(id, _parameters(one))) for one in self._made)

    def _ended(self) -> None:
        self.count += 1
        self._log.add(Kind.STEP, self.count)
        self._tell(f"step {self.count}")
        made = _allocated(self._log.events[self._last :])
        if self.count == self._warm_up:
            self._storages.modules()
            self._log.detailed, self.begin = True, len(self._log.events)
            self._stepped.clear()
        elif self.count == self._warm_up + 1:
            if idle := self._idle():
                self._log.answer(f"a step ends with the first optimizer's: {idle} of others did not step within it")
            if self._warm_up > 1 and any(
                abs(a - b) > _UNLIKE * max(a, b) for a, b in zip(made, self._before, strict=True)
            ):
                (times, size), (times_before, before) = made, self._before
                counts = f"the one before allocated {times_before:,} times, {format_bytes(before)}, this one {times:,}, {format_bytes(size)}"
                self._log.answer(
                    f"steps differ ({counts}): this one stands for all, --warm-up {self.count} records the next"
                )
            self.done = self._log.closed = True
            raise self._finished
        self._last, self._before = len(self._log.events), made


def _allocated(events: Iterable[list[int]]) -> tuple[int, int]:
    """How often a step allocates, and the bytes of what it also frees: what stays, as DDP's buckets, is made once."""
    found, size, alive = 0, 0, dict[int, int]()
    for kind, *values in events:
        if kind == Kind.ALLOCATE:
            found, alive[values[0]] = found + 1, values[1]
        elif kind == Kind.FREE:
            size += alive.pop(values[0], 0)
    return found, size


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _unconverged(log: Log, warm_up: int) -> None:
    """LBFGS tests values that nobody knows: no test ends it, and a line search takes its first step.

    As it does near a minimum (Nocedal and Wright, Numerical Optimization, 2006, section 6.1).
    """
    module: Any = sys.modules[torch.optim.LBFGS.__module__]
    made = module.LBFGS.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        group = self.param_groups[0]
        group["tolerance_change"] = 0
        if (full := -(-group["history_size"] // group["max_iter"])) > warm_up:
            log.answer(f"LBFGS with a part of its history: --warm-up {full} records a step with all of it")
        log.answer("whether LBFGS has converged: not before its last iteration; each line search takes its first step")

    def searched(evaluated: Callable[..., Any], x: Any, t: Any, d: Any, *_: object, **__: object) -> tuple[Any, ...]:
        return *evaluated(x, t, d), t, 1

    module.LBFGS.__init__, module._strong_wolfe = init, searched


def _count_nodes(log: Log) -> None:
    """Of each backward, autograd's nodes that it may run: those that its results depend on."""
    run = torch.autograd.graph._engine_run_backward

    def counted(results: Any, *args: Any, **kwargs: Any) -> Any:
        if log.detailed:
            nodes = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in results]
            for name, count in _nodes([one for one in nodes if one is not None]).items():
                log.handled(name, Phase.BACKWARD, count)
                if name != NODE:
                    log.handled(name, Phase.FORWARD, count)  # where the node was made
        return run(results, *args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        setattr(module, "_engine_run_backward", counted)  # noqa: B010  mypy knows no such name


def _nodes(left: list[Any]) -> Counter[int]:
    """How many nodes there are of each kind."""
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions if after is not None]
    return Counter(_OF_DTENSOR.get(node.name(), NODE) for node in seen)


def _subclasses(owner: type) -> list[type]:
    found: list[type] = []
    direct: list[type] = owner.__subclasses__()
    for one in direct:
        found += [one, *_subclasses(one)]
    return found
