"""Exceptions of a cluster: what a file may say, what it becomes, and who refuses it."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import ClusterError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.exceptions import numbers_of
from simulator.spec.cluster.gpu_kinds import GpuKinds
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.work.collectives import link_capacities

HGX = Cluster.load("hgx-h100-8", 4)
MODEL = Model.load("llama3.2-1b")


def uneven(*exceptions: dict[str, Any], cluster: Cluster = HGX) -> Cluster:
    data = {name: getattr(cluster, name) for name in Cluster.model_fields}
    return Cluster.parse(data | {"exceptions": list(exceptions)}, "odd", ClusterError)


def test_spans() -> None:
    assert numbers_of("0-3,7") == [0, 1, 2, 3, 7]
    assert numbers_of("5, 1-2, 2") == [1, 2, 5]


def test_kinds_add_up() -> None:
    """Two exceptions of one node say different things; equal GPUs are one kind, whoever says so."""
    kinds = GpuKinds.of(
        uneven(
            {"nodes": "1", "speed": 0.9},
            {"nodes": "1-2", "nic_bytes_per_s": "200Gb/s"},
            {"nodes": 3, "gpus": "0,4-5", "intra_bytes_per_s": "225GB/s"},
        )
    )
    assert len(kinds.kinds) == 4
    assert [kinds.number(rank) for rank in (0, 7, 8, 15, 16, 23, 24, 25, 28, 29, 30)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        0,
        3,
        3,
        0,
    ]
    assert kinds.kinds[1].unlike(kinds.kinds[0]) == "speed = 0.9, nic_bytes_per_s = 25GB/s"
    assert kinds.kinds[0].unlike(kinds.kinds[0]) == "all others"


def test_another_device_brings_the_links_of_its_usual_machine() -> None:
    """An A100 has NVLink 3 wherever it sits, an H200 those of an H100, and what is stated stands."""
    a100, stated, h200 = GpuKinds.of(
        uneven(
            {"nodes": "0", "device": "a100-sxm4-80gb"},
            {"nodes": "1", "device": "A100 80GB", "intra_bytes_per_s": "150GB/s"},
            {"nodes": "2", "device": "h200"},
        )
    ).kinds[1:]
    assert (a100.intra_kind, a100.intra_bytes_per_s) == ("nvlink3", 300e9)
    assert (stated.intra_kind, stated.intra_bytes_per_s) == ("nvlink3", 150e9)
    assert (h200.intra_kind, h200.intra_bytes_per_s) == ("nvlink4", 450e9)


def test_a_group_runs_as_its_slowest_in_everything() -> None:
    kinds = GpuKinds.of(uneven({"nodes": "0", "device": "a100-sxm4-80gb"}, {"nodes": "1", "num_nics": 2}))
    found = kinds.slowest(HGX, {0, 1, 2}, own=2)
    assert (found.intra.kind, found.device.name, found.device.architecture) == ("nvlink3", "h100-sxm5-80gb", "ampere")
    assert found.inter is not None
    assert found.inter.num_nics == 2
    assert not found.exceptions


def test_exceptions_that_change_nothing_are_none() -> None:
    even, same = (predict(MODEL, Plan(dp_shard=32), one) for one in (HGX, uneven({"nodes": "2", "speed": 1.0})))
    assert (even.step_s, even.kinds) == (same.step_s, same.kinds)


@pytest.mark.parametrize(
    ("exception", "place", "problem"),
    [
        ({"nodes": "4", "speed": 0.5}, "nodes", "4 is beyond the last node, 3"),
        ({"nodes": "3-1", "speed": 0.5}, "nodes", "ends before it begins"),
        ({"nodes": "a", "speed": 0.5}, "nodes", "is not a list of numbers"),
        ({"nodes": "", "speed": 0.5}, "nodes", "is not a list of numbers"),
        ({"nodes": "0", "gpus": "8", "speed": 0.5}, "gpus", "8 is beyond the last GPU of a node, 7"),
        ({"nodes": "0"}, "", "does not say what is different"),
        ({"nodes": "0", "speed": 0}, "speed", "at least 1e-06"),
        ({"nodes": "0", "speed": 1.2}, "speed", "must be at most 1"),
        ({"nodes": "0", "gpus": "1", "num_nics": 2}, "num_nics", "cards are the node's"),
        ({"nodes": "0", "num_nics": 0}, "num_nics", "greater than 0"),
        ({"nodes": "0", "device": "H999"}, "device", "no device is called"),
        ({"nodes": "0", "device": "mi300x"}, "device", "no collectives in common"),
        ({"nodes": "0", "device": "l40s"}, "device", "no rule says by which links"),
        ({"nodes": "0", "intra_kind": "pcie5"}, "intra_kind", "not modelled"),
        ({"nodes": "0", "spede": 0.5}, "spede", "unknown key"),
        ({"speed": 0.5}, "nodes", "is missing"),
    ],
)
def test_faults(exception: dict[str, Any], place: str, problem: str) -> None:
    with pytest.raises(ClusterError) as caught:
        uneven(exception)
    assert any(
        fault.place.endswith(f"exceptions[0].{place}" if place else "exceptions[0]") and problem in fault.problem
        for fault in caught.value.faults
    ), str(caught.value)


def test_faults_of_what_joins_the_gpus() -> None:
    wired = Cluster.load("dgx1-v100-8", 2)
    with pytest.raises(ClusterError, match="not modelled on shape 'cube_mesh'"):
        uneven({"nodes": "0", "intra_bytes_per_s": "100GB/s"}, cluster=wired)
    with pytest.raises(ClusterError, match="the cluster has no network"):
        uneven(
            {"nodes": "0", "nic_bytes_per_s": "100Gb/s"}, cluster=HGX.with_nodes(1).model_copy(update={"inter": None})
        )
    with pytest.raises(ClusterError, match=r"exceptions\[0\] says it of some of these GPUs too"):
        uneven({"nodes": "0-2", "speed": 0.5}, {"nodes": "2", "gpus": "1", "speed": 0.6})
    uneven({"nodes": "0-2", "gpus": "0", "speed": 0.5}, {"nodes": "2", "gpus": "1", "speed": 0.6})


def test_fewer_nodes_than_an_exception_names() -> None:
    with pytest.raises(ClusterError, match="3 is beyond the last node, 1"):
        uneven({"nodes": "3", "speed": 0.5}).with_nodes(2)


def test_what_takes_nodes_as_equal_says_so() -> None:
    cluster = uneven({"nodes": "1", "speed": 0.5})
    for ask in (lambda: link_capacities(cluster), lambda: cluster.route(0, 9), cluster.islands, cluster.graph):
        with pytest.raises(ClusterError, match="takes all nodes as equal, and these differ"):
            ask()
    offload = Offload(optimizer="host", parameters="host")
    with pytest.raises(PlanError, match="offload on nodes that differ is not modelled"):
        predict(MODEL, Plan(dp_shard=32, offload=offload), cluster)
    mixed = uneven({"nodes": "1", "gpus": "0", "device": "a100-sxm4-80gb"})
    plan = Plan(tp=2, pp=2, dp_shard=8, zero=1, data_parallel="megatron", num_micro_batches=2)
    with pytest.raises(PlanError, match="different GPUs inside the tensor"):
        predict(MODEL, plan, mixed)


def test_the_gpu_that_is_full_decides_the_verdict() -> None:
    """8B and 6,144 tokens of activations: on an H100, not on the 40 GB A100s of node 1."""
    plan, model = Plan(dp_shard=32, seq_len=6144), Model.load("llama3-8b")
    mixed = uneven({"nodes": "1", "device": "a100-sxm4-40gb"})
    assert predict(model, plan, HGX).verdict == "fits"
    found = predict(model, plan, mixed, advise=True)
    assert {kind.device: kind.verdict for kind in found.kinds} == {
        "h100-sxm5-80gb": "fits",
        "a100-sxm4-40gb": "does not fit",
    }
    assert (found.verdict, found.cause.partition(":")[0]) == ("does not fit", "a100-sxm4-40gb")
    assert found.memory.capacity_bytes == next(
        kind.memory.capacity_bytes for kind in found.kinds if kind.verdict == "does not fit"
    )
    assert "equal nodes" in found.suggestion


def test_memory_is_that_of_the_stages_a_device_holds() -> None:
    """Stage 3 has the head and its logits; the A100s of node 1 hold stage 1, which needs less."""
    plan = Plan(pp=4, dp_shard=8, zero=1, data_parallel="megatron", num_micro_batches=4)
    usual, other = predict(Model.load("llama3-8b"), plan, uneven({"nodes": "1", "device": "a100-sxm4-80gb"})).kinds
    assert other.memory.peak_allocated_bytes < usual.memory.peak_allocated_bytes
    assert "loss" not in other.memory.by_category


def test_peaks_and_sources_know_both_devices() -> None:
    found = predict(MODEL, Plan(dp_shard=32), uneven({"nodes": "0-1", "device": "a100-sxm4-80gb"}))
    peaks = [Cluster.load(name).device.peak("bf16") for name in ("hgx-h100-8", "dgx-a100-80-8")]
    assert found.peak_flop_per_s == pytest.approx(sum(peaks) / 2)
    assert [kind.num_devices for kind in found.kinds] == [16, 16]
    assert "kernels of a100-sxm4-80gb" in {source.what for source in found.sources}


def test_a_file_and_a_flag_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "odd.toml"
    text = (Path(__file__).parents[2] / "topologies" / "hgx-h100-8.toml").read_text(encoding="utf-8")
    file.write_text(f'{text}\n[[exceptions]]\nnodes = "1"\nspeed = 0.5\n', encoding="utf-8")
    plan = ["--model", "llama3.2-1b", "--json"]
    assert main(["predict", "--cluster", str(file), "--nodes", "2", *plan]) == ExitCode.OK
    from_file = json.loads(capsys.readouterr().out)
    flag = 'cluster.exceptions=[{nodes="1", speed=0.5}]'
    assert main(["predict", "--nodes", "2", "--set", flag, *plan]) == ExitCode.OK
    from_flag = json.loads(capsys.readouterr().out)
    assert from_file["step_s"] == from_flag["step_s"]
    assert [kind["num_devices"] for kind in from_file["kinds"]] == [8, 8]
    assert from_file["kinds"][0]["waiting_s"] > 0.5 * from_file["kinds"][1]["waiting_s"]


def test_a_written_cluster_is_read_back(tmp_path: Path) -> None:
    cluster = uneven(
        {"nodes": "0-2", "gpus": "1,3", "speed": 0.875},
        {"nodes": "3", "device": "a100-sxm4-80gb", "intra_bytes_per_s": "250GB/s", "nic_bytes_per_s": "100Gb/s"},
    )
    file = tmp_path / "odd.toml"
    file.write_text(cluster_toml(cluster), encoding="utf-8")
    assert Cluster.load(file).exceptions == cluster.exceptions


def test_the_suggestion_names_who_is_waited_for() -> None:
    found = predict(MODEL, Plan(dp_shard=32, micro_batch_size=4), uneven({"nodes": "1", "gpus": "0-3", "speed": 0.7}))
    assert "4 GPUs (speed = 0.7) compute" in found.suggestion
    found = predict(MODEL, Plan(dp_shard=32), uneven({"nodes": "1", "gpus": "0-3", "speed": 0.99}))
    assert "speed = 0.99" not in found.suggestion


def test_text_names_who_computes_and_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    flag = 'cluster.exceptions=[{nodes="0", gpus="2", speed=0.5}]'
    assert main(["predict", "--model", "llama3.2-1b", "--set", flag, "--plain"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "Kinds of GPUs" in shown
    assert "speed = 0.5" in shown
    assert "wait:" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", 'cluster.exceptions=[{nodes="1", nic_bytes_per_s=25}]'],
        ["--set", "cluster.exceptions=3"],
        ["--set", "cluster.exceptions.0.speed=0.5"],
        ["--links", "x.png", "--set", 'cluster.exceptions=[{nodes="0", speed=0.5}]'],
    ],
)
def test_bad_flags(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--nodes", "2", *arguments]) == ExitCode.BAD_INPUT
    assert "exceptions" in capsys.readouterr().err
