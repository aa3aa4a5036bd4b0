"""What a step does beside its layers: maxima of fp8 that ranks agree on, gradients that are clipped."""

from collections import Counter

import pytest

from simulator.base.kernels import DTYPE_BYTES
from simulator.play.lower import Lowering, lower
from simulator.predict import predict
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import clip_kernels
from simulator.work.program import Collective, Program

MODEL = Model(
    name="small",
    family="llama",
    num_layers=8,
    d_model=512,
    num_heads=8,
    num_kv_heads=4,
    d_ff=1024,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=4096,
)
LINEAR_LAYERS = 4  # of a layer: QKV, the way out, gate with up, down


def lowered(plan: Plan, stack: Stack, nodes: int = 1) -> Lowering:
    cluster = Cluster.load("hgx-h100-8", nodes)
    return lower(MODEL, plan, cluster, stack, Calibration.datasheet(cluster.device), default_curves())


def sent(program: Program) -> Counter[tuple[str, str, int]]:
    """(kind, role, bytes) of every collective, those inside folded passes among them."""
    found = Counter({(kind, role, size): count for kind, role, size, count in program.exchanges})
    for op in program.ops:
        if isinstance(op, Collective):
            found[op.kind, op.key.partition(":")[0], op.size_bytes] += 1
    return found


@pytest.mark.parametrize(("pp", "virtual_stages"), [(1, 1), (2, 1), (2, 2)])
def test_ranks_agree_on_the_maxima_of_all_their_layers_behind_each_pass_of_a_chunk(
    pp: int, virtual_stages: int
) -> None:
    plan = Plan(
        data_parallel="megatron", zero=1, tp=2, pp=pp, dp_shard=4 // pp, micro_batch_size=1, seq_len=512,
        num_micro_batches=4, precision="fp8", fp8_recipe="delayed",
        virtual_stages=virtual_stages,
    )  # fmt: skip
    stack = Stack.load("megatron-core-2025")
    found = sent(lowered(plan, stack).programs(4)[0])
    modules = MODEL.num_layers // pp * LINEAR_LAYERS
    passes = 4 * virtual_stages
    # Each keeps three maxima forward, and two backward; four bytes each
    assert found["all_reduce", "stage", 4 * 3 * modules] == passes
    assert found["all_reduce", "stage", 4 * 2 * modules] == passes
    of_this_step = sent(lowered(plan.copy_with(fp8_recipe="tensorwise"), stack).programs(4)[0])
    assert not [one for one in of_this_step if one[1] == "stage"]


def test_clipping_passes_three_times_over_the_gradients_that_a_rank_has() -> None:
    plan = Plan(data_parallel="fsdp2", dp_shard=8, micro_batch_size=1, seq_len=512)
    stack = Stack.load("torchtitan-2025-eager")
    numel, tensors = 1000, 100
    assert sum(k.read_bytes + k.write_bytes for k in clip_kernels(numel, tensors, plan)) == pytest.approx(
        3 * numel * DTYPE_BYTES["fp32"], abs=4 * tensors
    )
    clipped, plain = (lowered(plan, stack.copy_with(clips=how)) for how in ("scaled", ""))
    more_s = clipped.step.clip.duration_s
    assert more_s > 0 == plain.step.clip.duration_s
    norms = [op for op in clipped.programs(1)[0].ops if op.label == "stage's gradient norm"]
    assert [(op.kind, op.size_bytes) for op in norms if isinstance(op, Collective)] == [("all_reduce", 4)]
    steps = [
        predict(MODEL, plan, Cluster.load("hgx-h100-8"), stack=stack.copy_with(clips=how)) for how in ("scaled", "")
    ]
    assert steps[0].breakdown["optimizer"] - steps[1].breakdown["optimizer"] > 0


def test_deepspeeds_own_step_has_the_passes_of_clipping() -> None:
    plan = Plan(data_parallel="deepspeed", zero=2, dp_shard=8, micro_batch_size=1, seq_len=512)
    assert not lowered(plan, Stack.load("transformers-2024")).step.clip.parts
