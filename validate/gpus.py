"""The GPUs of this machine as the driver tells them: which are this process's own, who else works there, their clocks.

Everything is read by nvidia-smi, nothing is set, and no CUDA context is made. Where there is no driver, nothing is told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault

_ASK_S = 20.0
_IDLE_BYTES = 600 * 2**20  # what a driver or a monitoring agent may hold
# They hold memory on GPUs that nobody computes on: MPS's server, displays, monitoring.
_BACKGROUND = ("nvidia-cuda-mps-server", "Xorg", "Xwayland", "gnome-shell", "kwin", "nv-hostengine", "dcgm")
_CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
_CLOCK_NAMES = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons")
_EVERY_MS = 500
# Bits of nvmlClocksEventReasons (nvml.h); the first means that nothing runs.
_REASONS: Final = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal",
    0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. index: nvidia-smi's; -1 for a part of one (MIG), of which the driver's queries say nothing."""

    index: int
    uuid: str


def own_gpus(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that CUDA shows to this process, in its order; empty where no driver answers."""
    variables = os.environ if environment is None else environment
    there = [Gpu(int(row[0]), row[1]) for row in ask("index,uuid") if len(row) == 2 and row[0].isdigit()]
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return there
    found: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        match = [gpu for gpu in there if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if not match and not name.startswith("MIG-"):
            break  # CUDA reads no further than the first name that it does not know
        found.append(match[0] if match else Gpu(-1, name))
    return found


def busy(gpus: Sequence[Gpu]) -> list[Fault]:
    """Somebody else's work on these GPUs: their processes, or memory in use that neither they nor a display explain."""
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    faults = [
        Fault(place=f"GPU {numbers[row[0]]}", problem=f"process {row[1]} ({row[2]}) holds {row[3]} MiB", remedy="wait for it, or CUDA_VISIBLE_DEVICES")
        for row in ask("gpu_uuid,pid,process_name,used_gpu_memory", "compute-apps")
        if len(row) == 4 and row[0] in numbers and not any(name in row[2] for name in _BACKGROUND)
    ]  # fmt: skip
    named = {fault.place for fault in faults}
    for row in ask("uuid,memory.used,display_active"):
        if len(row) != 3 or row[0] not in numbers or row[2] == "Enabled" or not row[1].isdigit():
            continue
        place = f"GPU {numbers[row[0]]}"
        if place not in named and int(row[1]) * 2**20 > _IDLE_BYTES and not _background_on(row[0]):
            problem = f"{row[1]} MiB are in use, by whom the driver does not say"
            faults.append(Fault(place=place, problem=problem, remedy="see nvidia-smi; an idle GPU holds less"))
    return faults


def _background_on(uuid: str) -> bool:
    """Whether MPS, a display or a monitor is what holds the memory."""
    rows = ask("gpu_uuid,process_name", "compute-apps")
    return any(row[0] == uuid and any(name in row[1] for name in _BACKGROUND) for row in rows if len(row) == 2)


def facts_of(gpu: Gpu | None) -> dict[str, str]:
    """Driver, firmware, limits and error correction of a GPU; empty where the driver does not say."""
    names = {
        "driver": "driver_version", "vbios": "vbios_version", "power_limit_w": "power.limit",
        "max_sm_clock_mhz": "clocks.max.sm", "ecc": "ecc.mode.current",
        "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total", "pcie_generation": "pcie.link.gen.current",
        "pcie_width": "pcie.link.width.current", "gpu_uuid": "uuid",
    }  # fmt: skip
    rows = ask(",".join(names.values()), gpu=gpu)
    return dict(zip(names, rows[0], strict=False)) if rows and len(rows[0]) == len(names) else {}


def clocks(gpu: Gpu | None) -> dict[str, str]:
    """Clocks, power and temperature of a GPU at this moment; empty where the driver does not say."""
    rows = ask(_CLOCKS, gpu=gpu)
    return dict(zip(_CLOCK_NAMES, rows[0], strict=False)) if rows else {}


class ClockLog:
    """Clocks of one GPU twice a second, so that what is told of a phase was read under its load."""

    def __init__(self, gpu: Gpu | None) -> None:
        program = shutil.which("nvidia-smi") if gpu is not None and gpu.index >= 0 else None
        self._rows: list[list[str]] = []
        self._process: subprocess.Popen[str] | None = None
        if program is None or gpu is None:
            return
        command = [program, f"--id={gpu.uuid}", f"--query-gpu={_CLOCKS}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(  # noqa: S603  a fixed command
                [*command, f"--loop-ms={_EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._rows.append([part.strip() for part in line.split(",")])

    def taken(self) -> dict[str, Any]:
        """What was read since this was last asked."""
        rows, self._rows = self._rows, []
        return summary(rows)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def summary(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Readings of one phase: medians, the lowest clock, the highest temperature, and why the clock was held back."""
    columns = {name: [row[i] for row in rows if len(row) == len(_CLOCK_NAMES)] for i, name in enumerate(_CLOCK_NAMES)}
    numbers = {name: [float(v) for v in values if _is_number(v)] for name, values in columns.items()}
    found: dict[str, Any] = {
        name: statistics.median(numbers[name]) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w") if numbers[name]
    }  # fmt: skip
    if numbers["sm_clock_mhz"]:
        found |= {"lowest_sm_clock_mhz": min(numbers["sm_clock_mhz"]), "readings": len(numbers["sm_clock_mhz"])}
    if numbers["temperature_c"]:
        found["temperature_c"] = max(numbers["temperature_c"])
    reasons = 0
    for value in columns["throttle_reasons"]:
        with contextlib.suppress(ValueError):
            reasons |= int(value, 16)
    return found | ({"throttled_by": ", ".join(names)} if (names := reason_names(reasons)) else {})


def reason_names(bits: int) -> list[str]:
    """Why clocks are held back, in words."""
    return [name for bit, name in _REASONS.items() if bits & bit]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def ask(fields: str, target: str = "gpu", *, gpu: Gpu | None = None) -> list[list[str]]:
    """Rows of a query to nvidia-smi; none where it does not answer."""
    chosen = [f"--id={gpu.uuid}"] if gpu is not None else []
    text = run_quietly(["nvidia-smi", *chosen, f"--query-{target}={fields}", "--format=csv,noheader,nounits"])
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]


def run_quietly(command: list[str]) -> str:
    """What a command prints; nothing where it is missing, fails or does not end."""
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


def built_with_cuda() -> bool:
    """The installed torch has CUDA's kernels, of which shapes are known without a GPU. torch is not loaded."""
    spec = find_spec("torch")
    return bool(spec and spec.origin and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists())
