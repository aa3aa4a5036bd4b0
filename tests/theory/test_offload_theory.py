"""Offload against ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857).

Letters as there: Ψ (M) parameters, N ranks, nl layers, hd hidden size, bsz batch, seq sequence length.
"""

from __future__ import annotations

from collections import Counter

import pytest

from simulator.base.errors import ClusterError
from simulator.memory import activation_bytes, step_live_bytes, write_history
from simulator.play.engine import run
from simulator.play.lower import Lowering, lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.plan.records import OptimizerPlan
from simulator.spec.software.stack import Stack
from simulator.work.offload import moves, tier_usage
from simulator.work.ops import build_blocks
from simulator.work.program import Collective
from simulator.work.script import model_state_bytes, resident_tensors

MODEL = Model(
    name="small",
    family="gpt2",
    num_layers=4,
    d_model=256,
    num_heads=4,
    num_kv_heads=4,
    d_ff=1024,
    mlp="gelu",
    norm="layer",
    positions="learned",
    max_positions=1024,
    vocab_size=1024,
)
PSI = MODEL.num_parameters
HOST = Offload(optimizer="host")
BOTH = Offload(optimizer="host", parameters="host")
NVME = Offload(optimizer="nvme", parameters="nvme")


def deepspeed(zero: int, ranks: int, offload: Offload, **more: object) -> Plan:
    given = {
        "data_parallel": "deepspeed",
        "zero": zero,
        "dp_shard": ranks,
        "precision": "fp16",
        "seq_len": 256,
        "optimizer_impl": "foreach",
    }
    return Plan.model_validate({**given, "offload": offload, **more})


def node(gpus: int) -> Cluster:
    data = {field: getattr(Cluster.load("hgx-h100-8"), field) for field in Cluster.model_fields}
    return Cluster.parse({**data, "gpus_per_node": gpus, "nvlink_domain_size": gpus}, "test", ClusterError)


def lowered(plan: Plan) -> Lowering:
    cluster = node(plan.num_devices)
    return lower(MODEL, plan, cluster, Stack.load(plan.stack), Calibration.ideal(), default_curves())


def moved(plan: Plan) -> Counter[str]:
    """Kind of transfer -> bytes (updates: elements) that one rank moves in a step."""
    total: Counter[str] = Counter()
    for op in lowered(plan).program(plan.num_micro_batches).ops:
        if isinstance(op, Collective) and not op.stream.startswith("nccl"):
            total[op.kind] += op.size_bytes
    return total


