"""The pool that a plan asks for: PyTorch's settings as torch reads them, its bytes against replays, its time by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from simulator import Cluster, Model, Plan, Prediction, predict
from simulator.cli import main
from simulator.memory import History, device_history, pools
from simulator.memory.allocator.blocks import MIB
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.history import live_by_category
from simulator.memory.policies import POLICIES, Pool, PoolInputs, make_pool
from simulator.memory.pools import Pools, settings_of
from simulator.memory.requests import ALLOC, FREE, REQUEST_FREE, Request, Sequence, of_history
from simulator.memory.requests import play as play_requests
from simulator.memory.tape import CATEGORIES, TAG
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.plan.alloc_conf import NUM_DIVISIONS, parse_alloc_conf
from simulator.spec.plan.memory import KINDS
from simulator.spec.software.stack import Stack
from simulator.studies.replay import compare, repeated

MODEL, CLUSTER = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8")
PLAN = Plan(dp_shard=8, zero=3, seq_len=1024, num_micro_batches=2)
OTHERS = [name for name in POLICIES if name != "native"]


@cache
def predicted(**memory: object) -> Prediction:  # of hashable fields
    return predict(MODEL, PLAN.copy_with(**memory), CLUSTER)


@cache
def history(num_micro_batches: int = 2) -> History:
    plan = PLAN.copy_with(num_micro_batches=num_micro_batches)
    return device_history(MODEL, plan, Stack.of(plan), CLUSTER.device)


@cache
def lowering() -> Lowering:
    calibration = Calibration.for_device(CLUSTER.device)
    return lower(MODEL, PLAN, CLUSTER, Stack.of(PLAN), calibration, calibration.links or default_curves())


# -- PYTORCH_CUDA_ALLOC_CONF


def test_the_example_of_torchs_header_is_read_as_torch_reads_it() -> None:
    """c10/core/AllocatorConfig.h's own example. Below the first size its value holds; `>` begins at the last one named."""
    conf = parse_alloc_conf(
        "max_split_size_mb:100,max_non_split_rounding_mb:20,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,256:4,1024:4,>:1],expandable_segments:True,pinned_use_background_threads:True"
    )
    assert conf.max_split_size_bytes == 100 * MIB
    assert conf.max_non_split_rounding_bytes == 20 * MIB
    assert conf.garbage_collection_threshold == 0.5
    assert conf.expandable_segments is True
    assert conf.roundup_power2_divisions == (*[8] * 7, 0, 4, 0, *[1] * 6)  # 1 .. 64 MiB, 256 MiB, from 1 GiB on
    assert conf.idle_keys == ("pinned_use_background_threads",)


def test_variables_blanks_and_one_number_for_all_sizes() -> None:
    conf = parse_alloc_conf("PYTORCH_ALLOC_CONF = roundup_power2_divisions : 4 , per_process_memory_fraction:0.5")
    assert conf.roundup_power2_divisions == (4,) * NUM_DIVISIONS
    assert conf.memory_fraction == 0.5


def test_every_fault_of_a_setting_is_told_with_what_would_be_right() -> None:
    text = "max_split_size_mb:19,expandable_segment:True,garbage_collection_threshold:1,roundup_power2_divisions:[3:8],\
backend:cudaMallocAsync,expandable_segments:true,pinned_num_register_threads:8,pinned_num_register_threads:8"
    with pytest.raises(ValueError, match="max_split_size_mb") as told:
        parse_alloc_conf(text)
    for words in (
        "max_split_size_mb is '19', not a whole number of MiB, at least 20",
        "'expandable_segment' is no key of it: did you mean expandable_segments",
        "garbage_collection_threshold is '1', not above 0, below 1",
        "roundup_power2_divisions is '[3:8]', not a power of two",
        "backend is 'cudaMallocAsync', not native",
        "expandable_segments is 'true', not True or False",
        "pinned_num_register_threads is given twice",
    ):
        assert words in str(told.value)


@pytest.mark.parametrize(
    "text", ["roundup_power2_divisions:[256:1", "roundup_power2_divisions:[]", "roundup_power2_divisions:[256]"]
)
def test_lists_are_whole(text: str) -> None:
    with pytest.raises(ValueError, match="roundup_power2_divisions is"):
        parse_alloc_conf(text)


