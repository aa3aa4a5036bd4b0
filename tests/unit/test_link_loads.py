"""What a plan puts on a node's links, counted by hand, and the picture of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from simulator import Model
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.html.traffic import _sent, traffic_of
from simulator.formats.writers.link_plot import _first, write_link_plot
from simulator.play.lower import Lowering, lowered
from simulator.predict.link_loads import Loads, idle_links, link_loads
from simulator.spec.cluster import Cluster, NicPlace, Pcie
from simulator.spec.plan import Offload, Plan
from simulator.studies.place.cost import step_calls
from simulator.work.collectives import host_traffic

MODEL = Model.load("llama3.2-1b")


def loads(cluster: Cluster, **plan: object) -> Loads:
    return link_loads(MODEL, Plan.model_validate({"seq_len": 512, **plan}), cluster)


def step_bytes(found: Loads) -> dict[str, float]:
    return {link.name: link.step_bytes for link in found.links}


def test_ddp_on_one_node_puts_two_passes_of_the_gradients_on_every_port() -> None:
    """A ring all-reduce of G bytes: 2·7/8·G on each port (fp32 gradients), nothing on NICs."""
    found = step_bytes(loads(Cluster.load("dgx-a100-80-8"), dp_replicate=8, zero=0))
    gradients = 4 * MODEL.num_parameters
    for gpu in range(8):
        assert found[f"port{gpu}"] == pytest.approx(2 * 7 / 8 * gradients, rel=1e-3)
        assert found[f"nic{gpu}"] == 0


def test_calls_that_are_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 micro-batches as many as of 4, and 16 times their bytes where each gathers and reduces."""
    asked = list[int]()

    def watched(kind: str, size_bytes: int, *others: object, **settings: object) -> object:
        asked.append(size_bytes)
        return host_traffic(kind, size_bytes, *others, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules[link_loads.__module__], "host_traffic", watched)
    few, many = (loads(Cluster.load("dgx-a100-80-8"), dp_shard=8, zero=3, num_micro_batches=n) for n in (4, 64))
    assert 0 < len(asked) < 12
    assert step_bytes(many)["port0"] == pytest.approx(16 * step_bytes(few)["port0"])


def test_replicas_between_nodes_use_cards_and_shards_use_ports() -> None:
    found = step_bytes(loads(Cluster.load("hgx-h100-8", num_nodes=2), dp_replicate=2, dp_shard=8, zero=3))
    assert found["port0"] > found["nic0"] > 0


def test_a_box_without_peer_access_loads_memory_with_every_hop() -> None:
    """Eight hops of a ring, each through host memory: eight times what goes up one GPU's link."""
    found = step_bytes(loads(Cluster.load("pcie-l40s-8"), dp_shard=8, zero=3))
    assert found["memory"] == pytest.approx(8 * found["up0"])
    assert found["up0"] == pytest.approx(found["down3"]) == pytest.approx(found["socket0>1"])


def test_cube_mesh_cables_carry_what_the_rings_put_on_them() -> None:
    """Six links of each GPU are on cycles: what leaves a GPU by its cables is what a port would carry."""
    found = step_bytes(loads(Cluster.load("dgx1-v100-8"), dp_shard=8, zero=3, precision="fp16"))
    leaving = sum(size for name, size in found.items() if name.startswith("gpu0>"))
    arriving = sum(size for name, size in found.items() if name.endswith(">gpu0"))
    assert leaving == pytest.approx(arriving)
    assert leaving > 0
    assert found["up0"] == 0


def test_copies_are_on_the_host_links() -> None:
    offload = Offload(optimizer="host", parameters="host")
    found = step_bytes(loads(Cluster.load("hgx-h100-8"), dp_shard=8, zero=3, offload=offload))
    shard = MODEL.num_parameters / 8
    assert found["up0"] == pytest.approx(4 * shard, rel=0.02)  # gradients leave in fp32
    assert found["down0"] > found["up0"]


