"""The tuner that AWS ships with its EFA plugin: which algorithm it asks for, by instance, ranks and size.

Its borders stand in efa.toml beside this module, at powers of two of ranks; other numbers of ranks take the nearest. Only for
groups of all eight GPUs of each node; other groups are left to NCCL. Latencies: src/platform-aws.cpp of the plugin.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from simulator.base.presets import facts

Instance = Literal["p4d", "p5", "p5en", "p6"]

GPUS_PER_NODE: Final = 8
LATENCY_US: Final[dict[Instance, float]] = {"p4d": 75.0, "p5": 75.0, "p5en": 35.0, "p6": 35.0}
AMD_HOSTS: Final[tuple[Instance, ...]] = ("p5",)  # the others' CPUs are Intel's (AWS's pages of its instances)
_NICS_P5: Final = 32  # NICs of 100 Gb/s; p5en has 16 of 200


def instance_of(architecture: str, num_nics: int) -> Instance:
    """The generation of instances with these GPUs and NICs."""
    if architecture == "blackwell":
        return "p6"
    if architecture == "hopper":
        return "p5" if num_nics >= _NICS_P5 else "p5en"
    return "p4d"


def choice(instance: Instance, kind: str, size_bytes: int, num_ranks: int, num_nodes: int) -> tuple[str, str] | None:
    """Algorithm and protocol that the tuner wants; None where it leaves the choice to NCCL."""
    columns: dict[str, list[tuple[float, str, str]]] | None = facts(__file__, "efa").get(kind, {}).get(instance)
    if columns is None or num_nodes < 2 or num_ranks != GPUS_PER_NODE * num_nodes:
        return None
    nearest = min(columns, key=lambda ranks: (abs(math.log(int(ranks) / num_ranks)), int(ranks)))
    return next((algorithm, protocol) for upper, algorithm, protocol in columns[nearest] if size_bytes <= upper)
