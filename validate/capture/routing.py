"""Tokens per expert, which depend on values: equal parts, or as uneven ones as were stated; the report says so.

A router's choices become counts (`histc`, `bincount`, a sum over a mask) that the host may read, and masks whose true
elements are picked. Of a mask made from chosen indices (`one_hot`, a `scatter` of ones, `indices == expert`) the share of
true elements is known, and kept beside its storage; counts get the values that equal parts have, or of which the first is so many times the mean as was stated (`--expert-imbalance`): the captured rank is the busiest. Other ranks are taken to have the same. Of any other
mask whose values nobody knows every element is picked, and values of which only the different ones are wanted all differ: no
real step has more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from validate.capture import trees, values

aten = torch.ops.aten
_SHARE = "_shardwise_share"  # of a storage's elements that are true or 1, alike everywhere
_MASKS = {aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src}
_SUMS = {
    aten.sum.dim_IntList, aten.sum.default, aten.count_nonzero.dim_IntList, aten.count_nonzero.default,
}  # fmt: skip
_KEPT = {  # of one element each: a mask's copy, another dtype, rows of it
    aten._to_copy.default, aten.clone.default, aten.index.Tensor, aten.index_select.default, aten.gt.Scalar, aten.ne.Scalar,
    aten.copy_.default,
}  # fmt: skip
_PICKS = {aten.nonzero.default, aten.masked_select.default, aten.bincount.default}
_CHOOSES = {aten.topk.default, aten.argmax.default, aten.max.dim}  # the largest along a dim, and where they are
_AMONG = "_shardwise_among"  # of a storage of choices: among how many each is
ALIGNMENTS = {aten._ctc_loss.default, aten._ctc_loss.Tensor}
_DIFFERENT = {aten._unique2.default, aten.unique_consecutive.default}


class Routing:
    """What is known of masks and counts. answer: tells the report. imbalance: tokens of the busiest expert over the mean."""

    def __init__(self, answer: Callable[[str], int], imbalance: float = 1.0) -> None:
        self._answer, self._imbalance = answer, imbalance
        self._tokens: dict[
            int, int
        ] = {}  # choices of a router -> among how many tokens, each of which chooses an expert once
        self._active = False  # some mask is known
        self.is_uneven = False  # some counts were made so

    def follow(self, func: Any, args: Sequence[Any], read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """What an operator that was run says of its results."""
        if func in _CHOOSES:
            self._chosen(func, args, made[-1])
        elif func in _MASKS:
            self._mask(args, made)
        elif func is aten.eq.Tensor and len(read) == len(made) + 1 == 2:
            self._equal(read, made[0])
        elif func is aten.eq.Scalar and (among := getattr(read[0].untyped_storage(), _AMONG, 0)):
            self._active = True
            _keep(made[0], 1 / among)
        elif func is aten.histc.default:
            self._counts(made[0], read[0].numel())
        elif func in _SUMS and made and read[0].dtype == torch.bool and _share(read[0]) is None:
            self._summed(read[0], made[0])
        elif self._active and read and made:
            self._carried(func, read, made[0])

    def _carried(self, func: Any, read: list[torch.Tensor], made: torch.Tensor) -> None:
        """What an operator makes of a mask whose share of true elements is known."""
        share = _share(read[-1] if func is aten.copy_.default else read[0])
        if share is None:
            return
        if func in _KEPT:
            _keep(made, share)
        elif func is aten.any.dim:  # a token chooses an expert at most once
            _keep(made, min(1.0, share * read[0].numel() / made.numel()))
        elif func in _SUMS:
            self._counts(made, round(read[0].numel() * share))

    def _chosen(self, func: Any, args: Sequence[Any], chosen: torch.Tensor) -> None:
        """Note among how many the largest were sought: topk(input, k, dim), argmax(input, dim), max(input, dim)."""
        place, dim = (2, -1) if func is aten.topk.default else (1, None)
        dim = args[place] if len(args) > place else dim
        if func is aten.topk.default:
            self._tokens[chosen.numel()] = chosen.numel() // max(args[1], 1)
        if dim is not None and args[0].dim() and isinstance(chosen, FakeTensor):
            setattr(chosen.untyped_storage(), _AMONG, args[0].size(dim))

    def picked(self, func: Any, args: Sequence[Any], kwargs: Any, run: Callable[..., Any]) -> Any:
        """The result of an operator whose shape depends on values; None where nobody knows it. run: an operator on fake tensors."""
        if func is aten.index.Tensor:
            places = [self._places(one, run) for one in args[1]]
            return run(aten.index.Tensor, (args[0], [each for one in places for each in one]), {})
        if func in _SHAPED:
            return _SHAPED[func](args, run)
        if func in _DIFFERENT:
            computed = self._computed(func, args, kwargs, run)
            return computed if computed is not None else self._different(func, args, kwargs, run)
        if func not in _PICKS:
            return self._computed(func, args, kwargs, run)
        if func is aten.bincount.default:
            return self._bins(args, kwargs, run)
        mask = args[-1]
        count = self._true(mask, args[0])
        shape = [count, mask.dim()] if func is aten.nonzero.default else [count]
        dtype = torch.int64 if func is aten.nonzero.default else args[0].dtype
        found = run(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": mask.device})
        real = values.known(mask)
        if real is not None and func is aten.nonzero.default:
            values.give(found, real.nonzero())
        return found

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Any, run: Callable[..., Any]) -> Any:
        """What it makes of whole numbers that are known, as `repeat_interleave` of counts that the host gave; None of others."""
        read = trees.tensors((args, dict(kwargs)))
        real = {id(one): values.known(one) if values.may_have(one) else None for one in read}
        if not read or any(one is None for one in real.values()):
            return None
        positional, named = trees.mapped((args, dict(kwargs)), lambda one: real.get(id(one), one))

        def given(result: Any) -> Any:
            how = {"dtype": result.dtype, "device": read[0].device}
            found = run(aten.empty.memory_format, (list(result.shape),), how)
            values.give(found, result)
            return found

        return trees.mapped(func(*positional, **named), given)

    def _places(self, index: Any, run: Callable[..., Any]) -> list[Any]:
        """Indices in place of a mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return list(run(aten.unbind.int, (self.picked(aten.nonzero.default, (index,), {}, run), 1), {}))

    def _different(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """Values, where each came from, how often each is there; None along a dimension."""
        arguments = {one.name: one.default_value for one in func._schema.arguments} | dict(kwargs)
        arguments |= dict(zip([one.name for one in func._schema.arguments], args, strict=False))
        if arguments.get("dim") is not None:
            return None
        one, size = args[0], args[0].numel()
        self._answer(f"which of {size:,} values differ: all of them")
        extra_shapes = [
            tuple(one.shape) if arguments["return_inverse"] else (0,),
            (size,) if arguments["return_counts"] else (0,),
        ]
        empty = aten.empty.memory_format
        others = (run(empty, (shape,), {"dtype": torch.int64, "device": one.device}) for shape in extra_shapes)
        return (run(empty, ((size,),), {"dtype": one.dtype, "device": one.device}), *others)

    def _true(self, mask: torch.Tensor, beside: torch.Tensor) -> int:
        """How many elements of a mask are true, spread over what it picks from."""
        real: Any = values.known(mask)
        share = _share(mask)
        if real is not None:
            return int(torch.count_nonzero(real.expand(torch.broadcast_shapes(mask.shape, beside.shape))))
        if share is None:
            numel: int = torch.broadcast_shapes(mask.shape, beside.shape).numel()
            self._answer(f"a mask of {numel:,} places whose values nobody knows: all are chosen")
            return numel
        count: int = round(mask.numel() * share)
        self._answer(f"a mask of {mask.numel():,} places that a router made: {count:,} are chosen, as with equal parts")
        return count

    def _summed(self, mask: torch.Tensor, made: torch.Tensor) -> None:
        """How many places of a mask are true: as many as are picked."""
        if values.may_have(made) and made.numel() and values.known(made) is None and values.known(mask) is None:
            each = self._true(mask, mask) // made.numel()
            values.give(made, torch.full(made.shape, each, dtype=made.dtype), assumed=True)

    def _bins(self, args: Sequence[Any], kwargs: Any, run: Callable[..., Any]) -> Any:
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if not least:
            return None
        found = run(aten.empty.memory_format, ([least],), {"dtype": torch.int64, "device": args[0].device})
        self._counts(found, args[0].numel())
        return found

    def _mask(self, args: Sequence[Any], made: list[torch.Tensor]) -> None:
        """Ones put where a router chose."""
        index, source = args[2], args[3]
        if isinstance(source, torch.Tensor):
            real = values.known(source) if values.may_have(source) else None
            ones = real is not None and bool((real == 1).all())
        else:
            ones = source == 1
        if ones and made and made[0].numel():
            self._active = True
            _keep(made[0], index.numel() / made[0].numel())

    def _equal(self, read: list[torch.Tensor], mask: torch.Tensor) -> None:
        """Choices compared with all that there are, as `one_hot` does on tensors without values: each is one of them."""
        for every, choices in (read, read[::-1]):
            real: Any = values.known(every) if choices.dtype == every.dtype == torch.int64 else None
            is_product = 1 < every.numel() < mask.numel() == every.numel() * choices.numel()
            if (
                real is not None
                and is_product
                and values.known(choices) is None
                and real.unique().numel() == real.numel()
            ):
                self._active = True
                _keep(mask, 1 / every.numel())

    def _counts(self, counts: torch.Tensor, total: int) -> None:
        """Parts of a total as they are stated to be, the first ones of equal parts one more where it does not divide."""
        if not values.may_have(counts) or values.known(counts) is not None or not counts.numel():
            return
        bins = counts.numel()
        most = min(round(self._imbalance * total / bins), self._tokens.get(total, total), total)
        uneven = int(self._imbalance > 1 and bins > 1)
        self.is_uneven = self.is_uneven or uneven > 0
        equal, more = divmod(total - most * uneven, bins - uneven)
        parts = torch.full((bins,), equal, dtype=counts.dtype)
        parts[uneven : uneven + more] += 1
        parts[:uneven] = most
        values.give(counts, parts.view(counts.shape), assumed=True)
        text = f"{most:,}, then " * uneven + (f"{equal:,}" if not more else f"{equal:,} or {equal + 1:,}")
        self._answer(f"how many of {total:,} choices fall on each of {bins:,}, as tokens on experts: {text}")


def _share(mask: torch.Tensor) -> float | None:
    return getattr(mask.untyped_storage(), _SHARE, None) if isinstance(mask, FakeTensor) else None


def _keep(mask: torch.Tensor, share: float) -> None:
    setattr(mask.untyped_storage(), _SHARE, share)


def _packed(padded: torch.Tensor, lengths: Any, run: Callable[..., Any]) -> Any:
    """Sequences end to end, and how many have a first, a second, … element; None where nobody knows their lengths."""
    real: Any = values.known(lengths)
    if real is None:
        return None
    sizes = torch.tensor([int((real > at).sum()) for at in range(int(real.max()))])
    return run(aten.new_empty.default, (padded, [int(real.sum()), *padded.shape[2:]]), {}), sizes


def _aligned(scores: torch.Tensor, labels: torch.Tensor, lengths: Any, run: Callable[..., Any]) -> Any:
    """CTC's losses, and for each step the places among labels and the blanks around them (ATen, LossCTC.cu)."""
    real: Any = values.known(lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    steps, batch = scores.shape[:2]
    widest = labels.shape[1] if labels.dim() > 1 else -(-labels.shape[0] // batch)
    longest = widest if real is None else int(real.max())
    shapes = [batch], [batch, steps, 2 * longest + 1]
    return tuple(run(aten.new_empty.default, (scores, shape), {}) for shape in shapes)


def _least_squares(a: torch.Tensor, b: torch.Tensor, run: Callable[..., Any]) -> Any:
    """Solution, residuals, rank and singular values as on a GPU, which has no other way than "gels": of full rank."""
    (m, n), is_vector = a.shape[-2:], b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    sides = [] if is_vector else [b.shape[-1]]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if is_vector else -2])
    shapes = [[*batch, n, *sides], [*batch, *sides] if m > n else [0]]
    found = [run(aten.new_empty.default, (a, shape), {}) for shape in shapes]
    return (
        *found,
        run(aten.new_empty.default, (a, [0]), {"dtype": torch.int64}),
        run(aten.new_empty.default, (a, [0]), {}),
    )


_SHAPED: dict[Any, Callable[[Sequence[Any], Callable[..., Any]], Any]] = {
    **dict.fromkeys(ALIGNMENTS, lambda args, run: _aligned(args[0], args[1], args[3], run)),
    aten._pack_padded_sequence.default: lambda args, run: _packed(args[0], args[1], run),
    aten.linalg_lstsq.default: lambda args, run: _least_squares(args[0], args[1], run),
}
