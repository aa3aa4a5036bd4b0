"""Checks of values that nobody knows: they find nothing wrong.

`all` is true, and values are finite: `isfinite`, `isnan` and `isinf` are comparisons of a tensor with itself and of its
absolute with infinity (ATen, TensorCompare.cpp). So assertions and the arguments' checks of torch.distributions pass as in
a run that works. A mask that was all false and to which others are added (`done = done | (token == end)`), or all true and
from which they are taken, never gets through, nor are all tokens that a model chose the same one: no real loop takes longer.
And not all whole numbers are one negative number: that is how labels say that they are ignored (`ignore_index`, -100), and no
batch is all ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from validate.capture import values
from validate.capture.ranks import RefusedError

aten = torch.ops.aten
_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
_LABELS, _IGNORED = {torch.int64, torch.int32}, "_shardwise_ignored"
_ANY = {aten.any.default, aten.any.dim}
_LEFT = "_shardwise_left"  # of a storage: its elements that are this will not all change
_ADDED, _TAKEN = (
    {getattr(getattr(aten, name), form) for name, form in forms}
    for forms in (
        (("bitwise_or", "Tensor"), ("bitwise_or_", "Tensor"), ("logical_or", "default"), ("logical_or_", "default")),
        (
            ("bitwise_and", "Tensor"),
            ("bitwise_and_", "Tensor"),
            ("logical_and", "default"),
            ("logical_and_", "default"),
        ),
    )
)
_NOT, _COPIED = {aten.bitwise_not.default, aten.logical_not.default}, {aten.clone.default, aten._to_copy.default}
_CURVED = 1e-10  # above which curvature lets LBFGS keep a pair of its history (torch 2.13, optim/lbfgs.py)
_MOST_TURNS = 1 << 16  # of loops until something is done
_CHOSEN = "_shardwise_chosen"  # of a storage: tokens that a model chose, which are not all the same one
_CHOOSES = {aten.argmax.default, aten.multinomial.default, aten.topk.default, aten.max.dim}
_SAME, _OTHER = {aten.eq.Tensor, aten.eq.Scalar}, {aten.ne.Tensor, aten.ne.Scalar}


def left(func: Any, args: Sequence[Any]) -> bool | None:
    """What some elements of an operator's result stay, as some of its arguments were; None: nobody knows. Before it runs."""
    if func in _NOT | _COPIED:
        found: bool | None = getattr(args[0].untyped_storage(), _LEFT, None)
        return not found if func in _NOT and found is not None else found
    if func in _SAME | _OTHER and getattr(args[0].untyped_storage(), _CHOSEN, False):
        return func in _OTHER
    for functions, value in ((_ADDED, False), (_TAKEN, True)):
        if func in functions and any(_stays(one, value) for one in args[:2]):
            return value
    return None


def _stays(one: torch.Tensor, value: bool) -> bool:  # noqa: FBT001  what it stays
    real = values.known(one) if one.dtype == torch.bool else None
    return bool((real == value).all()) if real is not None else getattr(one.untyped_storage(), _LEFT, None) is value


def follow(
    func: Any, args: Sequence[Any], made: Sequence[torch.Tensor], answer: Callable[[str], int], *, left: bool | None
) -> None:
    """Give a check's result its value, where it has none. answer: tells the report, and says how often it has. left: what some elements stay."""
    if left is not None and made:
        setattr(made[0].untyped_storage(), _LEFT, left)
    if func in _CHOOSES and made:
        setattr(made[-1].untyped_storage(), _CHOSEN, True)
    if func is aten.eq.Scalar and made and args[0].dtype in _LABELS and args[1] < 0:
        setattr(made[0].untyped_storage(), _IGNORED, True)
    found = _found(func, args)
    if found is None or not made or not values.may_have(made[0]) or values.known(made[0]) is not None:
        return
    values.give(made[0], torch.full(made[0].shape, found, dtype=made[0].dtype), assumed=True)
    if func in _ALL | _ANY and getattr(args[0].untyped_storage(), _LEFT, None) is (func in _ANY):
        _turned(answer)
    elif func in _ALL:
        answer(f"whether all of {args[0].numel():,} values are true, which nobody knows: {found}")


def _turned(answer: Callable[[str], int]) -> None:
    """A loop asks whether all are done. Raises RefusedError where nothing else ends it."""
    if answer("whether all of a loop's elements are done: never, it runs as long as the program lets it") > _MOST_TURNS:
        raise RefusedError(
            f"a loop waits for values that nobody knows, {_MOST_TURNS:,} times by now: give it a most number of turns"
        )


def _found(func: Any, args: Sequence[Any]) -> bool | None:
    """What a check finds; None of other operators."""
    if func in _ALL:
        storage = args[0].untyped_storage()
        return not getattr(storage, _IGNORED, False) and getattr(storage, _LEFT, None) is not False
    if func in _ANY:
        return getattr(args[0].untyped_storage(), _LEFT, None) or None
    if func is aten.gt.Scalar and args[1] == _CURVED:
        return True
    if func not in _SAME | _OTHER:
        return None
    one, other = args[:2]
    if one is other:
        return func in _SAME
    return func in _OTHER if isinstance(other, float) and math.isinf(other) else None
