"""Traffic of different groups on one link, of NICs that GPUs share, and of copies beside collectives: shares done by hand.

Ideal links throughout: bytes over data-sheet rates, no latency. Rates are max-min fair, so two flows on a link halve it until
the smaller has gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from simulator import Calibration, Model, Stack
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.play.engine import run
from simulator.play.lower import lower
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import D2H, H2D, HOST_MEMORY, HostTier
from simulator.spec.plan import Offload, Plan
from simulator.work.collectives import KINDS, LinkCurves, collective_cost, default_curves, host_traffic, link_capacities
from simulator.work.offload import Transfers
from simulator.work.program import Collective, CollectiveCost, Program

IDEAL = LinkCurves.ideal()
H100 = Cluster.load("hgx-h100-8", num_nodes=4)
NIC, PORT = 50 * 10**9, 450 * 10**9
S = 2**30


def ends(costs: Sequence[CollectiveCost], links: dict[str, float | Fraction]) -> list[float]:
    """When each of several flows that start together has arrived."""
    ops = [
        Collective(id=i, stream=str(i), label=str(i), kind="all_gather", key=str(i), cost=one, size_bytes=1)
        for i, one in enumerate(costs)
    ]
    program = Program(name="rank", num_ranks=1, ops=tuple(ops), links=links)
    return [float(span.end_s) for span in run([program]).spans]


def of(mesh: Mesh, axis: str, kind: str, size: int) -> CollectiveCost:
    return collective_cost(kind, size, mesh.group_shape(axis), mesh.cluster, curves=IDEAL)


def test_two_groups_that_leave_the_node_halve_its_cards() -> None:
    """dp 4 and cp 2 of 8 GPUs a node, each across nodes: equal bytes end together, at the sum of both times."""
    mesh = Mesh(Plan(dp_replicate=4, dp_shard=8, seq_len=4096), H100)
    replicas = of(mesh, "dp_replicate", "all_reduce", S)
    links = link_capacities(H100, IDEAL)
    # a ring of four ranks, one a node: 2·3/4·S into each GPU's NIC
    alone = 1.5 * S / NIC
    assert ends([replicas], links) == [pytest.approx(alone)]
    assert ends([replicas, replicas], links) == [pytest.approx(2 * alone)] * 2


def test_a_small_flow_leaves_the_rest_of_the_cards_to_a_large_one() -> None:
    mesh = Mesh(Plan(dp_replicate=4, dp_shard=8, seq_len=4096), H100)
    small, large = (of(mesh, "dp_replicate", "all_reduce", size) for size in (S, 3 * S))
    one = 1.5 * S / NIC
    assert ends([small, large], link_capacities(H100, IDEAL)) == [pytest.approx(2 * one), pytest.approx(4 * one)]


def test_groups_inside_a_node_and_replicas_between_nodes_do_not_meet() -> None:
    """HSDP: shards over NVLink, replicas over cards: each as fast as alone."""
    mesh = Mesh(Plan(dp_replicate=4, dp_shard=8, seq_len=4096), H100)
    shards, replicas = of(mesh, "dp_shard", "all_gather", S), of(mesh, "dp_replicate", "all_reduce", S // 8)
    together = ends([shards, replicas], link_capacities(H100, IDEAL))
    assert together == [pytest.approx(7 / 8 * S / PORT), pytest.approx(1.5 * S / 8 / NIC)]


def test_eight_replica_groups_of_a_node_have_a_card_each() -> None:
    """HSDP's replicas use all NICs of a node at once: what one ring of all GPUs with the same total would take.

    Total into a node: 8 groups × 2·3/4·S/8 = 1.5·S over 8 NICs.
    """
    mesh = Mesh(Plan(dp_replicate=4, dp_shard=8, seq_len=4096), H100)
    (end,) = ends([of(mesh, "dp_replicate", "all_reduce", S // 8)], link_capacities(H100, IDEAL))
    assert end == pytest.approx(1.5 * S / (8 * NIC))


def test_half_the_cards_are_half_the_speed() -> None:
    """The slope over nodes is the NICs': 8 × 400 Gb/s against 4."""
    assert H100.inter is not None
    few = H100.model_copy(update={"inter": H100.inter.model_copy(update={"num_nics": 4})})
    shape = Mesh(Plan(dp_shard=32, seq_len=4096), H100).group_shape("dp_shard")
    times = [
        ends([collective_cost("all_gather", S, shape, c, curves=IDEAL)], link_capacities(c, IDEAL))[0]
        for c in (H100, few)
    ]
    assert times[0] == pytest.approx(31 / 32 * S / (8 * NIC))
    assert times[1] == pytest.approx(2 * times[0])


