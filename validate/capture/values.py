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
    whole = tensor.untyped_storage().nbytes()

    def twin() -> torch.UntypedStorage:
        storage = torch.UntypedStorage(whole)
        view = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        view.copy_(torch.frombuffer(bytearray(content()), dtype=dtype).view(shape))
        return storage

    setattr(tensor.untyped_storage(), _TWIN, twin)


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
    values = {id(one): known(one) for one in read}
    if any(one is None for one in values.values()):
        return _unknown(func, args, found)
    with torch.no_grad():
        positional, named = trees.mapped((args, dict(kwargs)), lambda one: _on_cpu(values, one))
        named.pop("pin_memory", None)
        results = trees.tensors(func(*positional, **named))
    return _with_values(found, read, made, results)


def _with_values(found: Any, read: list[Any], made: list[Any], results: list[torch.Tensor]) -> Any:
    """Results on the GPU get their twins; those on the CPU are real."""
    held = {id(one): one for one in read if not isinstance(one, FakeTensor)}
    replaced: dict[int, torch.Tensor] = {}
    for fake, real in zip(made, results, strict=True):
        if fake.device.type == "cpu":
            replaced[id(fake)] = real
        elif getattr(fake.untyped_storage(), _TWIN, None) is None and id(fake) not in held:
            twin = torch.UntypedStorage(fake.untyped_storage().nbytes())
            torch.empty(0, dtype=real.dtype).set_(twin, *_place(fake)).copy_(real)
            setattr(fake.untyped_storage(), _TWIN, twin)
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
