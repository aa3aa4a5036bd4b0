"""Tensors as a program on a GPU sees them, without values: parameters, storages that change size, pinned memory, moves."""

from __future__ import annotations

import types
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit._builtins import _register_builtin
from torch.optim import optimizer
from torch.utils import _foreach_utils

from validate.capture import lazy, trees, values
from validate.capture.mode import CaptureMode
from validate.capture.storages import Storages, pinned
from validate.capture.streams import Recorder


def install(storages: Storages, mode: CaptureMode) -> None:
    """Parameters without values, storages that change size, pinned memory, uses on other streams."""
    # torch.tensor(..., device="cuda") moves what it made where the mode sees it
    torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003
    make = torch.tensor

    @wraps(make)
    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        """Of tensors in a list torch asks the value of each, below what a mode sees."""
        if isinstance(data, list | tuple) and any(isinstance(one, FakeTensor) for one in trees.tensors(data)):
            data = trees.mapped(data, lambda one: one.item() if isinstance(one, torch.Tensor) else one)
        return make(data, *args, **kwargs)

    torch.tensor = tensor
    _register_builtin(tensor, "aten::tensor")  # TorchScript knows it as it knew torch's own
    FakeTensor.__format__, FakeTensor.numpy = _formatted, _as_numpy
    for module in (_foreach_utils, optimizer):  # which a GPU's tensors take together, unless a program says otherwise
        module._foreach_supported_types.append(FakeTensor)
    resize = torch.UntypedStorage.resize_

    @wraps(resize)
    def resize_(self: Any, size: int) -> Any:
        found = resize(self, size)
        storages.resize(self, int(size))
        return found

    torch.UntypedStorage.resize_ = resize_
    torch.Tensor.record_stream = lambda self, stream: storages.record_stream(self, stream.number)
    torch.Tensor.pin_memory = lambda self, *_: pinned(self)
    torch.Tensor.is_pinned = lambda *_: True
    # `tensor.data = tensor.to("cuda")` moves a tensor; torch's fake tensors remember where they were made
    data = torch._C.TensorBase.data

    def move(self: Any, other: Any) -> None:
        data.__set__(self, other)
        if isinstance(other, FakeTensor):
            self.fake_device = other.fake_device

    FakeTensor.data = property(data.__get__, move)
    # torch.utils.swap_tensors, by which modules move to the GPU, refuses tensors with weak references; those of fake
    # tensors are memos of the fake mode, which may follow the swap
    torch.utils.weakref = types.SimpleNamespace(getweakrefs=lambda _: [])
    _keeping_notes()
    lazy.install(mode.to_fake)
    _registered(nn.Module, "register_parameter", mode)
    _registered(nn.Module, "register_buffer", mode)


def _formatted(tensor: FakeTensor, wanted: str) -> str:
    """As torch formats a tensor of one value, which the host waits for: `f"{loss:.3f}"`."""
    return tensor.item().__format__(wanted) if tensor.dim() == 0 else object.__format__(tensor, wanted)


def _as_numpy(tensor: FakeTensor, **_: bool) -> Any:
    """Of what nobody knows zeros: metrics, rewards and plots are reckoned on the CPU."""
    known = values.known(tensor)
    if known is not None:
        return known.numpy()
    Recorder.log.answer(f"{tensor.numel():,} values of a tensor as a NumPy array: 0")
    return np.zeros(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)


def _without_values(tensor: nn.Parameter, mode: CaptureMode) -> nn.Parameter:
    """A parameter for one that was made on the CPU: the same one each time, with what the program noted on it."""
    made: nn.Parameter | None = getattr(tensor, "_shardwise_fake", None)
    if made is None:
        made = nn.Parameter(mode.to_fake(tensor.data), requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        tensor._shardwise_fake = made
    return made


def _keeping_notes() -> None:
    """A module's tensors move by a swap where they are fake, else by `.data =`, which leaves what programs note on them."""
    swap = torch.utils.swap_tensors

    @wraps(swap)
    def swap_tensors(one: Any, other: Any) -> None:
        swap(one, other)
        if isinstance(one, FakeTensor):
            for name, value in vars(other).items():
                vars(one).setdefault(name, value)

    torch.utils.swap_tensors = swap_tensors


def _registered(owner: type, name: str, mode: CaptureMode) -> None:
    """A module's tensors have shapes and no values, whatever they were made of."""
    original = getattr(owner, name)

    @wraps(original)
    def register(self: Any, key: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if type(tensor) is nn.Parameter and not isinstance(tensor.data, FakeTensor) and tensor.device.type != "meta":
            tensor = _without_values(tensor, mode)
        original(self, key, tensor, *args, **kwargs)

    setattr(owner, name, register)
