"""Benches of memory and storage: device copies, transfers to and from the host, allocations, a file beside the samples."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from validate.benches import Item, Tensor, spread
from validate.stopwatch import Session

MIB = 2**20
STORAGE_SHARE = 0.1  # of the free space of the file system at most
REPEATS = 3
LEAST_S = 2.0  # a file that takes less is always measured


def transfer_items(s: Session) -> Iterator[Item]:
    """Copies in device memory, and over PCIe (pinned, pageable, both ways at once)."""
    sizes = spread((1, 16, 256, 1024)) if s.gpu else spread((1, 4, 16, 64))
    for mib in sizes[:1] if s.setting.tiny else sizes:
        yield partial(device_copy, s, mib * MIB)
    if s.gpu:
        for mib in sizes[:1] if s.setting.tiny else sizes:
            yield partial(host_copies, s, mib * MIB)


def device_copy(s: Session, size: int) -> None:
    """bytes_moved counts the read and the write."""
    if s.fits(2 * size):
        source = s.torch.empty(size, dtype=s.torch.uint8, device=s.setting.device)
        target = s.torch.empty_like(source)
        s.record("hbm_copy", lambda _: target.copy_(source), {"bytes_moved": 2 * size})


def host_copies(s: Session, size: int) -> None:
    """Both directions from pinned and pageable memory, then both at once, either way."""
    torch = s.torch
    if not s.fits(2 * size):
        return
    device, other = (torch.empty(size, dtype=torch.uint8, device=s.setting.device) for _ in range(2))
    for name, pin in (("pinned", True), ("pageable", False)):
        host, back = (torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
        s.record(f"h2d_{name}", partial(_copy, device, host), {"bytes": size})
        s.record(f"d2h_{name}", partial(_copy, back, device), {"bytes": size})
        if pin:
            s.record("h2d_d2h_together", _on_two_streams(s, device, host, back, other), {"bytes": 2 * size})
        else:
            both = _from_two_threads(s, device, host, back, other)
            s.record("h2d_d2h_together_pageable", both, {"bytes": 2 * size}, by_host=True)


def _copy(target: Tensor, source: Tensor, _: int) -> None:
    target.copy_(source, non_blocking=True)  # pageable memory blocks all the same


def _on_two_streams(s: Session, device: Tensor, host: Tensor, back: Tensor, other: Tensor) -> Callable[[int], object]:
    cuda = s.torch.cuda
    streams = cuda.Stream(), cuda.Stream()

    def both(_: int) -> None:
        here = cuda.current_stream()
        for stream, (target, source) in zip(streams, ((device, host), (back, other)), strict=True):
            stream.wait_stream(here)
            with cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            here.wait_stream(stream)

    return both


def _from_two_threads(s: Session, device: Tensor, host: Tensor, back: Tensor, other: Tensor) -> Callable[[int], object]:
    """The driver stages pageable copies with the calling thread, so both ways at once are two threads (and no GIL)."""
    cuda = s.torch.cuda
    streams, here = (cuda.Stream(), cuda.Stream()), cuda.current_device()

    def way(stream: Any, target: Tensor, source: Tensor) -> None:  # noqa: ANN401  torch's stream
        cuda.set_device(here)
        with cuda.stream(stream):
            target.copy_(source)
        stream.synchronize()

    def both(_: int) -> None:
        down = threading.Thread(target=way, args=(streams[0], device, host))
        down.start()
        way(streams[1], back, other)
        down.join()

    return both


def allocation_items(s: Session) -> Iterator[Item]:
    """The driver's own allocations: what a retry of the caching allocator waits for."""
    if s.gpu:
        for mib in (2, 20) if s.setting.tiny else spread((2, 20, 200, 1024, 4096)):
            yield partial(device_allocation, s, mib * MIB)


def device_allocation(s: Session, size: int) -> None:
    """What cudaMalloc and cudaFree take of a block that the caching allocator does not hold."""
    torch, cuda = s.torch, s.torch.cuda
    if not s.fits(size):
        return
    took: list[float] = []
    freed: list[float] = []
    for _ in range(5):
        cuda.empty_cache()
        s.sync()
        begun = time.perf_counter()
        block = torch.empty(size, dtype=torch.uint8, device=s.setting.device)
        took.append(time.perf_counter() - begun)
        del block
        s.sync()
        begun = time.perf_counter()
        cuda.empty_cache()
        freed.append(time.perf_counter() - begun)
    s.emit("device_malloc", sorted(took), {"bytes": size})
    s.emit("device_free", sorted(freed), {"bytes": size})


def storage_items(s: Session) -> Iterator[Item]:
    """One file beside the samples: written and flushed to the device, read with the page cache dropped for it."""
    sizes = (1, 4) if s.setting.tiny else spread((1, 4, 16, 64)) if not s.gpu else spread((16, 64, 256, 1024))
    speed: list[float] = []
    for mib in sizes:
        yield partial(storage, s, mib * MIB, speed)


def storage(s: Session, size: int, speed: list[float]) -> None:
    """A file of `size` bytes. Read speed is the device's only where the system lets go of its cache (Linux).

    speed: bytes a second that smaller files were written with; a file that would outlast the phase is left out.
    """
    if s.setting.rank != 0:
        return  # one file at a time: the ranks of a node share the disk
    folder = Path(os.path.realpath(s.setting.out)).parent
    free = os.statvfs(folder)
    too_long = bool(speed) and size / speed[-1] > max(LEAST_S, s.left_s())
    if too_long or size > STORAGE_SHARE * free.f_bavail * free.f_frsize:
        return
    data = os.urandom(MIB)
    try:
        with TemporaryFile(dir=folder, buffering=0) as file:  # without a name: nothing stays of it after kill -9
            writes = _repeated(s, lambda: _seconds(partial(_write, file, data, size)))
            s.emit("storage_write", writes, {"bytes": size})
            s.emit("storage_read", _repeated(s, lambda: _read(file)), {"bytes": size})
        speed.append(size / writes[0])
    except OSError as exc:
        s.failed("storage_write", exc, {"bytes": size})


def _repeated(s: Session, once: Callable[[], float]) -> list[float]:
    """Three times, sorted; fewer where the phase's time runs out."""
    found = [once()]
    while len(found) < REPEATS and s.left_s() > found[-1]:
        found.append(once())
    return sorted(found)


def _write(file: IO[bytes], data: bytes, size: int) -> None:
    file.seek(0)
    file.truncate()
    for _ in range(size // len(data)):
        file.write(data)
    os.fsync(file.fileno())


def _read(file: IO[bytes]) -> float:
    file.seek(0)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _seconds(lambda: _drain(file))


def _drain(file: IO[bytes]) -> None:
    while file.read(MIB):
        pass


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
