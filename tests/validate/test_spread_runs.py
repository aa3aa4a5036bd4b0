"""Context, expert and pipeline parallelism played by torch, beside what is predicted of the same plans."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode

from simulator.play.lower import lowered
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests.machines import island
from validate.compare import compare_run
from validate.compare.borders import borders
from validate.context_parallel import tokens_of
from validate.pipelined import LonePipelinedStep
from validate.playable import unplayable
from validate.players import fake
from validate.players.allocated import phases_bytes
from validate.run_plan import play
from validate.task import Task
from validate.torch_releases import BUFFERS_ON_DEMAND, installed, release

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of which every version has others

CPU = Stack.load("torch-2.13-cpu")
TINY = Model(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
MIXTURE = TINY.model_copy(update={"experts": Experts(num_experts=4, top_k=2, d_ff=64)})
ON_DEMAND = pytest.mark.skipif(
    release(installed()) >= BUFFERS_ON_DEMAND,
    reason="predictions are of releases that make every stage's buffers at once",
)
COUNTERS = 128  # Adam's step counters of more parameters than a table, and Python's own


def plan(**options: Any) -> Plan:
    return Plan(**{"seq_len": 64, "precision": "fp32", **options})


def played(model: Model, **options: Any) -> tuple[dict[str, Any], Task]:
    task = Task(mode="cpu", model=model, plan=plan(**options), stack=CPU, num_steps=2, num_warm_up=1)
    record = play(task)
    assert record["verdict"] == "ok", record["trouble"]
    return record, task


# --- context parallelism


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_gives_every_rank_as_many_pairs_of_the_causal_triangle(cp: int) -> None:
    asked = plan(cp=cp)
    held = [[i for one in tokens_of(asked, rank) for i in one] for rank in range(cp)]
    assert sorted(i for one in held for i in one) == list(range(asked.seq_len))
    assert len({sum(one) for one in held}) == 1


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_split_sequences_hold_what_is_predicted(exchange: str) -> None:
    """Up to the position tables, which the prediction counts whole, and what attention's kernel holds inside."""
    asked = plan(cp=2, cp_exchange=exchange)
    tracked, predicted = fake.play(TINY, asked, CPU), borders(TINY, asked, CPU, granularity_bytes=1)
    tables = 2 * 4 * TINY.head_dim * asked.seq_len // 2
    inside = 4 * (asked.seq_len // 2) * (TINY.d_model + TINY.num_heads)
    for name in ("start", "after_forward", "after_backward"):
        difference = getattr(predicted, f"{name}_bytes") - getattr(tracked, name).total_bytes
        assert tables <= difference <= tables + 24 * TINY.num_layers, name
    assert tables <= predicted.peak_bytes - tracked.peak.total_bytes <= tables + inside


@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_attend_in_a_ring() -> None:
    record, _ = played(TINY, cp=2)
    assert {"all_gather", "all_to_all"} <= set(record["profile"]["communication"])
    assert len(record["time"]["times_s"]) == 2


# --- experts


def test_experts_on_other_ranks_hold_what_is_predicted() -> None:
    """Between steps to the byte; numbers of rows (int64) are what the prediction counts more narrowly."""
    asked = plan(dp_shard=4, ep=2)
    tracked, predicted = fake.play(MIXTURE, asked, CPU), borders(MIXTURE, asked, CPU, granularity_bytes=1)
    assert predicted.start_bytes == tracked.start.total_bytes
    assert predicted.after_backward_bytes == tracked.after_backward.total_bytes
    assert predicted.after_forward_bytes == pytest.approx(tracked.after_forward.total_bytes, rel=0.005)


@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_send_rows_to_experts() -> None:
    record, _ = played(MIXTURE, dp_shard=2, ep=2)
    assert "all_to_all" in record["profile"]["communication"]


# --- pipelines


@ON_DEMAND
@pytest.mark.usefixtures("warm_ranks")
def test_a_pipeline_of_replicas_holds_what_is_predicted_on_every_stage() -> None:
    """The allocator's own events: the first stage to Adam's counters, whatever the schedule keeps in flight."""
    record, task = played(TINY, zero=0, dp_replicate=2, pp=2, num_micro_batches=2, schedule="gpipe")
    predicted = borders(TINY, task.plan, CPU, granularity_bytes=1, library="gloo")
    for name in ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes"):
        assert abs(getattr(predicted, name) - record["memory"][name]) <= COUNTERS, name
    found = {row["name"]: row for row in compare_run(record)["memory"]}
    assert found["peak of stage 1_bytes"]["measured"] == record["memory_by_rank"][2]
    assert found["peak of stage 1_bytes"]["relative_error"] == pytest.approx(0, abs=0.1)
    assert "send_recv" in record["profile"]["communication"]


@ON_DEMAND
@pytest.mark.usefixtures("warm_ranks")
def test_chunks_of_a_stage_interleave() -> None:
    model = TINY.model_copy(update={"num_layers": 4})
    record, task = played(model, zero=0, pp=2, num_micro_batches=4, virtual_stages=2)
    predicted = borders(model, task.plan, CPU, granularity_bytes=1, library="gloo")
    assert record["memory"]["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0, abs=COUNTERS)


FAKE = Stack.load("torch-2.13-fake-cpu")
FOUR = TINY.model_copy(update={"num_layers": 4})
GPT: dict[str, Any] = {
    "num_kv_heads": 4, "positions": "learned", "max_positions": 512, "norm": "layer", "mlp": "gelu_tanh",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "fused_qkv": True,
}  # fmt: skip
MODELS: dict[str, Model] = {  # besides Llama's, which the schedules play
    "large vocabulary": TINY.model_copy(update={"vocab_size": 2048}),
    "normed heads": TINY.model_copy(update={"qk_norm": True}),
    "gpt": Model.model_validate({**TINY.model_dump(), **GPT}),
}
SCALARS = 24  # bytes a layer and micro-batch: losses, counters
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 3, "num_micro_batches": 4, "schedule": "1f1b"},
    "1f1b, replicas, bf16": {"pp": 2, "num_micro_batches": 3, "dp_replicate": 2, "precision": "bf16"},
    "1f1b, zero1, recomputed": {"pp": 2, "num_micro_batches": 3, "zero": 1, "dp_shard": 2, "recompute": "full"},
    "1f1b, fsdp2, bf16": {
        "pp": 2,
        "num_micro_batches": 3,
        "zero": 3,
        "dp_shard": 2,
        "precision": "bf16",
        "sync_every_micro_batch": False,
        "reshard_after_forward": False,
    },
    "1f1b, fsdp2, fp32": {
        "pp": 2,
        "num_micro_batches": 3,
        "zero": 3,
        "dp_shard": 2,
        "sync_every_micro_batch": False,
        "reshard_after_forward": False,
    },
    "interleaved": {"pp": 2, "num_micro_batches": 4, "virtual_stages": 2, "schedule": "interleaved"},
    "zb_h1": {"pp": 3, "num_micro_batches": 4, "schedule": "zb_h1"},
    "zb_h1, bf16": {"pp": 2, "num_micro_batches": 3, "schedule": "zb_h1", "precision": "bf16"},
    "dualpipe_v, fsdp2, bf16": {
        "pp": 2,
        "num_micro_batches": 4,
        "virtual_stages": 2,
        "schedule": "dualpipe_v",
        "zero": 3,
        "dp_shard": 2,
        "precision": "bf16",
        "sync_every_micro_batch": False,
        "reshard_after_forward": False,
    },
}
# of these more micro-batches than fill the pipeline twice: what a step leaves of each stays to its end
LONGER: dict[str, dict[str, Any]] = {
    "gpipe": {"num_micro_batches": 5, "schedule": "gpipe"},
    "interleaved": {"num_micro_batches": 6, "virtual_stages": 2, "schedule": "interleaved"},
    "zb_h1": {"num_micro_batches": 6, "schedule": "zb_h1"},
    "dualpipe_v": {"num_micro_batches": 7, "virtual_stages": 2, "schedule": "dualpipe_v"},
}


