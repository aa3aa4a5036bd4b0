"""What a row does not say of its experts, adapters, vocabulary and TFLOP/s: intervals reach to what may have been."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simulator.spec.cluster.device import Device
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.rows import RunRow
from simulator.studies.backtest.unstated import adapted, counted_otherwise, untrained

ROW = RunRow(
    line=2, id="row", framework="somebody's", model_name="small", n_layers=4, d_model=1024, n_heads=8, n_kv_heads=8,
    d_ff=4096, mlp_kind="swiglu", vocab=32_000, seq_len=2048, gpu="H100", n_gpus=8, zero_or_fsdp="fsdp_full",
    micro_batch=1, global_batch=8, precision="bf16", act_ckpt="none", metric="step_time_s", value=1.0,
)  # fmt: skip
MIXTURE = replace(ROW, n_experts=8, top_k=2, d_ff=2048)


def _step(row: RunRow) -> tuple[float, float, float]:
    one = evaluate_row(row)
    assert one.status == "ok", one.reason
    return one.low_step_s or 0.0, one.predicted_step_s or 0.0, one.high_step_s or 0.0


def test_exchanges_of_experts_that_are_not_stated_widen_the_interval_alone() -> None:
    balanced = ("plan.expert_imbalance", 1.0)
    open_, stated, deep = (
        replace(MIXTURE, ep=8, settings=(balanced, *exchange))
        for exchange in ((), (("plan.dispatcher", "all_to_all"),), (("plan.dispatcher", "deep_ep"),))
    )
    (low, step, high), (low_stated, step_stated, high_stated), quicker = map(_step, (open_, stated, deep))
    assert step == step_stated
    assert high == high_stated
    assert low == min(low_stated, quicker[0])


def test_routing_that_nothing_forces_may_be_that_of_an_untrained_router() -> None:
    """Software that joins experts by torch's operators; a row that states an imbalance has that one."""
    each = replace(MIXTURE, framework="Hugging Face Trainer")
    assert untrained(each) == pytest.approx(0.92 * 8 / 2)
    balanced = _step(replace(each, settings=(("plan.expert_imbalance", 1),)))
    uneven = _step(replace(each, settings=(("plan.expert_imbalance", untrained(each)),)))
    low, step, high = _step(each)
    assert (low, step) == balanced[:2]
    assert high == max(uneven[2], balanced[2])


def test_programs_that_nobody_described_may_pad_all_experts_to_the_busiest_ones_rows() -> None:
    large, balanced = replace(MIXTURE, seq_len=8192, d_ff=8192), (("plan.expert_imbalance", 1),)
    uneven = (("plan.expert_imbalance", untrained(large)), ("stack.expert_rows", "stacked"))
    (low, step, high), plain = _step(large), _step(replace(large, settings=balanced))
    padded = _step(replace(large, settings=uneven))
    assert (low, step, high) == (min(low, plain[0], padded[0]), plain[1], padded[2])
    assert high > plain[2]


def test_programs_that_nobody_described_may_dequantise_by_operators() -> None:
    """And no others: HF's Trainer has the kernel that its row does not deny."""
    tuned = (("plan.peft", "qlora"), ("plan.base_weights", "gptq"), ("plan.lora_rank", 8))
    row = replace(ROW, zero_or_fsdp="ddp", settings=tuned)
    by_operators = _step(replace(row, settings=(*tuned, ("stack.dequantised", "operators"))))
    assert _step(row)[2] == by_operators[2] > by_operators[1] > _step(row)[1]
    named = replace(row, framework="HF Trainer")
    assert _step(named) == _step(replace(named, settings=(*tuned, ("stack.dequantised", "kernel"))))


PIPELINE = replace(
    ROW, framework="Megatron-LM", n_layers=12, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=8192, vocab=64 * 2048, n_gpus=4,
    pp=4, zero_or_fsdp="ddp", micro_batch=4, global_batch=32,
)  # fmt: skip


