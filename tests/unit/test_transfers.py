"""The schedule of transfers: in order, in time, and as much as the plan says."""

from __future__ import annotations

from itertools import pairwise

from simulator import predict
from simulator.predict.transfers import Transfer, transfer_schedule
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan

HGX = Cluster.load("hgx-h100-8")
SMALL = Model.load("llama3.2-1b")


def schedule(plan: Plan) -> tuple[Transfer, ...]:
    return transfer_schedule(SMALL, plan, HGX).transfers


def test_what_is_needed_is_there() -> None:
    plan = Plan(dp_shard=8, seq_len=2048, num_micro_batches=6)
    found = transfer_schedule(SMALL, plan, HGX)
    assert (found.num_shown, found.num_micro_batches) == (4, 6)
    for one in found.transfers:
        assert one.start_s < one.end_s <= one.released_s
        assert one.slack_s is None or one.slack_s >= -1e-9
    for before, after in pairwise(one for one in found.transfers if one.stream == "nccl:shard"):
        assert before.end_s <= after.start_s + 1e-12  # one communicator, one after another
    assert max(one.released_s for one in found.transfers) <= predict(SMALL, plan, HGX).step_s


def test_gathers_of_a_step_are_the_parameters_of_its_units() -> None:
    """Every block forward and backward, in bf16; 16 blocks of 60,821,504 parameters."""
    gathers = [one for one in schedule(Plan(dp_shard=8, seq_len=2048)) if one.action == "prefetch"]
    blocks = [one for one in gathers if "layer" in one.what]
    assert len(blocks) == 32
    assert {one.size_bytes for one in blocks} == {2 * 60_821_504}
    forward, backward = blocks[0], next(one for one in blocks if one.what == "all-gather layer0 mb0 backward")
    # resharded after its forward, gathered again: the room is free in between
    assert forward.released_s < backward.start_s


def test_parameters_that_stay_are_held_to_their_backward() -> None:
    found = schedule(Plan(dp_shard=8, seq_len=2048, reshard_after_forward=False))
    gathers = {one.what: one for one in found if one.action == "prefetch"}
    assert gathers["all-gather layer0 mb0"].released_s > gathers["all-gather layer15 mb0"].released_s


def test_offloaded_activations_leave_and_come_back() -> None:
    found = schedule(Plan(dp_shard=8, seq_len=2048, offload=Offload(activations="host")))
    out = {one.what.split()[-2]: one for one in found if one.action == "evict"}
    back = {one.what.split()[-2]: one for one in found if one.kind == "h2d"}
    assert out.keys() == back.keys() >= {"layer0", "layer7"}
    for name, one in back.items():
        assert out[name].end_s <= one.start_s
        assert out[name].size_bytes == one.size_bytes
        assert one.needed_s is not None
