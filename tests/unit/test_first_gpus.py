"""`--set cluster.gpus_per_node=N`: a node with only its first GPUs, and of its links those between them."""

from __future__ import annotations

import pytest

from simulator.formats.study.loading import loaded_cluster
from simulator.formats.study.overrides import parse_overrides
from simulator.formats.study.tables import ROOTS
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.cluster import cluster_names
from simulator.spec.cluster.hosts import first_gpus


def smaller(preset: str, *settings: str, nodes: int | None = None) -> Cluster:
    overrides, faults = parse_overrides(settings, ROOTS)
    assert not faults
    cluster = loaded_cluster({"cluster": preset, "nodes": nodes}, overrides)
    assert cluster is not None
    return cluster


@pytest.mark.parametrize("preset", cluster_names())
def test_every_preset_has_nodes_of_fewer_gpus(preset: str) -> None:
    usual = Cluster.load(preset)
    for gpus in range(1, usual.gpus_per_node):
        found = smaller(preset, f"cluster.gpus_per_node={gpus}")
        assert found.gpus_per_node == gpus
        assert all(max(edge.src, edge.dst) < gpus for edge in found.intra.edges)
        assert {edge for edge in usual.intra.edges if max(edge.src, edge.dst) < gpus} == set(found.intra.edges)
        assert found.islands()  # the tree of links is sound


def test_one_gpu_of_a_cube_mesh_on_two_nodes() -> None:
    found = smaller("dgx1-v100-8", "cluster.gpus_per_node=1", nodes=2)
    assert (found.num_devices, found.nvlink_domain_size, found.intra.edges) == (2, 1, ())


def test_what_else_is_set_holds_for_the_smaller_node() -> None:
    found = smaller("dgx1-v100-8", "link.intra=nvlink5", "cluster.gpus_per_node=x0.5", "cluster.nvlink_domain_size=2")
    assert (found.gpus_per_node, found.nvlink_domain_size, found.intra.kind) == (4, 2, "nvlink5")


def test_nics_beside_gpus_that_are_gone_go_too() -> None:
    cards = [{"gpus": [0, 1]}, {"gpus": [2, 3]}, {"socket": 1}]
    fields = {name: getattr(Cluster.load("pcie-a40-8"), name) for name in Cluster.model_fields}
    inter = fields["inter"].model_dump() | {"num_nics": 3, "cards": cards}
    node = Cluster.model_validate(fields | {"inter": inter})
    one, half = (first_gpus(node.model_dump(), gpus)["inter"] for gpus in (1, 4))
    assert [nic["gpus"] for nic in one["cards"]] == [(0,)]
    assert [nic["gpus"] for nic in half["cards"]] == [(0, 1), (2, 3)]
    assert (one["num_nics"], half["num_nics"]) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "confirmed"),
    [
        ((), True),
        (("cluster.gpus_per_node=4",), True),
        (("cluster.fabric.speed=2",), True),
        (("link.intra=nvlink5",), True),
        (("link.inter.bytes_per_s=x0.5",), True),
        (("cluster.inter.nic_bytes_per_s=100Gb/s",), False),
        (("cluster.inter.rdma=false",), False),
        (("cluster.fabric.oversubscription=2",), False),
        (("cluster.inter.num_nics=4", "cluster.fabric.confirmed=true"), True),
    ],
)
def test_a_confirmed_network_is_known_by_its_sheet_once_another_is_set(
    settings: tuple[str, ...], *, confirmed: bool
) -> None:
    found = smaller("dgx-h100-8", *settings, nodes=2)
    assert Cluster.load("dgx-h100-8").fabric.confirmed
    assert found.fabric.confirmed is confirmed
    assert ("so confirmed=false" in found.sources.get("fabric", "")) is not confirmed