def test_the_picture_is_the_same_twice_and_shows_every_device(tmp_path: Path) -> None:
    one, two = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (one, two):
        assert main(["topo", "dgx1-v100-8", "--draw", str(path)]) == ExitCode.OK
    assert one.read_bytes() == two.read_bytes()
    assert len({link.name for link in idle_links(Cluster.load("dgx1-v100-8")).links}) == 32 + 16 + 8


def test_a_plan_is_drawn_by_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "loads.png"
    arguments = ["predict", "--model", "llama3.2-1b", "--seq-len", "512", "--links", str(out)]
    assert main(arguments) == ExitCode.OK
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main(["topo", "dgx1-v100-8", "--draw", str(tmp_path / "x.gif")]) != ExitCode.OK
    assert "is not a picture format" in capsys.readouterr().err
    assert main(["topo", "dgx1-v100-8", "--draw", str(tmp_path / "none" / "x.png")]) != ExitCode.OK
    assert "there is no folder" in capsys.readouterr().err


def test_tensor_parallel_traffic_is_on_the_ports() -> None:
    """A block gathers or reduces the stream four times a pass of forward and backward: 2·(n−1)/n of its bytes each."""
    plan = {"tp": 4, "dp_replicate": 2, "zero": 0, "num_micro_batches": 1}
    found = step_bytes(loads(Cluster.load("hgx-h100-8"), **plan))
    stream = 2 * 512 * MODEL.d_model  # bf16, one sequence
    layers = 4 * MODEL.num_layers * 2 * 3 / 4 * stream
    gradients = 2 * 1 / 2 * 4 * MODEL.num_parameters / 4
    assert found["port0"] > layers + 0.9 * gradients
    assert found["port0"] < 1.2 * (layers + gradients)


def test_pipeline_messages_cross_between_stages() -> None:
    """Two stages on two nodes: node 0 sends its activations by the NICs, micro-batch by micro-batch, from every GPU."""
    plan = {"pp": 2, "tp": 8, "dp_replicate": 1, "zero": 1, "num_micro_batches": 4, "seq_len": 512}
    found = step_bytes(loads(Cluster.load("hgx-h100-8", num_nodes=2), **plan))
    activations = 4 * 2 * 512 * MODEL.d_model
    assert found["nic3"] >= activations
    assert found["nic3"] < 1.5 * activations + 8 * MODEL.num_parameters / 8  # and the tied embedding's gradient
    alone = step_bytes(loads(Cluster.load("hgx-h100-8"), pp=2, dp_shard=4, zero=1, num_micro_batches=4))
    assert all(alone[f"port{gpu}"] > 0 for gpu in range(8))
    assert alone["nic0"] == 0


def test_stated_cards_carry_what_reaches_them() -> None:
    """Four NICs beside GPUs 0 to 3: replicas of GPUs 4 to 7 pass the sockets and the memory."""
    box = Cluster.load("dgx-a100-80-8", num_nodes=2)
    assert box.inter is not None
    inter = box.inter.model_copy(update={"num_nics": 4, "cards": tuple(NicPlace(gpus=(gpu,)) for gpu in range(4))})
    tree = Pcie(sockets=((0, 1, 2, 3), (4, 5, 6, 7)))
    found = step_bytes(loads(box.model_copy(update={"inter": inter, "pcie": tree}), dp_replicate=2, dp_shard=8, zero=3))
    assert found["nic0 in"] == pytest.approx(found["nic3 out"])
    assert found["nic0 in"] == pytest.approx(2 * found["down5"])
    assert found["socket0>1"] == pytest.approx(4 * found["down5"])
    assert found["memory"] == pytest.approx(8 * found["down5"])


def test_sums_of_tensor_parallel_ranks_count_in_every_micro_batch_of_a_pipeline() -> None:
    plan = {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1, "data_parallel": "megatron"}
    found = [step_bytes(loads(Cluster.load("dgx-a100-80-8"), num_micro_batches=n, **plan)) for n in (8, 16, 24)]
    first, second, third = (one["port0"] for one in found)
    assert third - second == pytest.approx(second - first)
    sums = MODEL.num_layers // 2 * 4 * 512 * MODEL.d_model * 2  # a layer's four sums: 2 (t - 1) / t of b s d, in bf16
    assert second - first > 8 * sums


