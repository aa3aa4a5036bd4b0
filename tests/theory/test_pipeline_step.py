"""A pipelined step against closed forms, and its folding against what it stands for."""

from dataclasses import replace
from typing import Any

import pytest

from simulator.play.engine import run
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.exceptions import Deviation
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

LLAMA = Model.load("llama3-8b")


NO_HOST = dict.fromkeys(
    ("host_launch_s", "host_module_s", "host_kernel_s", "host_collective_s", "step_overhead_s"), 0.0
)


def lowered(
    *, ideal: bool = True, model: Model = LLAMA, exceptions: tuple[Deviation, ...] = (), **fields: Any
) -> Lowering:
    plan = Plan.model_validate({"seq_len": 2048, "zero": 0, "data_parallel": "megatron"} | fields)
    cluster = Cluster.load("hgx-h100-8", max(1, plan.num_devices // 8))
    cluster = cluster.model_copy(update={"exceptions": exceptions})
    calibration = Calibration.ideal() if ideal else Calibration.datasheet(cluster.device)
    curves = LinkCurves.ideal() if ideal else default_curves()
    stack = Stack.load(fields.get("stack", "megatron-core-2025-exposed"))
    stack = stack.copy_with(**NO_HOST, clips="")
    return lower(model, plan, cluster, stack, calibration, curves)


def stage_times(lowering: Lowering) -> list[float]:
    """Forward and backward of one micro-batch on each stage, messages and collectives apart."""
    return [
        sum(unit.work.forward.work.duration_s + unit.backward.work.duration_s for unit in stage.chunks[0].units)
        for stage in lowering.stages
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_micro_batches", [8, 11, 64])
def test_the_last_stage_is_never_idle_once_it_has_begun(schedule: str, num_micro_batches: int) -> None:
    # Eight equal stages but for the head on the last: it is the slowest, so the step is m of its times and one pass of
    # every other stage before and after (arXiv 2104.04473, section 2.2, for unequal stages), plus what travels.
    lowering = lowered(pp=8, num_micro_batches=num_micro_batches, schedule=schedule)
    times = stage_times(lowering)
    assert max(times) == times[-1]
    compute = num_micro_batches * times[-1] + sum(times[:-1])
    messages = lowering.stages[0].message_bytes / 450e9  # one way over NVLink 4
    optimizer = max(stage.chunks[0].optimizer.duration_s for stage in lowering.stages)
    assert play(lowering).step_s >= compute
    assert play(lowering).step_s <= compute + 2 * (num_micro_batches + 8) * messages + optimizer


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("num_micro_batches", [8, 16, 33])
def test_every_second_beyond_the_formula_has_a_name(micro_batch_size: int, num_micro_batches: int) -> None:
    # Stages as equal as a small vocabulary makes them: (m + p - 1) t, messages, and once a step the optimizer. A stage waits
    # for a message with each micro-batch but one, and p - 1 of them pass on the way to the last stage and on the way back
    # (docs/background/pipeline.md, "From the formula to a step")
    model = LLAMA.model_copy(update={"vocab_size": 128})
    lowering = lowered(model=model, pp=8, num_micro_batches=num_micro_batches, micro_batch_size=micro_batch_size)
    times = stage_times(lowering)
    compute = num_micro_batches * max(times) + sum(times) - max(times)
    message = micro_batch_size * 2048 * 4096 * 2 / 450e9  # bf16 activations over NVLink 4
    messages = (num_micro_batches - 1 + 2 * 7) * message
    optimizer = lowering.stages[0].chunks[0].optimizer.duration_s
    assert play(lowering).step_s - compute == pytest.approx(messages + optimizer, rel=1e-3)


def test_the_bubble_of_interleaving_is_smaller_by_its_chunks() -> None:
    # arXiv 2104.04473, section 2.2.2: (p - 1)/v of a stage's time instead of p - 1; the head, which is in one of the
    # chunks, costs a little more
    plain = play(lowered(pp=8, num_micro_batches=64, schedule="1f1b"))
    chunks = play(lowered(pp=8, num_micro_batches=64, virtual_stages=4))
    assert plain.breakdown["bubble"] / 4 <= chunks.breakdown["bubble"] <= plain.breakdown["bubble"] / 3


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 4, "num_micro_batches": 40, "virtual_stages": 2},
        {"pp": 4, "num_micro_batches": 33},
        {"pp": 4, "num_micro_batches": 33, "schedule": "zb_h1"},
        {"pp": 4, "num_micro_batches": 34, "schedule": "dualpipe", "virtual_stages": 2},
    ],
)
def test_a_full_pipeline_repeats(fields: dict[str, Any]) -> None:
    lowering = lowered(ideal=False, tp=2, **fields)
    played = play(lowering)
    assert played.num_played < fields["num_micro_batches"]
    whole = run(lowering.programs(fields["num_micro_batches"]))
    assert played.step_s == pytest.approx(whole.step_s, rel=1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "1f1b", "sequence_parallel": True, "stack": "nemo-24", "data_parallel": "ddp"},
        {"schedule": "zb_h1", "stack": "nemo-24"},
        {"schedule": "zb_h1", "stack": "megatron-core-2025-exposed", "cp": 2},
        {"schedule": "zb_h1", "stack": "megatron-core-2025-exposed"},
    ],
)
def test_folded_chunks_take_what_their_blocks_take(fields: dict[str, Any]) -> None:
    lowering = lowered(ideal=False, pp=2, num_micro_batches=6, **({"tp": 4} | fields))
    apart = replace(lowering, stages=tuple(replace(stage, folds=False) for stage in lowering.stages))
    folded, unfolded = lowering.programs(6), apart.programs(6)
    assert len(folded[0].ops) < len(unfolded[0].ops) / 3
    # messages share NVLink with the collectives of blocks only where those are played: some 0.01 %
    assert run(folded).step_s == pytest.approx(run(unfolded).step_s, rel=1e-4)


