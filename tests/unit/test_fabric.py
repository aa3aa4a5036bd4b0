"""A fabric as measured: the forms in which a file, a flag and a log may say it, their faults, and what a step makes of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from simulator.base.errors import ClusterError, InputError
from simulator.base.presets import TOPOLOGIES
from simulator.cli import main
from simulator.cli.fabric import with_fabric
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.parallel.mesh import GroupShape
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.collectives import collective_s, copies

H100 = Cluster.load("hgx-h100-8", 4)


def loaded(tmp_path: Path, table: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text((TOPOLOGIES / "hgx-h100-8.toml").read_text() + "\n" + table)
    return Cluster.load(path, 4)


def numbers(cluster: Cluster) -> set[tuple[str, int, int, float]]:
    return {(one.collective, one.nodes, one.size_bytes, one.bus_bytes_per_s) for one in cluster.fabric.measured}


def group(nodes: int) -> GroupShape:
    spans = nodes > 1
    return GroupShape(num_ranks=8 * nodes, num_nodes=nodes, ranks_per_node=8, num_groups_per_node=1, spans_domain=spans)


def test_a_table_and_a_list_say_the_same(tmp_path: Path) -> None:
    table = '[fabric.measured]\nsize_bytes = "1GiB"\nall_reduce = { 1 = "425GB/s", 4 = { 64MiB = "90GB/s", 1GiB = "161GB/s" } }'
    rows = [
        '{ collective = "allreduce", nodes = 1, size_bytes = "1GiB", bus_bytes_per_s = "425GB/s" }',
        '{ collective = "all_reduce", nodes = 4, size_bytes = "64MiB", bus_bytes_per_s = "90GB/s" }',
        '{ collective = "all-reduce", nodes = 4, size_bytes = "1GiB", bus_bytes_per_s = "161GB/s" }',
    ]
    listed = f"[fabric]\nmeasured = [{', '.join(rows)}]"
    plain = (TOPOLOGIES / "hgx-h100-8.toml").read_text().split("[fabric]")[0]
    (tmp_path / "listed.toml").write_text(plain + listed)
    assert numbers(loaded(tmp_path, table)) == numbers(Cluster.load(tmp_path / "listed.toml"))
    assert len(numbers(loaded(tmp_path, table))) == 3


def test_a_saved_cluster_states_what_it_stated(tmp_path: Path) -> None:
    stated = with_fabric(H100, ["allreduce=343@2,161@4:1GiB", "allgather=80@4x4"])
    path = tmp_path / "saved.toml"
    path.write_text(cluster_toml(stated))
    assert Cluster.load(path).fabric == stated.fabric


def test_all_faults_of_a_table_are_named_at_once(tmp_path: Path) -> None:
    lines = [
        'all_reduce = { 2 = "-343GB/s", 0 = "161GB/s", 4 = "4000GB/s", 8 = 3 }',
        'allgater = { 1 = "330GB/s" }',
        'all_to_all = "3GB/s"',
        'send_recv = { 2 = { 64KiB = "3GB/s" } }',
        "gpus_per_node = 8",
    ]
    with pytest.raises(ClusterError) as caught:
        loaded(tmp_path, "[fabric.measured]\n" + "\n".join(lines))
    told = [str(fault) for fault in caught.value.faults]
    words = (
        "-343GB/s",
        "no count of nodes",
        "must be a data rate with its unit",
        "did you mean all_gather",
        "by node count",
    )
    for word in (*words, "alone, which are latency", "4000GB/s is more than the links can give"):
        assert sum(word in one for one in told) == 1, (word, told)
    assert len(told) == 7


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("allreduc=343@2", "did you mean allreduce"),
        ("allreduce=343", "is not BUSBW@NODES"),
        ("allreduce=-3@2", "is not BUSBW@NODES"),
        ("allreduce=343Gx/s@2", "not a data rate"),
        ("allreduce=343@2:1KB", "not a size"),
        ("allreduce=343@2x9", "gpus_per_node from 1 to 8"),
        ("allreduce=3@70000", "nodes"),
        ("allreduce=3@2,4@2", "stated twice"),
        ("allgather=900@4", "more than the links can give"),
        ("nowhere.log", "is no file"),
    ],
)
def test_a_wrong_flag_is_told(given: str, told: str) -> None:
    with pytest.raises((InputError, ClusterError), match=told):
        with_fabric(H100, [given])


def test_numbers_between_nodes_need_a_network() -> None:
    alone = Cluster.load("pcie-l40s-8")
    if alone.inter is not None:
        alone = Cluster.parse(
            {**{k: getattr(alone, k) for k in Cluster.model_fields}, "inter": None}, "t", ClusterError
        )
    with pytest.raises(ClusterError, match="nothing joins the nodes"):
        with_fabric(alone, ["allreduce=10@2"])


def nccl_log(tmp_path: Path, times_us: dict[int, float]) -> Path:
    ranks = "\n".join(
        f"#  Rank {rank:2d} Group  0 Pid {rank} on node{rank // 8} device  {rank % 8} [0000:04:00] H100"
        for rank in range(16)
    )
    rows = "\n".join(
        f"  {size}  {size // 4}  float  none  -1  {time}  1.00  1.00  0" for size, time in times_us.items()
    )
    path = tmp_path / "run.log"
    path.write_text(f"# Collective test starting: all_gather_perf\n{ranks}\n{rows}\n")
    return path


def test_a_log_is_followed_at_its_sizes_and_between(tmp_path: Path) -> None:
    times = {2**26: 400.0, 2**28: 1500.0, 2**30: 5600.0}
    stated = with_fabric(H100, [str(nccl_log(tmp_path, times))])
    for size, time_us in times.items():
        assert float(collective_s("all_gather", size, group(2), stated)) == pytest.approx(time_us * 1e-6, rel=1e-9)
    between = float(collective_s("all_gather", 2**27, group(2), stated))
    assert between == pytest.approx((400e-6 * 1500e-6) ** 0.5, rel=1e-9)


def test_a_table_of_collectives_is_taken_too(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["collective", "gpu", "n_gpus", "n_nodes", "size_bytes", "time_us"])
        writer.writerows([["all_gather", "H100", 16, 2, 2**28, time] for time in (1400, 1500, 1700)])
    stated = with_fabric(H100, [str(path)])
    assert float(collective_s("all_gather", 2**28, group(2), stated)) == pytest.approx(1500e-6, rel=1e-9)


def test_a_kind_that_nobody_measured_follows_the_nearest() -> None:
    stated = with_fabric(H100, ["allgather=100@4"])
    own = float(collective_s("all_gather", 2**28, group(4), H100)) / float(
        collective_s("all_gather", 2**28, group(4), stated)
    )
    for kind in ("reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
        other = float(collective_s(kind, 2**28, group(4), H100)) / float(collective_s(kind, 2**28, group(4), stated))
        assert other == pytest.approx(own, rel=0.35), kind  # waits stay the model's


def test_slow_links_of_a_node_slow_its_tensor_parallelism_and_no_network() -> None:
    model, plan = (
        Model.load("llama3-8b"),
        Plan(tp=8, dp_shard=4, micro_batch_size=1, seq_len=4096, stack="torch-2.11-compiled"),
    )  # no host that lags
    usual = predict(model, plan, H100).step_s
    slow = predict(model, plan, with_fabric(H100, ["allreduce=45@1"])).step_s
    assert slow > 1.5 * usual
    far = float(collective_s("send_recv", 2**28, group(2), with_fabric(H100, ["allreduce=45@1"])))
    assert far == pytest.approx(float(collective_s("send_recv", 2**28, group(2), H100)))


def test_a_rack_is_one_place_whatever_its_trays_are_called() -> None:
    rack = Cluster.load("gb200-nvl72", 4)
    stated = with_fabric(rack, ["allreduce=400@4"])
    shape = GroupShape(num_ranks=16, num_nodes=4, ranks_per_node=4, num_groups_per_node=1, spans_domain=False)
    time_s = float(collective_s("all_reduce", 2**28, shape, stated))
    assert 2 * 15 / 16 * 2**28 / time_s == pytest.approx(400e9, rel=1e-6)


def test_a_step_says_what_hangs_on_its_network() -> None:
    model, plan = Model.load("llama3-8b"), Plan(dp_shard=32, micro_batch_size=1, seq_len=4096)
    slow = with_fabric(H100, ["allgather=60@4", "reducescatter=60@4"])
    found = predict(model, plan, slow, advise=True)
    network = found.network
    assert network is not None
    assert 0 < network.tenth_less_s < network.hangs_s < found.step_s
    fabric = slow.fabric.model_copy(update={"speed": 0.9})
    less = predict(model, plan, slow.model_copy(update={"fabric": fabric})).step_s
    assert less - found.step_s == pytest.approx(network.tenth_less_s)
    nine = with_fabric(H100, ["allgather=54@4", "reducescatter=54@4"])  # latencies and bytes, not bytes alone
    assert predict(model, plan, nine).step_s == pytest.approx(less, rel=0.07)
    assert predict(model, Plan(dp_shard=8), Cluster.load("hgx-h100-8"), advise=True).network is None


def test_the_command_lines_follow(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "--nodes", "4", "--micro-batch-size", "1", "--json", "--fabric", "allgather=60@4"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["network"]["hangs_s"] > answer["network"]["tenth_less_s"] > 0
    assert any("as measured: all_gather on 4 nodes" in one["detail"] for one in answer["sources"])
    assert (
        main(["collective", "all_gather", "--nodes", "4", "--fabric", "allgather=60@4", "--size", "256MiB", "--json"])
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 31 / 32 * 2**28 / row["time_s"] == pytest.approx(60e9, rel=1e-6)


def test_playing_a_step_again_does_not_slow_its_hosts_twice() -> None:
    """A100's hosts are slower than the stack's: what is asked again is the stack as it was asked."""
    cluster = Cluster.load("selene", 2)
    plan = Plan(
        tp=2, dp_shard=8, zero=1, data_parallel="megatron", stack="megatron-2021", precision="fp16", seq_len=1024
    )
    network = predict(Model.load("gpt2"), plan, cluster, advise=True).network
    assert network is not None
    assert network.hangs_s > network.tenth_less_s > 0


def test_a_node_with_fewer_cards_gives_less_than_the_usual_ones_were_measured_to() -> None:
    """All-gathers of 4 nodes run at the pace of the one that has half of its NICs."""
    stated = with_fabric(H100, ["allgather=200@4", "allgather=300@1"])
    data = {name: getattr(stated, name) for name in Cluster.model_fields}
    halved = Cluster.parse(data | {"exceptions": ({"nodes": "3", "num_nics": 4},)}, "test", ClusterError)
    model, plan = Model.load("llama3-8b"), Plan(dp_shard=32, micro_batch_size=1, seq_len=1024)
    half = with_fabric(H100, ["allgather=100@4", "allgather=300@1"])
    # half of the cards is half of the bytes; half of a number may be latency too, which small messages of the step then pay
    assert predict(model, plan, halved).step_s == pytest.approx(predict(model, plan, half).step_s, rel=0.25)
    assert predict(model, plan, halved).step_s > 1.5 * predict(model, plan, stated).step_s


def test_copies_between_gpus_follow_slow_links_and_not_a_quick_library() -> None:
    def seconds(cluster: Cluster) -> float:
        cost, _ = copies("all_gather", 2**28, group(1), cluster)
        return sum(float(b) for b in cost.link_bytes.values())

    usual = seconds(H100)
    assert seconds(with_fabric(H100, ["allgather=40@1"])) > 5 * usual
    assert seconds(with_fabric(H100, ["allgather=390@1"])) == usual
