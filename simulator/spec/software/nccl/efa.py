"""The tuner that AWS ships with its EFA plugin: which algorithm it asks for, by instance, ranks and size.

Facts read in aws/aws-ofi-nccl, src/tuner/nccl_ofi_regions.cpp (commit 228fa0eafb41) and src/platform-aws.cpp: polygons over
(bytes, ranks), here as the borders they have at powers of two of ranks; other numbers of ranks take the nearest. Only for
groups of all eight GPUs of each node; other groups are left to NCCL. p5's table asks for LL128 from the first byte; the
published p5 sweeps, of older plugins, have LL's times up to 128 KiB (a step of 65 to 75 us to 112), so it begins there.
"""

from __future__ import annotations

import math
from typing import Final, Literal

Instance = Literal["p4d", "p5", "p5en", "p6"]
Border = tuple[float, str, str]  # up to these bytes: algorithm, protocol

GPUS_PER_NODE: Final = 8
LATENCY_US: Final[dict[Instance, float]] = {"p4d": 75.0, "p5": 75.0, "p5en": 35.0, "p6": 35.0}
AMD_HOSTS: Final[tuple[Instance, ...]] = ("p5",)  # the others' CPUs are Intel's (AWS's pages of its instances)
_NICS_P5: Final = 32  # NICs of 100 Gb/s; p5en has 16 of 200
_ANY: Final = math.inf
_TREE_LL, _TREE, _RING, _RINGS, _NVLS = (
    ("tree", "ll"),
    ("tree", "ll128"),
    ("ring", "ll128"),
    ("ring", "simple"),
    ("nvlstree", "simple"),
)


def _borders(*parts: tuple[float, tuple[str, str]]) -> tuple[Border, ...]:
    return tuple((upper, *names) for upper, names in parts)


_ALL_REDUCE: Final[dict[Instance, dict[int, tuple[Border, ...]]]] = {
    "p5": {
        16: _borders((131072, _TREE_LL), (31457280, _TREE), (_ANY, _NVLS)),
        32: _borders((131072, _TREE_LL), (37748736, _TREE), (1610612736, _RING), (_ANY, _RINGS)),
        64: _borders((131072, _TREE_LL), (117440512, _TREE), (2147483648, _RING), (_ANY, _RINGS)),
        128: _borders((131072, _TREE_LL), (301989888, _TREE), (2147483648, _RING), (6442450944, _NVLS), (_ANY, _RINGS)),
        256: _borders((131072, _TREE_LL), (301989888, _TREE), (_ANY, _NVLS)),
        512: _borders((131072, _TREE_LL), (335544320, _TREE), (_ANY, _NVLS)),
        1024: _borders((131072, _TREE_LL), (536870912, _TREE), (_ANY, _NVLS)),
        2048: _borders((131072, _TREE_LL), (402653184, _TREE), (_ANY, _NVLS)),
    },
    "p5en": {
        16: _borders((196608, _TREE_LL), (13107200, _TREE), (29884416, _RING), (_ANY, _NVLS)),
        32: _borders((196608, _TREE_LL), (28e6, _TREE), (293601280, _RING), (509607936, _NVLS), (_ANY, _RINGS)),
        64: _borders((196608, _TREE_LL), (60e6, _TREE), (589299712, _RING), (1.25e9, _NVLS), (_ANY, _RINGS)),
        128: _borders((196608, _TREE_LL), (129499136, _TREE), (549453824, _RING), (3.06e9, _NVLS), (_ANY, _RINGS)),
        256: _borders((196608, _TREE_LL), (154e6, _TREE), (7516192768, _NVLS), (_ANY, _RINGS)),
        1024: _borders((196608, _TREE_LL), (218103808, _TREE), (_ANY, _NVLS)),
    },
    "p6": {
        16: _borders((393216, _TREE_LL), (4718592, _TREE), (_ANY, _NVLS)),
        32: _borders((393216, _TREE_LL), (18350080, _TREE), (133693440, _RING), (435159040, _NVLS), (_ANY, _RINGS)),
        64: _borders((393216, _TREE_LL), (40370176, _TREE), (120061952, _RING), (1072693248, _NVLS), (_ANY, _RINGS)),
        128: _borders((393216, _TREE_LL), (57147392, _TREE), (2.3e9, _NVLS), (_ANY, _RINGS)),
        256: _borders((393216, _TREE_LL), (72876032, _TREE), (5e9, _NVLS), (_ANY, _RINGS)),
        512: _borders((393216, _TREE_LL), (84e6, _TREE), (10737418240, _NVLS), (_ANY, _RINGS)),
        1024: _borders((393216, _TREE_LL), (96993280, _TREE), (2.2e10, _NVLS), (_ANY, _RINGS)),
    },
}


def _rings(ll: float, ll128: float) -> tuple[Border, ...]:
    return _borders((ll, ("ring", "ll")), (ll128, _RING), (_ANY, _RINGS))


_ALL_GATHER: Final[dict[Instance, dict[int, tuple[Border, ...]]]] = {
    "p5en": {
        16: _rings(786432, 236978176),
        64: _rings(2.6e6, 956301312),
        128: _rings(4718592, 2.1e9),
        512: _rings(19922944, 9.6e9),
        1024: _rings(33554432, 1.9e10),
    },
    "p6": {
        16: _rings(786432, 198705152),
        32: _rings(1572864, 456130560),
        64: _rings(2621440, 871366656),
        128: _rings(4718592, 1.9e9),
        512: _rings(36e6, 8321499136),
        2048: _rings(213385216, 32212254720),
    },
}
_REDUCE_SCATTER: Final[dict[Instance, dict[int, tuple[Border, ...]]]] = {
    "p5en": {
        16: _rings(786432, 291504128),
        32: _rings(1.4e6, 589299712),
        128: _rings(4718592, 2415919104),
        256: _rings(7340032, 7247757312),
        512: _rings(18874368, 1.4e10),
    },
    "p6": {
        16: _rings(786432, 219676672),
        32: _rings(1572864, 508559360),
        64: _rings(2621440, 592445440),
        256: _rings(17301504, 4294967296),
        512: _rings(35127296, 8589934592),
    },
}
_TABLES: Final = {"all_reduce": _ALL_REDUCE, "all_gather": _ALL_GATHER, "reduce_scatter": _REDUCE_SCATTER}


def instance_of(architecture: str, num_nics: int) -> Instance:
    """The generation of instances with these GPUs and NICs."""
    if architecture == "blackwell":
        return "p6"
    if architecture == "hopper":
        return "p5" if num_nics >= _NICS_P5 else "p5en"
    return "p4d"


def asked(instance: Instance, kind: str, size_bytes: int, num_ranks: int, num_nodes: int) -> tuple[str, str] | None:
    """Algorithm and protocol that the tuner wants; None where it leaves the choice to NCCL."""
    columns = _TABLES.get(kind, {}).get(instance)
    if columns is None or num_nodes < 2 or num_ranks != GPUS_PER_NODE * num_nodes:
        return None
    nearest = min(columns, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
    return next((algorithm, protocol) for upper, algorithm, protocol in columns[nearest] if size_bytes <= upper)
