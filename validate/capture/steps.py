"""Where a step ends: with the optimizer's step. One is recorded, after those that make its state and warm it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from simulator.work.captured.capture import LAYOUT, NODE, WRAP, Kind, Phase
from validate.capture.graphs import Graph
from validate.capture.log import Log
from validate.capture.modules import Modules
from validate.capture.storages import Storages

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
        self.count, self.begin, self.done = 0, 0, False
        Graph.stepped = self._ended
        _count_nodes(log)
        optimizer = torch.optim.Optimizer
        original = optimizer.profile_hook_step

        def profile_hook_step(function: Any) -> Any:
            return self._wrapped(original(function))

        optimizer.profile_hook_step = staticmethod(profile_hook_step)
        for each in _subclasses(optimizer):
            if "step" in vars(each):
                setattr(each, "step", self._wrapped(vars(each)["step"]))  # noqa: B010  mypy knows no step of a type

    def _wrapped(self, step: Any) -> Any:
        @wraps(step)
        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._modules.updating:
                return step(optimizer, *args, **kwargs)
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
            elif optimizer is self._first:
                self._ended()
            return found

        setattr(run, "hooked", True)  # noqa: B010  torch wraps what has no such mark
        return run

    def _ended(self) -> None:
        self.count += 1
        self._log.add(Kind.STEP, self.count)
        self._tell(f"step {self.count}")
        if self.count == self._warm_up:
            self._log.detailed, self.begin = True, len(self._log.events)
        elif self.count == self._warm_up + 1:
            self.done = self._log.closed = True
            raise self._finished


def _count_nodes(log: Log) -> None:
    """Of each backward, autograd's nodes that it may run: those that its results depend on."""
    run = torch.autograd.graph._engine_run_backward

    def counted(results: Any, *args: Any, **kwargs: Any) -> Any:
        if log.detailed:
            for name, count in _nodes([one.grad_fn for one in results if one.grad_fn is not None]).items():
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
