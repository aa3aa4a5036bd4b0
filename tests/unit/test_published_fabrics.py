"""Facts that published sweeps agree on, held loosely: what a change of the fabric must not turn round."""

from __future__ import annotations

import pytest

from simulator import Model, Plan, predict
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster, Pcie
from simulator.spec.plan import Offload
from simulator.work.collectives import collective_s

GIB = 2**30


def bus_gb_per_s(name: str, num_ranks: int, num_nodes: int = 1) -> float:
    cluster = Cluster.load(name, num_nodes=num_nodes)
    shape = GroupShape(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        ranks_per_node=num_ranks // num_nodes,
        num_groups_per_node=1,
        spans_domain=num_nodes > 1,
    )
    return 2 * (num_ranks - 1) / num_ranks * GIB / float(collective_s("all_reduce", GIB, shape, cluster)) / 1e9


def test_pcie_boxes_without_peer_access_collapse() -> None:
    """Published for eight L40S: 20.1, 5.1 and 1.4 to 2.1 GB/s on 2, 4 and 8 GPUs."""
    two, four, eight = (bus_gb_per_s("pcie-l40s-8", n) for n in (2, 4, 8))
    assert two == pytest.approx(20.1, rel=0.1)
    assert four == pytest.approx(5.1, rel=0.1)
    assert eight < four / 1.8


def test_four_nodes_are_slower_than_two() -> None:
    """Published for 8 × H100 a node with 8 × 400 Gb/s: 467 and 325 GB/s, a ratio of 0.70."""
    two, four = bus_gb_per_s("hgx-h100-8", 16, 2), bus_gb_per_s("hgx-h100-8", 32, 4)
    assert 0.6 < four / two < 0.85


def test_bridged_pairs_of_an_a100_box_fall_to_pcie() -> None:
    """Published for a box of four A100 on two bridges: 195 GB/s on a pair and 24 on all four; 21 here."""
    assert bus_gb_per_s("pcie-a40-8", 4) < 0.7 * bus_gb_per_s("pcie-a40-8", 2)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("pcie-a40-8", {"dp_shard": 4, "dp_replicate": 2}),
        ("dgx1-v100-8", {"dp_shard": 4, "dp_replicate": 2, "precision": "fp16"}),
        ("pcie-l40s-8", {"dp_shard": 8}),
    ],
)
def test_every_rank_by_itself_gives_the_folded_step(name: str, degrees: dict[str, object]) -> None:
    plan = Plan.model_validate({"zero": 3, "seq_len": 512, **degrees})
    model, cluster = Model.load("llama3.2-1b"), Cluster.load(name)
    assert predict(model, plan, cluster).step_s == pytest.approx(predict(model, plan, cluster, fold=False).step_s)


def test_ranks_behind_pcie_switches_give_the_folded_step_with_offload() -> None:
    tree = Pcie(sockets=((0, 1, 2, 3), (4, 5, 6, 7)), switches=((0, 1), (2, 3), (4, 5), (6, 7)))
    cluster = Cluster.load("pcie-a40-8", num_nodes=2).model_copy(update={"pcie": tree})
    offload = Offload(optimizer="host", parameters="host")
    plan = Plan(dp_shard=8, dp_replicate=2, zero=3, seq_len=512, offload=offload)
    model = Model.load("llama3.2-1b")
    assert predict(model, plan, cluster).step_s == pytest.approx(predict(model, plan, cluster, fold=False).step_s)