def test_stages_may_be_interleaved_where_a_row_does_not_say() -> None:
    plain, interleaved = _step(replace(PIPELINE, vpp=1)), _step(replace(PIPELINE, vpp=3))
    assert interleaved[1] < plain[1]
    assert _step(PIPELINE) == (interleaved[0], *plain[1:])
    assert _step(replace(PIPELINE, settings=(("plan.virtual_stages", 1),))) == plain
    small = replace(PIPELINE, d_model=1024, d_ff=4096, micro_batch=1, global_batch=8)
    assert _step(replace(small, vpp=1)) == _step(small)  # there it would take longer


def test_programs_that_nobody_described_may_deal_layers_by_what_the_head_computes() -> None:
    """A layer has 4 d² + 3 · 4 d² weights, the head 64 d²: as much as four layers, so in quarters of 16 it is a stage alone."""
    unnamed = replace(PIPELINE, framework="somebody's", vpp=1)
    even = _step(replace(unnamed, settings=(("plan.head_as_layer", False),)))
    dealt = _step(replace(unnamed, settings=(("plan.stage_layers", (4, 4, 4, 0)),)))
    assert dealt[1] < even[1]
    assert _step(unnamed) == (dealt[0], even[1], even[2])


def test_a_stack_may_say_that_its_routers_are_untrained() -> None:
    run = resolve(replace(MIXTURE, framework="KempnerForge"))
    assert run.plan.experts.imbalance == pytest.approx(0.92 * 8 / 2)


def test_a_blank_vocabulary_is_open() -> None:
    outcome = evaluate_row(replace(ROW, vocab=None))
    assert outcome.status == "ok"
    assert "vocab 50304" in (outcome.open or "")
    small, large = (_step(replace(ROW, vocab=size)) for size in (32_000, 128_256))
    assert (outcome.low_step_s, outcome.high_step_s) == (small[0], large[2])


def test_tflops_of_a_run_that_recomputes_may_count_that_too() -> None:
    """96 B s l h² (1 + s/6h + V/16lh) of arXiv 2104.04473 over 72 B s l h² (1 + s/6h + V/12lh): the blocks' forward is a third more."""
    row = replace(ROW, mlp_kind="gelu", model_name="gpt", metric="model_tflops_per_gpu", act_ckpt="full", value=10.0)
    model = resolve(row).model
    l, h, s, v = 4, 1024, 2048, 32_000  # noqa: E741  the paper's letters
    expected = 4 / 3 * (1 + s / (6 * h) + v / (16 * l * h)) / (1 + s / (6 * h) + v / (12 * l * h))
    assert counted_otherwise(row, model, 8) == pytest.approx(expected, rel=1e-3)
    assert counted_otherwise(replace(row, act_ckpt="none"), model, 8) == 1
    assert counted_otherwise(replace(row, flop_convention="full_attention"), model, 8) == 1
    low, step, _ = _step(row)
    assert low / step == pytest.approx(
        _step(replace(row, flop_convention="full_attention"))[0] / step / counted_otherwise(row, model, 8)
    )


def test_options_that_no_prediction_holds_widen_both_ends() -> None:
    (low, step, high), (lower, same, higher) = _step(ROW), _step(replace(ROW, unmodelled="--deterministic-mode"))
    assert same == step
    assert math.log(higher / step) == pytest.approx(math.hypot(math.log(high / step), math.log(1.6)))
    assert math.log(step / lower) == pytest.approx(math.hypot(math.log(step / low), math.log(1.6)))


@pytest.mark.parametrize(
    ("text", "method", "rank"),
    [
        ("LoRA", "lora", 64),
        ("QLoRA r=16, NF4", "qlora", 16),
        ("LoRA r=16; base_weights=bnb-nf4", "qlora", 16),
        ("Q-LoRA, rank 64", "qlora", 64),
        ("LoRA rank: 32", "lora", 32),
    ],
)
def test_adapters_that_only_a_note_names(text: str, method: str, rank: int) -> None:
    first, second = adapted(replace(ROW, notes=text))
    plan = first.of("plan")
    assert (plan["peft"], plan["lora_rank"], plan["master_dtype"]) == (method, rank, "bf16")
    assert (plan["lora_targets"], second.of("plan")["lora_targets"]) == (("all",), ("q", "v"))
    outcome = evaluate_row(replace(ROW, notes=text))
    assert outcome.status == "ok"
    assert f"{method} of rank {rank} on all" in (outcome.open or "")


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("LoRA r=16 targets=q,k,v,o", ("q", "k", "v", "out")),
        ("LoRA targets c_attn,c_proj,w1,w2 (defaults)", ("c_attn", "out", "down", "gate", "up")),
        ("LoRA targets: w1, w2, w3", ("gate", "down", "up")),
        ("LoRA, targets all-linear", ("all",)),
    ],
)
def test_modules_that_a_note_names_leave_one_way(text: str, targets: tuple[str, ...]) -> None:
    (only,) = adapted(replace(ROW, notes=text))
    assert only.of("plan")["lora_targets"] == targets
    assert resolve(replace(ROW, notes=text)).plan.peft.method == "lora"


