"""What cudaMalloc and cudaFree cost by size: the price of an allocator retry. Needs one CUDA device and torch.

    python experiments/cuda_malloc.py OUT.jsonl

A line a sample: kind, bytes, calls, time_s (median of `reps`, one call). Segments are taken and given back through
torch's caching allocator, whose own work is microseconds; `calls` segments are given back by one `empty_cache`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

MIB = 2**20
SIZES_MIB = (2, 20, 64, 256, 1024, 4096, 16384)
REPS = 7


def take(mib: int, calls: int) -> tuple[float, list[torch.Tensor]]:
    """Seconds of `calls` requests of `mib` MiB, and what they gave."""
    begin = time.perf_counter()
    tensors = [torch.empty(mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(calls)]
    return time.perf_counter() - begin, tensors


def give_back() -> float:
    """Seconds of returning every cached segment, with nothing queued on the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda.empty_cache()
    return time.perf_counter() - begin


def segments(mib: int, calls: int) -> tuple[list[float], list[float]]:
    """Seconds of taking and of giving back `calls` segments, one entry a repetition."""
    taken, given = [], []
    for _ in range(REPS):
        give_back()
        seconds, tensors = take(mib, calls)
        taken.append(seconds)
        tensors.clear()
        given.append(give_back())
    return taken, given


def samples() -> Iterator[dict[str, object]]:
    """Every line of the file."""
    properties = torch.cuda.get_device_properties(0)
    yield {
        "kind": "machine",
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for mib in SIZES_MIB:
        for calls in (1, 8) if mib < SIZES_MIB[-1] else (1, 4):
            taken, given = segments(mib, calls)
            for kind, times in (("cuda_malloc", taken), ("cuda_free", given)):
                median = statistics.median(times) / calls
                yield {"kind": kind, "bytes": mib * MIB, "calls": calls, "time_s": median, "reps": REPS}
    yield from retry()


def retry() -> Iterator[dict[str, object]]:
    """One request that only fits after the cache is given back: the whole stall, host side."""
    for mib in (1024, 8192):
        times, count = [], 0
        for _ in range(REPS):
            give_back()
            free, _ = torch.cuda.mem_get_info()
            count = free // (mib * MIB)
            _, cached = take(mib, count)
            cached.clear()  # the whole device is cached now, in segments too small for the next request
            torch.cuda.synchronize()
            seconds, _ = take(2 * mib, 1)
            times.append(seconds)
        yield {
            "kind": "retry",
            "bytes": mib * MIB,
            "calls": count,
            "time_s": statistics.median(times),
            "reps": REPS,
            "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }


def main(out: Path) -> None:
    """Measure, write and show."""
    with out.open("w") as file:
        for sample in samples():
            print(json.dumps(sample), file=file, flush=True)
            print(json.dumps(sample))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
