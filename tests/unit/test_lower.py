"""The programs that schedules write: what travels, who waits for whom, and what a step without overlap costs."""

from math import prod
from typing import Any

import pytest

from simulator.base.errors import ClusterError, PlanError
from simulator.base.kernels import Gemm
from simulator.parallel.legal import legal
from simulator.parallel.legality import check
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import Lowering, lower
from simulator.play.lower.work import Clock
from simulator.predict import predict
from simulator.predict.play import collective_s, issuing_s, launched_s, play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.program import Collective, Compute, Program
from simulator.work.script import pieces

MODEL = Model(
    name="small",
    family="llama",
    num_layers=6,
    d_model=512,
    num_heads=8,
    num_kv_heads=4,
    d_ff=1024,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=4096,
)


def lowered(plan: Plan, *, stack: str | Stack = "torch-2.6-eager", nodes: int = 1) -> Lowering:
    cluster = Cluster.load("hgx-h100-8", nodes)
    calibration = Calibration.datasheet(cluster.device)
    loaded = Stack.load(stack) if isinstance(stack, str) else stack
    return lower(MODEL, plan, cluster, loaded, calibration, default_curves())


def sent_bytes(program: Program, kind: str) -> int:
    return sum(op.size_bytes for op in program.ops if isinstance(op, Collective) and op.kind == kind)


def waits(program: Program, label: str) -> set[str]:
    labels = {op.id: op.label for op in program.ops}
    return {labels[i] for op in program.ops if op.label == label for i in op.after}


def test_fsdp2_sends_what_the_zero_paper_counts() -> None:
    """Blocks are gathered twice and the kept root once, in bf16; gradients are reduced once, in fp32."""
    shapes = {unit: [shape for _, shape in MODEL.parameter_shapes(unit)] for unit in ("embedding", "layer", "head")}
    layers = MODEL.num_layers * sum(map(prod, shapes["layer"]))
    root = sum(map(prod, shapes["embedding"] + shapes["head"]))
    program = lowered(Plan(dp_shard=8, seq_len=256)).program(1)
    assert sent_bytes(program, "all_gather") == 2 * (2 * layers + root)
    assert sent_bytes(program, "reduce_scatter") == 4 * (layers + root)
    assert sent_bytes(program, "all_reduce") == 0


def test_accumulation_repeats_the_gathers_and_no_sync_reduces_once() -> None:
    plan = Plan(dp_shard=8, seq_len=256, num_micro_batches=3, sync_every_micro_batch=False)
    one, three = lowered(plan).program(1), lowered(plan).program(3)
    assert sent_bytes(three, "all_gather") == 3 * sent_bytes(one, "all_gather")
    assert sent_bytes(three, "reduce_scatter") == sent_bytes(one, "reduce_scatter")


def test_a_group_of_one_node_gathers_again_without_the_network() -> None:
    """reshard_after_forward = 8: forward and reduction cross nodes, the backward's gathers stay inside."""
    plan = Plan(dp_shard=16, seq_len=256)
    inside = lowered(plan.copy_with(reshard_after_forward=8), nodes=2).program(1)
    across = lowered(plan, nodes=2).program(1)
    assert sent_bytes(inside, "all_gather") == sent_bytes(across, "all_gather")

    def backward(program: Program) -> set[str]:
        gathers = [op for op in program.ops if isinstance(op, Collective) and op.label.endswith("backward")]
        return {link for op in gathers if op.kind == "all_gather" for link in op.cost.link_bytes}

    assert backward(across) - backward(inside)
    forward = next(op for op in inside.ops if isinstance(op, Collective) and op.label == "all-gather layer0 mb0")
    assert set(forward.cost.link_bytes) == backward(across)


@pytest.mark.parametrize(("number", "same"), [(1, False), (16, True)])
def test_resharding_to_one_or_all_ranks_is_a_word_of_its_own(number: int, same: object) -> None:
    """torch takes 1 for False and the whole group for True, of the blocks."""
    kinds = [
        lowered(Plan(dp_shard=16, seq_len=256, reshard_after_forward=value), nodes=2).program(1)
        for value in (number, same)
    ]
    labels = [[op.label for op in program.ops if "layer" in op.label] for program in kinds]
    assert labels[0] == labels[1]


