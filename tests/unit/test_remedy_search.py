"""What would make a plan fit: told only if predicting it again says so."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest

from simulator.base.fit import Fit
from simulator.base.units import format_seconds
from simulator.memory import MemoryUse, Pressure, simulate_memory
from simulator.memory.allocator import AllocatorSettings
from simulator.predict import Z90, Prediction, Remedy, predict
from simulator.predict.changes import Change, changes
from simulator.predict.confidence import RETRIES
from simulator.predict.prediction import STALL
from simulator.predict.remedy_search import _NO_EFFECT, NUM_REMEDIES, _Candidate, _pipeline_proofs, _Search
from simulator.predict.verdict import cause_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.peft import PeftPlan
from simulator.spec.plan.traits import implementation_names, traits_of
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks

GIB = 2**30
MODEL = Model.load("llama3.2-1b")
NODE = Cluster.load("hgx-h100-8")
CALIBRATION = Calibration.for_device(NODE.device)


@cache
def predicted(plan: Plan, memory_gib: float) -> Prediction:
    device = NODE.device.model_copy(update={"memory_bytes": int(memory_gib * GIB), "cuda_memory_bytes": None})
    return predict(MODEL, plan, NODE.model_copy(update={"device": device}), CALIBRATION, advise=True)


PLAN = Plan(dp_shard=8, seq_len=4096, micro_batch_size=2)


@pytest.fixture(scope="module")
def short() -> Prediction:
    """A plan that needs about half as much again as the device has."""
    whole = predicted(PLAN, 80)
    assert whole.verdict == "fits"
    return predicted(PLAN, whole.memory.used_bytes / GIB / 1.5)


def applied(remedy: Remedy) -> Plan:
    return Change(kind="", plan=remedy.plan).applied(PLAN)


def test_a_plan_that_fits_needs_no_remedy() -> None:
    assert predicted(PLAN, 80).remedies == ()


def test_what_is_told_fits_when_predicted(short: Prediction) -> None:
    assert short.verdict == "does not fit"
    assert 0 < len(short.remedies) <= NUM_REMEDIES
    stack = Stack.load(PLAN.stack)
    for remedy in short.remedies:
        plan = applied(remedy)
        settings = AllocatorSettings(expandable_segments=bool(remedy.environment))
        blocks = build_blocks(MODEL, stack, plan)
        memory, _ = simulate_memory(MODEL, plan, stack, blocks, NODE.device, settings)
        assert memory.peak_reserved_bytes == remedy.peak_reserved_bytes
        assert memory.high_reserved_bytes + memory.outside_torch_bytes <= short.memory.capacity_bytes


def test_its_price_is_the_predicted_step(short: Prediction) -> None:
    for remedy in short.remedies:
        cluster = NODE.with_nodes(remedy.num_devices // 8)
        alone = predict(MODEL, applied(remedy), cluster, CALIBRATION)
        assert remedy.step_s == pytest.approx(alone.step_s, rel=1e-12)
        before = short.step_s * 8 / short.tokens_per_step
        assert remedy.cost == pytest.approx(alone.step_s * remedy.num_devices / alone.tokens_per_step / before)
    assert [r.cost for r in short.remedies] == sorted(r.cost for r in short.remedies)


def test_the_same_tokens_a_step_unless_there_are_more_devices(short: Prediction) -> None:
    assert all(r.tokens_per_step == short.tokens_per_step or r.num_devices > 8 for r in short.remedies)


def test_two_searches_say_the_same(short: Prediction) -> None:
    again = predicted.__wrapped__(PLAN, short.memory.capacity_bytes / GIB)
    assert again.remedies == short.remedies


def test_the_suggestion_names_each_with_its_step(short: Prediction) -> None:
    lines = short.suggestion.splitlines()
    assert len(lines) == len(short.remedies)
    for number, (line, remedy) in enumerate(zip(lines, short.remedies, strict=True), start=1):
        assert line.startswith(f"{number}. {remedy.change}: step ")


def test_changes_add_up_where_one_is_not_enough() -> None:
    tiny = predicted(PLAN, predicted(PLAN, 80).memory.used_bytes / GIB / 2.5)
    assert tiny.remedies
    assert all(len(r.plan) + bool(r.environment) > 1 for r in tiny.remedies)


def test_remedies_are_looked_for_only_when_asked(short: Prediction) -> None:
    device = NODE.device.model_copy(update={"memory_bytes": short.memory.capacity_bytes, "cuda_memory_bytes": None})
    unasked = predict(MODEL, PLAN, NODE.model_copy(update={"device": device}), CALIBRATION)
    assert (unasked.verdict, unasked.remedies) == (short.verdict, ())
    assert "advise" in unasked.suggestion


def test_nothing_is_made_up_where_nothing_helps() -> None:
    hopeless = predicted(PLAN, 2)
    assert hopeless.verdict == "does not fit"
    assert hopeless.remedies == ()
    assert "no change that was tried" in hopeless.suggestion


def test_advice_on_a_bubble_makes_the_tokens_cheaper() -> None:
    fields = {"pp": 8, "zero": 1, "seq_len": 1024, "micro_batch_size": 2}
    few, many = (predict(MODEL, Plan(**fields, num_micro_batches=count), NODE, CALIBRATION) for count in (2, 32))
    assert "pipeline's bubble: num_micro_batches = 32 instead of 2 (micro_batch_size = 1 makes" in few.suggestion
    assert many.tokens_per_s > 1.5 * few.tokens_per_s
    assert "bubble: num_micro_batches" not in many.suggestion


def test_a_step_that_waits_for_the_host_s_optimizer_is_not_told_to_send_less() -> None:
    fields = {"zero": 2, "data_parallel": "deepspeed", "offload": {"optimizer": "host"}, "seq_len": 1024}
    alone = Cluster.load("gh200-1")
    few, many = (predict(MODEL, Plan(**fields, num_micro_batches=count), alone) for count in (1, 4))
    assert "waits for the optimizer on the host's cores: num_micro_batches = 4" in few.suggestion
    assert many.tokens_per_s > 2 * few.tokens_per_s


def test_every_single_change_is_a_legal_plan_or_refused_as_one() -> None:
    for start in (PLAN, Plan(dp_replicate=8, zero=0, micro_batch_size=3), Plan(dp_shard=8, zero=2, optimizer="sgd")):
        for change in changes(start, NODE, Stack.load(start.stack)):
            assert change.applied(start) != start
            assert change.words


@pytest.mark.parametrize("name", implementation_names())
def test_what_a_change_says_is_all_that_changes(name: str) -> None:
    """Given beside the plan's own fields, as a user gives it, it is the changed plan: no field returns to a default unsaid."""
    for zero in traits_of(name).zero_stages:
        given = {"data_parallel": name, "zero": zero, ("dp_shard" if zero else "dp_replicate"): 8}
        for change in changes(Plan(**given), NODE, Stack.load("torch-2.6-eager")):
            tables = [key for key in change.plan if "." in key]
            plain = {
                key: value for key, value in change.plan.items() if key not in tables and f"{key} = " in change.words
            }
            told = Change(kind="", plan={key: change.plan[key] for key in tables}).applied(Plan(**given | plain))
            assert told == change.applied(Plan(**given))


