"""nanotron's own way: layers by cost, fp32 sums beside 16-bit gradients, blocking messages, a host that loops over parameters."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.kernels import Gemm
from simulator.parallel.model_shard import shard_of
from simulator.parallel.pipeline.layers import by_cost
from simulator.play.lower import Lowering, lower
from simulator.predict import memory_of
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.program import Collective
from simulator.work.script import communication, pieces, resident_bytes

STACK = Stack.load("nanotron-2025")
MODEL = Model(
    name="small",
    family="llama",
    num_layers=8,
    d_model=1024,
    num_heads=16,
    num_kv_heads=16,
    d_ff=4096,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=32768,
)
PARAMETERS = sum(prod(shape) for _, shapes in pieces(MODEL, Plan()) for shape in shapes)


def plan(**fields: object) -> Plan:
    usual = {"data_parallel": "nanotron", "zero": 0, "seq_len": 2048, "stack": STACK.name, "optimizer_impl": "fused"}
    found = Plan.model_validate(usual | fields)
    rest = 8 // found.num_devices
    return found if found.num_devices >= 8 or found.zero else found.copy_with(dp_replicate=rest)


def lowered(one: Plan, stack: Stack = STACK) -> Lowering:
    cluster = Cluster.load("hgx-h100-8", 1)
    return lower(MODEL, one, cluster, stack, Calibration.datasheet(cluster.device), default_curves())


@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(0, 60), st.integers(1, 8)
)  # layers, cost of one, cost of the head, stages
def test_a_stage_takes_layers_until_the_share_of_the_stages_so_far_is_full(
    layers: int, cost: int, head: int, stages: int
) -> None:
    """Layer k stands behind as many borders as layers before it met or passed one each, a border at a time."""
    total = layers * cost + head
    stage_of = []
    for before in accumulate([cost] * layers, initial=0):
        stage = stage_of[-1] if stage_of else 0
        stage_of.append(stage + (before * stages >= total * (stage + 1)))
    counts = by_cost(layers, cost, head, stages)
    assert counts == tuple(stage_of[:layers].count(stage) for stage in range(stages))
    assert sum(counts) == layers


def test_a_large_vocabulary_is_the_last_stages_share() -> None:
    """Sixteen layers and a head of four: borders at 5, 10 and 15 of 20; whoever passes one keeps the layer."""
    assert by_cost(16, 1, 4, 4) == (5, 5, 5, 1)
    assert by_cost(16, 2, 9, 4) == (6, 5, 5, 0)  # of 41: borders at 10.25, 20.5 and 30.75
    shards = [shard_of(MODEL, plan(pp=2, num_micro_batches=4), stage) for stage in (0, 1)]
    assert [shard.num_layers for shard in shards] == [5, 3]  # the head is worth two layers: the border is at 5 of 10
    even = plan(pp=2, num_micro_batches=4, stage_layers=(4, 4))
    assert shard_of(MODEL, even).num_layers == 4


@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_of_a_parameter(ranks: int) -> None:
    """16-bit parameters and fp32 sums of all; ZeRO-1 shards the fp32 copy and momenta, DDP holds buckets of 16 bits."""
    whole = sum(resident_bytes(MODEL, plan(dp_replicate=ranks)).values())
    sharded = sum(resident_bytes(MODEL, plan(zero=1, dp_shard=ranks)).values())
    others = 2 * 2048 * (MODEL.d_model // MODEL.num_heads) * 4  # rotary tables
    assert whole - others == pytest.approx((2 + 4 + 12 + 2) * PARAMETERS, rel=1e-4)
    assert sharded - others == pytest.approx((2 + 4 + 12 / ranks) * PARAMETERS, rel=1e-4)


def test_sums_travel_in_fp32_to_all_ranks() -> None:
    """ZeRO-1 too: one ring carries 4 bytes a parameter, and the gather brings 16-bit parameters."""
    for one in (plan(dp_replicate=8), plan(zero=1, dp_shard=8)):
        assert sum(comm.all_reduce_bytes for comm in communication(MODEL, one)) == 4 * PARAMETERS
    gathered = sum(comm.parameter_gather_bytes for comm in communication(MODEL, plan(zero=1, dp_shard=8)))
    assert gathered == 2 * PARAMETERS


def test_zero1_reduces_behind_the_last_backward_and_ddp_beside_it() -> None:
    def last_backward_before_first_sum(one: Plan) -> bool:
        ops = lowered(one).program(2).ops
        sums = [op.id for op in ops if isinstance(op, Collective) and op.kind == "all_reduce"]
        return max(op.id for op in ops if op.label.startswith("backward")) < sums[0]

    assert last_backward_before_first_sum(plan(zero=1, dp_shard=8, num_micro_batches=2))
    assert not last_backward_before_first_sum(plan(dp_replicate=8, num_micro_batches=2))


def test_gradients_of_a_micro_batch_end_with_its_backward() -> None:
    """Sums exist already, so more micro-batches need no more memory, and the optimizer sees no 16-bit gradients."""
    peaks = {
        count: memory_of(lowered(plan(num_micro_batches=count))).memory.peak_allocated_bytes for count in (1, 2, 5)
    }
    assert peaks[1] == peaks[2] == peaks[5]


def test_the_slices_of_zero1_cost_the_host_a_call_each() -> None:
    comms = [communication(MODEL, plan(zero=1, dp_shard=ranks)) for ranks in (2, 16)]
    calls = [sum(k.launches for comm in found for k in comm.gather_forward_kernels) for found in comms]
    assert calls[1] == 8 * calls[0]


@pytest.mark.parametrize("tp", [2, 4])
def test_own_tokens_are_multiplied_beside_the_gather(tp: int) -> None:
    """The products of a layer are the same FLOP as without pieces; one of tp parts runs beside the gather."""
    one = plan(tp=tp, sequence_parallel=True)
    layer = build_blocks(MODEL, STACK, one).layer
    qkv = next(op for op in layer.ops if op.name == "qkv")
    own, rest = (kernel for kernel in qkv.forward if isinstance(kernel, Gemm))
    assert own.m * tp == own.m + rest.m == 2048
    assert [(e.at, e.beside) for e in qkv.forward_exchanges] == [(0, 1)]
    plain = build_blocks(MODEL, STACK.copy_with(tp_overlap="none"), one).layer
    assert layer.forward_flop == plain.forward_flop
    kinds = [e.kind for op in layer.ops for e in (*op.forward_exchanges, *op.backward_exchanges)]
    assert sorted(kinds) == ["all_gather"] * 6 + ["reduce_scatter"] * 4  # gathered tokens are gathered again


def test_the_loss_moves_52_bytes_a_logit_and_holds_8_of_them() -> None:
    head = build_blocks(MODEL, STACK, plan()).head
    logits = 2048 * MODEL.vocab_size
    moved = sum(k.num_bytes for op in head.ops if op.category == "loss" for k in (*op.forward, *op.backward))
    assert moved == pytest.approx(52 * logits, rel=0.01)
    loss = next(op for op in head.ops if op.name == "cross_entropy")
    assert loss.forward_temporary_bytes == 4 * logits
    assert loss.grad_overwrites == ("logits.float",)


def test_what_is_agreed_upon_before_a_message_is_nobodys_compute() -> None:
    """In 1F1B between two stages each of six micro-batches waits for two tensors there and for one back, in turn."""
    one, late = plan(pp=2, num_micro_batches=6), 3e-3
    steps = [play(lowered(one, STACK.copy_with(host_message_s=wait))).step_s for wait in (0.0, late)]
    assert steps[1] - steps[0] == pytest.approx(6 * 3 * late, rel=0.15)


def test_a_step_that_waits_for_the_host_takes_what_a_layer_costs_it() -> None:
    """Twice a layer, each micro-batch; a step that waits for the device takes nothing of it."""
    one, seconds = plan(seq_len=128, num_micro_batches=2), 2e-3
    stack = STACK.copy_with(host_layer_s=5e-3)
    more = STACK.copy_with(host_layer_s=5e-3 + seconds)
    steps = [play(lowered(one, each)).step_s for each in (stack, more)]
    assert steps[1] - steps[0] == pytest.approx(2 * 2 * MODEL.num_layers * seconds, rel=0.02)
    long = plan(seq_len=32768, num_micro_batches=2)
    steps = [play(lowered(long, STACK.copy_with(host_layer_s=each))).step_s for each in (0.0, 0.5e-3)]
    assert steps[1] == pytest.approx(steps[0], rel=0.02)


def test_the_optimizers_loop_takes_the_host_for_each_parameter() -> None:
    one, seconds = plan(seq_len=128), 1e-3
    steps = [play(lowered(one, STACK.copy_with(host_parameter_s=each))).step_s for each in (2e-3, 2e-3 + seconds)]
    count = sum(len(shapes) for _, shapes in pieces(MODEL, Plan()))
    assert steps[1] - steps[0] == pytest.approx(count * seconds, rel=0.02)


def test_queries_that_are_rotated_in_place_keep_the_copy_they_share_with_keys_and_values() -> None:
    """Of as many heads the three are turned around as one tensor, of which the queries are a view; of fewer keys each is its own."""
    queries = 2048 * MODEL.d_model * 2  # bytes
    beside = {}  # all that a layer saves but its keys and values
    for heads in (16, 4):
        layer = build_blocks(MODEL.model_copy(update={"num_kv_heads": heads}), STACK, plan()).layer
        beside[heads] = layer.saved_bytes - 2 * queries * heads // 16
    assert beside[16] == beside[4] + 2 * queries