def test_the_first_method_that_is_named_is_the_rows() -> None:
    """What a clause says of other rows, or of what the table leaves out, is not said of this one."""
    full, adapters = "method=Full-parameter; LoRA r=64 as in the recipe", "method=LoRA; zero3 for full-parameter"
    assert [adapted(replace(ROW, notes=text))[0].of("plan")["peft"] for text in (full, adapters)] == ["full", "lora"]
    for remark in (
        "SFT; LoRA rank and targets not in table",
        "tuned; QLoRA rows keep act offload",
        "rank of LoRA not stated",
    ):
        assert adapted(replace(ROW, notes=remark)) == (replace(ROW, notes=remark),)


def test_a_sentence_after_targets_and_a_method_that_is_denied_cost_nothing() -> None:
    sentence = replace(ROW, notes="LoRA r=16; the run targets throughput, latency")
    plain = adapted(replace(ROW, notes="LoRA r=16"))
    assert [way.settings for way in adapted(sentence)] == [way.settings for way in plain]
    assert evaluate_row(sentence).status == "ok"
    denied = replace(ROW, notes="without LoRA")
    assert adapted(denied) == (denied,)


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("cpu_offload=param+grad", ("host", "host", "none")),
        ("CPU offload = yes", ("host", "host", "none")),
        ("optimizer offload", ("none", "host", "none")),
        ("activation offload", ("none", "none", "host")),
        ("no activation offload", ("none", "none", "none")),
        ("without optimizer offload", ("none", "none", "none")),
        ("activation_offload: false", ("none", "none", "none")),
        ("no overlap; optimizer_offload = no, activation_offloading=true", ("none", "none", "host")),
    ],
)
def test_what_a_note_says_leaves_the_device(text: str, leaves: tuple[str, str, str]) -> None:
    offload = resolve(replace(ROW, notes=text, framework="DeepSpeed", zero_or_fsdp="zero3")).plan.offload
    assert (offload.parameters, offload.optimizer, offload.activations) == leaves


def test_offload_of_who_knows_what_is_refused() -> None:
    assert "offload" in (evaluate_row(replace(ROW, notes="with offloading")).reason or "")
    assert evaluate_row(replace(ROW, notes="cpu_offload=no; rows with offloading are slower")).status == "ok"


def test_weights_and_moments_of_sixteen_bits_by_a_note() -> None:
    plan = resolve(replace(ROW, notes="bf16 everything")).plan
    assert (plan.precision.master, plan.optimizer.dtype) == ("bf16", "bf16")


def test_what_a_note_says_of_overlap() -> None:
    split = replace(ROW, framework="Megatron-LM 2025", tp=2, seq_parallel="y", zero_or_fsdp="zero1")
    assert resolve(split).stack.overlap.communication
    apart = resolve(replace(split, notes="NO comm overlap")).stack
    assert (apart.overlap.communication, apart.overlap.tp) == (False, "none")
    torch = replace(ROW, framework="torchtitan", tp=2, seq_parallel="y", compile="y", zero_or_fsdp="fsdp_full")
    assert resolve(replace(torch, notes="async TP")).stack.overlap.tp == "symmetric_memory"
    assert resolve(replace(torch, tp=1, cp=2, notes="Ulysses-style all-to-all")).plan.cp_exchange == "all_to_all"
    assert resolve(replace(torch, tp=1, cp=2, notes="no Ulysses")).plan.cp_exchange == "ring"


