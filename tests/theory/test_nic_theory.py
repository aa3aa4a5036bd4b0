"""Where NICs sit and what NCCL may do there (NVIDIA/nccl 2.30.7, src/graph/paths.cc, search.cc): which link is full first."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.base.errors import ClusterError
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import NicPaths
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives import choose, collective_cost, sigma
from simulator.work.collectives.cost import call_of
from simulator.work.collectives.host_traffic import host_traffic

GB = 1e9
NIC, PCIE, SOCKET, MEMORY = 25.0, 31.0, 67.2, 160.0  # of the machine below, GB/s one way
NEAR = [{"gpus": [0]}, {"gpus": [1]}, {"gpus": [2]}, {"gpus": [3]}]


def machine(cards: list[dict[str, Any]], *, nvlink: bool = True, **fabric: Any) -> Cluster:
    """Two sockets of four A100, four NICs."""
    pcie = {"kind": "pcie4", "bytes_per_s": PCIE * GB}
    return Cluster.parse(
        {
            "name": "machine",
            "device": "a100-80gb",
            "num_nodes": 2,
            "gpus_per_node": 8,
            "intra": {"kind": "nvlink3", "shape": "switch", "bytes_per_s": 300 * GB}
            if nvlink
            else pcie | {"shape": "pcie"},
            "host": pcie if nvlink else None,
            "pcie": {"cpu": "intel", "sockets": [[0, 1, 2, 3], [4, 5, 6, 7]], "host_bytes_per_s": MEMORY * GB},
            "inter": {"kind": "infiniband", "num_nics": 4, "nic_bytes_per_s": NIC * GB, "cards": cards},
            "fabric": {"nodes_per_leaf": 32} | fabric,
        },
        "machine",
        ClusterError,
    )


def whole(ranks: int = 8) -> GroupShape:
    """One group over both nodes."""
    return GroupShape(num_ranks=2 * ranks, num_nodes=2, ranks_per_node=ranks, num_groups_per_node=1, spans_domain=True)


REPLICAS = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=8, spans_domain=True)


def got(cluster: Cluster, shape: GroupShape, kind: str = "all_gather", **variables: str) -> NicPaths:
    found = call_of(kind, 2**30, shape, cluster, Nccl.of(variables=variables)).links.nics
    assert found is not None
    return found


def test_cards_beside_every_gpu_are_the_even_share() -> None:
    """Two GPUs a NIC, all beside it: what a file without places says, to the byte."""
    stated = machine([{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"gpus": [4, 5]}, {"gpus": [6, 7]}])
    assert stated.inter is not None
    silent = stated.model_copy(update={"inter": stated.inter.model_copy(update={"cards": ()})})
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        for shape in (whole(), REPLICAS):
            assert collective_cost(kind, 2**28, shape, stated) == collective_cost(kind, 2**28, shape, silent)


def test_rings_use_the_near_cards_and_leave_by_pxn() -> None:
    """All eight GPUs on NVLink: rings come in by GPUs 0 to 3 and leave by them; the other socket costs nothing."""
    found = got(machine(NEAR), whole())
    assert found.bytes_per_s == 4 * NIC * GB
    assert (found.word, found.in_memory, found.off_rail) == ("PXN", 0, 0)


def test_replicas_on_the_other_socket_are_staged_and_share_the_cards() -> None:
    """One rank a node has no peer to send through. Each NIC carries its own GPU and a fourth of four others: 2 loads."""
    found = got(machine(NEAR), REPLICAS)
    assert found.bytes_per_s == NIC * GB / 2
    assert (found.word, found.in_memory) == ("SYS", 0.5)
    assert found.loads["memory"] == 4 + 4  # four GPUs, in and out
    assert found.loads["socket0>1"] == 4


def test_the_cpus_link_is_full_first_where_cards_are_quick() -> None:
    """Four GPUs over one link of 67.2 GB/s, beside NICs that would carry 2 loads each at 25."""
    cluster = machine(NEAR)
    assert cluster.inter is not None
    cards = cluster.inter.model_copy(update={"nic_bytes_per_s": 4 * NIC * GB})
    found = got(cluster.model_copy(update={"inter": cards}), REPLICAS)
    assert found.bytes_per_s == min(SOCKET / 4, PCIE, MEMORY / 8) * GB == SOCKET / 4 * GB


def test_gpudirect_level_takes_the_memory_off_the_road() -> None:
    """NCCL_NET_GDR_LEVEL=SYS: NICs write to GPUs across the sockets, and no byte is staged."""
    found = got(machine(NEAR), REPLICAS, NCCL_NET_GDR_LEVEL="SYS")
    assert (found.word, found.in_memory) == ("SYS", 0)
    assert "memory" not in found.loads


def test_without_gpudirect_every_byte_is_staged() -> None:
    """Four NICs in and four out at 25 GB/s would load the memory with 200 of 160 GB/s: 80 remain, one way."""
    for variables in ({"NCCL_NET_GDR_LEVEL": "LOC"}, {"NCCL_NET": "Socket"}):
        found = got(machine(NEAR), whole(), "all_gather", **variables)
        assert found.in_memory == 1
        assert found.bytes_per_s == pytest.approx(MEMORY / 2 * GB)


def test_reads_alone_stage_what_leaves() -> None:
    """NCCL_NET_GDR_READ=0: what arrives goes to the GPU, what leaves is read from memory; no peer can read for another."""
    found = got(machine(NEAR), REPLICAS, NCCL_NET_GDR_READ="0")
    assert found.loads["memory"] == 8 + 4  # all eight GPUs out, four in
    assert got(machine(NEAR), REPLICAS).loads["memory"] == 4 + 4


def test_without_pxn_a_ring_leaves_by_another_card_and_its_rail() -> None:
    """The ring of NIC 0 enters at GPU 0 and leaves by NIC 1 beside GPU 1: another rail, another leaf, the spine."""
    found = got(machine(NEAR), whole(), NCCL_PXN_DISABLE="1")
    assert (found.bytes_per_s, found.off_rail, found.word) == (4 * NIC * GB, 1, "PIX")
    crowded = machine(NEAR, oversubscription=2.0)
    nccl = Nccl.of(variables={"NCCL_PXN_DISABLE": "1"})
    slow = collective_cost("all_gather", 2**30, whole(), crowded, nccl=nccl).link_bytes["inter"]
    fast = collective_cost("all_gather", 2**30, whole(), machine(NEAR), nccl=nccl).link_bytes["inter"]
    assert float(slow) == pytest.approx(2 * float(fast))
    kept = collective_cost("all_gather", 2**30, whole(), crowded).link_bytes["inter"]
    assert float(kept) == pytest.approx(float(fast))


def test_neither_pxn_nor_cross_nic_leaves_a_ring_the_far_gpu() -> None:
    """Same NIC out, from a GPU that is not beside it: over the CPU, staged; half of all traffic."""
    found = got(machine(NEAR), whole(), NCCL_PXN_DISABLE="1", NCCL_CROSS_NIC="0")
    assert (found.word, found.in_memory, found.off_rail) == ("PHB", 0.5, 0)
    assert found.loads["memory"] == 1  # what leaves


def test_all_to_all_without_pxn_leaves_its_rails() -> None:
    """Of messages to four NICs' receivers one in four has the sender's own NIC."""
    near = machine([{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"gpus": [4, 5]}, {"gpus": [6, 7]}])
    assert got(near, whole(), "all_to_all").off_rail == 0
    assert got(near, whole(), "all_to_all", NCCL_PXN_DISABLE="1").off_rail == pytest.approx(3 / 4)
    same = got(near, whole(), "all_to_all", NCCL_PXN_DISABLE="1", NCCL_CROSS_NIC="0")
    assert (same.off_rail, same.word) == (0, "SYS")


def test_releases_before_2_12_have_no_pxn() -> None:
    old = call_of("all_gather", 2**30, whole(), machine(NEAR), Nccl.of("2.11.4")).links.nics
    assert old is not None
    assert old.off_rail == 1


def test_no_nvlink_no_pxn() -> None:
    """A PCIe box with one NIC beside GPU 0: a ring enters there and leaves from GPU 1 over the CPU."""
    cluster = machine([{"gpus": [0]}, {"socket": 0}, {"socket": 1}, {"socket": 1}], nvlink=False)
    found = got(cluster, whole())
    assert (found.word, found.in_memory) == ("PHB", 0.5)
    assert found.bytes_per_s == NIC * GB  # the one NIC that is near serves the rings


def test_cards_behind_the_cpus_serve_where_none_is_near() -> None:
    found = got(machine([{"socket": 0}, {"socket": 0}, {"socket": 1}, {"socket": 1}]), whole())
    assert (found.word, found.in_memory) == ("PHB", 1)
    assert found.bytes_per_s == pytest.approx(MEMORY / 2 * GB)


def test_ll128_stays_inside_nodes_whose_cards_are_far() -> None:
    """Ampere: nothing beyond PXB; a size at which rings run LL128 with NICs beside the GPUs."""
    near = machine([{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"gpus": [4, 5]}, {"gpus": [6, 7]}])
    sizes = [2**k for k in range(12, 24)]
    assert "ll128" in {choose("all_gather", size, whole(), near).protocol for size in sizes}
    assert "ll128" not in {choose("all_gather", size, whole(), machine(NEAR)).protocol for size in sizes}


def test_staged_bytes_load_the_memory_that_offload_uses() -> None:
    near = machine([{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"gpus": [4, 5]}, {"gpus": [6, 7]}])
    assert host_traffic("all_gather", 2**30, REPLICAS, near).memory_bytes == 0
    far = host_traffic("all_gather", 2**30, REPLICAS, machine(NEAR))
    assert far.memory_bytes == far.network_bytes / 2


def test_staging_is_less_sure() -> None:
    near = machine([{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"gpus": [4, 5]}, {"gpus": [6, 7]}])
    assert sigma("all_gather", 2**30, REPLICAS, machine(NEAR)) > sigma("all_gather", 2**30, REPLICAS, near)


def test_time_is_that_of_the_fullest_link() -> None:
    """Replicas at half a NIC's rate take twice what a NIC of their own would give them."""
    near = machine([{"gpus": [g]} for g in range(4)])
    alone = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=4, spans_domain=True)
    crowd = float(collective_cost("all_gather", 2**30, REPLICAS, near).link_bytes["inter"])
    assert crowd == pytest.approx(2 * float(collective_cost("all_gather", 2**30, alone, near).link_bytes["inter"]))


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([{"gpus": [0]}], "1 places for 4 cards"),
        ([{"gpus": [9]}, *NEAR[:3]], "names GPU 9"),
        ([{"gpus": [3, 4]}, *NEAR[:3]], "two sockets"),
        ([{}, *NEAR[:3]], "neither beside GPUs nor on a socket"),
        ([{"gpus": [0], "socket": 0}, *NEAR[:3]], "beside GPUs and on a socket"),
        ([{"socket": 5}, *NEAR[:3]], "names socket 5"),
    ],
)
def test_places_that_cannot_be_are_refused(cards: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        machine(cards)
