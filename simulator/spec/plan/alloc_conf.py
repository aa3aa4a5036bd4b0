"""PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF: every key of torch 2.13 and the values that it takes.

Keys and limits: torch's c10/core/AllocatorConfig.h, c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from simulator.base.schema import nearest

MIB: Final = 2**20
NUM_DIVISIONS: Final = 16  # powers of two from 1 MiB to 64 GiB, the first and last also for what lies beyond
_LEAST_SPLIT_MB: Final = 20
_MOST_MB: Final = 2**30
# as torch looks for them
VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocConf:
    """The settings of device memory in a value of the variable; None: not set.

    idle_keys: keys that are legal and change nothing here: pinned host memory, locks, graph captures.
    """

    expandable_segments: bool | None = None
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] | None = None
    garbage_collection_threshold: float | None = None
    memory_fraction: float | None = None
    idle_keys: tuple[str, ...] = ()


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("True or False")
    return text == "True"


def _megabytes(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text) or not least <= int(text) <= _MOST_MB:
            raise ValueError(f"a whole number of MiB, at least {least}")
        return int(text) * MIB

    return read


def _share(*, integer: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = float(text) if re.fullmatch(r"\d{0,9}\.?\d{1,9}", text) else 0.0
        if not 0 < number <= 1 or (number == 1 and not integer):
            raise ValueError(f"above 0, {'at most' if integer else 'below'} 1, as 0.8")
        return number

    return read


def _power_of_two(text: str) -> int:
    number = int(text) if re.fullmatch(r"\d{1,7}", text) else 3
    if number & (number - 1):
        raise ValueError("a power of two, or 0 for none")
    return number


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or [256:1,512:2,>:4] by megabytes; what lies below the first has its value."""
    if not text.startswith("["):
        return (_power_of_two(text),) * NUM_DIVISIONS
    if not text.endswith("]"):
        raise ValueError("a list that ends with ]")
    found, last, first = [0] * NUM_DIVISIONS, 0, True
    for part in text.strip("[]").split(","):
        size, _, value = part.partition(":")
        division = _power_of_two(value)
        if size == ">":
            found[last:] = [division] * (NUM_DIVISIONS - last)
            continue
        if not (megabytes := _power_of_two(size)):
            raise ValueError("sizes that are powers of two MiB")
        last = min(megabytes.bit_length() - 1, NUM_DIVISIONS - 1)
        if first:
            found[:last] = [division] * last
        found[last], first = division, False
    return tuple(found)


def _backend(text: str) -> None:
    if text != "native":
        raise ValueError("native: the driver's pool (cudaMallocAsync) has no published rules to simulate")


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text):
        raise ValueError("a whole number")
    return int(text)


_KNOWN: Final[
    Mapping[str, tuple[str, Callable[[str], Any]]]
] = {  # key -> field of AllocConf ("": none), how it is read
    "backend": ("", _backend),
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share(integer=False)),
    "graph_capture_record_stream_reuse": ("", _flag),
    "large_segment_size_mb": ("large_segment_bytes", _megabytes(_LEAST_SPLIT_MB)),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _megabytes(_LEAST_SPLIT_MB)),
    "max_split_size_mb": ("max_split_size_bytes", _megabytes(_LEAST_SPLIT_MB)),
    "per_process_memory_fraction": ("memory_fraction", _share(integer=True)),
    "pinned_free_catch_all": ("", _flag),
    "pinned_max_cached_size_mb": ("", _count),
    "pinned_max_round_threshold_mb": ("", _count),
    "pinned_num_register_threads": ("", _power_of_two),
    "pinned_reserve_segment_size_mb": ("", _count),
    "pinned_use_background_threads": ("", _flag),
    "pinned_use_cuda_host_register": ("", _flag),
    "pinned_use_hip_host_register": ("", _flag),
    "release_lock_on_cudamalloc": ("", _flag),
    "release_lock_on_hipmalloc": ("", _flag),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "throw_on_cudamalloc_oom": ("", _flag),
}


@cache
def parse_alloc_conf(text: str) -> AllocConf:
    """Read a value of the variable, with or without its name. Raises ValueError that lists every fault."""
    plain = "".join(text.split())
    plain = next((plain.removeprefix(f"{name}=") for name in VARIABLES if plain.startswith(f"{name}=")), plain).strip(
        "\"'"
    )
    found: dict[str, Any] = {}
    idle: list[str] = []
    faults: list[str] = []
    for part in filter(None, re.split(r",(?![^\[]*\])", plain)):
        key, _, value = part.partition(":")
        if key not in _KNOWN:
            hint = nearest(key, _KNOWN) or f"known: {', '.join(_KNOWN)}"
            faults.append(f"{key[:60]!r} is no key of it: {hint}")
            continue
        field, read = _KNOWN[key]
        if key in idle or field in found:
            faults.append(f"{key} is given twice")
            continue
        try:
            answer = read(value)
        except ValueError as exc:
            faults.append(f"{key} is {value[:40]!r}, not {exc}")
            continue
        if field:
            found[field] = answer
        else:
            idle.append(key)
    if faults:
        raise ValueError("; ".join(faults))
    return AllocConf(**found, idle_keys=tuple(idle))
