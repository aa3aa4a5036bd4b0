"""A program written for CUDA, played on a CPU: what it puts on a GPU stays here, what it sends by NCCL goes by gloo.

Only what decides where tensors are is changed; every operator, and autograd, run as torch has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

_SET = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
_NONE = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")


def _here(value: Any) -> Any:
    """A CUDA device as the CPU; what else there is, as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Every function of torch that is given a CUDA device gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of the function."""
        if getattr(func, "__name__", "") in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        given = {name: _here(value) for name, value in (kwargs or {}).items()}
        return func(*(_here(value) for value in args), **given)


def install(world: int) -> OnCpu:
    """Change what says where: process groups, meshes, autocast, DDP, questions about devices. The mode is to be entered."""
    dist.init_process_group = _joined(dist.init_process_group, world)
    dist.distributed_c10d.init_process_group = dist.init_process_group
    mesh = dist.device_mesh
    mesh.init_device_mesh = dist.init_device_mesh = _first_here(mesh.init_device_mesh)
    mesh.DeviceMesh.__init__ = _first_here(mesh.DeviceMesh.__init__, at=1)
    torch.autocast.__init__ = _first_here(torch.autocast.__init__, at=1)
    original = DistributedDataParallel.__init__

    def __init__(self: Any, module: Any, *_: object, **more: object) -> None:  # noqa: N807  device_ids stand first
        original(
            self, module, **{name: one for name, one in more.items() if name not in ("device_ids", "output_device")}
        )

    DistributedDataParallel.__init__ = __init__
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: world
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    for name in (*_SET, *_NONE):
        setattr(torch.cuda, name, lambda *_, **__: 0)
    return OnCpu()


def _first_here(function: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
    """A function whose argument at a place, or `device_type`, names a device."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        moved = [_here(one) if index == at else one for index, one in enumerate(args)]
        if "device_type" in kwargs:
            kwargs["device_type"] = _here(kwargs["device_type"])
        return function(*moved, **kwargs)

    return run


def _joined(function: Callable[..., Any], world: int) -> Callable[..., Any]:
    """init_process_group by gloo and a file; each process is a rank of its own."""

    @wraps(function)
    def run(*_: object, **kwargs: Any) -> Any:
        timeout = {"timeout": kwargs["timeout"]} if kwargs.get("timeout") else {}
        store = dist.FileStore(os.environ["SHARDWISE_RENDEZVOUS"], world)
        return function("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world, **timeout)

    return run
