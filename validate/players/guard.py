"""CUDA's shapes of memory on a machine without CUDA: a device guard that does nothing, for fake tensors only.

Call `stand_in(folder)` before torch is imported for the first time. It compiles `cuda_guard.cpp` against the installed
torch, loads it, and gives torch.cuda streams and events that do nothing. Compiling takes seconds; the library lies in
`folder`, or in the folder that SHARDWISE_CACHE names, where later runs find it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from validate.gpus import built_with_cuda

_SOURCE = Path(__file__).with_name("cuda_guard.cpp")
_COMPILE_S = 300


def needs_guard() -> bool:
    """The installed torch was built without CUDA, or there is no driver for it (a login node, a laptop)."""
    return not (built_with_cuda() and _has_driver())


def _has_driver() -> bool:
    """Whether CUDA's driver can be loaded and starts; torch would keep what it found, so it is not asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuInit(0) == 0)


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


def stand_in(folder: Path) -> None:
    """Compile, load, patch. Raises OSError or CalledProcessError in words of the compiler's."""
    if "torch" in sys.modules:
        raise RuntimeError("the device guard comes too late: torch is loaded already")
    Streams.library = library = ctypes.CDLL(str(_compiled(folder)), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  a build with CUDA puts its own guard in the place of ours

    library.claim_cuda()
    _patch()


class Streams:
    """The guard's current stream, by number, and what autograd's engine does with streams."""

    library: ClassVar[ctypes.CDLL | None] = None
    _kept: ClassVar[list[object]] = []  # functions that C++ calls

    @classmethod
    def hear(
        cls,
        current: Callable[[int], None],
        record: Callable[[int], int],
        block: Callable[[int, int], None],
        used: Callable[[int, int], None],
    ) -> bool:
        """Whether there is a guard, which from now on calls these.

        current: the stream that becomes it. record: on a stream, gives the event's number, from 1 on. block: a stream waits
        for an event. used: a storage, as `_cdata` has it, by a stream.
        """
        if cls.library is None:
            return False
        number, storage = ctypes.c_int64, ctypes.c_uint64
        kinds = [
            ctypes.CFUNCTYPE(None, number),
            ctypes.CFUNCTYPE(number, number),
            ctypes.CFUNCTYPE(None, number, number),
            ctypes.CFUNCTYPE(None, storage, number),
        ]
        given: tuple[Callable[..., Any], ...] = (current, record, block, used)
        kept = [kind(one) for kind, one in zip(kinds, given, strict=True)]
        cls._kept += kept
        cls.library.hear_streams(*kept)
        return True

    @classmethod
    def set_current(cls, stream: int) -> None:
        """Of this thread, without a call of `current`."""
        if cls.library is not None:
            cls.library.set_current_stream(ctypes.c_int64(stream))


def _torch() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    return Path(spec.origin).parent


def _compiled(folder: Path) -> Path:
    program, home = compiler(), _torch()
    if program is None:
        raise FileNotFoundError("no C++ compiler for the device guard: install g++, or use --device cpu")
    command = [program, "-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}", str(_SOURCE)]
    command += ["-DBUILT_WITH_CUDA"] if built_with_cuda() else []
    command += [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    cache = Path(os.environ.get("SHARDWISE_CACHE") or folder)
    library = cache / f"libcuda_guard-{_fingerprint(command, home)}.so"
    if not library.is_file():
        made = folder / library.name
        command_line = [*command, "-o", str(made)]
        subprocess.run(command_line, check=True, capture_output=True, timeout=_COMPILE_S)  # noqa: S603  a fixed command
        try:
            _move(made, library)
        except OSError:  # a folder that cannot be written costs time alone
            return made
    return library


def _fingerprint(command: list[str], home: Path) -> str:
    """What the library depends on: the command, the source, and which torch lies there."""
    parts = (json.dumps(command).encode(), _SOURCE.read_bytes(), (home / "version.py").read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _move(made: Path, library: Path) -> None:
    """Whole or not at all: another run may look for it at the same time."""
    if made == library:
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    beside = library.with_name(f"{library.name}.{os.getpid()}")
    shutil.copyfile(made, beside)
    beside.replace(library)


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> _Event:
        return self

    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    """A stream on which everything is done at once."""

    device_index = 0
    device_type = 1  # c10's number of CUDA
    stream_id = 0
    priority = 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _patch() -> None:
    """What FSDP and checkpoints ask of torch.cuda."""
    import torch

    only = _Stream()
    only.device = torch.device("cuda", 0)  # type: ignore[attr-defined]
    answers: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: only,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (9, 0),  # a broadcast asks, and nothing else does
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # without this autocast says that there is no CUDA, switches itself off, and every product is one of fp32
    from validate.torch_private import autocast_stays_on

    autocast_stays_on()
