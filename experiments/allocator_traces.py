"""Random allocator programs on a real GPU, recorded as the replay tests read them. Needs one CUDA device and torch.

    python experiments/allocator_traces.py OUT_DIR

One process a setting of PYTORCH_CUDA_ALLOC_CONF: two streams, blocks that the other stream still reads when they are
freed, an emptied cache now and then. The last process records a profiler's trace of a small training step.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max_split": "max_split_size_mb:64",
    "roundup": "roundup_power2_divisions:4",
    "expandable_roundup": "expandable_segments:True,roundup_power2_divisions:8",
}
MIB = 2**20
SEGMENT = ("device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable")
BLOCK = ("address", "size", "requested_size", "state")
EVENT = ("action", "addr", "size", "stream", "time_us", "pool_id")


def main(out: Path) -> None:
    """All of them at once."""
    runs = []
    for name, setting in SETTINGS.items():
        target = str(out / f"trace-random-{name}.json.gz")
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        runs.append(subprocess.Popen([sys.executable, __file__, "--one", target], env=environment))  # noqa: S603
    runs.append(subprocess.Popen([sys.executable, __file__, "--profile", str(out / "kineto-small.json.gz")]))  # noqa: S603
    for run in runs:
        run.wait()


def one(target: Path) -> None:
    """A program of 3,000 steps, recorded from its first allocation."""
    import torch

    draw = random.Random(0)  # noqa: S311
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)  # noqa: SLF001
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    live: list[tuple[Any, int]] = []
    for _ in range(3000):
        chance = draw.random()
        if chance < 0.52:
            size = draw.choice((draw.randrange(1, 4096), draw.randrange(1, 2 * MIB), draw.randrange(MIB, 96 * MIB)))
            stream = int(draw.random() < 0.3)
            with torch.cuda.stream(streams[stream]):
                live.append((torch.empty(size, dtype=torch.uint8, device="cuda"), stream))
        elif chance < 0.98 and live:
            tensor, stream = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.2:
                other = streams[1 - stream]
                with torch.cuda.stream(other):
                    torch.cuda._sleep(200_000)  # noqa: SLF001
                tensor.record_stream(other)
            del tensor
        elif draw.random() < 0.3:
            torch.cuda.empty_cache()
        if len(live) > 150:
            del live[:50]
    write(target, torch.cuda.memory._snapshot())  # noqa: SLF001


def write(target: Path, snapshot: dict[str, Any]) -> None:
    """Events and segments without stack frames."""
    segments = [
        {k: s[k] for k in SEGMENT if k in s} | {"blocks": [{k: b[k] for k in BLOCK if k in b} for b in s["blocks"]]}
        for s in snapshot["segments"]
    ]
    traces = [[{k: e[k] for k in EVENT if k in e} for e in trace] for trace in snapshot["device_traces"]]
    settings = snapshot.get("allocator_settings")
    data = {"allocator_settings": settings, "device_traces": traces, "segments": segments}
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(json.dumps(data, separators=(",", ":")).encode())


def profiled(target: Path) -> None:
    """Three steps of a small network under torch's profiler, memory included."""
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(2)]).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=3), profile_memory=True) as profiler:
        for _ in range(5):
            net(torch.randn(256, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            profiler.step()
    profiler.export_chrome_trace(str(target))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]))
    elif sys.argv[1] == "--profile":
        profiled(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
