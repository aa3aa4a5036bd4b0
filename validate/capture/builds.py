"""What a torch with CUDA has and one without lacks, where a program asks by name: versions, profilers, old tensor types."""

from __future__ import annotations

from typing import Any, Self

import torch

from validate.capture.streams import Recorder

CUDA = "12.8"  # a version that torch 2.13 is built with, where the build at hand has none
_TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


def install(*, stream: type, event: type, device: type) -> None:
    """In this process."""
    torch.version.cuda = torch.version.cuda or CUDA
    torch.cuda.streams.Stream = torch.cuda.streams.ExternalStream = stream
    torch.cuda.streams.Event = event
    torch.Stream, torch.Event = stream, event  # of whatever device
    torch.cuda.device_of = device
    nothing: dict[str, Any] = {"_sleep": None, "check_error": None, "can_device_access_peer": True}
    nothing |= {"get_allocator_backend": "native", "cudart": Nothing()}
    for name, value in nothing.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    for module in (torch.cuda, torch.cuda.memory):
        module.MemPool, module.use_mem_pool = Nothing, _in_pool
    for name in ("start", "stop", "init"):
        setattr(torch.cuda.profiler, name, lambda *_, **__: None)
    torch.profiler.profile = torch.profiler.profiler.profile = Nothing
    for name in _TYPES:
        old = getattr(torch.cuda, f"{name}Tensor")
        setattr(torch.cuda, f"{name}Tensor", Legacy(old, getattr(torch, f"{name}Tensor").dtype))
    convert = torch.Tensor.type
    torch.Tensor.type = lambda self, dtype=None, *args, **kwargs: convert(
        self, dtype.old if isinstance(dtype, Legacy) else dtype, *args, **kwargs
    )


class Nothing:
    """A profiler, a pool of memory, or CUDA's runtime: whatever it is asked, nothing is done and nothing was seen."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __str__(self) -> str:
        return ""


def _in_pool(*_: object) -> Nothing:
    Recorder.log.answer("torch.cuda.MemPool: its tensors lie in the one pool of the process")
    return Nothing()


class Legacy:
    """torch.cuda.FloatTensor and its like: makes tensors, and tells them by their type."""

    def __init__(self, old: Any, dtype: torch.dtype) -> None:
        self.old, self.dtype = old, dtype

    def __call__(self, *given: Any) -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int):
            return torch.as_tensor(given[0], dtype=self.dtype, device="cuda")
        return torch.empty(given, dtype=self.dtype, device="cuda")

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == self.dtype