def test_hsdp_reduces_shards_between_replicas() -> None:
    sharded = lowered(Plan(dp_shard=8, dp_replicate=2, seq_len=256), nodes=2).program(1)
    assert sent_bytes(sharded, "all_reduce") * 8 == sent_bytes(sharded, "reduce_scatter")


def test_ddp_reduces_every_gradient_once_in_its_own_dtype() -> None:
    program = lowered(Plan(zero=0, dp_replicate=8, seq_len=256, num_micro_batches=2)).program(2)
    assert sent_bytes(program, "all_reduce") == pytest.approx(4 * MODEL.num_parameters, rel=1e-3)
    assert sent_bytes(program, "all_gather") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"zero": 0, "dp_replicate": 8},
        {"zero": 1, "dp_shard": 8},
        {"zero": 3, "dp_shard": 8},
        {"zero": 3, "dp_shard": 8, "data_parallel": "fsdp1"},
        {"zero": 2, "dp_shard": 8, "data_parallel": "deepspeed"},
        {"zero": 3, "dp_shard": 8, "data_parallel": "deepspeed"},
    ],
)
def test_a_backward_that_reduces_is_over_before_the_next_forward(fields: dict[str, object]) -> None:
    """As the libraries wait (docs/background/schedules.md), also where the links are much slower than the compute."""
    plan = Plan.model_validate({**fields, "seq_len": 64, "num_micro_batches": 3, "sync_every_micro_batch": True})
    cluster = Cluster.load("hgx-h100-8")
    spans = predict(MODEL, plan, cluster, Calibration.datasheet(cluster.device)).timeline.of()
    for index in (0, 1):
        reductions = [s for s in spans if s.category in ("all_reduce", "reduce_scatter") and f" mb{index}" in s.label]
        last = max(span.end_s for span in reductions)
        next_forward = next(s.start_s for s in spans if s.label.startswith(f"forward embedding mb{index + 1}"))
        assert next_forward >= last


def test_torch_zero_1_reduces_like_ddp_and_sends_the_parameters_back() -> None:
    """ZeroRedundancyOptimizer: DDP's all-reduce of every gradient, then each owner broadcasts tensor by tensor."""
    program = lowered(Plan(zero=1, dp_shard=8, seq_len=256)).program(1)
    assert sent_bytes(program, "all_reduce") == pytest.approx(4 * MODEL.num_parameters, rel=1e-3)
    assert sent_bytes(program, "broadcast") == 4 * MODEL.num_parameters
    assert sent_bytes(program, "all_gather") == 0


def test_where_the_host_is_the_device_fsdp_waits_for_every_collective_and_ddp_for_none() -> None:
    """torch 2.13: FSDP2 calls collectives with async_op=False and relies on streams, which a CPU has not."""
    blocking, asynchronous = (
        [op.blocking for op in lowered(plan, stack="torch-2.13-cpu").program(1).ops if isinstance(op, Collective)]
        for plan in (Plan(dp_shard=8, seq_len=256), Plan(zero=0, dp_replicate=8, seq_len=256))
    )
    assert blocking
    assert all(blocking)
    assert asynchronous
    assert not any(asynchronous)


def test_a_host_that_reads_each_loss_starts_every_backward_anew() -> None:
    """Megatron-LM's loss_func asks the loss whether it is NaN: the host waits for the forward, once a micro-batch."""
    plan = Plan(dp_shard=8, zero=1, data_parallel="megatron", seq_len=256, num_micro_batches=3)
    megatron = Stack.load("megatron-core-2025").copy_with(host_launch_s=1e-3, clips="")
    programs = [lowered(plan, stack=megatron.copy_with(reads_loss=reads)).program(3) for reads in (True, False)]
    waited = [[op.label for op in program.ops if op.blocking] for program in programs]
    assert waited == [[f"forward head mb{index}" for index in range(3)], []]
    reading, ahead = (play(lowered(plan, stack=megatron.copy_with(reads_loss=r))) for r in (True, False))
    assert reading.step_s > ahead.step_s


def test_the_last_stage_of_an_interleaved_pipeline_waits_for_each_loss() -> None:
    """No message makes it wait there; the other stages' hosts run on."""
    plan = Plan(
        zero=0, data_parallel="megatron", pp=2, dp_replicate=4, seq_len=256, num_micro_batches=4, virtual_stages=2
    )
    megatron = Stack.load("megatron-core-2025").copy_with(clips="")
    waited = {}
    for reads in (True, False):
        programs = lowered(plan, stack=megatron.copy_with(reads_loss=reads)).programs(4)
        waited[reads] = [sum(op.blocking for op in program.ops if isinstance(op, Compute)) for program in programs]
    assert waited == {True: [0, 4], False: [0, 0]}