def test_a_key_that_is_like_none_lists_all() -> None:
    with pytest.raises(ValueError, match="zzz") as told:
        parse_alloc_conf("zzz:1")
    assert "roundup_power2_divisions" in str(told.value)
    assert "pinned_free_catch_all" in str(told.value)


def test_garbage_is_collected_only_where_torch_is_limited() -> None:
    conf = "garbage_collection_threshold:0.6"
    assert settings_of(PLAN.copy_with(alloc_conf=conf)).garbage_collection_threshold == 0
    for limited in (
        PLAN.copy_with(alloc_conf=conf, memory_fraction=0.9),
        PLAN.copy_with(alloc_conf=f"{conf},per_process_memory_fraction:0.9"),
    ):
        assert settings_of(limited).garbage_collection_threshold == 0.6


def test_a_fraction_in_the_setting_is_the_plans() -> None:
    said = predicted(alloc_conf="per_process_memory_fraction:0.5").memory
    assert said.capacity_bytes == predicted(memory_fraction=0.5).memory.capacity_bytes


def test_contradictions_are_errors_together(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-policy", "slab", "--alloc-conf", "per_process_memory_fraction:0.5", "--memory-fraction", "0.9"]
    assert main(["predict", "--model", "llama3.2-1b", *flags]) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert "the policy slab is not PyTorch's allocator" in told
    assert "per_process_memory_fraction:0.5 is not memory_fraction = 0.9" in told


# -- bytes


def test_the_usual_pool_played_as_a_policy_is_the_usual_prediction() -> None:
    """An own allocator's time makes it a pool that is asked for; its bytes are PyTorch's allocator's."""
    usual, asked = predicted(), predicted(alloc_s=1e-12)
    assert usual.memory.pool is None
    assert replace(asked.memory, pool=None) == usual.memory
    assert asked.memory_trace == usual.memory_trace


@pytest.mark.parametrize("policy", [*OTHERS, "alloc_conf"])
def test_a_predicted_policy_is_its_replay(policy: str) -> None:
    """The requests of the predicted step, replayed under the policy: the same peak, the same calls of the driver."""
    conf = "max_split_size_mb:64,roundup_power2_divisions:8,large_segment_size_mb:40"
    memory = {"alloc_conf": conf} if policy == "alloc_conf" else {"memory_policy": policy}
    use, pools = predicted(**memory).memory, Pools.of(PLAN.copy_with(**memory))
    costs = DriverCosts.of(Calibration.for_device(CLUSTER.device))
    needs = PoolInputs(settings=pools.settings)
    sequence = of_history(history(), "")
    (steady,) = compare(sequence, [pools.name], needs, costs)
    assert use.peak_reserved_bytes == steady.peak_reserved_bytes
    third = repeated(sequence, 2)
    assert third is not None
    (settled,) = compare(third, [pools.name], needs, costs)
    assert use.pool is not None
    assert use.pool.calls == settled.calls
    assert use.peak_allocated_bytes == predicted().memory.peak_allocated_bytes  # what lives is the same under any


def test_a_snapshot_of_a_prediction_replays_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the files: predict --snapshot, replay SNAPSHOT --policy; over both steps, as a snapshot does not part them."""
    snapshot = f"{tmp_path}/of.pickle"
    asked = ["--model", "llama3.2-1b", "--seq-len", "1024", "--num-micro-batches", "2"]
    assert main(["predict", *asked, "--snapshot", snapshot]) == 0
    capsys.readouterr()
    assert main(["replay", snapshot, "--policy", "slab", "--policy", "fixed", "--json"]) == 0
    for found in json.loads(capsys.readouterr().out)["policies"]:
        memory = predicted(memory_policy=found["policy"]).memory
        assert found["peak_reserved_bytes"] == memory.peak_reserved_bytes, found["policy"]


def test_requests_of_micro_batches_that_are_not_played_are_counted() -> None:
    """A history has two micro-batches; the third and fourth ask for what the second does, seen from 1 and 2."""
    counts = {}
    for number in (1, 2):
        step = of_history(history(number), "").step
        kinds = [one[0] for one in step]
        counts[number] = kinds.count(ALLOC), kinds.count(FREE) + kinds.count(REQUEST_FREE)
    pool = predicted(num_micro_batches=4, alloc_s=1e-12).memory.pool
    assert pool is not None
    two, each = counts[2], [b - a for a, b in zip(counts[1], counts[2], strict=True)]
    assert (pool.allocations, pool.frees) == (two[0] + 2 * each[0], two[1] + 2 * each[1])


def test_a_pool_that_is_limited_retries_or_fails_as_its_replay_does() -> None:
    memory = predicted(memory_policy="arena").memory
    share = (memory.peak_reserved_bytes - 200 * MIB) / memory.capacity_bytes
    tight = predicted(memory_policy="arena", memory_fraction=share).memory
    limit = tight.capacity_bytes - tight.outside_torch_bytes
    (score,) = compare(of_history(history(), ""), ["arena"], PoolInputs(capacity_bytes=limit), DriverCosts.of())
    assert tight.pressure is not None
    assert tight.pressure.fails == (score.out_of_memory is not None)
    assert tight.pressure.peak_reserved_bytes == score.peak_reserved_bytes or tight.pressure.fails


# -- time


def test_the_drivers_calls_are_priced_by_the_calibration() -> None:
    """The policy `fixed` maps in every step: calls × what one takes, on top of the step."""
    usual, fixed = predicted(), predicted(memory_policy="fixed")
    overheads = Calibration.for_device(CLUSTER.device).overheads
    pool = fixed.memory.pool
    assert pool is not None
    assert set(pool.calls) == {"remap"}
    assert overheads.cuda_malloc is not None
    stall_s = pool.calls["remap"] * overheads.cuda_malloc.call_s
    assert fixed.step_s == pytest.approx(usual.step_s + stall_s, rel=1e-12)
    assert fixed.breakdown["cuda_malloc"] == pytest.approx(stall_s, rel=1e-12)
    assert next(one.detail for one in fixed.sources if one.what == "pool").startswith("calibration h100-sxm")


@pytest.mark.parametrize(("alloc_s", "free_s"), [(1e-9, 0.0), (2e-5, 1e-5), (1e-3, 0.0)])
def test_an_own_allocators_time_is_hidden_as_far_as_the_host_is_ahead(alloc_s: float, free_s: float) -> None:
    usual, own = predicted(), predicted(alloc_s=alloc_s, free_s=free_s)
    kinds = [one[0] for one in of_history(history(), "").step]
    time_s = kinds.count(ALLOC) * alloc_s + (kinds.count(FREE) + kinds.count(REQUEST_FREE)) * free_s
    ahead_s = usual.step_s - play(lowering()).host_s
    assert ahead_s > 0
    assert own.step_s == pytest.approx(usual.step_s + max(0.0, time_s - ahead_s), rel=1e-12)


def test_what_would_make_it_fit_counts_the_pools_time_too() -> None:
    plan = PLAN.copy_with(memory_policy="fixed", micro_batch_size=64, num_micro_batches=1)
    whole = predict(MODEL, plan, CLUSTER, advise=True)
    assert not whole.fits
    remedy = next(one for one in whole.remedies if one.num_devices == 8)
    changed = predict(MODEL, plan.copy_with(**remedy.plan), CLUSTER)
    assert changed.fits
    assert changed.breakdown["cuda_malloc"] > 0
    assert remedy.step_s == pytest.approx(changed.step_s, rel=1e-12)


# -- a pool that is given back, and compression


def test_a_pool_that_is_given_back_is_taken_again() -> None:
    """What emptying the cache frees between steps is what the next step takes; a tenth of both where that is every tenth step."""
    usual, refilled = predicted(), predicted(refill_every=10)
    sequence = of_history(history(), "")
    pool: Pool[object] = make_pool("native", PoolInputs())
    handles = play_requests(sequence.requests, pool)
    before = pool.reserved_bytes
    pool.empty_cache()
    emptied = pool.reserved_bytes
    use = refilled.memory.pool
    assert use is not None
    assert use.refill["segment_free"][1] == before - emptied
    play_requests(repeated_step(sequence), pool, handles=handles)
    assert use.refill["segment_alloc"][1] == pool.reserved_bytes - emptied
    assert refilled.memory.peak_reserved_bytes == max(usual.memory.peak_reserved_bytes, pool.reserved_bytes)
    overheads = Calibration.for_device(CLUSTER.device).overheads
    assert overheads.cuda_malloc is not None
    assert overheads.cuda_free is not None
    once_s = overheads.cuda_malloc.seconds(*use.refill["segment_alloc"]) + overheads.cuda_free.seconds(
        *use.refill["segment_free"]
    )
    assert refilled.step_s == pytest.approx(usual.step_s + once_s / 10, rel=1e-12)


def repeated_step(sequence: Sequence) -> tuple[Request, ...]:
    again = repeated(sequence, 2)
    assert again is not None
    return again.step


def test_compressed_kinds_take_their_ratio_and_no_others_change() -> None:
    ratios = {"activations": 2.0, "optimizer_state": 4.0}
    plan = PLAN.copy_with(compress=ratios)
    plain, small = history(), device_history(MODEL, plan, Stack.of(plan), CLUSTER.device)
    for at in range(0, len(plain.events), 97):
        before, after = live_by_category(plain, at, 1), live_by_category(small, at, 1)
        assert before.keys() == after.keys()
        for kind, size in before.items():
            assert after[kind] == pytest.approx(
                size / ratios.get(kind, 1.0), abs=len(plain.events)
            )  # each rounded up to bytes
            assert kind in ratios or after[kind] == size
    whole, memory = predicted().memory, predict(MODEL, plan, CLUSTER).memory
    assert memory.peak_allocated_bytes < whole.peak_allocated_bytes
    assert whole.by_category["optimizer_state"] / memory.by_category["optimizer_state"] == pytest.approx(4, rel=1e-3)


def test_compression_by_kernels_costs_its_bytes_twice_and_by_the_memory_nothing() -> None:
    made = sum(
        size for _, size, _, tag in history().events[history().steady :] if size > 0 and tag == TAG["activations"]
    )
    plan = PLAN.copy_with(compress={"activations": 2.0})
    free, paid = predict(MODEL, plan, CLUSTER), predict(MODEL, plan.copy_with(compress_bytes_per_s=1e12), CLUSTER)
    assert free.step_s == predicted().step_s
    assert paid.breakdown["compression"] == pytest.approx(2 * made / 1e12, rel=1e-6)
    assert paid.step_s == pytest.approx(free.step_s + 2 * made / 1e12, rel=1e-6)


def test_kinds_and_ratios_that_are_none_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert KINDS == CATEGORIES
    assert (
        main(["predict", "--set", "plan.memory.compress.activation=2", "--set", "plan.memory.compress.loss=0.5"]) == 3
    )
    told = " ".join(capsys.readouterr().err.split())
    assert "'activation' is no kind of tensor: did you mean activations" in told
    assert "loss = 0.5 is no ratio" in told


def test_a_search_does_not_prune_what_compression_makes_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose states alone do not fit one small GPU; at an eighth of the optimizer's they do."""
    asked = [
        "search",
        "--model",
        "llama3.2-1b",
        "--cluster",
        "1xt4",
        "--global-batch",
        "1",
        "--seq-len",
        "128",
        "--stack",
        "torch-2.6-eager",
        "--fix",
        "precision=fp16",
        "--json",
    ]
    fixed = ["--fix", "compress={optimizer_state = 8}"]
    codes = {}
    for name, more in (("plain", []), ("compressed", fixed)):
        codes[name] = main([*asked, *more])
        capsys.readouterr()
    assert codes == {"plain": 4, "compressed": 0}


def test_a_step_is_played_as_often_as_its_figures_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where live tensors alone do not fit, no step is repeated for its calls; a buffer is sized where one is kept."""
    counted: list[str] = []
    settled, sized = pools._PoolRun.settled, pools.checkpoints
    monkeypatch.setattr(pools._PoolRun, "settled", lambda run: counted.append("repeated") or settled(run))
    monkeypatch.setattr(pools, "checkpoints", lambda requests: counted.append("sized") or sized(requests))
    model, cluster = Model.load("gpt2"), Cluster.load("hgx-h100-8", 1)
    found = {}
    for policy, size in product(("defrag", "checkpoint_buffer"), (1, 512)):
        plan = Plan(dp_shard=8, seq_len=1024, micro_batch_size=size, memory_policy=policy)  # type: ignore[call-arg]
        counted.clear()
        memory = predict(model, plan, cluster).memory
        found[policy, memory.live_tensors_fit] = [*counted]
        assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    assert found == {
        ("defrag", True): ["repeated"],
        ("defrag", False): [],
        ("checkpoint_buffer", True): ["sized", "repeated"],
        ("checkpoint_buffer", False): ["sized"],
    }
