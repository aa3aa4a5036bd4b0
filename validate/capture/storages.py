"""Storages on the GPU: born when an operator makes one, dead when its last reference goes, resized in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from simulator.memory.tape import CATEGORIES
from simulator.work.captured.capture import Kind, Phase
from validate.capture.log import Log
from validate.capture.streams import Recorder

_BORN = {Phase.FORWARD: "activations", Phase.BACKWARD: "temporaries", Phase.OPTIMIZER: "temporaries"}
_PINNED = "_shardwise_pinned"


class Storages:
    """Which CUDA storages are alive, and what they are for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._alive: dict[int, int] = {}  # by torch's own identity
        self._sizes: dict[int, int] = {}
        self._count = 0

    def see(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which begins if nobody saw it before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return self._alive[key]
        number = self._alive[key] = self._count
        self._count += 1
        self._log.categories[number] = _BORN[self._log.phase]
        self._begin(number, storage.nbytes())
        weakref.finalize(storage, self._gone, key, number)
        return number

    def begin(self, num_bytes: int) -> int:
        """A buffer inside a compiled region, which no tensor holds: its number."""
        number, self._count = self._count, self._count + 1
        self._log.categories[number] = "temporaries"
        self._begin(number, num_bytes)
        return number

    def end(self, number: int) -> None:
        """It is not needed on."""
        self._end(number)

    def resize(self, storage: Any, num_bytes: int) -> None:
        """A storage is given another size: FSDP frees and takes parameters this way."""
        number = self._alive.get(storage._cdata)
        if number is None or self._sizes.get(number, 0) == num_bytes:
            return
        self._end(number)
        self._begin(number, num_bytes)
        self.name(number, "unsharded_parameters")

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """The allocator waits for a stream before it gives the storage's room to others."""
        self._used(self.see(tensor), stream)

    def used(self, key: int, stream: int) -> None:
        """The same of a storage by torch's own identity, as autograd's engine does."""
        if key in self._alive:
            self._used(self._alive[key], stream)

    def _used(self, number: int, stream: int) -> None:
        if self._sizes.get(number):
            self._log.add(Kind.RECORD_STREAM, number, stream)

    def name(self, number: int, category: str) -> None:
        """What a storage is for."""
        self._log.categories[number] = category

    def owners(self, optimizer: torch.optim.Optimizer) -> None:
        """Name what an optimizer holds: parameters, gradients, state."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._name_all(parameter, "parameters")
                if parameter.grad is not None:
                    self._name_all(parameter.grad, "gradients")
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._name_all(value, "optimizer_state")

    def modules(self) -> None:
        """Name what modules hold and no optimizer does: frozen parameters, averages of parameters, buffers."""
        for module in (one for one in gc.get_objects() if issubclass(type(one), nn.Module)):
            for held, category in (("_parameters", "parameters"), ("_buffers", "buffers")):
                for tensor in vars(module).get(held, {}).values():
                    if isinstance(tensor, torch.Tensor) and not is_lazy(tensor):
                        self._name_all(tensor, category, among=_BORN.values())

    def _name_all(self, tensor: torch.Tensor, category: str, among: Collection[str] = CATEGORIES) -> None:
        for one in local_tensors(tensor):
            if one.device.type == "cuda" and self._log.categories[number := self.see(one)] in among:
                self.name(number, category)

    def _begin(self, number: int, num_bytes: int) -> None:
        self._sizes[number] = num_bytes
        if num_bytes:
            self._log.add(Kind.ALLOCATE, number, num_bytes, Recorder.stack[-1].number)

    def _end(self, number: int) -> None:
        if self._sizes.pop(number, 0):
            self._log.add(Kind.FREE, number)

    def _gone(self, key: int, number: int) -> None:
        self._alive.pop(key, None)
        self._end(number)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory on the host the GPU copies from and to at its link's full speed."""
    for one in local_tensors(tensor):
        if one.device.type == "cpu":
            setattr(one.untyped_storage(), _PINNED, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the program pinned a tensor's memory."""
    return getattr(tensor.untyped_storage(), _PINNED, False)


def local_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What this rank holds of a tensor: a DTensor's local part, a wrapper's inner tensors, or itself."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        yield from local_tensors(local)
    elif hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from local_tensors(getattr(tensor, name))
    else:
        yield tensor
