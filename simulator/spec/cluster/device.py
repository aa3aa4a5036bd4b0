"""Device: speed and memory of one accelerator by its data sheet. What it *achieves* is in the calibration."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.errors import ClusterError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, nearest, read_toml
from simulator.base.units import Bytes, BytesPerS, FlopPerS, format_bytes
from simulator.spec.cluster.mig import profile_of, sliced

Architecture = Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "cpu"]

DEVICES: Final = TOPOLOGIES / "devices"

_VENDORS = re.compile(r"\b(nvidia|amd|tesla|geforce|instinct)\b")
# What a board's name may be dressed in without naming another one
_DRESS = re.compile(
    r"\b(nvidia|amd|tesla|geforce|instinct|tensor|cores?|gpus?|hgx|dgx|oam|hbm[0-9a-z]*|nvl(?=72|36)\d*|\d+(?:\.\d+)?tb/s)\b|\b\d+ *x(?= )"
)
_MEMORY = re.compile(r"\b(\d{1,6}) ?(?:gib|gb|g)\b|(?<=\w )(\d{2,3}) *$")  # `A100 80GB`, `a100-80`
_POWER = re.compile(r"\b(\d{1,6}) ?w\b")
_SERIES = re.compile(r"\b(g?rtx|gtx|quadro)(?=\d)")  # written together with what comes behind it
_NO_GPU = re.compile(
    r"\btpu|\bv[2-6][ep]\b|gaudi|habana|\bhpu\b|trainium|\btrn[12]|inferentia|\binf[12]\.|ascend|\b910[abc]?\b|cerebras|\bipu\b|\bv[2-6](?:litepod|p)?-\d|\bdcu\b|hygon|kunlun|cambricon|\bmlu\d|\bmtt\b|\bapple\b|\bintel\b",
    re.IGNORECASE,
)
_TOLERANCE = 0.08  # marketing counts GB or GiB, with or without what ECC and the driver keep


class PeakFlop(Strict):
    """Dense peak FLOP/s by dtype; 0 where the device has no such units."""

    fp32: FlopPerS = Field(gt=0)
    tf32: FlopPerS = Field(ge=0, default=0)
    bf16: FlopPerS = Field(ge=0, default=0)
    fp16: FlopPerS = Field(ge=0, default=0)
    fp8: FlopPerS = Field(ge=0, default=0)
    fp4: FlopPerS = Field(ge=0, default=0)


class Device(Strict):
    """One accelerator.

    memory_bytes: what the driver reports as total (nvidia-smi's MiB × 2**20), not the marketing gigabytes.
    cuda_memory_bytes: what a process can get of it (cudaMemGetInfo's total), where a source states it.
    hypervisor_bytes: what a hypervisor or another tenant keeps of the memory.
    power_w: the board's power cap; sustained matrix speed follows it.
    host_factor: time that Python takes on its host over DGX H100's Xeon, where the CPU is part of the device or of its age.
    aliases: other names that tables and users give it.
    sources: where each number stands.
    """

    name: str
    architecture: Architecture
    memory_bytes: Bytes = Field(gt=0)
    cuda_memory_bytes: Bytes | None = Field(gt=0, default=None)
    hypervisor_bytes: Bytes = Field(ge=0, default=0)
    memory_bytes_per_s: BytesPerS = Field(gt=0)
    peak_flop_per_s: PeakFlop
    num_sms: int = Field(gt=0)
    power_w: float = Field(ge=1, le=1e6)
    host_factor: float = Field(gt=0, le=100, default=1.0)
    calibration: str = ""  # the calibration whose kernels this device shares (empty: data sheet only)
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()  # a list in TOML
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _has_memory(self) -> Self:
        if self.hypervisor_bytes >= self.usable_bytes:
            raise ValueError(f"hypervisor_bytes leaves none of its memory of {format_bytes(self.usable_bytes)}")
        return self

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for `dtype`; 0 if the device lacks it."""
        return float(getattr(self.peak_flop_per_s, dtype))

    @property
    def half(self) -> Literal["bf16", "fp16"]:
        """The 16-bit dtype that programs train in on it: fp16 where it has no units for bf16 (before Ampere)."""
        return "fp16" if self.peak("fp16") and not self.peak("bf16") else "bf16"

    @property
    def usable_bytes(self) -> int:
        """Memory a process can get, before its own context: CUDA's total where known, else the driver's."""
        return self.cuda_memory_bytes or self.memory_bytes

    @classmethod
    def load(cls, name: str) -> Device:
        """The device of that name or alias, a slice of one (`h100:3g.40gb`), or of a TOML file.

        Raises ClusterError with the nearest names.
        """
        base, _, profile = name.partition(":")
        if profile and not name.endswith(".toml"):
            data = cls.load(base).model_dump()
            return cls.parse(sliced(data, profile), name, ClusterError)
        return _read(Path(name)) if name.endswith(".toml") else _shipped(cls.resolve(name))

    @classmethod
    def resolve(cls, alias: str) -> str:
        """The name behind an alias, spelling aside. Raises ClusterError with the nearest names."""
        if alias in device_names():
            return alias
        base, _, profile = alias.partition(":")
        if profile:
            profile_of(name := cls.resolve(base), profile)
            return f"{name}:{profile}"
        found = _by_alias().get(_key(alias)) or _by_words(alias)
        if found is None:
            if _NO_GPU.search(alias):
                problem = f"{alias!r} is no GPU: accelerators of other kinds are not modelled"
                raise ClusterError.at(
                    "device", problem, "a GPU of NVIDIA or AMD, or a cluster file whose `device` states its numbers"
                )
            known = {*device_names(), *(a for aliases in _aliases().values() for a in aliases)}
            raise ClusterError.at(
                "device",
                f"no device is called {alias!r}",
                nearest(alias, known) or f"known: {', '.join(device_names())}",
            )
        return found


def _read(path: Path) -> Device:
    return Device.parse(read_toml(path, ClusterError), str(path), ClusterError, from_file=True)


@cache  # what ships does not change while a process runs
def _shipped(name: str) -> Device:
    return _read(DEVICES / f"{name}.toml")


@cache
def device_names() -> tuple[str, ...]:
    """Names of all device files, sorted."""
    return tuple(sorted(path.stem for path in DEVICES.glob("*.toml")))


@cache
def _aliases() -> dict[str, tuple[str, ...]]:
    """Name -> aliases; read without validation, which loading a device does."""
    files = {name: tomllib.loads((DEVICES / f"{name}.toml").read_text("utf-8")) for name in device_names()}
    return {name: tuple(data.get("aliases", ())) for name, data in files.items()}


@cache
def _by_alias() -> dict[str, str]:
    return {_key(spelling): name for name, aliases in _aliases().items() for spelling in (name, *aliases)}


@dataclass(frozen=True, slots=True)
class _Spelling:
    """`H100 SXM5 80 GB HBM3 (700W)`: the words h100 and sxm, 80 GB, 700 W."""

    words: frozenset[str]
    gigabytes: int | None
    watts: int | None

    def means(self, alias: _Spelling, name: str) -> bool:
        """Whether this spelling means the device `name`: the same words, and its memory and power if stated."""
        if self.words != alias.words or (self.gigabytes is None and alias.gigabytes is not None):
            return False
        device = Device.load(name)
        sizes = [self.gigabytes * unit / device.memory_bytes for unit in (10**9, 2**30)] if self.gigabytes else [1.0]
        power = self.watts / device.power_w if self.watts else 1.0
        return abs(power - 1) <= _TOLERANCE and any(abs(size - 1) <= _TOLERANCE for size in sizes)


@cache
def _spelled(text: str) -> _Spelling:
    plain = _SERIES.sub(r"\1 ", re.sub(r"[_\-(),@]+", " ", text.casefold()))
    memory, power = _MEMORY.search(plain), _POWER.search(plain)
    name = _DRESS.sub(" ", _POWER.sub(" ", _MEMORY.sub(" ", plain)))
    words = frozenset(re.sub(r"^sxm\d$", "sxm", word) for word in name.split())
    return _Spelling(words, int(memory[1] or memory[2]) if memory else None, int(power[1]) if power else None)


def _by_words(text: str) -> str | None:
    """The one device with these words in any order; None if there are several or none."""
    spelling = _spelled(text)
    found = {
        name
        for name, aliases in _aliases().items()
        if any(spelling.means(_spelled(alias), name) for alias in (name, *aliases))
    }
    return found.pop() if len(found) == 1 and spelling.words else None


def _key(spelling: str) -> str:
    """`NVIDIA A100-SXM4-80GB`, `a100_sxm4_80gb` and `A100 SXM4 80GB` are one spelling."""
    return re.sub(r"[\W_]+", "", _VENDORS.sub("", spelling.casefold()))