@pytest.mark.parametrize(("pp", "zero"), [(1, 0), (1, 1), (2, 0)])
def test_the_calls_of_a_steps_end_are_hidden_by_nothing(pp: int, zero: int) -> None:
    """Each call takes the host an operator's time behind the last backward: for each parameter of the rank's own, and once."""
    ranks = {"dp_shard": 8 // pp} if zero else {"dp_replicate": 8 // pp}
    plan = Plan(zero=zero, data_parallel="megatron", pp=pp, seq_len=256, num_micro_batches=2, **ranks)  # type: ignore[arg-type]
    plain = Stack.load("megatron-core-2025").copy_with(reads_loss=True)
    logs = plain.copy_with(parameter_calls=5, step_calls=100)
    held = [sum(len(shapes) for _, shapes in pieces(shard_of(MODEL, plan, index), plan)) for index in range(pp)]
    calls = max(-(-tensors // (8 if zero else 1)) for tensors in held) * 5 + 100
    longer_s = play(lowered(plan, stack=logs)).step_s - play(lowered(plan, stack=plain)).step_s
    assert longer_s == pytest.approx(calls * plain.host.launch_s, rel=0.1)


def test_filled_outputs_cost_a_kernel_each() -> None:
    """Of what Transformer Engine computes: products, norms, attention; the device is not kept longer."""
    plan = Plan(zero=0, data_parallel="megatron", dp_replicate=8, seq_len=256)
    plain = Stack.load("megatron-core-2025")
    one, filled = (
        lowered(plan, stack=plain.copy_with(fills_outputs=fills)).step.units[1].work.forward.work
        for fills in (False, True)
    )
    # two norms, four linear layers (gate and up are one), attention
    assert filled.host_s - one.host_s == pytest.approx(7 * plain.further_kernel_s())
    assert filled.duration_s == one.duration_s


def test_fsdp2_gathers_at_most_three_units_ahead() -> None:
    """torch 2.13: the gather of unit i waits for the copy-out of unit i-2, so for the kernels of unit i-3."""
    program = lowered(Plan(dp_shard=8, seq_len=256)).program(1)
    assert waits(program, "all-gather layer3 mb0") == {"forward layer0 mb0"}
    assert waits(program, "all-gather layer1 mb0") == set()


def test_fsdp1_keeps_two_gathered_units() -> None:
    plan = Plan(data_parallel="fsdp1", dp_shard=8, seq_len=256)
    assert waits(lowered(plan).program(1), "all-gather layer2 mb0") == {"forward layer0 mb0"}


def test_backward_prefetches_one_unit() -> None:
    program = lowered(Plan(dp_shard=8, seq_len=256)).program(1)
    order = [op.label for op in program.ops]
    assert order.index("all-gather layer3 mb0 backward") < order.index("backward layer4 mb0")
    assert order.index("all-gather layer2 mb0 backward") > order.index("backward layer4 mb0")


def test_a_checkpointed_block_pays_for_its_forward_again() -> None:
    plain = lowered(Plan(dp_shard=8, seq_len=2048)).step.units[1]
    full = lowered(Plan(dp_shard=8, seq_len=2048, recompute="full"), stack="deepspeed-0.14").step.units[1]
    assert "recompute" not in dict(plain.backward.work.parts)
    # that stack's checkpoint is re-entrant: the whole forward runs again
    assert dict(full.backward.work.parts)["recompute"] == pytest.approx(full.work.forward.work.duration_s, rel=0.02)


def test_every_kth_block_is_checkpointed() -> None:
    units = lowered(Plan(dp_shard=8, seq_len=256, recompute="every_k", recompute_every=3)).step.units
    assert [u.name for u in units if u.checkpointed] == ["layer0", "layer3"]


def test_without_overlap_everything_runs_one_after_another() -> None:
    exposed_stack = Stack.load("megatron-core-2025-exposed")  # on a host that never keeps the device waiting
    exposed_stack = exposed_stack.copy_with(host_module_s=0.0, host_collective_s=0.0, reads_loss=False, clips="")
    lowering = lowered(Plan(dp_shard=8, seq_len=2048), stack=exposed_stack)
    program = lowering.program(1)
    collectives = sum(collective_s(op, program) for op in program.ops if isinstance(op, Collective))
    played = play(lowering)
    exposed = sum(v for k, v in played.breakdown.items() if k.startswith("exposed"))
    assert exposed == pytest.approx(collectives, rel=1e-9)


def one_gpu_step_s(stack: Stack, micro_batch_size: int, **plan: int) -> float:
    """On as many GPUs as tp has, with a head that takes longer than the layers."""
    cluster = Cluster.load("hgx-h100-8", 1).model_copy(update={"gpus_per_node": plan.get("tp", 1)})
    made = Plan(zero=0, seq_len=1024, micro_batch_size=micro_batch_size, **plan)  # type: ignore[arg-type]
    model = MODEL.model_copy(update={"vocab_size": 65536})
    lowering = lower(model, made, cluster, stack, Calibration.datasheet(cluster.device), default_curves())
    return float(play(lowering).step_s)


def test_a_host_that_waits_for_blocks_takes_no_lead_from_one_to_the_next() -> None:
    """Layers that the host decides and a head that the GPU decides: their sum, and not the longer of the two."""
    free = Stack.load("megatron-2021").copy_with(host_launch_s=0.0, host_collective_s=0.0)
    slow = free.copy_with(host_launch_s=60e-6)
    waits = slow.copy_with(host_waits_for_blocks=True)
    gpu_s, leads_s, sum_s = (one_gpu_step_s(stack, 8) for stack in (free, slow, waits))
    assert 1.2 * gpu_s < leads_s
    assert 1.1 * leads_s < sum_s < gpu_s + leads_s
    idle = free.copy_with(host_waits_for_blocks=True)
    assert one_gpu_step_s(idle, 8) == pytest.approx(gpu_s, rel=1e-9)


def test_collectives_inside_blocks_wait_for_their_last_rank() -> None:
    """Two a layer each way, and those around embedding and loss; nothing else changes where the host is quick."""
    free = Stack.load("megatron-2021").copy_with(host_launch_s=0.0, host_collective_s=0.0)
    waits = free.copy_with(collective_wait_s=1e-4)
    more = one_gpu_step_s(waits, 1, tp=2) - one_gpu_step_s(free, 1, tp=2)
    ends = round(more / 1e-4) - 4 * MODEL.num_layers
    assert more == pytest.approx(1e-4 * (4 * MODEL.num_layers + ends), rel=1e-6)
    assert 2 <= ends <= 6
    assert one_gpu_step_s(waits, 1) == one_gpu_step_s(free, 1)


def test_gradients_may_wait_for_the_last_backward() -> None:
    """Megatron-LM until 2023 and DeepSpeed's pipelines: each reduction is issued behind the last layer's backward."""
    plan = Plan(dp_replicate=8, zero=0, num_micro_batches=2)
    programs = [
        lowered(plan, stack=Stack.load("megatron-2021").copy_with(late_gradients=late)).program(2)
        for late in (False, True)
    ]
    assert sent_bytes(programs[0], "all_reduce") == sent_bytes(programs[1], "all_reduce") > 0
    early = []
    for program in programs:
        last = next(op.id for op in program.ops if op.label == "backward embedding mb1")
        early.append([op for op in program.ops if isinstance(op, Collective) and op.id < last])
    assert early[0]
    assert early[1] == []


def test_updated_parameters_may_all_come_before_the_forward() -> None:
    """Megatron's distributed optimizer without --overlap-param-gather: no forward begins before the last gather."""
    plan = Plan(dp_shard=8, zero=1, data_parallel="megatron", num_micro_batches=2)
    stack = Stack.load("megatron-core-2025")
    beside, before = (lowered(plan, stack=stack.copy_with(late_parameters=late)).program(2) for late in (False, True))
    assert sent_bytes(beside, "all_gather") == sent_bytes(before, "all_gather") > 0
    for program, waits in ((beside, False), (before, True)):
        gathers = [op.id for op in program.ops if isinstance(op, Collective) and op.kind == "all_gather"]
        first = next(op.id for op in program.ops if op.label.startswith("forward"))
        assert (max(gathers) < first) == waits


def test_a_single_device_sends_nothing_and_its_step_is_its_kernels() -> None:
    cluster = Cluster.load("hgx-h100-8", 1).model_copy(update={"gpus_per_node": 1})
    calibration = Calibration.ideal()
    stack = Stack.load("torch-2.6-eager").copy_with(host_launch_s=0.0)
    lowering = lower(MODEL, Plan(zero=0, seq_len=2048), cluster, stack, calibration, LinkCurves.ideal())
    program = lowering.program(1)
    assert all(isinstance(op, Compute) for op in program.ops)
    assert play(lowering).step_s == pytest.approx(sum(op.duration_s for op in program.ops), rel=1e-12)


def test_what_is_not_modelled_is_refused_with_every_fault() -> None:
    offload = {"optimizer": "host", "parameters": "host"}
    plan = Plan.model_validate({"dp_shard": 4, "pp": 2, "seq_len": 256, "schedule": "zb_h1", "offload": offload})
    with pytest.raises(PlanError) as caught:
        lowered(plan)
    assert {fault.place for fault in caught.value.faults} == {"plan: offload", "plan: schedule"}


def test_gradients_that_stay_unreduced_are_kept_and_added() -> None:
    """FSDP2 casts the first micro-batch's to the reduction's dtype and adds the others to it."""
    labels = [op.label for op in lowered(Plan(dp_shard=8, seq_len=256, num_micro_batches=3)).program(3).ops]
    assert not any(label.endswith("kept") for label in labels)
    plan = Plan(dp_shard=8, seq_len=256, num_micro_batches=3, sync_every_micro_batch=False)
    step = lowered(plan)
    kept, added, final = (
        [op for op in step.program(3).ops if op.label == f"copy-in layer2 mb{i} kept"] for i in range(3)
    )
    assert len(kept) == len(added) == len(final) == 1
    layer = next(unit for unit in step.step.units if unit.name == "layer2")
    numel = sum(prod(shape) for _, shape in MODEL.parameter_shapes("layer"))
    assert [kernel.num_bytes for kernel in layer.comm.keep_kernels] == [(2 + 4) * numel]
    assert [kernel.num_bytes for kernel in layer.comm.add_kernels] == [(4 + 2 + 4) * numel]


def test_an_ideal_machine_knows_no_losses_of_a_stack() -> None:
    cluster, plan = Cluster.load("hgx-h100-8"), Plan(dp_shard=8, seq_len=256)
    stack = Stack.load("torch-2.6-eager")
    slow = stack.copy_with(
        elementwise_factor=3.0,
        gemm_factor={"hopper": 0.5},
        attention=stack.attention.model_copy(update={"speed_factor": {"hopper": 0.5}}),
    )
    ideal = Calibration.ideal()
    one, other = (lower(MODEL, plan, cluster, s, ideal, LinkCurves.ideal()) for s in (stack, slow))
    assert play(one).step_s == play(other).step_s


def test_a_stack_states_its_factor_on_elementwise_kernels_by_architecture() -> None:
    stack = Stack.load("torch-2.6-eager")
    sources = {**stack.sources, "elementwise_factor": "made up"}

    def factor(value: object) -> list[float]:
        made = Stack.model_validate(
            {**stack.model_dump(exclude_unset=True), "elementwise_factor": value, "sources": sources}
        )
        return [made.elementwise_factor_on(name) for name in ("ampere", "hopper")]

    assert factor(1.5) == [1.5, 1.5]
    assert factor({"ampere": 0.5}) == [0.5, 1.0]  # the calibration's own where none is given


def test_streams_over_memory_leave_products_more_of_the_power_cap() -> None:
    """The same product is faster in a step with more memory-bound work, and never slower than in a loop of products."""
    cluster, plan = Cluster.load("hgx-h200-8"), Plan(dp_shard=8, seq_len=2048)
    calibration, curves = Calibration.load("h200-sxm"), default_curves()
    eager, compiled = (
        lower(MODEL, plan, cluster, Stack.load(f"torch-2.11-{how}"), calibration, curves)
        for how in ("eager", "compiled")
    )
    product = Gemm(m=8192, n=8192, k=8192, dtype="bf16")
    loop_s = calibration.kernel_s(product, cluster.device)
    bare = [calibration.timer(cluster.device, None, use).kernel_s(product) for use in (0.9, 0.5)]
    assert bare[1] < bare[0] < loop_s
    factor = [s.stack.gemm_factor_on("hopper", "bf16") for s in (eager, compiled)]
    in_eager, in_compiled = (s.clock.seconds(product) * f for s, f in zip((eager, compiled), factor, strict=True))
    assert in_eager <= in_compiled < loop_s


def test_every_fault_of_plan_model_and_cluster_is_told_at_once() -> None:
    # the plan's own (a sequence that cp does not halve), the degrees', the heads', and what no model of ours has
    plan = Plan.model_validate({"tp": 6, "pp": 5, "cp": 3, "dp_shard": 4, "schedule": "zb_h1", "zero": 3})
    with pytest.raises(PlanError) as caught:
        legal(Model.load("llama3-70b"), plan, Cluster.load("hgx-h100-8", 2), Stack.load(plan.stack))
    told = str(caught.value)
    for words in ("2 × cp = 6", "= 360, the cluster has 16", "64 heads", "8 key-value heads", "delays the weights'"):
        assert words in told
    assert len(caught.value.faults) == len(set(caught.value.faults))


def test_a_slow_host_launches_late() -> None:
    stack, grace = Stack.load("megatron-core-2025"), Cluster.load("gb200-nvl72").device
    # between nothing and a loop of Linear alone, github.com/NVIDIA/TransformerEngine/issues/2053: 37.1 µs for 13.5 of a Xeon
    assert 1 < grace.host_factor < 37.1 / 13.5
    slow = stack.on_host_of(grace)
    for name in ("host_launch_s", "host_module_s", "host_kernel_s", "host_collective_s"):
        assert slow.value(name) == pytest.approx(grace.host_factor * stack.value(name))
    h100 = Cluster.load("hgx-h100-8")
    assert stack.on_host_of(h100.device) is stack
    # a cluster's own word on its CPUs stands above the device's, and stays with its nodes
    other = Cluster.parse({**h100.model_dump(), "device": "h100", "host_factor": 1.2}, "mine", ClusterError).with_nodes(
        4
    )
    assert (other.device.host_factor, h100.device.host_factor) == (1.2, 1.0)


def test_the_hosts_time_is_of_calls_modules_and_what_they_launch_in_cpp() -> None:
    """A Llama layer has four linear layers and attention: five modules each way. Experts are launched from one call."""
    stack = Stack.load("megatron-core-2025").copy_with(host_launch_s=1e-3, host_module_s=0.0)
    plan = Plan(zero=1, data_parallel="megatron", dp_shard=8, ep=8, seq_len=4096, stack=stack.name)

    def host_s(model: Model, **changes: float | str) -> float:
        changed = stack.copy_with(**changes)
        layer = build_blocks(model, changed, plan).layer
        device = Cluster.load("hgx-h100-8").device
        clock = Clock(device, Calibration.for_device(device), changed)
        return clock.direction(layer, "forward").work.host_s

    dense, mixture = Model.load("llama3-8b"), Model.load("qwen3-30b-a3b")
    assert host_s(dense, host_module_s=1.0) - host_s(dense) == pytest.approx(5)
    # 16 experts a rank, two products of each: 30 kernels behind the first of their call
    assert host_s(mixture, host_kernel_s=1.0) - host_s(mixture, host_kernel_s=0.0) == pytest.approx(30)
    # query-key-value, attention, output, router, and each expert's two; here every expert's product is a call
    assert host_s(mixture, host_module_s=1.0, grouped_gemm="modules") - host_s(
        mixture, grouped_gemm="modules"
    ) == pytest.approx(4 + 32)


def test_stage_3_hooks_each_linear_layer() -> None:
    """DeepSpeed's alone, seven of a Llama layer: forward, backward, and recomputed once more."""
    stack = Stack.load("transformers-2024").copy_with(host_hook_s=1.0)
    device = Cluster.load("dgx-a100-80-8").device
    clock, model = Clock(device, Calibration.for_device(device), stack), Model.load("llama3-8b")

    def hooks_s(**fields: Any) -> tuple[int, ...]:
        plan = Plan(**{"seq_len": 1024, "recompute": "full", "stack": stack.name, **fields})
        work = clock.block(build_blocks(model, stack, plan).layer, plan)
        return tuple(int(phase.work.host_s) for phase in (work.forward, work.backward, work.recompute))

    assert hooks_s(zero=3, dp_shard=8, data_parallel="deepspeed") == (7, 7, 7)
    assert hooks_s(zero=2, dp_shard=8, data_parallel="deepspeed") == (0, 0, 0)
    assert hooks_s(zero=3, dp_shard=8, data_parallel="fsdp2") == (0, 0, 0)


@pytest.mark.parametrize(("mode", "again"), [("full", 1), ("none", 0)])
def test_a_layer_that_is_computed_again_costs_the_host_once(mode: str, again: int) -> None:
    stack = Stack.load("transformers-2024").copy_with(host_checkpoint_s=1.0)
    device = Cluster.load("dgx-a100-80-8").device
    plan = Plan(seq_len=1024, recompute=mode, stack=stack.name)
    work = Clock(device, Calibration.for_device(device), stack).block(
        build_blocks(Model.load("llama3-8b"), stack, plan).layer, plan
    )
    assert [int(phase.work.host_s) for phase in (work.forward, work.backward, work.recompute)] == [0, 0, again]


def test_what_a_graph_holds_costs_the_host_one_call() -> None:
    """Router and counts captured: what is left are attention, permutation and the experts. All captured: one call each way."""
    stack, model = Stack.load("megatron-core-2025"), Model.load("qwen3-30b-a3b")
    device = Cluster.load("hgx-h100-8").device
    call_s = stack.host.module_s + stack.host.launch_s

    def host_s(*graphs: str) -> tuple[float, float]:
        plan = Plan.model_validate(
            {"zero": 1, "data_parallel": "megatron", "dp_shard": 8, "ep": 8, "seq_len": 4096, "cuda_graphs": graphs}
        )
        check(plan)
        layer = build_blocks(model, stack, plan).layer
        clock = Clock(device, Calibration.for_device(device), stack)
        forward, backward = (clock.direction(layer, name) for name in ("forward", "backward"))
        return forward.work.host_s, backward.work.host_s

    eager, routed, begun, whole = (
        host_s(),
        host_s("moe_router", "moe_preprocess"),
        host_s("attn", "moe_router", "moe_preprocess"),
        host_s("attn", "moe"),
    )
    for direction in (0, 1):
        assert eager[direction] > routed[direction] > begun[direction] > whole[direction] == pytest.approx(call_s)
    router = 1 + 1 + stack.kernels.routing_launches  # its norm, its product, what follows
    captured = stack.host.module_s + router * stack.host.launch_s
    assert eager[0] - routed[0] == pytest.approx(captured - call_s)
    full = Plan(
        zero=1,
        data_parallel="megatron",
        dp_shard=8,
        ep=8,
        seq_len=4096,
        cuda_graphs=("full_iteration",),
        stack=stack.name,
    )
    lowering = lower(model, full, Cluster.load("hgx-h100-8"), stack, Calibration.datasheet(device), default_curves())
    assert all(op.host_s == 0 for op in lowering.program(1).ops)


def test_scopes_of_graphs_that_do_not_go_together_are_refused() -> None:
    for graphs, said in (
        (("moe_preprocess",), "only together with moe_router"),
        (("attn", "full_iteration"), "already includes all others"),
        (("moe", "moe_router"), "moe already includes"),
    ):
        with pytest.raises(PlanError, match=said):
            check(Plan(cuda_graphs=graphs))
    plan = Plan(dp_shard=8, seq_len=2048, cuda_graphs=("attn",))
    with pytest.raises(PlanError, match="CUDA graphs of modules are Megatron's"):
        legal(MODEL, plan, Cluster.load("hgx-h100-8"), Stack.load("torch-2.6-eager"))


def test_a_host_that_waits_on_the_way_still_bounds_the_step_by_its_own_time() -> None:
    """Where it waits for the device it never runs ahead; all that it issues takes its time all the same."""
    fields: dict[str, Any] = {"dp_shard": 8, "zero": 1, "data_parallel": "deepspeed", "seq_len": 256}
    plan = Plan(**fields)
    program = lowered(plan, stack="megatron-deepspeed-2022-blocking").program(2)
    assert any(op.blocking for op in program.ops)
    assert launched_s(program) == 0.0
    assert issuing_s(program) == pytest.approx(float(sum(op.host_s for op in program.ops)))
    assert issuing_s(program) > 0.0
