"""Checks of values that nobody knows: they find nothing wrong.

`all` is true, and values are finite: `isfinite`, `isnan` and `isinf` are comparisons of a tensor with itself and of its
absolute with infinity (ATen, TensorCompare.cpp). So assertions and the arguments' checks of torch.distributions pass as in
a run that works, and a loop until all are done ends. But not all whole numbers are one negative number: that is how labels
say that they are ignored (`ignore_index`, -100), and no batch is all ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from validate.capture import values

aten = torch.ops.aten
_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
_LABELS, _IGNORED = {torch.int64, torch.int32}, "_shardwise_ignored"
_SAME, _OTHER = {aten.eq.Tensor, aten.eq.Scalar}, {aten.ne.Tensor, aten.ne.Scalar}


def follow(func: Any, args: Sequence[Any], made: Sequence[torch.Tensor], answer: Callable[[str], None]) -> None:
    """Give a check's result its value, where it has none. answer: tells the report."""
    if func is aten.eq.Scalar and made and args[0].dtype in _LABELS and args[1] < 0:
        setattr(made[0].untyped_storage(), _IGNORED, True)
    found = _found(func, args)
    if found is None or not made or not values.may_have(made[0]) or values.known(made[0]) is not None:
        return
    values.give(made[0], torch.full(made[0].shape, found, dtype=made[0].dtype), assumed=True)
    if func in _ALL:
        answer(f"whether all of {args[0].numel():,} values are true, which nobody knows: {found}")


def _found(func: Any, args: Sequence[Any]) -> bool | None:
    """What a check finds; None of other operators."""
    if func in _ALL:
        return not getattr(args[0].untyped_storage(), _IGNORED, False)
    if func not in _SAME | _OTHER:
        return None
    one, other = args[:2]
    if one is other:
        return func in _SAME
    return func in _OTHER if isinstance(other, float) and math.isinf(other) else None
