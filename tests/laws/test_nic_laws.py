"""Whatever the places of NICs and what NCCL may do: every byte in comes by a NIC, and no NIC gives more than it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import ClusterError
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import PATH_TYPES, NicPaths, NicRules, Pattern, reached
from tests.examples import examples

PATTERNS: tuple[Pattern, ...] = ("ring", "all_to_all", "send")
PLACES = st.one_of(
    st.sampled_from([{"gpus": [g]} for g in range(8)]),
    st.sampled_from([{"gpus": [g, g + 1]} for g in (0, 2, 4, 6)]),
    st.sampled_from([{"socket": 0}, {"socket": 1}]),
)
RULES = st.builds(
    NicRules,
    direct=st.sampled_from([None, *PATH_TYPES]),
    direct_reads=st.booleans(),
    pxn=st.booleans(),
    cross=st.booleans(),
    same_nic=st.booleans(),
)
GROUPS = st.sampled_from(
    [
        (tuple(range(8)),),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 2, 4, 6), (1, 3, 5, 7)),
        tuple((gpu,) for gpu in range(8)),
        ((0, 4), (1, 5), (2, 6), (3, 7)),
    ]
)


def node(cards: list[dict[str, object]], *, nvlink: bool) -> Cluster:
    pcie = {"kind": "pcie4", "bytes_per_s": 31e9}
    return Cluster.parse(
        {
            "name": "node",
            "device": "a100-80gb",
            "gpus_per_node": 8,
            "intra": {"kind": "nvlink3", "shape": "switch", "bytes_per_s": 3e11}
            if nvlink
            else {**pcie, "shape": "pcie"},
            "host": pcie if nvlink else None,
            "pcie": {"sockets": [[0, 1, 2, 3], [4, 5, 6, 7]], "switches": [[0, 1], [4, 5]], "host_bytes_per_s": 8e10},
            "inter": {"kind": "infiniband", "num_nics": len(cards), "nic_bytes_per_s": 25e9, "cards": cards},
        },
        "node",
        ClusterError,
    )


def way(found: NicPaths, name: str) -> float:
    return sum(load for link, load in found.loads.items() if link.startswith("nic") and link.endswith(name))


@examples(150)
@given(
    cards=st.lists(PLACES, min_size=1, max_size=8),
    rules=RULES,
    groups=GROUPS,
    pattern=st.sampled_from(PATTERNS),
    nvlink=st.booleans(),
)
def test_bytes_come_and_go_by_cards_that_have_them(
    cards: list[dict[str, object]],
    rules: NicRules,
    groups: tuple[tuple[int, ...], ...],
    pattern: Pattern,
    nvlink: bool,  # noqa: FBT001  drawn
) -> None:
    found = reached(node(cards, nvlink=nvlink), groups, rules, pattern)
    assert way(found, " in") == pytest.approx(len(groups)) == pytest.approx(way(found, " out"))
    assert 0 < found.bytes_per_s * len(groups) <= len(cards) * 25e9 * (1 + 1e-9)
    assert 0 <= found.in_memory <= 1
    assert -1e-9 <= found.off_rail <= 1 + 1e-9
    assert found.loads.get("memory", 0) == pytest.approx(2 * found.in_memory * len(groups))


@examples(60)
@given(cards=st.lists(PLACES, min_size=1, max_size=8), groups=GROUPS, pattern=st.sampled_from(PATTERNS))
def test_gpudirect_from_anywhere_never_stages(
    cards: list[dict[str, object]], groups: tuple[tuple[int, ...], ...], pattern: Pattern
) -> None:
    cluster = node(cards, nvlink=True)
    free = reached(cluster, groups, NicRules(direct="SYS"), pattern)
    never = reached(cluster, groups, NicRules(direct=None), pattern)
    assert free.in_memory == 0
    assert never.in_memory == 1