def test_one_gpu_s_full_fine_tune_may_keep_its_states_on_the_host_or_take_a_loss_without_logits() -> None:
    """DeepSpeed's engine on one GPU, pages of bitsandbytes, Liger's kernel: each told with the keys that apply it."""
    start = Plan(peft="full", zero=0, data_parallel="ddp", stack="transformers-2024", recompute="full", seq_len=2048)
    alone = Cluster.synthesise("a100-80gb", 1)
    found = {one.words for one in changes(start, alone, Stack.load(start.stack))}
    assert "data_parallel = deepspeed, offload.optimizer = host, zero = 2" in found
    assert {"optimizer = paged_adam8bit", "stack.loss = fused_linear"} <= found
    beside = start.copy_with(peft="qlora")  # frozen weights, too, may lie in host memory
    whole = "data_parallel = deepspeed, offload.optimizer = host, zero = 3, offload.parameters = host"
    assert whole in {one.words for one in changes(beside, alone, Stack.load(start.stack))}
    stacks = (Stack.load(start.stack).copy_with(loss="cut"), Stack.load("torch-2.11-compiled"))
    assert all("stack.loss = fused_linear" not in {one.words for one in changes(start, alone, each)} for each in stacks)


def test_a_remedy_of_the_stack_fits_when_it_is_applied() -> None:
    """A vocabulary of 262,144 on a card where half of what is alive are logits."""
    model, cluster = Model.load("gemma3-1b"), Cluster.synthesise("l4", 1)
    fields = {
        "peft": "lora",
        "zero": 0,
        "data_parallel": "ddp",
        "recompute": "full",
        "micro_batch_size": 4,
        "seq_len": 2048,
    }
    plan, stack = Plan(**fields, stack="transformers-2024"), Stack.load("transformers-2024")
    asked = predict(model, plan, cluster, stack=stack, advise=True)
    assert asked.verdict != "fits"
    (fused,) = (one for one in asked.remedies if one.plan == {"stack.loss": "fused_linear"})
    done = predict(model, plan, cluster, stack=stack.copy_with(loss="fused_linear"))
    assert (done.verdict, done.memory.used_bytes, done.step_s) == ("fits", fused.used_bytes, fused.step_s)
    assert not fused.changes_numerics


