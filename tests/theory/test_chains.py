"""Broadcasts along chains of ranks, and the ZeRO-1 whose owners broadcast."""

from __future__ import annotations

from math import prod

import pytest

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives.call import Call
from simulator.work.collectives.cost import call_of, collective_s
from simulator.work.collectives.latency import chain_fill_s
from simulator.work.collectives.proxy_messages import crowd, sliced
from simulator.work.script import communication, pieces, resident_bytes

FOUR_NICS = Cluster.load("hgx-a100-80-8-roce-4x100")
MODEL = Model.load("internlm-7b")
SIZE = 1 << 25


def shape(nodes: int) -> GroupShape:
    return GroupShape(
        num_ranks=8 * nodes, num_nodes=nodes, ranks_per_node=8, num_groups_per_node=1, spans_domain=nodes > 1
    )


def call(kind: str, nodes: int, size: int = SIZE) -> Call:
    return call_of(kind, size, shape(nodes), FOUR_NICS.with_nodes(nodes), Nccl.of("2.14.3", {}))


def test_a_chain_is_late_by_a_chunk_of_every_channel_a_node() -> None:
    one = chain_fill_s(call("broadcast", 2), "ll128")
    assert one > 0
    for nodes in (3, 9, 129):
        assert chain_fill_s(call("broadcast", nodes), "ll128") == pytest.approx((nodes - 1) * one)
    nics = 4 * 100e9 / 8
    assert one * nics / (640 * 120 * 8 * 15 // 16) == pytest.approx(8)  # channels: two for each NIC


def test_only_chains_over_nodes_wait_and_no_front_is_larger_than_the_tensor() -> None:
    assert chain_fill_s(call("all_gather", 8), "ll128") == 0
    assert chain_fill_s(call("broadcast", 1), "simple") == 0
    assert chain_fill_s(call("broadcast", 8, 8000), "ll128") == pytest.approx(7 * 8000 / (4 * 100e9 / 8))


def test_broadcasts_grow_with_the_ranks_where_all_gathers_hardly_do() -> None:
    few, many = (collective_s("broadcast", SIZE, shape(n), FOUR_NICS.with_nodes(n)) for n in (8, 128))
    assert many > 4 * few


def plan(ranks: int) -> Plan:
    return Plan.model_validate({"zero": 1, "data_parallel": "internevo", "dp_shard": ranks, "stack": "internevo-2023"})


def test_owners_broadcast_once_each_or_once_a_tensor() -> None:
    tensors = sum(len(shapes) for _, shapes in pieces(MODEL, plan(8)))
    for ranks in (8, 64, 1024):
        comms = communication(MODEL, plan(ranks))
        sent = sum(size for comm in comms for size, _ in comm.broadcasts)
        assert sent == 2 * MODEL.num_parameters
        calls = sum(count for comm in comms for _, count in comm.broadcasts)
        if ranks > tensors:
            assert calls == tensors
        else:  # at least one for each piece of the model, else one an owner
            assert max(ranks, len(comms)) * 0.8 <= calls <= max(ranks, len(comms)) * 1.2


def test_the_fullest_rank_holds_the_largest_tensor_where_there_are_more_ranks_than_tensors() -> None:
    largest = max(prod(one) for _, shapes in pieces(MODEL, plan(8)) for one in shapes)
    held = resident_bytes(MODEL, plan(1024))
    assert held["optimizer_state"] == pytest.approx(12 * largest)
    assert held["parameters"] == 2 * MODEL.num_parameters


def test_small_whole_chunks_are_one_message() -> None:
    most = 64 * 8 * 32 * 1024  # ranks, channels (two for each of four NICs), and a 32nd of a slice of 1 MiB
    assert [sliced(call("all_gather", 8, size), "ring", "simple") for size in (most, most + 1)] == [False, True]
    assert sliced(call("all_gather", 8, 1), "ring", "ll")


@pytest.mark.parametrize("nodes", [2, 8])
def test_crowding_is_as_fitted_and_grows_by_levels(nodes: int) -> None:
    assert crowd(call("all_to_all", nodes)) == pytest.approx(1 - 2 / nodes)
    assert crowd(call("all_gather", nodes)) == 0
    grown = crowd(call("all_to_all", 4 * nodes)) - crowd(call("all_to_all", 2 * nodes))
    assert grown == pytest.approx(crowd(call("all_to_all", 4)))
