"""Where a program is: the module whose forward runs, and whether it is forward, backward or the optimizer's step; which a function calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from simulator.work.captured.capture import Phase

_BREAKS = (torch.optim.Optimizer, DistributedDataParallel)  # a graph ends at these


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


_ELSEWHERE = ("_parameters", "_buffers", "_modules")  # walked or given by name


def written_alike(module: nn.Module) -> Any:
    """What a module computes beside its parameters and buffers: two of which it is equal run the same operators.

    Classes, plain attributes and hooks of the module and all below, but hooks around itself and a forward that it was given; of
    other objects, whether they are the same.
    """
    return tuple((name, type(one), tuple(_attributes(one, inside=bool(name)))) for name, one in module.named_modules())


def _attributes(module: nn.Module, *, inside: bool) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key in _ELSEWHERE or "state_dict" in key or key.startswith("__composable"):  # FSDP's, whose hooks are around
            continue
        if inside or (key != "forward" and "_hooks" not in key):
            hooks = "_hooks" in key and isinstance(value, dict)
            yield key, _plain([*value.values()] if hooks else value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return type(value), tuple(map(_plain, value.items() if isinstance(value, dict) else value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_plain, value))
    if isinstance(value, partial):
        return id(value.func), _plain(value.args), _plain(value.keywords)
    return value if isinstance(value, int | float | str | bool | torch.dtype | type(None)) else id(value)


def reached(function: Callable[..., Any], given: Sequence[Any]) -> tuple[list[nn.Module], bool]:
    """Modules that a function refers to (its object's, those in its closure, globals), and whether it is no graph alone.

    It is none where it runs a backward or steps an optimizer, is given a module, calls one with hooks (DDP's), or has tensors
    of its own that want gradients.
    """
    owner, inner = getattr(function, "__self__", None), inspect.unwrap(getattr(function, "__func__", function))
    every = [owner, *getattr(owner, "__dict__", {}).values()]
    if not inspect.isfunction(inner):
        return [], False
    variables = inspect.getclosurevars(inner)
    every += [*variables.nonlocals.values(), *variables.globals.values(), *given]
    modules = list({id(one): one for one in every if isinstance(one, nn.Module)}.values())
    breaks = "backward" in inner.__code__.co_names or any(isinstance(one, _BREAKS) for one in (*every, owner))
    wanting = (one.requires_grad for one in every[: len(every) - len(given)] if isinstance(one, torch.Tensor))
    return modules, breaks or any(wanting) or any(isinstance(one, nn.Module) for one in given)
