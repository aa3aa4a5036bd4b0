"""Parameters without a shape (`nn.LazyLinear`): fake ones take their place, where their module was moved, when they get one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._python_dispatch import _disable_current_modes

_LIKE = "_shardwise_like"  # an empty tensor of the device and dtype that it is to have


def install(to_fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """For this process. to_fake: a tensor without values like a real one."""
    nn.Module._apply = _moved(nn.Module._apply)

    def materialize(one: Any, shape: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        like = vars(one)[_LIKE]
        made = to_fake(torch.empty(shape, device=device or like.device, dtype=dtype or like.dtype))
        if issubclass(one.cls_to_become, nn.Parameter):
            made = nn.Parameter(made, requires_grad=one.requires_grad)
        torch.utils.swap_tensors(one, made)

    for kind in (UninitializedParameter, UninitializedBuffer):
        setattr(kind, "materialize", materialize)  # noqa: B010  mypy lets nobody assign it
        setattr(kind, "__new__", _without_device(kind.__new__))  # noqa: B010


def _without_device(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(kind: type, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        like = torch.empty(0, device=device, dtype=dtype)
        with _disable_current_modes():
            one = make(kind, *args, **kwargs)
        vars(one)[_LIKE] = like
        return one

    return made


def _moved(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A module's conversion, which those without a shape remember."""

    @wraps(apply)
    def moved(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        held = [(of, name, one) for of in (module._parameters, module._buffers) for name, one in of.items()]
        lazy = [each for each in held if is_lazy(each[2])]
        for of, name, _ in lazy:
            of[name] = None
        try:
            return apply(module, function, *args, **kwargs)
        finally:
            for of, name, one in lazy:
                vars(one)[_LIKE] = function(vars(one)[_LIKE])
                of[name] = one

    return moved
