"""Benches of memory and storage: device copies, transfers to and from the host, allocations, a file beside the samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from validate.bench_compute import Item, spread
from validate.stopwatch import Session

MIB = 2**20
STORAGE_SHARE = 0.1  # of the free space of the file system at most


def transfer_items(s: Session) -> Iterator[Item]:
    """Copies in device memory, and over PCIe (pinned, pageable, both ways at once)."""
    sizes = spread((1, 16, 256, 1024)) if s.gpu else spread((1, 8, 64))
    for mib in sizes[:1] if s.setting.tiny else sizes:
        yield partial(device_copy, s, mib * MIB)
    if s.gpu:
        for mib in sizes:
            yield partial(host_copies, s, mib * MIB)


def device_copy(s: Session, size: int) -> None:
    """bytes_moved counts the read and the write."""
    if s.fits(2 * size):
        source = s.torch.empty(size, dtype=s.torch.uint8, device=s.setting.device)
        target = s.torch.empty_like(source)
        s.record("hbm_copy", lambda _: target.copy_(source), {"bytes_moved": 2 * size})


def host_copies(s: Session, size: int) -> None:
    """Both directions from pinned and pageable memory, then both at once on two streams."""
    torch, cuda = s.torch, s.torch.cuda
    if not s.fits(2 * size):
        return
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable, device = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda")
    s.record("h2d_pinned", lambda _: device.copy_(pinned, non_blocking=True), {"bytes": size})
    s.record("d2h_pinned", lambda _: pinned.copy_(device, non_blocking=True), {"bytes": size})
    s.record("h2d_pageable", lambda _: device.copy_(pageable), {"bytes": size})
    s.record("d2h_pageable", lambda _: pageable.copy_(device), {"bytes": size})
    streams = cuda.Stream(), cuda.Stream()
    back, other = torch.empty_like(pinned, pin_memory=True), torch.empty_like(device)

    def both(_: int) -> None:
        here = cuda.current_stream()
        for stream, (target, source) in zip(streams, ((device, pinned), (back, other)), strict=True):
            stream.wait_stream(here)
            with cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            here.wait_stream(stream)

    s.record("h2d_d2h_together", both, {"bytes": 2 * size})


def allocation_items(s: Session) -> Iterator[Item]:
    """The driver's own allocations: what a retry of the caching allocator waits for."""
    if s.gpu:
        for mib in spread((2, 20, 200, 1024, 4096)):
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
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
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
    sizes = (1, 4) if s.setting.tiny else spread((1, 16, 64)) if not s.gpu else spread((16, 256, 1024))
    for mib in sizes:
        yield partial(storage, s, mib * MIB)


def storage(s: Session, size: int) -> None:
    """A file of `size` bytes. Read speed is the device's only where the system lets go of its cache (Linux)."""
    if s.setting.rank != 0:
        return  # one file at a time: the ranks of a node share the disk
    folder = Path(s.setting.out).resolve().parent
    free = os.statvfs(folder)
    if size > STORAGE_SHARE * free.f_bavail * free.f_frsize:
        return
    path = folder / f".shardwise-{os.getpid()}.tmp"
    data = os.urandom(MIB)
    try:
        s.emit("storage_write", sorted(_seconds(partial(_write, path, data, size)) for _ in range(3)), {"bytes": size})
        s.emit("storage_read", sorted(_read(path) for _ in range(3)), {"bytes": size})
    except OSError as exc:
        s.failed("storage_write", exc, {"bytes": size})
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _seconds(lambda: _drain(file))


def _drain(file: Any) -> None:  # noqa: ANN401
    while file.read(MIB):
        pass


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
