"""Ranks on other GPUs than those of their numbers: files, faults, and what the simulator makes of them."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import predict
from simulator.base.errors import ClusterError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.placement import read_placement
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster, Edge, Intra, Pcie
from simulator.spec.cluster import Host as HostLink
from simulator.spec.cluster.host import Gpu, Host
from simulator.spec.cluster.rank_mapping import gpu_at, rank_on, ranks_on, shortest
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from tests.examples import examples

GB = 1e9
HEAD = "rank\tnode\tgpu\n"
DGX1 = Cluster.load("dgx1-v100-8")
SMALL = Model.load("llama3.2-1b")


def crossed_pairs() -> Cluster:
    """Four GPUs on two sockets; bridges join 0 with 2 and 1 with 3."""
    edges = tuple(Edge(src=a, dst=a + 2, bytes_per_s=300 * GB) for a in (0, 1))
    return Cluster(
        name="crossed",
        device="a100-pcie-80gb",
        gpus_per_node=4,
        intra=Intra(kind="nvlink3", shape="pairs", bytes_per_s=300 * GB, edges=edges),
        host=HostLink(kind="pcie4", bytes_per_s=31 * GB),
        pcie=Pcie(sockets=((0, 1), (2, 3))),
    )


def step_s(plan: Plan, cluster: Cluster) -> float:
    return predict(SMALL, plan, cluster).step_s


def test_seats_of_one_node_repeat_on_all() -> None:
    assert [gpu_at((1, 0), rank) for rank in range(4)] == [1, 0, 3, 2]
    assert [gpu_at((3, 0, 2, 1), rank) for rank in range(4)] == [3, 0, 2, 1]


@given(st.permutations(range(8)))
def test_rank_on_is_the_inverse(seats: list[int]) -> None:
    assert [rank_on(tuple(seats), gpu_at(tuple(seats), rank)) for rank in range(8)] == list(range(8))


def test_the_shortest_form() -> None:
    assert shortest([0, 1, 2, 3], 2) == ()
    assert shortest([1, 0, 3, 2], 2) == (1, 0)
    assert shortest([2, 3, 0, 1], 2) == (2, 3, 0, 1)


def test_faults_of_seats_are_told_at_once() -> None:
    with pytest.raises(ClusterError) as told:
        DGX1.with_rank_mapping((0, 1, 2, 3, 4, 4, 6, 9))
    text = str(told.value)
    for words in ("names GPU 9; there are 8", "GPU 4 appears twice", "GPU 5, 7 has no rank"):
        assert words in text
    with pytest.raises(ClusterError, match="3 GPUs"):
        DGX1.with_nodes(2).with_rank_mapping((0, 1, 2))


def test_a_cluster_file_keeps_them(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(cluster_toml(DGX1.with_rank_mapping((0, 3, 1, 2, 4, 7, 5, 6))))
    assert Cluster.load(file).seats == (0, 3, 1, 2, 4, 7, 5, 6)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2, dp_shard=4, seq_len=1024, precision="fp16"),
        Plan(tp=2, pp=2, dp_replicate=2, zero=0, num_micro_batches=4, seq_len=1024, precision="fp16"),
        Plan(pp=4, dp_replicate=2, zero=0, num_micro_batches=4, seq_len=1024, precision="fp16", rank_order="dp-pp-tp"),
    ],
)
def test_seats_in_order_change_nothing(plan: Plan) -> None:
    assert step_s(plan, DGX1) == step_s(plan, DGX1.with_rank_mapping(range(8)))


def test_groups_of_ranks_meet_on_the_gpus_of_their_seats() -> None:
    mesh = Mesh(Plan(tp=2, dp_shard=4), DGX1.with_rank_mapping((0, 3, 1, 2, 4, 7, 5, 6)))
    assert mesh.group_shape("tp").patterns == (((0, 3), (1, 2), (4, 7), (5, 6)),)
    assert mesh.group_shape("dp_shard").patterns == (((0, 1, 4, 5), (3, 2, 7, 6)),)
    two = Mesh(Plan(tp=2, dp_shard=8), DGX1.with_nodes(2).with_rank_mapping((*range(0, 16, 2), *range(1, 16, 2))))
    shape = two.group_shape("tp")
    assert (shape.num_nodes, shape.ranks_per_node, shape.num_groups_per_node) == (1, 2, 4)
    shape = two.group_shape("dp_shard")
    assert (shape.num_nodes, shape.ranks_per_node, shape.num_groups_per_node, shape.spans_domain) == (2, 4, 2, True)


def test_a_pair_of_stages_is_priced_where_it_sits() -> None:
    # one rank a stage: 0 to 1 and 2 to 3 share a bridge or do not; 1 to 2 then crosses, or stays
    plan = Plan(pp=4, zero=0, num_micro_batches=4, seq_len=1024)
    mesh = Mesh(plan, crossed_pairs())
    assert [mesh.pair_shape(stage, stage + 1).patterns for stage in range(3)] == [
        (((0, 1),),),
        (((1, 2),),),
        (((2, 3),),),
    ]
    bridged = Mesh(plan, crossed_pairs().with_rank_mapping((0, 2, 1, 3)))
    assert bridged.pair_shape(0, 1).patterns == (((0, 2),),)


def test_tensor_parallel_groups_on_their_bridges_are_faster() -> None:
    plan = Plan(tp=2, dp_shard=2, sequence_parallel=True, micro_batch_size=4, seq_len=2048)
    assert step_s(plan, crossed_pairs().with_rank_mapping((0, 2, 1, 3))) < step_s(plan, crossed_pairs())


@examples(10)
@given(order=st.permutations(range(4)), swap=st.sampled_from([(0, 1), (2, 3)]))
def test_ranks_of_one_group_may_swap_their_seats(order: list[int], swap: tuple[int, int]) -> None:
    plan, a, b = Plan(tp=2, dp_shard=2, seq_len=1024), *swap
    other = list(order)
    other[0], other[1], other[2], other[3] = order[2], order[3], order[0], order[1]  # the two groups swapped as well
    other[a], other[b] = other[b], other[a]
    other[2 - a], other[3 - a] = other[3 - a], other[2 - a]  # in both, so that replicas stay together
    assert step_s(plan, crossed_pairs().with_rank_mapping(order)) == pytest.approx(
        step_s(plan, crossed_pairs().with_rank_mapping(other))
    )


def test_every_rank_played_agrees_with_the_class() -> None:
    plan = Plan(tp=2, dp_shard=2, sequence_parallel=True, seq_len=1024)
    for seats in list(permutations(range(4)))[::5]:
        cluster = crossed_pairs().with_rank_mapping(seats)
        assert predict(SMALL, plan, cluster, fold=False).step_s == pytest.approx(step_s(plan, cluster))


def test_exceptions_name_gpus_and_reach_their_ranks() -> None:
    # without communication between them, the slow GPU's rank is the slow one wherever it sits
    slow = crossed_pairs().model_dump(exclude={"device"}) | {"device": crossed_pairs().device}
    cluster = Cluster.model_validate({**slow, "exceptions": ({"nodes": "0", "gpus": "0", "speed": 0.5},)})
    plan = Plan(pp=4, zero=0, num_micro_batches=4, seq_len=1024, stage_layers=(1, 5, 5, 5))
    # the first stage has one layer: the slow GPU loses little there, and much behind it
    assert step_s(plan, cluster) < step_s(plan, cluster.with_rank_mapping((3, 1, 2, 0)))


def written(tmp_path: Path, *rows: str, head: str = HEAD) -> Path:
    file = tmp_path / "ranks.tsv"
    file.write_text(head + "".join(f"{row}\n" for row in rows))
    return file


def test_a_table_is_read(tmp_path: Path) -> None:
    rows = [f"{rank}\t0\t{gpu}" for rank, gpu in enumerate((0, 2, 1, 3))]
    assert read_placement(written(tmp_path, *rows), crossed_pairs()) == (0, 2, 1, 3)


def test_every_fault_of_a_table_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "0\t0\t0", "1\t0\t0", "1\t0\t1", "2\t1\t2", "x\t0\t7", "9\t0\t3")
    with pytest.raises(PlanError) as told:
        read_placement(file, crossed_pairs())
    text = str(told.value)
    for words in (
        ":4: rank 1 appears twice",
        ":5: names node 1; there are 1",
        ":6: rank: not a whole number",
        ":6: names GPU 7; a node has 4",
        ":7: names rank 9; there are 4",
        "rank 3 is missing",
        "GPU 0 of node 0 has ranks 0, 1",
        "GPU 1 of node 0, 2 of node 0, 3 of node 0 has no rank",
    ):
        assert words in text


def test_bus_ids_name_gpus(tmp_path: Path) -> None:
    ids = ("0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0000:d8:00.0")
    host = Host(source="made", format="xml", gpus=tuple(Gpu(name=f"GPU{n}", pci=pci) for n, pci in enumerate(ids)))
    head = "rank\tnode\tpci_bus_id\n"
    rows = [f"{rank}\t0\t{ids[gpu]}" for rank, gpu in enumerate((3, 2, 1, 0))]
    assert read_placement(written(tmp_path, *rows, head=head), crossed_pairs(), host) == (3, 2, 1, 0)
    with pytest.raises(PlanError, match="no source tells whose bus id 0000:d8"):
        read_placement(written(tmp_path, *rows, head=head), crossed_pairs())
    head = "rank\tnode\tgpu\tpci_bus_id\n"
    rows = [f"{rank}\t0\t{rank}\t{pci}" for rank, pci in enumerate(("0000:3b:00.0", "0000:00:00.0", ids[3], "-"))]
    with pytest.raises(PlanError) as told:
        read_placement(written(tmp_path, *rows, head=head), crossed_pairs(), host)
    assert ":3: no GPU has bus id 0000:00:00.0" in str(told.value)
    assert ":4: bus id 0000:d8:00.0 is GPU 3's, not GPU 2's" in str(told.value)


def test_serving_knows_no_seats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.toml").write_text(cluster_toml(DGX1.with_rank_mapping((0, 3, 1, 2, 4, 7, 5, 6))))
    assert main(["serve", "--cluster", str(tmp_path / "node.toml")]) == ExitCode.BAD_INPUT
    assert "serving takes rank r on GPU r" in capsys.readouterr().err


def test_verbs_take_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crossed.toml").write_text(cluster_toml(crossed_pairs()))
    written(tmp_path, *(f"{rank}\t0\t{gpu}" for rank, gpu in enumerate((0, 2, 1, 3))))
    study = 'model = "llama3.2-1b"\ncluster = "crossed.toml"\n[plan]\ntp = 2\nsequence_parallel = true\nmicro_batch_size = 4\nseq_len = 2048\n'
    (tmp_path / "a.toml").write_text(study)
    (tmp_path / "b.toml").write_text(f'placement = "ranks.tsv"\n{study}')
    found = []
    for name in ("a", "b"):
        assert main(["predict", str(tmp_path / f"{name}.toml"), "--json"]) == ExitCode.OK
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["inputs"]["seats"] == [0, 2, 1, 3]
    assert found[1]["step_s"] < found[0]["step_s"]
    flag = ["--placement", str(tmp_path / "ranks.tsv")]
    assert main(["predict", str(tmp_path / "a.toml"), "--json", *flag]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["step_s"] == found[1]["step_s"]
    assert main(["compare", *(str(tmp_path / f"{n}.toml") for n in "ab"), "--json", "--no-ablations"]) == ExitCode.OK
    kit = tmp_path / "kit"
    assert main(["export", str(tmp_path / "b.toml"), "--to", "launch-kit", "-o", str(kit)]) == ExitCode.OK
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in (kit / "launch.sh").read_text()
    assert 'placement = "../ranks.tsv"' in (kit / "plan" / "study.toml").read_text()
    assert read_placement(kit / "ranks.tsv", crossed_pairs()) == (0, 2, 1, 3)


def test_a_mapping_is_looked_up_once_for_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look passes over all of it: for every GPU of 4,096 nodes that was 5 s."""
    looked = list[tuple[int, ...]]()

    def inverse(rank_mapping: tuple[int, ...]) -> tuple[int, ...]:
        looked.append(rank_mapping)
        return (2, 0, 1)

    monkeypatch.setattr("simulator.spec.cluster.rank_mapping._inverse", inverse)
    assert list(ranks_on((1, 2, 0), range(6))) == [2, 0, 1, 5, 3, 4]
    assert looked == [(1, 2, 0)]
