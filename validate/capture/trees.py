"""Arguments of operators are lists in tuples, and little else: faster than torch's general trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return found
    for one in value:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | dict):
            found += tensors(one)
    return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same value with what `change` makes of its leaves."""
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        found = [mapped(one, change) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return change(value)


class Mask(int):
    """The place of a mask that was put aside."""


def is_mask(value: Any) -> bool:
    """FlexAttention's, which no graph takes."""
    return isinstance(value, BlockMask)


def put_aside(masks: list[Any], value: Any) -> Any:
    """A leaf, or the place of a mask."""
    if not is_mask(value):
        return value
    masks.append(value)
    return Mask(len(masks) - 1)
