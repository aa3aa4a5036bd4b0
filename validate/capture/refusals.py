"""What ends a capture, in words: what the program asked for that nobody here has, and what to do instead."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
import traceback
from typing import Any, Never

import torch

from validate.capture.ranks import OTHERS_MEMORY, RefusedError
from validate.capture.rows import MATRICES


def in_a_line(error: BaseException) -> str:
    """An exception of the program's: what happened, and what to do where that is known."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint, by rank: (exception, its place)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines()
    line = f"the program raised {type(error).__name__}{f': {lines[0]}' if lines else ''}"
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} …"
    remedy = _remedy(error, str(error)) or (_remedy(error.__cause__, str(error.__cause__)) if error.__cause__ else "")
    return f"{line}; {remedy}" if remedy else line


_LONGEST = 300  # characters of somebody else's message: torch lists every backend that it knows


_NO_COMMAND = "a command that is not here: of a GPU nothing could be asked, so leave it out"
_NO_DATA = "a capture reads your data: give the path from this folder, or let the script make data up"
_BY_MESSAGE = {
    "SparseTensorImpl": MATRICES,
    "tensors do not have strides": MATRICES,
    "Creating a new Tensor subclass": "a class of tensors of your own holds plain ones: torch.Tensor._make_wrapper_subclass, as DTensor",
    "SymmetricMemory": OTHERS_MEMORY,
    "data pointer": "a kernel of your own has no address to work on: make it a torch.library.custom_op with register_fake",
}


def _remedy(error: BaseException, message: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install {package} beside shardwise: {sys.executable} -m pip install …"
    if isinstance(error, FileNotFoundError) or "No such file or directory" in message:  # of another rank's, as text
        started = any(one.filename == subprocess.__file__ for one in traceback.extract_tb(error.__traceback__))
        return _NO_COMMAND if started else _NO_DATA
    for part, remedy in _BY_MESSAGE.items():
        if part in message:
            return remedy
    if (
        type(error).__name__ in ("UnsupportedOperatorException", "UnsupportedFakeTensorException")
        or "fake impl" in message
    ):
        return 'say what the operator returns: torch.library.register_fake("NAME")(function of the same arguments)'
    if isinstance(error, NotImplementedError) and "'CUDA' backend" in message:
        return "there is no GPU to run it: its tensors must be made inside the capture, by torch's own operators"
    return ""


def without_children() -> None:
    """A program that starts copies of itself is none of one rank: no fork, no multiprocessing."""

    def refused(*_: object, **__: object) -> Never:
        raise RefusedError(
            "the program starts processes of its own (fork, multiprocessing), and a capture is of one rank: "
            "capture what one of them runs, as a script for torchrun or as module:function"
        )

    os.fork = os.forkpty = refused
    multiprocessing.process.BaseProcess.start = refused  # type: ignore[method-assign]
    torch.nn.DataParallel.forward = _data_parallel
    if calls := sys.modules.get("torch.distributed.rpc"):
        setattr(calls, "init_rpc", _without_calls)  # noqa: B010  mypy knows no such name of a module


def _without_calls(*_: object, **__: object) -> Never:
    """It would wait for workers that nobody starts."""
    raise RefusedError(
        "torch.distributed.rpc calls other processes, and a capture is of one rank: collectives, or send and recv"
    )


def _data_parallel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of one GPU it is the module itself."""
    if len(self.device_ids) > 1:
        raise RefusedError(
            "nn.DataParallel drives several GPUs from one process, and a capture is of one rank: "
            "DistributedDataParallel, or --ranks 1"
        )
    return self.module(*args, **kwargs)


class UnknownPropertyError(RefusedError, AttributeError):
    """Libraries ask with hasattr() and go on without."""


class Properties:
    """torch.cuda.get_device_properties: what the cluster's device is known by."""

    def __init__(self, **known: object) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(vars(self))
        raise UnknownPropertyError(
            f"the program asks for the GPU's {name}, and a capture has no GPU; known are {known}"
        )


def without_sensors() -> None:
    """What only a GPU's own sensors could say."""
    for name in ("temperature", "power_draw", "clock_rate", "device_memory_used", "list_gpu_processes"):
        for module in (torch.cuda, torch.cuda.memory):
            setattr(module, name, _refused(name))


def _refused(name: str) -> Any:
    def answer(*_: object, **__: object) -> Never:
        raise RefusedError(f"the program asks torch.cuda.{name}() of the GPU, and a capture has none: leave it out")

    return answer
