"""What torch's other threads do: counted, and waited for. Apart, so that a user's program gets nothing else loaded with it."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_LOOK_S = 0.002  # long enough for a thread that waits for Python's lock to take it
_LOOKS = 3  # in a row, before all are believed to rest
_AT_MOST_S = 2.0  # thread pools spin for a while before they sleep
_AWAKE = {"R", "D"}  # runs, or would if it had a core; waits for a page
# Threads that wake for nothing every few milliseconds, and on a busy machine wait for a core; their names in torch 2.13
_NETWORKS = {"gloo_tcp_loop", "pt_tcpstore_uv"}


def count_every_thread(*, counts: bool = True) -> bool:
    """Make torch's CPU allocator count what any thread takes and frees, or only what profiled ones do, as it does by itself.

    Gloo's threads free the tensors of collectives. The switch is a flag of c10 (CPUAllocator.cpp; seen in torch 2.13)
    that Python has no name for. False where this torch has none.
    """
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = counts
    except (OSError, ValueError):
        return False
    return True


def wait_for_threads() -> None:
    """Return when every other thread of this process sleeps, at the latest after two seconds.

    gloo tells a waiting thread first and lets go of the collective a moment later, in a thread of its own. Until then the
    tensors of a collective may or may not count, and a profiler that stops meanwhile ends in a corrupted heap.
    """
    if not sys.platform.startswith("linux"):  # no list of threads to look at
        time.sleep(_LOOK_S * 25)
        return
    until, rests = time.monotonic() + _AT_MOST_S, 0
    while rests < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)
        rests = rests + 1 if _AWAKE.isdisjoint(_states()) else 0


def _states() -> Iterator[str]:
    """What each other thread does, in a letter (proc(5), /proc/PID/stat)."""
    own = str(threading.get_native_id())
    for thread in Path("/proc/self/task").iterdir():
        if thread.name != own:
            try:
                before, _, rest = (thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
                if before.partition("(")[2] not in _NETWORKS:
                    yield rest.split()[0]
            except (OSError, IndexError):  # it ended
                continue
