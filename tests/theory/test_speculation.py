"""Speculative decoding against its paper (arXiv 2211.17192) and its rooflines; weights in NVFP4."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Gemm
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Chunk, InferencePlan, StepCosts, Workload, check, serve
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.kernels import NarrowWeights, multiplied, stored_as
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.shards import stage_shards, weight_bytes
from simulator.studies.serving.speculation import tokens_a_step

MODEL, CLUSTER, STACK = Model.load("llama3-8b"), Cluster.load("hgx-h100-8"), Stack.load("vllm-2025")


def costs_of(model: Model = MODEL, **plan: object) -> StepCosts:
    """On a machine without losses."""
    made = InferencePlan.parse(plan, "plan", PlanError)
    return StepCosts(model, made, CLUSTER, STACK, Calibration.ideal(), LinkCurves.ideal())


def seconds(costs: StepCosts, count: int = 1, context: int = 1000) -> float:
    return sum(costs.stages_s(batch_of(costs, count, context)))


@pytest.mark.parametrize("guesses", [1, 3, 7])
def test_a_step_yields_what_equation_1_says(guesses: int) -> None:
    for acceptance in (Fraction(0), Fraction(1, 3), Fraction(4, 5)):
        expected = (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
        assert tokens_a_step(guesses, acceptance) == expected  # type: ignore[arg-type]  # exact in fractions
    assert tokens_a_step(guesses, 1.0) == guesses + 1


def test_guesses_that_cost_nothing_divide_the_time_of_reading_weights() -> None:
    """One sequence reads all weights, for one token or for four: the time a token is a step's over what it yields."""
    plain = seconds(costs_of())
    guessed = seconds(costs_of(speculative="ngram", draft_tokens=3, acceptance=0.5))
    assert guessed == pytest.approx(plain / tokens_a_step(3, 0.5), rel=0.01)


def test_guesses_that_are_never_accepted_cost_what_they_cost() -> None:
    """256 sequences are bound by products: four tokens of each take nearly four times as long, and one of them counts."""
    plain, guessed = costs_of(), costs_of(speculative="ngram", draft_tokens=3, acceptance=0.0)
    assert seconds(guessed) >= seconds(plain)
    assert 2.5 < seconds(guessed, 256, 16) / seconds(plain, 256, 16) < 4.5


def test_a_draft_model_adds_its_own_steps() -> None:
    """Over the n-gram's: three steps of the small model, divided by what a step yields."""
    draft = Model.load("llama3.2-1b")
    ngram = costs_of(speculative="ngram", draft_tokens=3, acceptance=0.7)
    drafted = costs_of(speculative="draft", draft_model="llama3.2-1b", draft_tokens=3, acceptance=0.7)
    more = 3 * seconds(costs_of(draft)) / tokens_a_step(3, 0.7)
    assert seconds(drafted) - seconds(ngram) == pytest.approx(more, rel=1e-6)


def test_pieces_of_prompts_are_not_divided() -> None:
    costs = costs_of(speculative="ngram", draft_tokens=3, acceptance=0.7)
    alone = batch_of(costs, 4, 1000)
    mixed = Batch(decodes=4, keys=alone.keys, chunks=(Chunk(new=2048, cached=0),))
    plain = costs_of()
    piece_s = sum(plain.stages_s(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=2048, cached=0),))))
    added_s = sum(costs.stages_s(mixed)) - sum(costs.stages_s(alone))
    reading_s = seconds(plain)  # which pieces and verified tokens share
    assert piece_s - reading_s < added_s < piece_s


def test_what_guesses_takes_memory() -> None:
    plan = InferencePlan(speculative="draft", draft_model="llama3.2-1b", acceptance=0.7, tp=2)
    without = InferencePlan(tp=2)
    found, plain = (serving_memory(MODEL, one, CLUSTER.device, STACK) for one in (plan, without))
    (draft,) = stage_shards(Model.load("llama3.2-1b"), without)
    assert found.weight_bytes - plain.weight_bytes == weight_bytes(draft, without)
    assert found.block_bytes > plain.block_bytes  # the draft's cache
    module = Model.load("deepseek-v3")
    mtp, none = (
        serving_memory(
            module,
            InferencePlan.parse({"tp": 8, "speculative": kind, "acceptance": share}, "plan", PlanError),
            CLUSTER.device,
            STACK,
        )
        for kind, share in (("mtp", 0.8), ("none", None))
    )
    layer = none.weight_bytes / module.num_layers
    assert layer < mtp.weight_bytes - none.weight_bytes < 1.3 * layer  # one layer with experts, as most are