def test_data_tensor_and_pipeline_groups_at_once() -> None:
    """Tensor groups stay on NVLink. Data groups and sends between stages share each GPU's NIC.

    A send of P bytes from each GPU to the next node: r·P into a node of r NICs, P a NIC. Data: a ring of two ranks, one a
    node: 2·1/2·S = S. With P = S both end at 2·S / NIC; the tensor group's all-reduce does not notice.
    """
    group = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=8, spans_domain=True)
    tensor = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
    stages = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=8, spans_domain=True)
    costs = [
        collective_cost("all_reduce", S, group, H100, curves=IDEAL),
        collective_cost("all_reduce", S, tensor, H100, curves=IDEAL),
        collective_cost("send_recv", S, stages, H100, curves=IDEAL),
    ]
    data_end, tensor_end, send_end = ends(costs, link_capacities(H100, IDEAL))
    assert tensor_end == pytest.approx(2 * 7 / 8 * S / PORT)
    assert data_end == send_end == pytest.approx(2 * S / NIC)


# -- copies between a GPU and its host, beside collectives ---------------------------------------------------------------

A100 = Cluster.load("dgx-a100-80-8", num_nodes=2)
COPY = 20 * 10**9
REPLICAS = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=8, spans_domain=True)


def transfers(cluster: Cluster, **given: float) -> Transfers:
    tier = HostTier.of_kind("pcie4").model_copy(
        update={"h2d_bytes_per_s": COPY, "d2h_bytes_per_s": COPY, "both_bytes_per_s": 2 * COPY, "copy_latency_s": 0.0}
        | {"memory_bytes_per_s": 1e15}
        | given
    )
    offload = Offload(optimizer="host")
    return Transfers(tier=tier, gpus_per_node=8, num_ranks=cluster.num_devices, offload=offload)


def beside(kind: str, size: int, shape: GroupShape, cluster: Cluster, moves: Transfers) -> CollectiveCost:
    traffic = host_traffic(kind, size, shape, cluster, IDEAL)
    found = collective_cost(kind, size, shape, cluster, curves=IDEAL)
    pcie, memory = float(traffic.pcie_bytes), float(traffic.memory_bytes)
    return moves.beside(found, pcie, memory, traffic.fastest_bytes_per_s)


def test_a_copy_to_the_gpu_shares_its_pcie_link_with_what_its_card_receives() -> None:
    """NICs of 25 GB/s a GPU, copies of 20 GB/s: S bytes of each over one link of 20 GB/s.

    What the ring of two sends counts S·20/25 on the link (so that alone it takes S/25, and not S/20). It has the same share
    of bytes a second: both run at 20 / (1 + 4/5) = 11.1 GB/s, and arrive together. Alone: 20 and 25 GB/s.
    """
    moves = transfers(A100)
    links = {**link_capacities(A100, IDEAL), **moves.links()}
    ring, copy = beside("all_reduce", S, REPLICAS, A100, moves), moves.cost("h2d", S)
    assert ends([ring], links) == [pytest.approx(S / 25e9)]
    assert ends([copy], links) == [pytest.approx(S / 20e9)]
    assert ends([ring, copy], links) == [pytest.approx(S * (1 + 4 / 5) / 20e9)] * 2