def test_messages_sent_in_turn_are_their_senders() -> None:
    """A micro-batch of activations one way and of gradients the other, over the ports of both stages."""
    plan = {"pp": 2, "dp_shard": 4, "zero": 1, "data_parallel": "nanotron", "num_micro_batches": 8}
    more, less = (
        step_bytes(loads(Cluster.load("dgx-a100-80-8"), **{**plan, "num_micro_batches": n}))["port0"] for n in (16, 8)
    )
    assert more - less == pytest.approx(8 * 512 * MODEL.d_model * 2)


def test_of_a_large_node_the_first_gpus_are_drawn_and_the_picture_says_so() -> None:
    """A GPU took 1.4 inches: a node of 1,000 a picture of 35 metres, and minutes."""
    node = Cluster.load("hgx-h100-8")
    first = _first(idle_links(node.model_copy(update={"gpus_per_node": 1000})))
    assert first.num_gpus == 32
    ends = {end for link in first.links for end in (link.src, link.dst) if end.startswith("gpu")}
    assert ends == {f"gpu{gpu}" for gpu in range(32)}
    assert "the first 32 of its 1,000 GPUs" in first.cluster
    assert _first(idle_links(Cluster.load("dgx1-v100-8"))) == idle_links(Cluster.load("dgx1-v100-8"))


def test_a_picture_is_no_wider_than_the_gpus_that_are_drawn(tmp_path: Path) -> None:
    node = Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 200})
    write_link_plot(tmp_path / "x.svg", idle_links(node), "--draw")
    width = float((tmp_path / "x.svg").read_text().partition('width="')[2].partition("pt")[0])
    assert width == pytest.approx(32 * 1.4 * 72)  # points


SPLIT = {"tp": 2, "pp": 2, "num_micro_batches": 4, "zero": 1}


def traffic(num_nodes: int, **plan: object) -> tuple[dict[str, Any], Lowering]:
    cluster = Cluster.load("dgx-a100-80-8", num_nodes=num_nodes)
    lowering = lowered(MODEL, Plan.model_validate({"seq_len": 512, **plan}), cluster, None, None)
    return traffic_of(lowering, 1.0), lowering


@pytest.mark.parametrize("plan", [{"dp_shard": 24, "zero": 3}, {**SPLIT, "dp_shard": 6}])
def test_the_matrix_of_gpus_is_what_each_rank_sends_to_each_of_its_peers(plan: dict[str, int]) -> None:
    """Rank by rank and call by call; of one GPU's row the sum is what it sends within its node."""
    found, lowering = traffic(3, **plan)
    gpus, nodes = ([[0.0] * size for _ in range(size)] for size in (8, 3))
    for call in step_calls(lowering):
        for rank in range(lowering.mesh.num_ranks):
            if isinstance(call.where, tuple):
                here = lowering.mesh.coordinates(rank)
                at, to = call.where
                peers = [lowering.mesh.rank({**here, "pp": to})] if here["pp"] == at else []
            else:
                peers = [other for other in lowering.mesh.group_of(call.where, rank) if other != rank]
            for peer in peers:
                sent = call.count * _sent(call, lowering) / len(peers)
                if max(rank, peer) < 8:
                    gpus[rank][peer] += sent
                if rank // 8 != peer // 8:
                    nodes[rank // 8][peer // 8] += sent
    assert sum(map(sum, gpus)) > 0 < sum(map(sum, nodes))
    for rows, expected in ((found["gpus"], gpus), (found["nodes"], nodes)):
        for row, wanted in zip(rows, expected, strict=True):
            assert row == pytest.approx(wanted, abs=1)


def test_the_matrix_costs_what_the_ranks_do_and_not_what_their_pairs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(num_nodes: int) -> int:
        ranks = list[int]()
        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "gpu_of", lambda _, rank: ranks.append(rank) or rank)
            traffic(num_nodes, dp_shard=8 * num_nodes, zero=3)
        return len(ranks)

    assert 0 < asked(16) < 6 * asked(4)