def test_absurd_sizes_are_answered() -> None:
    absurd = predicted(Plan(dp_shard=8, seq_len=2**31, micro_batch_size=2**31), 80)
    assert absurd.verdict == "does not fit"
    assert absurd.memory.peak_allocated_bytes > 2**62


# --- retries of the allocator


def retrying() -> Prediction:
    """More would be reserved than the device has, by a tenth of what is reserved beyond the live bytes."""
    use = predicted(PLAN, 80).memory
    between = (use.peak_allocated_bytes + 9 * use.peak_reserved_bytes) // 10 + use.outside_torch_bytes
    return predicted(PLAN, between / GIB)


def test_the_slow_end_holds_the_retries_of_every_rank() -> None:
    """Whose memory fills up at its own time, while the other seven wait."""
    tight = retrying()
    slow_s = tight.step_s + 7 * tight.breakdown[STALL]
    assert math.exp(Z90 * tight.spread[RETRIES]) == pytest.approx(slow_s / tight.step_s)
    assert RETRIES not in predicted(PLAN, 80).spread


def test_retries_cost_what_the_driver_takes() -> None:
    tight = retrying()
    pressure = tight.memory.pressure
    assert isinstance(pressure, Pressure)
    assert tight.verdict == "tight"
    assert pressure.num_retries
    overheads = CALIBRATION.overheads
    assert overheads.cuda_malloc is not None
    assert overheads.cuda_free is not None
    stall_s = overheads.cuda_malloc.seconds(pressure.malloc_calls, pressure.malloc_bytes)
    stall_s += overheads.cuda_free.seconds(pressure.free_calls, pressure.free_bytes)
    assert tight.breakdown[STALL] == pytest.approx(stall_s)
    assert sum(tight.breakdown.values()) == pytest.approx(tight.step_s)
    assert tight.lower_s <= tight.step_s <= tight.upper_s
    assert tight.needs.endswith(
        f"{'retry' if pressure.num_retries == 1 else 'retries'} a step, which cost {format_seconds(stall_s)}"
    )
    assert (
        tight.memory.used_bytes
        <= tight.memory.capacity_bytes
        < tight.memory.peak_reserved_bytes + tight.memory.outside_torch_bytes
    )


def test_an_interval_holds_what_retries_leave() -> None:
    plan = Plan(dp_shard=8, seq_len=2048, precision="fp16")
    tight = predict(Model.load("llama3-8b"), plan, Cluster.load("dgx1-v100-8")).memory
    assert tight.retries
    assert tight.low_reserved_bytes <= tight.reserved_bytes < 0.95 * tight.peak_reserved_bytes


def use(**changes: object) -> MemoryUse:
    fields: dict[str, object] = {
        "peak_allocated_bytes": 60 * GIB,
        "peak_reserved_bytes": 82 * GIB,
        "low_reserved_bytes": 79 * GIB,
        "high_reserved_bytes": 86 * GIB,
        "outside_torch_bytes": 2 * GIB,
        "capacity_bytes": 80 * GIB,
        "resident_bytes": GIB,
        "by_category": {"activations": 60 * GIB},
        "peak_moment": "backward",
    }
    return MemoryUse(**{**fields, **changes})  # type: ignore[arg-type]