def smallest(**options: Any) -> dict[str, Any]:
    """A plan with a model of a layer a stage and chunk; FSDP2 gathers one layer while another runs."""
    asked = plan(**{"zero": 0, **options})
    layers = 4 if asked.zero == 3 else asked.pp * asked.pipeline.virtual_stages
    return {"model": TINY.model_copy(update={"num_layers": layers}), "played_plan": asked}


@ON_DEMAND
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_holds_on_fake_tensors_what_is_predicted(name: str) -> None:
    assert_every_stage_is_predicted(**smallest(**SCHEDULES[name]))


@ON_DEMAND
@pytest.mark.parametrize("name", LONGER)
def test_what_micro_batches_leave_stays_to_the_end_of_the_step(name: str) -> None:
    assert_every_stage_is_predicted(**smallest(pp=2, **LONGER[name]))


@ON_DEMAND
@pytest.mark.parametrize("num_micro_batches", [3, 6])
def test_halves_of_a_backward_leave_narrow_gradients_to_the_next_ones_hook(num_micro_batches: int) -> None:
    """FSDP2 widens what waits for a reduction in the hook behind a unit's inputs, so a micro-batch late."""
    sharded = {"zero": 3, "dp_shard": 2, "reshard_after_forward": False, "sync_every_micro_batch": False}
    asked = plan(pp=2, num_micro_batches=num_micro_batches, schedule="zb_h1", precision="bf16", **sharded)
    tracked = fake.play(FOUR, asked, FAKE, rank=2)
    predicted = borders(FOUR, asked, FAKE, granularity_bytes=1, stage=1)
    norm = 2 * FOUR.d_model  # of the last gradient of the last unit, which its copy replaces
    assert predicted.after_forward_bytes == pytest.approx(
        tracked.after_forward.total_bytes, abs=SCALARS * num_micro_batches
    )
    assert predicted.peak_bytes == pytest.approx(tracked.peak.total_bytes, abs=norm + SCALARS * num_micro_batches)


