"""SLURM's tree becomes the fabric of a cluster, and who sits below which switch counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator import Plan
from simulator.base.errors import ClusterError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.slurm_topology import read_conf, read_yaml
from simulator.formats.readers.tree_cluster import cluster_below
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.spec.cluster import Cluster, Fabric, FabricLevel
from simulator.spec.cluster.links import route
from simulator.work.collectives import collective_cost

NODE = Cluster.load("hgx-h100-8")
CONF = """
SwitchName=leaf0 Nodes=node[00-15]
SwitchName=leaf1 Nodes=node[16-31]
SwitchName=leaf2 Nodes=node[32-47]
SwitchName=leaf3 Nodes=node[48-63]
SwitchName=pod0 Switches=leaf[0-1]
SwitchName=pod1 Switches=leaf[2-3]
SwitchName=core Switches=pod[0-1]
"""
TREE = read_conf(CONF, "topology.conf")


def shape(num_nodes: int, stride: int = 1) -> GroupShape:
    return GroupShape(
        num_ranks=8 * num_nodes,
        num_nodes=num_nodes,
        ranks_per_node=8,
        num_groups_per_node=1,
        spans_domain=True,
        node_stride=stride,
    )


def slowdown(cluster: Cluster, kind: str, group: GroupShape) -> float:
    """Of the NICs, against the same cluster below one large switch."""
    flat = cluster.model_copy(update={"fabric": Fabric(nodes_per_leaf=1024)})
    one, other = (float(collective_cost(kind, 2**30, group, c).link_bytes["inter"]) for c in (cluster, flat))
    return one / other


def test_leaves_and_levels_are_the_trees() -> None:
    cluster = cluster_below(TREE, NODE)
    assert cluster.num_nodes == 64
    assert cluster.fabric == Fabric(nodes_per_leaf=16, above=(FabricLevel(nodes=32),))
    assert "SLURM does not say" in cluster.sources["fabric"]
    stated = cluster_below(TREE, NODE, oversubscription=4.0)
    assert stated.fabric.oversubscription == 4.0
    assert "SLURM does not say" not in stated.sources["fabric"]


def test_the_file_reads_back() -> None:
    cluster = cluster_below(TREE, NODE, hosts="node[00-03,16-19]", oversubscription=2.0)
    assert cluster.fabric.nodes_used_per_leaf == 4
    text = cluster_toml(cluster)
    path = Path("unused.toml")
    import tomllib

    data = tomllib.loads(text)
    assert Cluster.parse(data, str(path), ClusterError, from_file=True) == cluster


def test_an_all_to_all_feels_the_taper_by_what_leaves_a_leaf() -> None:
    """16 of 32 nodes below a leaf that sends up a fourth: 16/31 of each node's traffic leaves it, times 4."""
    cluster = cluster_below(TREE, NODE, oversubscription=4.0)
    assert slowdown(cluster, "all_to_all", shape(16)) == 1
    assert slowdown(cluster, "all_to_all", shape(32)) == pytest.approx(4 * 16 / 31)


def test_a_ring_of_neighbours_leaves_a_leaf_once_and_strided_ones_side_by_side() -> None:
    """Uplinks of 16 / 4 nodes: one ring is 1 node's traffic; 8 rings interleaved are 8; 16 and more are everything."""
    cluster = cluster_below(TREE, NODE, oversubscription=4.0)
    assert slowdown(cluster, "all_gather", shape(32)) == 1
    assert slowdown(cluster, "all_gather", shape(4, 8)) == pytest.approx(8 / 4)
    assert slowdown(cluster, "all_gather", shape(2, 32)) == pytest.approx(16 / 4)


def test_upper_levels_add_their_own() -> None:
    """Leaves without loss, pods of 32 nodes that send up a half: only what leaves a pod feels it."""
    fabric = Fabric(nodes_per_leaf=16, above=(FabricLevel(nodes=32, oversubscription=2.0),))
    cluster = NODE.model_copy(update={"fabric": fabric, "num_nodes": 64})
    assert slowdown(cluster, "all_to_all", shape(32)) == 1
    assert slowdown(cluster, "all_to_all", shape(64)) == pytest.approx(2 * 32 / 63)
    assert cluster.network_bytes_per_s(32) == cluster.node_bytes_per_s == 2 * cluster.network_bytes_per_s(64)


