"""Where a step ends: with the optimizer's step. One is recorded, after those that make its state and warm it up."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from simulator.work.captured.capture import Kind
from validate.capture.log import Log
from validate.capture.modules import Modules
from validate.capture.storages import Storages


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
            if optimizer is self._first:
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


def _subclasses(owner: type) -> list[type]:
    found: list[type] = []
    direct: list[type] = owner.__subclasses__()
    for one in direct:
        found += [one, *_subclasses(one)]
    return found