@ON_DEMAND
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("model", MODELS)
def test_halves_of_backwards_hold_what_is_predicted_of_every_model(model: str, schedule: str) -> None:
    assert_every_stage_is_predicted(MODELS[model], plan(zero=0, pp=2, num_micro_batches=3, schedule=schedule))


@ON_DEMAND
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (TINY, {"schedule": "zb_h1"}),
        (FOUR, {"schedule": "dualpipe_v", "virtual_stages": 2, "num_micro_batches": 4, "zero": 3, "dp_shard": 2}),
    ],
)
def test_halves_of_a_checkpoints_backward_run_it_again_for_every_weight(model: Model, options: dict[str, Any]) -> None:
    """What each time stays makes this the fullest way to run a step."""
    gathers = {"sync_every_micro_batch": False, "reshard_after_forward": False}
    asked, kept = (
        plan(**{"zero": 0, "pp": 2, "num_micro_batches": 3, "recompute": mode, **gathers, **options})
        for mode in ("full", "none")
    )
    tracked = fake.play(model, asked, FAKE, rank=asked.num_devices // 2).peak.total_bytes
    predicted, without = (borders(model, one, FAKE, granularity_bytes=1, stage=1).peak_bytes for one in (asked, kept))
    assert predicted == pytest.approx(tracked, rel=0, abs=SCALARS)
    assert tracked > 1.1 * without


class Products(TorchDispatchMode):
    """FLOP of matrix products and of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket._qualified_op_name
        if name in ("aten::mm", "aten::addmm"):
            left, right = args[-2:]
            self.flop += 2 * left.numel() * right.shape[1]
        elif "attention" in name:  # half of two products of all pairs; five of them on the way back
            query = args[1 if name.endswith("backward") else 0]
            self.flop += query.numel() * query.shape[-2] * (5 if name.endswith("backward") else 2)
        return out


def test_halves_of_backwards_compute_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage's is whole; elsewhere a checkpoint runs once for the inputs, and once for each weight again."""
    original, counted = LonePipelinedStep.run, []

    def run(step: LonePipelinedStep, *arguments: Any) -> None:
        with Products() as found:
            original(step, *arguments)
        counted.append(found.flop)

    monkeypatch.setattr(LonePipelinedStep, "run", run)
    model, asked = MODELS["gpt"], plan(zero=0, pp=2, num_micro_batches=2, schedule="zb_h1", recompute="full")
    for stage in lowered(model, asked, island("h100-sxm5-80gb", 2, 1e11), stack=FAKE).stages:
        fake.play(model, asked, FAKE, rank=stage.index)
        assert stage.flop == counted[-1]


def assert_every_stage_is_predicted(model: Model, played_plan: Plan) -> None:
    for stage in range(played_plan.pp):
        tracked = fake.play(model, played_plan, FAKE, rank=stage * (played_plan.num_devices // played_plan.pp))
        predicted = borders(model, played_plan, FAKE, granularity_bytes=1, stage=stage)
        index = (
            8 * played_plan.seq_len * (model.positions == "learned")
        )  # of rows of the table, which the prediction leaves out
        bound = (SCALARS * model.num_layers // played_plan.pp + index) * played_plan.num_micro_batches
        assert predicted.start_bytes == tracked.start.total_bytes
        assert predicted.after_backward_bytes == tracked.after_backward.total_bytes
        assert tracked.peak_phase in tracked.peak_by_phase_bytes  # of the step, not of what came before it
        assert abs(predicted.after_forward_bytes - tracked.after_forward.total_bytes) <= bound
        assert abs(predicted.peak_bytes - tracked.peak.total_bytes) <= bound


@ON_DEMAND
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (3, {"pp": 4, "dp_replicate": 2, "num_micro_batches": 8}),
        (1, {"pp": 2, "num_micro_batches": 6, "schedule": "zb_h1"}),
        (1, {"pp": 2, "num_micro_batches": 6, "schedule": "dualpipe_v", "virtual_stages": 2}),
        (0, {"pp": 2, "num_micro_batches": 6, "schedule": "gpipe"}),
    ],
)
def test_a_stage_alone_holds_what_is_predicted(rank: int, options: dict[str, Any]) -> None:
    """The allocator's events of real tensors, and nobody at the other end of the messages."""
    asked = plan(zero=0, **options)
    task = Task(mode="solo", device="cpu", model=FOUR, plan=asked, stack=CPU, rank=rank, num_steps=1, num_warm_up=1)
    record = play(task)
    assert record["verdict"] == "ok", record["trouble"]
    rows = {row["name"]: row for row in compare_run(record)["memory"]}
    random_states = SCALARS * asked.num_micro_batches * FOUR.num_layers // asked.pp
    assert all(abs(row["error"]) <= max(COUNTERS, random_states) for row in rows.values()), rows
    stage = rank * asked.pp // asked.num_devices
    assert rows["peak_bytes"]["predicted"] == borders(FOUR, asked, CPU, granularity_bytes=1, stage=stage).peak_bytes


@ON_DEMAND
@pytest.mark.usefixtures("warm_ranks")
def test_a_fake_record_has_every_stage() -> None:
    asked = plan(zero=0, pp=3, num_micro_batches=3)
    model = TINY.model_copy(update={"num_layers": asked.pp})
    record = play(Task(mode="fake", model=model, plan=asked, stack=FAKE))
    assert record["memory_by_stage"][0]["peak_bytes"] == record["memory"]["peak_bytes"]
    rows = {row["name"]: row["error"] for row in compare_run(record)["memory"]}
    assert {f"peak of stage {stage}_bytes" for stage in (1, 2)} < set(rows)
    assert max(map(abs, rows.values())) <= SCALARS * asked.num_micro_batches


def test_phases_are_counted_between_their_marks() -> None:
    """A trace of two micro-batches to and fro: the borders are those of the last time, the peaks those of all."""

    def memory(at: int, total: int) -> dict[str, Any]:
        told = {"Device Type": 0, "Total Allocated": total, "Bytes": 1, "Addr": at}
        return {"name": "[memory]", "ts": at, "tid": 1, "args": told}

    names = ["start", "forward", "backward", "forward", "backward", "optimizer", "end"]
    marks = [{"name": f"shardwise phase {name}", "ts": 10 * i} for i, name in enumerate(names)]
    totals = [100, 150, 130, 170, 160, 120, 100]
    found = phases_bytes([*marks, *(memory(10 * i + 5, total) for i, total in enumerate(totals))])
    assert found == {
        "start_bytes": 100,
        "after_forward_bytes": 170,
        "after_backward_bytes": 160,
        "peak_bytes": 170,
        "peak_phase": "forward",
        "peak_by_phase_bytes": {"forward": 170, "backward": 160, "optimizer": 120},
    }


# --- refusals


@pytest.mark.parametrize(
    ("model", "changes", "place", "mode"),
    [
        (TINY, {"pp": 2, "zero": 0, "num_micro_batches": 4, "schedule": "dualpipe", "virtual_stages": 2}, "plan: schedule", "cpu"),
        (TINY, {"pp": 2, "zero": 0, "num_micro_batches": 3, "schedule": "dualpipe_v", "virtual_stages": 2}, "plan: num_micro_batches", "cpu"),
        (TINY, {"pp": 2, "zero": 0, "dp_replicate": 2, "num_micro_batches": 4, "schedule": "zb_h1"}, "plan: schedule", "fake"),
        (TINY, {"pp": 2, "zero": 0, "num_micro_batches": 5, "schedule": "zb_h1"}, "plan: num_micro_batches", "fake"),
        (TINY, {"pp": 2, "num_micro_batches": 2}, "plan: sync_every_micro_batch", "cpu"),
        (TINY.model_copy(update={"tied_embeddings": True}), {"pp": 2, "zero": 0}, "plan: pp", "cpu"),
        (TINY.model_copy(update={"positions": "alibi"}), {"cp": 2}, "plan: cp", "cpu"),
        (MIXTURE, {"dp_shard": 2, "expert_imbalance": 1.5}, "plan: expert_imbalance", "cpu"),
        (MIXTURE, {"dp_shard": 2, "ep": 2, "dispatcher": "deep_ep"}, "plan: dispatcher", "cpu"),
        (MIXTURE, {"dp_shard": 2, "seq_len": 65}, "plan: micro_batch_size", "cpu"),
    ],
)  # fmt: skip
def test_what_torch_cannot_spread_is_refused_by_name(model: Model, changes: Any, place: str, mode: str) -> None:
    faults = unplayable(model, plan(**changes), CPU, mode)
    assert place in {fault.place for fault in faults}
    assert all(fault.remedy for fault in faults)