def test_layers_that_stages_cannot_share_evenly() -> None:
    """61 on 16 stages: four each, and the one that is left beside the head."""
    row = replace(ROW, framework="Megatron-LM 2025", n_layers=7, n_gpus=4, pp=4, micro_batch=1, global_batch=8)
    assert resolve(row).plan.pipeline.stage_layers == (2, 2, 2, 1)
    assert resolve(replace(row, n_layers=8)).plan.pipeline.stage_layers is None
    narrow = replace(row, precision="fp8", settings=(("plan.first_layers_bf16", 1),))
    assert resolve(narrow).plan.pipeline.stage_layers == (2, 2, 2, 1)
    stated = replace(row, settings=(("plan.stage_layers", (1, 2, 2, 2)),))
    assert resolve(stated).plan.pipeline.stage_layers == (1, 2, 2, 2)


@pytest.mark.parametrize(
    ("framework", "flash", "stack"),
    [
        ("Megatron-LM", "n", "megatron-2022"),
        ("Megatron-LM", "y", "megatron-core-2025"),
        ("Megatron-LM", None, "megatron-core-2025"),
        ("Megatron-LM 2025", "n", "megatron-core-2025"),
        ("Megatron-Core (dev)", "n", "megatron-core-2025"),
    ],
)
def test_without_flash_attention_a_version_that_nobody_states_is_an_old_one(
    framework: str, flash: str, stack: str
) -> None:
    assert resolve(replace(ROW, framework=framework, flash_attn=flash)).stack.name == stack


@pytest.mark.parametrize("text", ["q_lora_rank=1536", "kv_lora_rank 512", "exploration"])
def test_ranks_of_latent_attention_are_no_adapters(text: str) -> None:
    row = replace(ROW, notes=text)
    assert adapted(row) == (row,)


@pytest.mark.parametrize(("gpus", "domain"), [(36, 72), (72, 72), (128, 64), (256, 64), (144, 72), (288, 72)])
def test_a_job_of_several_racks_takes_as_much_of_each(gpus: int, domain: int) -> None:
    row = replace(ROW, gpu="GB200", n_gpus=gpus, intra_link="NVL72", global_batch=gpus)
    assert resolve(row).cluster.nvlink_domain_size == domain


@pytest.mark.parametrize(("gbps", "nics"), [(3200, 8), (1600, 8), (800, 8), (400, 4), (100, 1), (25, 1)])
def test_a_stated_network_has_nics_that_exist(gbps: int, nics: int) -> None:
    inter = resolve(replace(ROW, n_gpus=16, global_batch=16, inter_link_gbps_per_node=gbps)).cluster.inter
    assert inter is not None
    assert inter.num_nics == nics
    assert inter.num_nics * inter.nic_bytes_per_s == pytest.approx(gbps * 1e9 / 8)


@pytest.mark.parametrize("text", ["RTX3090-24GB", "rtx4090", "NVIDIA RTX 4090", "GeForce RTX3090"])
def test_a_series_written_together_with_its_number(text: str) -> None:
    assert Device.resolve(text) == ("rtx-3090" if "3090" in text else "rtx-4090")


def test_an_interval_reaches_to_less_recomputation_than_fits() -> None:
    """Some layers recomputed lie between none, which is too much for the device, and all, which is predicted."""
    row = replace(ROW, n_layers=32, d_model=4096, n_heads=32, d_ff=11008, micro_batch=8, global_batch=64, act_ckpt="")
    (low, step, high), (kept_low, kept, _) = _step(row), _step(replace(row, act_ckpt="none"))
    whole_low, whole, whole_high = _step(replace(row, act_ckpt="full"))
    assert "act_ckpt full" in (evaluate_row(row).open or "")
    assert kept < whole
    assert (low, step, high) == (min(kept_low, whole_low), whole, whole_high)


@pytest.mark.parametrize(
    ("text", "tied"),
    [
        ("tie_word_embeddings=True; 1F1B", True),
        ("tied embeddings", True),
        ("tie_word_embeddings=False", False),
        ("untied embeddings, mock data", False),
        ("--untie-embeddings-and-output-weights", False),
        ("tie_word_embeddings=unknown", False),
        ("not tied embeddings", False),
    ],
)
def test_a_note_says_whether_the_head_is_the_embedding(text: str, tied: bool) -> None:  # noqa: FBT001
    assert resolve(replace(ROW, notes=text)).model.tied_embeddings is tied