def test_fragmentation_alone_can_be_too_much() -> None:
    calls = {"num_retries": 1, "malloc_calls": 1, "malloc_bytes": GIB, "free_calls": 1, "free_bytes": GIB}
    failed = use(pressure=Pressure(**calls, peak_reserved_bytes=79 * GIB, fails=True))
    assert failed.fit is Fit.DOES_NOT_FIT
    assert failed.used_bytes == 84 * GIB  # a GPU with that much would not retry
    assert cause_of(failed).startswith("fragmentation")
    retried = use(pressure=Pressure(**calls, peak_reserved_bytes=77 * GIB, fails=False))
    assert (retried.fit, retried.used_bytes) == (Fit.TIGHT, 79 * GIB)


def test_a_pipeline_of_more_stages_than_a_short_model_has_layers_is_helped() -> None:
    """Short models have layers for every stage; a split that is stated is kept whole."""
    plan = Plan(pp=8, zero=0, micro_batch_size=4, seq_len=8192, num_micro_batches=8)
    cluster = Cluster.load("hgx-h100-8")
    for split in ({}, {"first_stage_layers": 3, "last_stage_layers": 5}):
        prediction = predict(Model.load("llama3-8b"), plan.copy_with(**split), cluster, advise=True)
        assert prediction.verdict == "does not fit"
        assert prediction.remedies


def test_a_long_pipeline_is_worth_fewer_full_predictions() -> None:
    """Each plays all layers of all its micro-batches, of 126 layers on 16 stages for some seconds; one is always made."""
    long, short = (Plan(pp=pp, num_micro_batches=4 * pp, seq_len=128) for pp in (16, 2))
    assert _pipeline_proofs(long, 126) == 1
    assert 1 < _pipeline_proofs(long, 32) < _pipeline_proofs(long, 16) == _pipeline_proofs(short, 80) == 4


def estimated(**fields: object) -> tuple[_Search, _Candidate]:
    """What estimates a pipeline of two stages, and the plan as it is."""
    plan = Plan.model_validate({"dp_replicate": 4, "zero": 0, "pp": 2, "seq_len": 128, **fields})
    stack = Stack.load(plan.stack)
    use, _ = simulate_memory(MODEL, plan, stack, build_blocks(MODEL, stack, plan), NODE.device)
    search = _Search(model=MODEL, calibration=CALIBRATION, curves=default_curves(), memory=use)
    return search, _Candidate(change=Change(kind=""), plan=plan, cluster=NODE, stack=stack, figures=_NO_EFFECT)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "dualpipe", "dualpipe_v"])
def test_no_schedule_is_refused_for_what_an_estimate_leaves_out(schedule: str) -> None:
    chunks = 1 if schedule in ("gpipe", "1f1b", "zb_h1") else 2
    search, one = estimated(schedule=schedule, virtual_stages=chunks, num_micro_batches=8)
    assert search.estimate(one).cost > 0


def test_a_pipeline_whose_last_stage_holds_most_is_estimated_there() -> None:
    """GPipe keeps the logits of every micro-batch: what is estimated lies near what the full prediction says."""
    search, one = estimated(schedule="gpipe", pp=4, dp_replicate=2, seq_len=2048, num_micro_batches=16)
    search.look_at_ends(one)
    assert search.last
    assert search.estimate(one).live == pytest.approx(search.memory.peak_allocated_bytes, rel=0.05)


