"""Torch's CPU allocator made to count all threads. Apart, so that a user's program gets nothing else loaded with it."""

from __future__ import annotations

import ctypes
from pathlib import Path


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
