"""Values that are known of small tensors of whole numbers on the GPU: those that the host made, or that another rank sent.

A storage on the fake GPU may have a real twin on the CPU. Operators on tensors whose storages all have one are computed
there too; what else writes to a storage ends its twin. So shapes, counts and positions that a program keeps on the GPU
reach its host as they would, and everything else has no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from validate.capture import trees

LARGEST = 1 << 16  # elements of a tensor whose values are kept
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_TWIN = "_shardwise_twin"
_ASSUMED = "_shardwise_assumed"  # marks a storage whose values somebody stated, here and on every other rank
aten = torch.ops.aten
# whose results are of an argument's shape, whatever its values
_FILLS = {
    getattr(aten, name).default
    for name in ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
}
_RANDOM = torch.Tag.nondeterministic_seeded


def may_have(tensor: torch.Tensor) -> bool:
    """Of a kind whose values are kept."""
    return tensor.dtype in _WHOLE and tensor.numel() <= LARGEST


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with its values; None where nobody knows them. May wait for another rank to send them."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    storage = tensor.untyped_storage()
    twin = getattr(storage, _TWIN, None)
    if twin is None:
        return None
    if not isinstance(twin, torch.UntypedStorage):
        twin = twin()
        setattr(storage, _TWIN, twin)
    real = torch.empty(0, dtype=tensor.dtype)
    return real.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())


def promise(tensor: torch.Tensor, content: Callable[[], bytes]) -> None:
    """The values of a tensor arrive when somebody asks for them."""
    shape, dtype, (offset, size, stride) = tensor.shape, tensor.dtype, _place(tensor)
    num_bytes = tensor.untyped_storage().nbytes()

    def twin() -> torch.UntypedStorage:
        storage = torch.UntypedStorage(num_bytes)
        view = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        view.copy_(torch.frombuffer(bytearray(content()), dtype=dtype).view(shape))
        return storage

    setattr(tensor.untyped_storage(), _TWIN, twin)


def give(tensor: torch.Tensor, real: torch.Tensor, *, assumed: bool = False) -> None:
    """A tensor's values are known from now on. assumed: stated, and taken to be the same on other ranks."""
    storage = tensor.untyped_storage()
    twin = torch.UntypedStorage(storage.nbytes())
    torch.empty(0, dtype=real.dtype).set_(twin, *_place(tensor)).copy_(real)
    setattr(storage, _TWIN, twin)
    if assumed:
        setattr(storage, _ASSUMED, True)


def exchanged(kind: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], ranks: int, own: int) -> None:
    """A collective's results have no known values, but those of stated ones: all ranks send what this one, the `own`-th, does."""
    found = [(got, _elsewhere(kind, sent, got, ranks, own)) for sent, got in zip(inputs, results, strict=False)]
    for one in results:
        if isinstance(one, FakeTensor):
            forget(one)
    for got, real in found:
        if real is not None:
            give(got, real, assumed=True)


def _elsewhere(kind: str, sent: torch.Tensor, got: torch.Tensor, ranks: int, own: int) -> torch.Tensor | None:
    """What arrives in `got` where each rank sends the same stated values."""
    if not isinstance(sent, FakeTensor) or not getattr(sent.untyped_storage(), _ASSUMED, False):
        return None
    real = known(sent)
    if real is None or not isinstance(got, FakeTensor) or not may_have(got):
        return None
    real = real.reshape(-1).clone()
    if kind == "all_to_all" and real.numel() == got.numel() and real.numel() % ranks == 0:
        return real.view(ranks, -1)[own].repeat(ranks).view(got.shape)
    if kind == "all_gather" and real.numel() * ranks == got.numel():
        return real.repeat(ranks).view(got.shape)
    if kind in ("all_reduce", "broadcast"):
        return (real * ranks if kind == "all_reduce" else real).view(got.shape)  # of counts, a sum
    return None


def forget(tensor: torch.Tensor) -> None:
    """Something wrote to the tensor that nobody knows."""
    storage = tensor.untyped_storage()
    if getattr(storage, _TWIN, None) is not None:
        setattr(storage, _TWIN, None)


def content(tensor: torch.Tensor) -> bytes | None:
    """The bytes of a tensor's values, in its order."""
    real = known(tensor) if may_have(tensor) or tensor.device.type == "cpu" else None
    return None if real is None else bytes(real.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def follow(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: Any,
    read: list[torch.Tensor],
    made: list[torch.Tensor],
) -> Any:
    """What an operator does to values. args, kwargs: as the program gave them; read, made: the tensors in them and in `found`.

    The result, with values where it is on the CPU.
    """
    if not made or not all(may_have(one) for one in made) or not all(may_have(one) for one in read):
        return _unknown(func, args, found)
    if func.is_view or _RANDOM in func.tags:
        return found if func.is_view else _unknown(func, args, found)
    if not all(isinstance(one, FakeTensor) or one.device.type == "cpu" for one in read):
        return found
    values = {id(one): torch.zeros(one.shape, dtype=one.dtype) if func in _FILLS else known(one) for one in read}
    if any(one is None for one in values.values()):
        return _unknown(func, args, found)
    with torch.no_grad():
        positional, named = trees.mapped((args, dict(kwargs)), lambda one: _on_cpu(values, one))
        named.pop("pin_memory", None)
        try:
            results = trees.tensors(func(*positional, **named))
        except NotImplementedError:  # on a CPU, or not of whole numbers
            return _unknown(func, args, found)
    return _with_values(found, read, made, results)


def _with_values(found: Any, read: list[Any], made: list[Any], results: list[torch.Tensor]) -> Any:
    """Results on the GPU get their twins; those on the CPU are real."""
    with_values = {id(one): one for one in read if not isinstance(one, FakeTensor)}
    assumed = any(getattr(one.untyped_storage(), _ASSUMED, False) for one in read if isinstance(one, FakeTensor))
    replaced: dict[int, torch.Tensor] = {}
    for fake, real in zip(made, results, strict=True):
        if fake.device.type == "cpu":
            replaced[id(fake)] = real
        elif getattr(fake.untyped_storage(), _TWIN, None) is None and id(fake) not in with_values:
            give(fake, real, assumed=assumed)
    return trees.mapped(found, lambda one: replaced.get(id(one), one)) if replaced else found


def _unknown(func: Any, args: Sequence[Any], found: Any) -> Any:
    """What an operator writes to has no known values any more."""
    if func._schema.is_mutable:
        for declared, given in zip(func._schema.arguments, args, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for one in trees.tensors(given):
                    if isinstance(one, FakeTensor):
                        forget(one)
    return found


def _place(tensor: torch.Tensor) -> tuple[int, Sequence[int], Sequence[int]]:
    return tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())


def _on_cpu(values: Mapping[int, torch.Tensor | None], value: Any) -> Any:
    """A leaf of an operator's arguments, for the CPU."""
    if isinstance(value, torch.Tensor):
        return values[id(value)]
    return torch.device("cpu") if isinstance(value, torch.device) else value