def test_bytes_of_many_micro_batches_are_carried_on_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gpipe holds all of them: what is alive is that of playing all, and few are played."""
    search, one = estimated(schedule="gpipe", num_micro_batches=24)
    whole, played = search._played_live(one, 4), _Search._played_live
    counts: list[int] = []

    def counting(self: _Search, of: _Candidate, num_layers: int) -> tuple[int, int]:
        counts.append(of.plan.num_micro_batches)
        return played(self, of, num_layers)

    monkeypatch.setattr(_Search, "_played_live", counting)
    assert search._live(one, 4) == whole
    assert counts == [4, 6]


def test_frozen_weights_that_fit_on_each_gpu_need_no_gathers_over_slow_links() -> None:
    """What is told holds: whole on each GPU it takes about as much as told, and less time."""
    model, cluster = Model.load("llama3.2-3b"), Cluster.synthesise("rtx-4090", 4)
    fields = {"peft": "lora", "stack": "transformers-2024", "recompute": "full", "seq_len": 1024}
    sharded = predict(model, Plan(dp_shard=4, **fields), cluster, CALIBRATION)
    told = re.search(r"zero = 0, data_parallel = ddp .* \(some ([0-9.]+) GiB\)", sharded.suggestion)
    assert told is not None
    whole = predict(model, Plan(dp_replicate=4, zero=0, data_parallel="ddp", **fields), cluster, CALIBRATION)
    assert whole.step_s < 0.8 * sharded.step_s
    assert whole.memory.used_bytes / 2**30 == pytest.approx(float(told[1]), rel=0.15)
    assert "data_parallel" not in whole.suggestion


def test_a_host_that_is_late_is_named_where_nothing_else_is_waited_for_longer() -> None:
    """Replicas over EFA: the step waits longer for them than for the host, and does not on one node."""
    model, found = Model.load("gpt2"), []
    for nodes in (4, 1):
        cluster = Cluster.load("aws-p5", nodes)
        one = predict(model, Plan(dp_replicate=nodes, dp_shard=8, seq_len=1024), cluster, CALIBRATION)
        exposed = sum(value for name, value in one.breakdown.items() if name.startswith("exposed"))
        assert one.breakdown["host"] > 0.1 * one.step_s
        found.append((exposed > one.breakdown["host"], "host launches kernels slower" in one.suggestion))
    assert found == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("cluster", "nodes", "stack"),
    [
        ("hgx-a100-80-8-roce-4x100", 2, "llm-foundry-2023"),
        ("pcie-a100-80-8", 2, "torch-2.4-eager"),
        ("mi300x-8", 2, "torch-2.11-eager"),
        ("hgx-h100-8", 1, "torch-2.11-compiled"),
    ],
)
def test_sharding_inside_nodes_is_advice_where_it_fits_and_is_quicker(cluster: str, nodes: int, stack: str) -> None:
    """Gradients of replicas cross the network twice in an all-reduce: on many networks that is more than gathers take."""
    plan, inputs = (
        Plan(dp_shard=8 * nodes, seq_len=1024, recompute="full"),
        (Cluster.load(cluster, nodes), None, Stack.load(stack)),
    )
    model = Model.load("llama3.2-1b")
    found = predict(model, plan, *inputs, advise=True)
    inside = predict(model, plan.copy_with(dp_replicate=nodes, dp_shard=8), *inputs)
    assert "waits for communication" in found.suggestion
    quicker = nodes > 1 and inside.fits and inside.step_s < found.step_s
    words = f"dp_replicate = {nodes}, dp_shard = 8 shards inside a node, a step of {format_seconds(inside.step_s)}"
    assert (words in found.suggestion) == ("dp_replicate" in found.suggestion) == quicker
    assert "fewer" not in found.suggestion  # there is one micro-batch


def test_where_nothing_need_be_recomputed_the_bytes_and_the_time_are_told() -> None:
    """LoRA on a 32B model has room for all that its layers keep: what is told is what predictions of the other plan say."""
    model, cluster, stack = Model.load("qwen2.5-32b"), Cluster.load("dgx-h100-8"), Stack.load("transformers-2024")
    plan = Plan(dp_shard=8, seq_len=2048, peft=PeftPlan(method="lora"), recompute="full")
    again, kept = (predict(model, plan.copy_with(recompute=mode), cluster, None, stack) for mode in ("full", "none"))
    found = re.search(r"recompute = none keeps ([0-9.]+) GiB more, of ([0-9.]+) GiB free, and saves about ([0-9.]+) ms", again.suggestion)  # fmt: skip
    assert found is not None
    more, free, saved = map(float, found.groups())
    assert more * GIB == pytest.approx(kept.memory.used_bytes - again.memory.used_bytes, rel=0.05)
    assert free * GIB == pytest.approx(again.memory.capacity_bytes - again.memory.used_bytes, rel=0.01)
    assert saved / 1000 == pytest.approx(again.step_s - kept.step_s, rel=0.1)
    longer = predict(model, plan.copy_with(micro_batch_size=4), cluster, None, stack)
    assert "recompute less (recompute = selective or every_k with recompute_every = 2)" in longer.suggestion
