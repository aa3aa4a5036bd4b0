"""Where a program is: the module whose forward runs, and whether it is forward, backward or the optimizer's step."""

from __future__ import annotations

import torch
from torch import nn

from simulator.work.captured.capture import Phase


class Modules:
    """Follows the calls of modules by torch's global hooks."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self.updating = 0
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _: object) -> None:
        if not self._stack and id(module) not in self._names:
            self._names |= {id(each): name for name, each in module.named_modules()}
        self._stack.append(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def path(self) -> str:
        """The dotted name of the innermost module, as `named_modules` of the outermost gives it; "" outside of any."""
        return self._names.get(id(self._stack[-1]), "") if self._stack else ""

    def phase(self) -> Phase:
        """What the program does now."""
        if self.updating:
            return Phase.OPTIMIZER
        return Phase.BACKWARD if torch._C._current_graph_task_id() != -1 else Phase.FORWARD
