"""What DTensor takes of the host: so much a split linear layer each way, so much a collective of tensor parallelism."""

from __future__ import annotations

import pytest

from simulator.play.lower import lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks

LAYERS = 6
MODEL = Model(
    name="narrow",
    family="llama",
    num_layers=LAYERS,
    d_model=256,
    num_heads=8,
    num_kv_heads=8,
    d_ff=512,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=1024,
)
PLAIN = Stack.load("torch-2.11-eager").copy_with(host_dtensor_s=0.0, host_redistribute_s=0.0)


def step_s(stack: Stack, **fields: object) -> float:
    plan = Plan.model_validate({"seq_len": 128, "zero": 0, "data_parallel": "ddp", "stack": stack.name} | fields)
    cluster = Cluster.load("hgx-h100-8", 1)
    low = lower(MODEL, plan, cluster, stack, Calibration.datasheet(cluster.device), default_curves())
    return play(low).step_s


@pytest.mark.parametrize("sequences", [False, True])
def test_a_step_that_waits_for_the_host_takes_what_a_layer_has_of_each(*, sequences: bool) -> None:
    """Seven linear layers and the head, there and back; two changes of layout each way a layer, or twice as many."""
    fields = {"tp": 8, "sequence_parallel": sequences}
    base = step_s(PLAIN, **fields)
    linear_s, change_s = 2e-3, 5e-3
    more = step_s(PLAIN.copy_with(host_dtensor_s=linear_s), **fields) - base
    assert more == pytest.approx(2 * linear_s * (7 * LAYERS + 1), rel=0.05)
    plan = Plan.model_validate({"seq_len": 128, "zero": 0, "stack": PLAIN.name} | fields)
    blocks = build_blocks(MODEL, PLAIN, plan)
    layer = sum(len(op.forward_exchanges) + len(op.backward_exchanges) for op in blocks.layer.ops)
    assert layer == (8 if sequences else 4)
    ends = sum(
        len(op.forward_exchanges) + len(op.backward_exchanges)
        for block in (blocks.embedding, blocks.head)
        for op in block.ops
    )
    more = step_s(PLAIN.copy_with(host_redistribute_s=change_s), **fields) - base
    assert more == pytest.approx(change_s * (layer * LAYERS + ends), rel=0.05)


def test_without_tensor_parallelism_nothing_passes_through_dtensor() -> None:
    slow = PLAIN.copy_with(host_dtensor_s=1.0, host_redistribute_s=1.0)
    assert step_s(slow, dp_replicate=8) == step_s(PLAIN, dp_replicate=8)


def test_compiled_and_hand_fused_stacks_take_none_of_it() -> None:
    for name in Stack.names():
        stack = Stack.load(name)
        assert not stack.host.dtensor_s or (stack.traits.dtensor and stack.traits.runs_operators), name