def test_a_job_in_part_of_its_leaves_has_more_of_their_uplinks() -> None:
    """4 + 4 nodes on leaves of 16 at 8 to 1: a leaf's uplinks carry 2 nodes, of whose 4 send 4/7 each across: 8/7."""
    cluster = cluster_below(TREE, NODE, hosts="node[00-03,16-19]", oversubscription=8.0)
    assert cluster.num_nodes == 8
    assert slowdown(cluster, "all_to_all", shape(8)) == pytest.approx(4 * (4 / 7) / 2)
    together = cluster_below(TREE, NODE, hosts="node[00-07]", oversubscription=8.0)
    assert slowdown(together, "all_to_all", shape(8)) == 1


def test_routes_pass_the_switches_between_their_leaves() -> None:
    cluster = cluster_below(TREE, NODE, oversubscription=2.0)
    ends = [[link.dst for link in route(cluster, 0, 8 * node)] for node in (1, 16, 32)]
    assert ends[0] == ["node0.nic0", "leaf0.0", "node1.nic0", "node1.gpu0"]
    assert ends[1][1:4] == ["leaf0.0", "level1.0", "leaf1.0"]
    assert ends[2][1:6] == ["leaf0.0", "level1.0", "spine", "level1.1", "leaf2.0"]
    up = next(link for link in route(cluster, 0, 128) if link.dst == "level1.0")
    assert up.bytes_per_s == 16 * 50e9 / 2


def test_pipeline_stages_on_different_leaves() -> None:
    mesh = Mesh(Plan(pp=2, dp_shard=128, num_micro_batches=2), NODE.with_nodes(32))
    assert mesh.pair_shape(0, 1).node_stride == 16
    assert mesh.group_shape("dp_shard").node_stride == 1
    hsdp = Mesh(Plan(dp_replicate=4, dp_shard=64), NODE.with_nodes(32))
    assert hsdp.group_shape("dp_replicate").node_stride == 8


def test_blocks_are_leaves_and_their_sizes_levels() -> None:
    text = "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4,8\n"
    fabric = cluster_below(read_conf(text, "topology.conf"), NODE).fabric
    assert (fabric.nodes_per_leaf, [level.nodes for level in fabric.above]) == (4, [8])


def test_unequal_leaves_count_as_the_smallest() -> None:
    text = "SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-10]\nSwitchName=c Switches=a,b\n"
    cluster = cluster_below(read_conf(text, "topology.conf"), NODE)
    assert cluster.num_nodes == 10
    assert "the smallest stands for all" in cluster.sources["fabric"]


@pytest.mark.parametrize(
    ("hosts", "node", "words"),
    [
        ("node[00-03,99]", NODE, "node99 is below no switch"),
        ("node[", NODE, "--hosts"),
        ("", Cluster.load("hgx-h100-8").model_copy(update={"inter": None}), "no network cards"),
    ],
)
def test_what_does_not_fit_is_refused(hosts: str, node: Cluster, words: str) -> None:
    with pytest.raises(ClusterError, match=words.replace("[", r"\[")):
        cluster_below(TREE, node, hosts=hosts)


def test_flat_says_nothing() -> None:
    flat = read_yaml("- topology: t\n  flat: true\n", "topology.yaml")
    with pytest.raises(ClusterError, match="no switches above"):
        cluster_below(flat, NODE)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf, out = tmp_path / "topology.conf", tmp_path / "job.toml"
    conf.write_text(CONF, encoding="utf-8")
    assert main(["topo", str(conf), "--node", "hgx-h100-8", "--save", str(out), "--plain"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "16 nodes a leaf, 32 a switch above" in shown
    assert "SLURM does not say" in shown
    assert Cluster.load(out).num_nodes == 64
    assert main(["topo", str(conf), "--hosts", "node01"]) == ExitCode.BAD_INPUT
    assert main(["topo", "hgx-h100-8", "--node", "hgx-h100-8"]) == ExitCode.BAD_INPUT
    assert "is not a SLURM tree" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fabric", "words"),
    [
        ({"nodes_per_leaf": 4, "nodes_used_per_leaf": 8}, "8 nodes used of leaves of 4"),
        ({"nodes_per_leaf": 4, "above": [{"nodes": 4}]}, "4 nodes above switches of 4"),
        ({"nodes_per_leaf": 4, "above": [{"nodes": 8}, {"nodes": 12}]}, "12 nodes above switches of 8"),
    ],
)
def test_levels_that_cannot_be_are_refused(fabric: dict[str, object], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Cluster.parse({**NODE.model_dump(), "device": NODE.device, "fabric": fabric}, "file", ClusterError)
