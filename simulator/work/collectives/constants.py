"""NCCL's own assumptions by release: what its cost model multiplies and adds. Not what a call takes.

Read in NVIDIA/nccl at the tags v2.12.7 to v2.30.7, src/graph/tuning.cc. Units are NCCL's: GB/s and microseconds; triples
are LL, LL128, Simple. A release before the first generation is taken as that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

Triple = tuple[float, float, float]
Table = Mapping[str, Triple]
# A row a GPU generation (compute capability below 8, 8, 9, 10 and up), a column for 1, 2 and more nodes
Caps = tuple[Triple, Triple, Triple, Triple]

GENERATIONS: Final = {"volta": 0, "ampere": 1, "ada": 1, "hopper": 2, "blackwell": 3}
NVLS_EFFICIENCY: Final = (0.0, 0.0, 0.85, 0.74)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """base_us: a call. nvlink_us, pcie_us, network_us: a step. The others: GB/s that a mode is capped at."""

    base_us: Table
    nvlink_us: Table
    pcie_us: Table
    network_us: Table
    ll: Caps
    ring_ll128_channel: Caps
    tree_channel: Caps
    tree_ll128_channel: Caps
    nvlstree_channel: Caps
    pat_share: float = 0.75
    # What the formulas themselves have changed in, by release
    ring_ll_share: tuple[float, float] = (0.5, 0.5)  # of the bus: a gather or scatter inside a node; all else
    lone_ll128_share: float = 0.92  # of the bus, for one rank a node
    lone_waits_as_tree: bool = True  # one rank a node: a step over the network is a tree's
    extra_network_steps: int = 0  # of a ring's all-reduce
    near_ll_factor: float = 1.0  # steps inside a node of a call that leaves it
    overhead_us: tuple[float, float] = (
        1.0,
        2.0,
    )  # of a message that the host posts: Intel and others, AMD; Simple: three times
    plateau_by_channel: bool = True
    adds_plugin_latency: bool = True  # or it stands in for the constant
    nvls: Literal["inside", "shared", "heads"] = "heads"


def _doubled(rows: Caps) -> Caps:
    """Blackwell as twice Hopper, until it got rows of its own."""
    a, b, c = rows[2]
    return (*rows[:3], (2 * a, 2 * b, 2 * c))


def _as_hopper(rows: Caps) -> Caps:
    """Blackwell before NCCL knew it."""
    return (*rows[:3], rows[2])


def _table(base: Table, **changes: Triple) -> Table:
    return MappingProxyType({**base, **changes})


_COLLNET_BASE: Final[dict[str, Triple]] = dict.fromkeys(
    ("collnetdirect", "collnetchain", "nvls", "nvlstree"), (0.0, 0.0, 0.0)
)
_NEWEST: Final = Constants(
    base_us=_table(_COLLNET_BASE, tree=(6.8, 14.0, 8.4), ring=(6.6, 14.0, 8.4), pat=(8.0, 8.0, 8.0)),
    nvlink_us=_table(
        {},
        tree=(0.6, 1.25, 4.0),
        ring=(0.6, 1.9, 3.4),
        collnetdirect=(0, 0, 3.7),
        collnetchain=(0, 0, 2.8),
        nvls=(0, 0, 25.0),
        nvlstree=(0, 0, 25.0),
        pat=(0, 0, 4.0),
    ),
    pcie_us=_table(
        {},
        tree=(1.0, 1.9, 4.0),
        ring=(1.0, 2.5, 5.7),
        collnetdirect=(0, 0, 3.7),
        collnetchain=(0, 0, 2.8),
        nvls=(0, 0, 0),
        nvlstree=(0, 0, 0),
        pat=(0, 0, 4.0),
    ),
    network_us=_table(
        {},
        tree=(5.0, 8.5, 14.0),
        ring=(2.7, 4.0, 14.0),
        collnetdirect=(0, 0, 31.0),
        collnetchain=(0, 0, 30.0),
        nvls=(0, 0, 18.0),
        nvlstree=(0, 0, 20.9),
        pat=(0, 0, 14.0),
    ),
    ll=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0)),
    ring_ll128_channel=((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3),
    tree_channel=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0)),
    tree_ll128_channel=((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0)),
    nvlstree_channel=((0.0,) * 3, (0.0,) * 3, (0.0, 57.7, 45.5), (0.0, 96.0, 80.0)),
)
_UNCAPPED: Final[Caps] = ((0.0,) * 3, (0.0,) * 3, (1e9,) * 3, (1e9,) * 3)


def _blackwell(rows: Caps, row: Triple) -> Caps:
    return (*rows[:3], row)


_SINCE_2_29: Final = replace(
    _NEWEST,
    ring_ll128_channel=_blackwell(_NEWEST.ring_ll128_channel, (34.5, 34.6, 34.5)),
    nvlstree_channel=_blackwell(_NEWEST.nvlstree_channel, (0.0, 96.0, 43.8)),
)
_SINCE_2_28: Final = replace(_SINCE_2_29, ring_ll128_channel=_doubled(_NEWEST.ring_ll128_channel))
_SINCE_2_25: Final = replace(
    _SINCE_2_28,
    network_us=_table(_NEWEST.network_us, nvlstree=(0, 0, 14.0)),
    tree_channel=_doubled(_NEWEST.tree_channel),
    tree_ll128_channel=_doubled(_NEWEST.tree_ll128_channel),
    nvlstree_channel=_UNCAPPED,
    nvls="shared",
)
_SINCE_2_24: Final = replace(
    _SINCE_2_25,
    ll=_as_hopper(_NEWEST.ll),
    ring_ll128_channel=_as_hopper(_NEWEST.ring_ll128_channel),
    tree_channel=_as_hopper(_NEWEST.tree_channel),
    tree_ll128_channel=_as_hopper(_NEWEST.tree_ll128_channel),
)
_SINCE_2_23: Final = replace(_SINCE_2_24, pat_share=0.85)
# A tree's step with whole chunks was thought to take 28 us: rings are preferred
_SINCE_2_21: Final = replace(
    _SINCE_2_23,
    base_us=_table(_SINCE_2_23.base_us, tree=(6.8, 14.0, 0.0)),
    nvlink_us=_table(_SINCE_2_23.nvlink_us, tree=(0.6, 1.25, 28.0)),
    pcie_us=_table(_SINCE_2_23.pcie_us, tree=(1.0, 1.9, 28.0)),
    network_us=_table(_SINCE_2_23.network_us, tree=(5.0, 8.5, 28.0)),
    lone_ll128_share=0.7,
    lone_waits_as_tree=False,
    extra_network_steps=2,
)
_SINCE_2_19: Final = replace(
    _SINCE_2_21,
    nvlink_us=_table(_SINCE_2_21.nvlink_us, nvls=(0, 0, 23.0), nvlstree=(0, 0, 23.0)),
    ll=(_NEWEST.ll[0], _NEWEST.ll[1], (87.7, 22.5, 19.0), (87.7, 22.5, 19.0)),
    ring_ll_share=(1 / 3, 1 / 4),
)
_SINCE_2_18: Final = replace(
    _SINCE_2_19,
    base_us=_table(_SINCE_2_19.base_us, nvls=(0, 0, 23.0), nvlstree=(0, 0, 23.0)),
    nvlink_us=_table(_SINCE_2_19.nvlink_us, tree=(0.6, 1.25, 4.0), nvls=(0, 0, 0), nvlstree=(0, 0, 0)),
    pcie_us=_table(_SINCE_2_19.pcie_us, tree=(1.0, 1.9, 6.0)),
    network_us=_table(_SINCE_2_19.network_us, tree=(5.0, 8.5, 14.0), nvlstree=(0, 0, 19.0)),
    nvls="inside",
)
_FIRST: Final = replace(
    _SINCE_2_18,
    base_us=_table(_SINCE_2_18.base_us, tree=(4.4, 4.4, 0.0), ring=(3.6, 10.0, 8.4), nvls=(0, 0, 40.0)),
    nvlink_us=_table(_SINCE_2_18.nvlink_us, tree=(0.52, 1.25, 28.0), ring=(0.47, 1.9, 3.4)),
    pcie_us=_table(_SINCE_2_18.pcie_us, tree=(1.0, 1.9, 28.0)),
    network_us=_table(_SINCE_2_18.network_us, tree=(5.0, 8.5, 28.0), ring=(2.7, 4.0, 9.6)),
    near_ll_factor=1.8,
    overhead_us=(0.0, 0.0),
    plateau_by_channel=False,
    adds_plugin_latency=False,
)
_BY_RELEASE: Final = (
    ((2, 30), _NEWEST),
    ((2, 29), _SINCE_2_29),
    ((2, 28), _SINCE_2_28),
    ((2, 25), _SINCE_2_25),
    ((2, 24), _SINCE_2_24),
    ((2, 23), _SINCE_2_23),
    ((2, 21), _SINCE_2_21),
    ((2, 19), _SINCE_2_19),
    ((2, 18), _SINCE_2_18),
)


@lru_cache(maxsize=64)
def constants_of(release: tuple[int, ...]) -> Constants:
    """The constants of a release of NCCL, (major, minor, …)."""
    return next((constants for since, constants in _BY_RELEASE if release[:2] >= since), _FIRST)
