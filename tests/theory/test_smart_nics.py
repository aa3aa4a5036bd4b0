"""NICs that run collectives themselves, or compress what they send: against bytes over links and SMs of channels."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.parallel.mesh import Mesh
from simulator.predict.telemetry import telemetry
from simulator.spec.calibration.collective_curves import default_curves
from simulator.work.collectives import collective_cost, interference, link_capacities

NODES = 4
CLUSTER = Cluster.load("hgx-h100-8", NODES)
PLAN = Plan(dp_shard=8, dp_replicate=NODES, seq_len=512)
MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, d_ff=2816, vocab_size=8192)


def with_nics(**traits: Any) -> Cluster:
    return CLUSTER.model_copy(update={"fabric": CLUSTER.fabric.model_copy(update=traits)})


def far_s(cluster: Cluster) -> float:
    """Seconds that a large all-reduce of one GPU a node occupies the network."""
    curves, shape = default_curves(), Mesh(PLAN, cluster).group_shape("dp_replicate")
    cost = collective_cost("all_reduce", 2**30, shape, cluster, curves=curves)
    return float(cost.link_bytes["inter"]) / float(link_capacities(cluster, curves)["inter"])


def test_compressed_bytes_take_their_ratio_until_pcie_is_full() -> None:
    assert CLUSTER.host is not None
    fed = CLUSTER.gpus_per_node * CLUSTER.host.bytes_per_s / CLUSTER.node_bytes_per_s
    for ratio in (1.0, 1.1, fed, 2 * fed):
        assert far_s(CLUSTER) / far_s(with_nics(nic_compression=ratio)) == pytest.approx(min(ratio, fed))


def test_a_nic_sends_fewer_bytes_and_a_step_is_never_longer() -> None:
    usual, smart = CLUSTER, with_nics(nic_compression=1.25)
    steps = [predict(MODEL, PLAN, cluster) for cluster in (usual, smart)]
    assert steps[1].step_s <= steps[0].step_s
    counted = [telemetry(step, MODEL, PLAN, one).busiest for step, one in zip(steps, (usual, smart), strict=True)]
    assert counted[0]["nic"][0].amount == pytest.approx(1.25 * counted[1]["nic"][0].amount)
    assert counted[0]["pcie up"][0].amount == pytest.approx(counted[1]["pcie up"][0].amount)  # whole, up to the NIC


def test_collectives_of_nics_leave_sms_and_not_the_memory() -> None:
    mesh, smart = Mesh(PLAN, CLUSTER), with_nics(nic_collectives=True)
    far, near = mesh.group_shape("dp_replicate"), mesh.group_shape("dp_shard_cp")
    both = [interference("all_reduce", far, cluster) for cluster in (CLUSTER, smart)]
    assert 0 < both[1] < both[0]
    bare = [interference("all_reduce", far, cluster, memory_weight=0.0) for cluster in (CLUSTER, smart)]
    assert bare[1] == 0 < bare[0]
    assert both[0] - both[1] == pytest.approx(bare[0])
    assert interference("all_reduce", near, smart) == interference("all_reduce", near, CLUSTER)
    assert predict(MODEL, PLAN, smart).step_s <= predict(MODEL, PLAN, CLUSTER).step_s