@pytest.mark.parametrize("degrees", [{"tp": 4, "dp_shard": 2}, {"tp": 2, "cp": 2, "dp_shard": 2}])
def test_folded_chunks_wait_for_the_slowest_of_their_block(degrees: dict[str, int]) -> None:
    # One GPU of a tensor-parallel group at 0.8 of its speed: what chunks as one op say of its peers is what happens where
    # each product and each collective is played, in which they meet
    fields = {"pp": 2, "zero": 1, "schedule": "zb_h1", "num_micro_batches": 6, **degrees}
    slow = Deviation(nodes="1", gpus="3", speed=0.8)
    lowering = lowered(ideal=False, exceptions=(slow,), **fields)
    apart = replace(lowering, stages=tuple(replace(stage, folds=False) for stage in lowering.stages))
    folded, unfolded = lowering.programs(6), apart.programs(6)
    assert len(folded) > 2
    assert run(folded).step_s == pytest.approx(run(unfolded).step_s, rel=1e-4)
    assert run(folded).step_s > 1.02 * run(lowered(ideal=False, **fields).programs(6)).step_s


def test_torch_asks_for_each_weight_by_itself_and_runs_a_checkpoint_each_time() -> None:
    """torch/distributed/pipelining: stage_backward_weight; its first stage leaves all to the W (backward_one_chunk)."""
    torch = {"data_parallel": "ddp", "stack": "torch-2.6-eager", "dp_replicate": 4, "recompute": "full"}
    lowering = lowered(pp=2, num_micro_batches=4, schedule="zb_h1", **torch)
    unit = lowering.stages[1].chunks[0].units[0]
    norms, products = 2, 7  # of a layer of Llama, that have weights
    again_s = unit.weights.work.duration_s - unit.work.weights.work.duration_s
    assert again_s == pytest.approx((norms + products) * unit.work.recompute.work.duration_s)
    first, last = (
        [op for op in program.ops if op.label.startswith(("B", "backward of inputs"))]
        for program in lowering.programs(4)
    )
    assert last
    assert not first


def test_a_tied_matrix_is_summed_between_the_ends() -> None:
    tied = LLAMA.model_copy(update={"tied_embeddings": True})
    labels = [{op.label for op in program.ops} for program in lowered(pp=4, dp_shard=1, model=tied, tp=2).programs(1)]
    assert ["all-reduce tied embeddings" in found for found in labels] == [True, False, False, True]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "dualpipe", "dualpipe_v"])
def test_every_schedule_comes_to_its_end(schedule: str, pp: int) -> None:
    """No stage waits for a message that stands behind another one: the engine refuses programs that cannot finish."""
    chunks = 2 if schedule in ("interleaved", "dualpipe", "dualpipe_v") else 1
    degrees = {"pp": pp, "dp_replicate": 8 // pp, "virtual_stages": chunks}
    lowering = lowered(schedule=schedule, num_micro_batches=2 * pp, **degrees)
    assert play(lowering).step_s > stage_times(lowering)[0]
