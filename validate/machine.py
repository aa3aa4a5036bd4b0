"""Which machine this is: devices, driver, versions, clocks. Everything is read, nothing is set."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault
from validate.stopwatch import MEMORY_SHARE, DeviceKind, free_memory

_ASK_S = 20.0
_LOAD_S = 120.0  # torch from a cold disk
_CAPABILITY = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
_IDLE_BYTES = 600 * 2**20  # what a driver, a display or a monitoring agent may hold


def describe(torch: Any, device: DeviceKind, *, num_ranks: int, threads: int, command: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """The machine line: what was measured, with what, and when."""
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    facts: dict[str, Any] = {
        "schema_version": 1,
        "date": now.isoformat().replace("+00:00", "Z"),
        "command": " ".join(command),
        "hostname": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "threads": threads,
        "num_ranks": num_ranks,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
    return facts | (_gpu(torch) if device == "cuda" else _cpu(torch))


def _cpu(torch: Any) -> dict[str, Any]:  # noqa: ANN401
    """Ranks share the memory, so each has its part of it."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "device": cpu_name(),
        "architecture": "cpu",
        "memory_bytes": pages or free_memory(torch, gpu=False),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "collectives": "gloo",
    }


def _gpu(torch: Any) -> dict[str, Any]:  # noqa: ANN401
    cuda = torch.cuda
    properties, (major, minor) = cuda.get_device_properties(0), cuda.get_device_capability()
    free, total = cuda.mem_get_info()
    torch.ones(1, device="cuda")
    cuda.synchronize()
    asked = _ask("driver_version,power.limit,clocks.max.sm")
    limits = dict(zip(("driver", "power_limit_w", "max_sm_clock_mhz"), asked[0] if asked else [], strict=False))
    return {
        "device": properties.name,
        "architecture": "ada" if (major, minor) == (8, 9) else _CAPABILITY.get(major, "hopper"),
        "num_devices": cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "total_bytes": total,
        "free_bytes_before": free,
        "free_bytes_after_first_tensor": cuda.mem_get_info()[0],
        "sms": properties.multi_processor_count,
        "capability": [major, minor],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, cuda.nccl.version())),
        "collectives": "nccl",
        "topology": _topology(),
        **limits,
        **clocks(),
    }


def clocks() -> dict[str, str]:
    """Clocks, power and temperature of the first GPU as the driver tells them; empty where it does not."""
    asked = _ask("clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active")
    names = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons")
    return dict(zip(names, asked[0] if asked else [], strict=False))


def cpu_name() -> str:
    """The processor's name as Linux tells it; its architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join((found or [platform.processor() or platform.machine()])[0].split())


# Ranks on a CPU keep the memory that they free, as CUDA's caching allocator does. By glibc's own rules blocks above a moving
# threshold go back to the system, and some steps pay for first touches again while others do not.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_TOP_PAD_": str(2**24)}


def count_gpus() -> int:
    """GPUs that torch sees. Asked in a process of its own: torch must not be loaded here, nor a CUDA context made."""
    ask = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = subprocess.run(  # noqa: S603  a fixed command
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=_LOAD_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0


def running_jobs() -> list[Fault]:
    """Somebody else's work on the GPUs that would be measured: their processes, or memory in use without any."""
    faults = [
        Fault(place=f"GPU {row[0]}", problem=f"process {row[1]} ({row[2]}) holds {row[3]} MiB", remedy="wait for it")
        for row in _ask("gpu_uuid,pid,process_name,used_gpu_memory", "compute-apps")
        if len(row) == 4
    ]
    for row in _ask("index,memory.used"):
        if not faults and len(row) == 2 and row[1].isdigit() and int(row[1]) * 2**20 > _IDLE_BYTES:
            problem = f"{row[1]} MiB are in use, by whom the driver does not say"
            faults.append(
                Fault(place=f"GPU {row[0]}", problem=problem, remedy="see nvidia-smi; an idle GPU holds less")
            )
    return faults


def memory_limit() -> int | None:
    """The most that ranks on a CPU may hold together: a share of what the machine says is free; None where it does not."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return int(MEMORY_SHARE * kib * 1024)


def _topology() -> str | None:
    found = _run(["nvidia-smi", "topo", "-m"])
    return found or None


def _ask(fields: str, what: str = "gpu") -> list[list[str]]:
    text = _run(["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"])
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]


def _run(command: list[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603  a fixed command
            [program, *command[1:]], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