@pytest.mark.parametrize("ranks", [1, 4])
def test_zero_offload_leaves_two_bytes_a_parameter_on_the_gpu(ranks: int) -> None:
    # section 3: 16 bytes a parameter become 2 on the GPU, "reducing its memory by 8 times"
    plan = deepspeed(2, ranks, HOST)
    padded = -(-PSI // ranks) * ranks
    assert model_state_bytes(MODEL, plan) == 2 * padded
    assert model_state_bytes(MODEL, deepspeed(2, 1, Offload())) == 16 * PSI


@pytest.mark.parametrize("ranks", [1, 4])
def test_zero_offload_keeps_sixteen_bytes_a_parameter_on_the_host_divided_by_the_ranks(ranks: int) -> None:
    # fp32 weights, momentum, variance and gradients; beside them one buffer of the largest parameter's 16-bit gradient
    below = tier_usage(MODEL, deepspeed(2, ranks, HOST))
    buffer = 2 * max(MODEL.vocab_size * MODEL.d_model, MODEL.d_model * MODEL.d_ff)
    assert below.host_bytes == 16 * -(-PSI // ranks) + buffer
    assert below.nvme_bytes == 0


def test_zero_offload_moves_four_bytes_a_parameter() -> None:
    # section 3.3: 2M of gradients down and 2M of parameters up is the least any such strategy can move
    assert moved(deepspeed(2, 1, HOST)) == {"d2h": 2 * PSI, "h2d": 2 * PSI, "cpu_adam": PSI}


def test_zero_infinity_keeps_twenty_bytes_a_parameter() -> None:
    # section 3: 16-bit parameters and gradients, fp32 momentum, variance, parameters and gradients
    below = tier_usage(MODEL, deepspeed(3, 4, BOTH))
    assert below.host_bytes == 20 * -(-PSI // 4)
    assert resident_tensors(MODEL, deepspeed(3, 4, BOTH))["parameters"] == []


@pytest.mark.parametrize(
    ("layers", "hidden", "published"),
    [(80, 10, "1.83"), (100, 20, "9.16"), (128, 25, "18.31"), (195, 64, "182.81"), (315, 160, "1845.70")],
)
def test_model_states_of_zero_infinitys_table(layers: int, hidden: int, published: str) -> None:
    """Figure 2a of arXiv 2104.07857: states in TB (2⁴⁰) of models with nl layers of 12 hd² parameters."""
    per_parameter = tier_usage(MODEL, deepspeed(3, 1, BOTH)).host_bytes / PSI
    tebibytes = per_parameter * 12 * layers * (hidden * 1024) ** 2 / 2**40
    assert tebibytes == pytest.approx(float(published), abs=0.006)


def test_states_on_nvme_pass_through_a_set_of_buffers_a_round() -> None:
    group = 200_000
    plan = deepspeed(3, 1, Offload(optimizer="nvme", parameters="host", sub_group_numel=group))
    below = tier_usage(MODEL, plan)
    assert below.nvme_bytes == 16 * PSI
    assert below.host["swap_buffers"] == 3 * 4 * group * 4  # three sets of four fp32 buffers
    transfers = moved(plan)
    # weights, moments and gradients come, weights and moments go back; gradients went there before
    assert transfers["nvme_read"] == 16 * PSI
    assert transfers["nvme_write"] >= 12 * PSI + 4 * PSI
    assert transfers["nvme_write"] - 16 * PSI < 16 * 4 * len(lowered(plan).step.units)


def test_fsdp2_fetches_fp32_shards_for_forward_and_backward() -> None:
    plan = Plan(dp_shard=4, seq_len=256, offload=BOTH)
    transfers = moves(MODEL, plan, {})
    layer = transfers.units["layer1"]
    numel = sum(-(-rows // 4) * per_row for rows, per_row in _rows())
    assert layer.fetch_forward_bytes == layer.fetch_backward_bytes == layer.gradient_bytes == 4 * numel
    # the root stays gathered between forward and backward
    assert transfers.units["head"].fetch_backward_bytes == 0
    assert moved(plan)["cpu_adam"] == sum(move.gradient_bytes for move in transfers.units.values()) // 4


def _rows() -> list[tuple[int, int]]:
    shapes = [shape for _, shape in MODEL.parameter_shapes("layer")]
    return [(shape[0], shape[1] if len(shape) == 2 else 1) for shape in shapes]


def test_offloaded_checkpoints_are_one_tensor_a_layer() -> None:
    # ZeRO-Infinity, section 3: 2 × bsz × seq × hd × nl / ci bytes; the last layer's is used at once and stays
    plan = Plan(micro_batch_size=3, seq_len=128, recompute="full", offload=Offload(activations="host"))
    stack = Stack.load(plan.stack)
    sizes = activation_bytes(MODEL, plan, stack, build_blocks(MODEL, stack, plan))
    assert sizes == {f"layer{i}": 2 * 3 * 128 * MODEL.d_model for i in range(MODEL.num_layers - 1)}


def test_offloaded_activations_do_not_grow_with_depth() -> None:
    def peak(layers: int, *, offloaded: bool) -> int:
        model = MODEL.model_copy(update={"num_layers": layers})
        plan = Plan(seq_len=1024, micro_batch_size=4, offload=Offload(activations="host" if offloaded else "none"))
        stack = Stack.load(plan.stack)
        history = write_history(model, plan, stack, build_blocks(model, stack, plan), ())
        course = step_live_bytes(history)
        return course.peak[0] - course.resident

    kept = peak(16, offloaded=False) - peak(8, offloaded=False)
    gone = peak(16, offloaded=True) - peak(8, offloaded=True)
    gradients = 8 * sum(rows * per_row for rows, per_row in _rows()) * 4
    assert gone <= gradients < kept


def test_the_cpu_updates_at_the_tiers_rate_and_nothing_hides_it() -> None:
    lowering = lowered(deepspeed(2, 1, HOST))
    program = lowering.program(1)
    timeline = run([program])
    tier = node(1).host_tier
    assert tier is not None
    spent = [span for span in timeline.spans if span.stream == "cpu_adam"]
    assert sum(span.end_s - span.start_s for span in spent) == pytest.approx(PSI / tier.adam_numel_per_s)
    assert float(timeline.exposed("cpu_adam")) == pytest.approx(PSI / tier.adam_numel_per_s)


def test_ranks_of_a_node_share_its_cores() -> None:
    tier = node(1).host_tier
    assert tier is not None
    for ranks in (1, 2, 8):
        timeline = run([lowered(deepspeed(2, ranks, HOST)).program(1)])
        (spent,) = [span for span in timeline.spans if span.stream == "cpu_adam"]
        # each rank updates Ψ/N, all of them together Ψ on the same cores
        assert spent.end_s - spent.start_s == pytest.approx(-(-PSI // ranks) * ranks / tier.adam_numel_per_s)


def test_torchs_own_loop_runs_in_each_process() -> None:
    """`torchrun` gives every rank one thread, so that the ranks of a node update beside each other."""
    tier = node(1).host_tier
    assert tier is not None
    for ranks in (1, 2, 8):
        plan = Plan(dp_shard=ranks, seq_len=256, offload=BOTH, optimizer=OptimizerPlan(impl="foreach"))
        timeline = run([lowered(plan).program(1)])
        spent = [span for span in timeline.spans if span.stream == "cpu_adam"]
        seconds = float(sum(span.end_s - span.start_s for span in spent))
        assert seconds == pytest.approx(moved(plan)["cpu_adam"] / tier.torch_adam_numel_per_s)
        half = run([lowered(plan.copy_with(master_dtype="bf16", optimizer_dtype="bf16")).program(1)])
        spent = [span for span in half.spans if span.stream == "cpu_adam"]
        # 0.17e9 elements a second in fp32 and 0.30e9 in bf16, of one thread (topologies/tiers)
        assert float(sum(span.end_s - span.start_s for span in spent)) == pytest.approx(seconds * 0.17 / 0.3, rel=0.01)


def test_experts_leave_as_all_weights_do() -> None:
    """A mixture whose experts every rank has: twenty bytes a parameter, sixteen under FSDP2, a checkpoint's input.

    Beside it leaves what the balancing loss keeps of each router: fp32 logits and probabilities of all experts.
    """
    model = Model.load("olmoe-1b-7b").model_copy(update={"num_layers": 2})
    numel = model.num_parameters
    assert tier_usage(model, deepspeed(3, 4, BOTH)).host_bytes == pytest.approx(20 * numel / 4, rel=1e-3)
    assert tier_usage(model, Plan(dp_shard=4, offload=BOTH)).host_bytes == pytest.approx(16 * numel / 4, rel=1e-3)
    plan = Plan.model_validate({"seq_len": 128, "recompute": "full", "offload": {"activations": "host"}})
    stack = Stack.load(plan.stack)
    assert activation_bytes(model, plan, stack, build_blocks(model, stack, plan)) == {
        "layer0": 2 * 128 * model.d_model + 2 * 4 * 128 * model.experts.num_experts
    }