def test_collectives_on_nvlink_do_not_slow_copies() -> None:
    shape = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
    assert host_traffic("all_gather", S, shape, A100, IDEAL).pcie_bytes == 0
    assert not {H2D, D2H} & set(beside("all_gather", S, shape, A100, transfers(A100)).link_bytes)


def test_cards_without_rdma_pass_host_memory_twice() -> None:
    assert A100.inter is not None
    slow = A100.model_copy(update={"inter": A100.inter.model_copy(update={"rdma": False})})
    moves = transfers(slow)
    assert HOST_MEMORY not in beside("all_reduce", S, REPLICAS, A100, moves).link_bytes
    # 8 ranks of the node, each S over its NIC, written and read
    assert beside("all_reduce", S, REPLICAS, slow, moves).link_bytes[HOST_MEMORY] == pytest.approx(8 * 2 * S)


def test_gpus_without_peer_access_load_host_memory_and_both_ways_of_pcie() -> None:
    """A ring of 8 on a box without peer access: 7/8·S up and down each GPU's link, all of it through memory."""
    box = Cluster.load("pcie-l40s-8")
    shape = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
    traffic = host_traffic("all_gather", S, shape, box, IDEAL)
    assert traffic.pcie_bytes == traffic.memory_bytes == Fraction(7, 8) * S
    pair = GroupShape(num_ranks=2, num_nodes=1, ranks_per_node=2, num_groups_per_node=1, spans_domain=False)
    assert host_traffic("all_gather", S, pair, box, IDEAL).memory_bytes == 0  # peers, by NCCL's rule for AMD


def test_copies_of_two_gpus_share_the_uplink_of_their_switch() -> None:
    """Pairs behind a switch whose own link is as wide as one GPU's: 10 of 20 GB/s each, in each direction."""
    moves = replace(transfers(A100), switches=((0, 1), (2, 3), (4, 5), (6, 7)), uplink_bytes_per_s=COPY)
    assert ends([moves.cost("h2d", S)], dict(moves.links())) == [pytest.approx(2 * S / COPY)]
    both = ends([moves.cost("h2d", S), moves.cost("d2h", S)], dict(moves.links()))
    assert both == [pytest.approx(2 * S / COPY)] * 2
    # each rank by itself: 0 and 1 meet, 2 does not
    links = {link: rate for rank in range(3) for link, rate in moves.links(rank).items()}
    assert ends([moves.cost("h2d", S, rank) for rank in range(3)], links) == [
        pytest.approx(2 * S / COPY),
        pytest.approx(2 * S / COPY),
        pytest.approx(S / COPY),
    ]


def test_an_offloaded_plan_on_two_nodes_pays_for_the_shared_link() -> None:
    """Without what collectives put on PCIe the step of two nodes is faster; one node's is not: it gathers over NVLink."""
    slower = {}
    for nodes in (1, 2):
        offload = Offload(optimizer="host", parameters="host")
        plan = Plan(dp_shard=8 * nodes, zero=3, seq_len=2048, offload=offload)
        calibration, stack = Calibration.load("a100-sxm"), Stack.load("torch-2.11-eager")
        model, links = Model.load("llama3.2-1b"), calibration.links or default_curves()
        program = lower(model, plan, A100.with_nodes(nodes), stack, calibration, links).program(1)
        ops = tuple(apart(op) if isinstance(op, Collective) else op for op in program.ops)
        slower[nodes] = float(run([program]).step_s - run([replace(program, ops=ops)]).step_s)
    assert slower[1] == 0
    assert slower[2] > 0


def apart(op: Collective) -> Collective:
    """A collective without what it puts on the links of copies; copies as they are."""
    if op.kind not in KINDS:
        return op
    kept = {link: size for link, size in op.cost.link_bytes.items() if link in ("intra", "inter")}
    return replace(op, cost=replace(op.cost, link_bytes=kept))
