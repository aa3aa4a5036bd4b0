"""NCCL's own assumptions by release: what its cost model multiplies and adds. Not what a call takes.

The numbers stand in constants.toml beside this module. Units are NCCL's: GB/s and microseconds; triples are LL, LL128, Simple.
A release before the first generation is taken as that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, Literal

from simulator.base.presets import facts

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
    pat_share: float
    # What the formulas themselves have changed in, by release
    ring_ll_share: tuple[float, float]  # of the bus: a gather or scatter inside a node; all else
    lone_ll128_share: float  # of the bus, for one rank a node
    lone_waits_as_tree: bool  # one rank a node: a step over the network is a tree's
    extra_network_steps: int  # of a ring's all-reduce
    near_ll_factor: float  # steps inside a node of a call that leaves it
    overhead_us: tuple[float, float]  # of a message that the host posts: Intel and others, AMD; Simple: three times
    plateau_by_channel: bool
    adds_plugin_latency: bool  # or it stands in for the constant
    nvls: Literal["inside", "shared", "heads"]


@cache
def _releases() -> tuple[tuple[tuple[int, ...], Constants], ...]:
    """(first release, constants), newest first: each states its changes to the one above it."""
    found, values = [], dict[str, Any]()
    for release, changes in facts(__file__, "constants").items():
        values = {name: _over(values.get(name, {}), value) for name, value in (values | changes).items()}
        found.append((tuple(map(int, release.split("."))), Constants(**values)))
    return tuple(found)


def _over(old: Any, new: Any) -> Any:  # noqa: ANN401  a table, or a value in its place
    if isinstance(new, dict):
        return {**old, **{name: _over({}, value) for name, value in new.items()}}
    return tuple(_over({}, value) for value in new) if isinstance(new, list | tuple) else new


@lru_cache(maxsize=64)
def constants_of(release: tuple[int, ...]) -> Constants:
    """The constants of a release of NCCL, (major, minor, …)."""
    releases = _releases()
    return next((constants for since, constants in releases if release[:2] >= since), releases[-1][1])
