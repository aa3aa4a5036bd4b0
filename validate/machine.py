"""Which machine this is: devices, driver, versions, clocks. Everything is read, nothing is set."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault
from validate.gpus import Gpu, busy, clocks, facts_of, own_gpus, run_quietly
from validate.launch import Launch, host_name
from validate.stopwatch import MEMORY_SHARE, DeviceKind, free_memory

_LOAD_S = 120.0  # torch from a cold disk
_CAPABILITY = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
# What changes how collectives, allocator and kernels behave is read from the environment, and by these names.
_SETTINGS: Final = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "RCCL_",
    "OMP_",
    "CUBLAS_",
    "NVTE_",
    "TORCHINDUCTOR_",
)
_SETTING_NAMES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "LD_PRELOAD",
)
_ALLOCATOR: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # torch 2.9's name, and the older one that it still reads


def describe(torch: Any, device: DeviceKind, *, num_ranks: int, threads: int, command: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """The machine line: what was measured, with what, and when."""
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    facts: dict[str, Any] = {
        "schema_version": 1,
        "date": now.isoformat().replace("+00:00", "Z"),
        "command": " ".join(command),
        "hostname": host_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "threads": threads,
        "num_ranks": num_ranks,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "settings": settings(),
        "nics": nics(),
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
    here = cuda.current_device()
    properties, (major, minor) = cuda.get_device_properties(here), cuda.get_device_capability()
    free, total = cuda.mem_get_info()
    torch.ones(1, device="cuda")
    cuda.synchronize()
    own = own_gpu(here)
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
        "topology": run_quietly(["nvidia-smi", "topo", "-m"]) or None,
        **facts_of(own),
        **clocks(own),
    }


def own_gpu(number: int) -> Gpu | None:
    """The GPU that CUDA counts as `number` here, as the driver knows it; None where it does not say."""
    there = own_gpus()
    return there[number] if number < len(there) else None


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that change what is measured, by name; secrets are in none of them."""
    variables = os.environ if environment is None else environment
    return {
        name: variables[name]
        for name in sorted(variables)
        if name.startswith(_SETTINGS) or name in _SETTING_NAMES or name in _ALLOCATOR
    }


def allocator_settings() -> str:
    """What the caching allocator was told: torch reads the newer name first."""
    return next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")


def nics(root: Path = Path("/sys/class")) -> list[str]:
    """RDMA ports and network cards that are up, with rate, firmware and driver, a line each."""
    found = []
    for port in sorted(root.glob("infiniband/*/ports/*")):
        device = port.parent.parent
        facts = (_read(port / "link_layer"), _read(port / "rate"), _read(port / "state").partition(": ")[2])
        firmware = _read(device / "fw_ver")
        details = ", ".join(filter(None, (*facts, f"firmware {firmware}" if firmware else "")))
        found.append(f"{device.name} port {port.name}: {details}")
    for card in sorted(root.glob("net/*/device")):
        speed, driver = _read(card.parent / "speed"), (card / "driver").resolve().name
        if _read(card.parent / "operstate") == "up":
            rate = f"{int(speed) / 1000:g} Gb/s, " if speed.isdigit() else ""
            found.append(f"{card.parent.name}: {rate}MTU {_read(card.parent / 'mtu')}, {driver}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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


def running_jobs(local_ranks: int = 1) -> list[Fault]:
    """Somebody else's work on the GPUs that this process would use; that on others is nobody's trouble.

    local_ranks: of ranks that this process starts itself; one that a launcher started looks at its own GPU.
    """
    there, launch = own_gpus(), Launch.of_environment()
    if not launch.outside or not there:
        return busy(there[:local_ranks])
    number = launch.device(len(there))
    return busy(there[number : number + 1])


def memory_limit(share: float = MEMORY_SHARE, parents: int = 1) -> int | None:
    """The most that ranks on a CPU may hold together: a share of what the machine says is free; None where it does not.

    parents: how many processes like this one start ranks here, and share it.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return int(share * kib * 1024 / parents)