def test_an_eagle_head_is_one_layer_more_for_any_model() -> None:
    """Its layer, and the product that joins a state with an embedding (arXiv 2401.15077, section 4.1); embedding and head are the model's."""
    eagle, ngram = (InferencePlan(speculative=kind, acceptance=0.7) for kind in ("eagle", "ngram"))
    found, plain = (serving_memory(MODEL, one, CLUSTER.device, STACK) for one in (eagle, ngram))
    layer = MODEL.d_model * (2 * 4096 + 2 * 1024) + 3 * MODEL.d_model * MODEL.d_ff
    assert found.weight_bytes - plain.weight_bytes == pytest.approx(2 * (layer + 2 * MODEL.d_model**2), rel=1e-3)
    head_s = 2 * MODEL.vocab_size * MODEL.d_model / CLUSTER.device.memory_bytes_per_s
    layer_s = (found.weight_bytes - plain.weight_bytes) / CLUSTER.device.memory_bytes_per_s
    costs = [costs_of(speculative=kind, draft_tokens=1, acceptance=0.0) for kind in ("eagle", "ngram")]
    assert seconds(costs[0]) - seconds(costs[1]) == pytest.approx(head_s + layer_s, rel=0.03)


def test_mxfp4_is_of_experts_alone() -> None:
    """Checkpoints of gpt-oss take 60.8 and 12.8 GiB (arXiv 2508.10925, table 1)."""
    for name, gib in (("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)):
        (shard,) = stage_shards(Model.load(name), InferencePlan())
        assert weight_bytes(shard, InferencePlan(weights="mxfp4")) / 2**30 == pytest.approx(gib, rel=0.005)
    one = Gemm(m=8, n=4096, k=4096, dtype="bf16")
    attention, (experts,) = (stored_as((kernel,), "mxfp4", {}) for kernel in (one, replace(one, grouped=True)))
    assert attention == (one,)
    assert isinstance(experts, NarrowWeights)
    assert experts.weight_bits == 4.25
    model = Model.load("gpt-oss-120b")
    told = serve(model, InferencePlan(window_cache=True), CLUSTER, Workload(num_requests=3).requests()).remedies
    assert {"weights": "mxfp4"} in [remedy.plan for remedy in told]
    with pytest.raises(PlanError, match="mxfp4 is of experts alone"):
        check(InferencePlan(weights="mxfp4"), MODEL, CLUSTER)


def test_contradictions_are_told_together() -> None:
    plan = InferencePlan(speculative="mtp", draft_model="qwen3-0.6b", pp=2)
    with pytest.raises(PlanError) as caught:
        check(plan, MODEL, CLUSTER)
    places = [fault.place.removeprefix("inference: ") for fault in caught.value.faults]
    assert sorted(places) == ["acceptance", "draft_model", "speculative", "speculative"]
    with pytest.raises(PlanError, match="has 151936 tokens, llama3-8b has 128256"):
        check(InferencePlan(speculative="draft", draft_model="qwen3-0.6b", acceptance=0.5), MODEL, CLUSTER)
    with pytest.raises(PlanError, match="nothing is guessed"):
        check(InferencePlan(acceptance=0.5), MODEL, CLUSTER)


def test_nvfp4_weights_have_four_and_a_half_bits() -> None:
    """Of 16 numbers: 16 × 4 bits and a scale of 8 (arXiv 2509.25149, section 2)."""
    (shard,) = stage_shards(MODEL, InferencePlan())
    wide, narrow = (weight_bytes(shard, InferencePlan(weights=kind)) for kind in ("fp8", "nvfp4"))
    layers = sum(MODEL.d_model * n for n in (4096 + 2 * 1024 + 4096, 3 * MODEL.d_ff)) * MODEL.num_layers
    assert wide - narrow == pytest.approx(layers * (8 - 4.5) / 8, rel=1e-6)
    product = Gemm(m=8, n=4096, k=4096, dtype="bf16")
    (_, narrow_product), (widened,) = (
        stored_as((product,), "nvfp4", multiplied(Device.load(name))) for name in ("b200-sxm", "h100-sxm5-80gb")
    )
    assert isinstance(narrow_product, Gemm)
    assert narrow_product.dtype == "fp4"
    assert isinstance(widened, NarrowWeights)
    assert (widened.dtype, widened.weight_bits) == ("bf16", 4.5)
