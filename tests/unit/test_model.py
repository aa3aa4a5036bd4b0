"""Models: published parameter counts, shapes, defaults and faults."""

from __future__ import annotations

import csv
import re
from math import prod
from pathlib import Path

import pytest

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from simulator.spec.model.families import preset_of
from simulator.spec.model.files import preset_names

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

# Parameters as published: the safetensors total on the model's Hugging Face page, unless a source is named.
PUBLISHED = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "llava-1.5-7b": 7_063_427_072,
    "llava-v1.6-mistral-7b": 7_566_747_648,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "baichuan-7b": 7_000_559_616,
    "baichuan-13b": 13_264_901_120,
    "bloom-1b1": 1_065_314_304,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,  # tied; the page counts the stored copy of the head too
    "qwen3-1.7b": 1_720_574_976,  # likewise
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    # EleutherAI's model NICs, "n_parameters" / "Total Params"
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "falcon-7b": 6_921_720_704,  # transformers' num_parameters(): tied, while the page counts the head's stored copy
    # llm-foundry scripts/train/benchmarking/README.md, column NumParams, rows at sequence length 2048
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    # huggingface.co, "Safetensors: model size" of these pages' base models
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "codellama-34b": 33_743_970_304,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen-7b": 7_721_324_544,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "chatglm3-6b": 6_243_584_000,
    "glm4-9b": 9_399_951_360,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "gpt-j-6b": 6_050_882_784,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "gemma3-1b": 999_885_952,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "dbrx": 131_596_523_520,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v2": 235_741_434_880,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

# As their authors print them, in billions, where no exact count is known or the preset counts a norm over all heads as
# one a head. GLM-4.5's pages count a second embedding and head in the module of multi-token prediction.
ROUNDED = {
    "gpt-20b": "20",
    "gpt-530b": "530",  # arXiv 2201.11990
    "powerlm-3b": "3.51",  # arXiv 2408.13359
    "internlm-7b": "7.3",
    "internlm-20b": "20.1",
    "qwen2-57b-a14b": "57.41",
    "glm-4.5": "357",
    "glm-4.5-air": "109",
    "falcon-40b": "41.3",
    "falcon-180b": "179",
    "opt-66b": "65.7",
    "opt-175b": "175",
    "phi-3.5-moe": "41.9",
    "olmo2-1b": "1.5",
    "olmo2-7b": "7.3",
    "olmo2-13b": "13.7",
    "olmo2-32b": "32.2",
    "olmoe-1b-7b": "6.92",
    "gemma3-4b": "3.88",
    "gemma3-12b": "11.8",
    "gemma3-27b": "27.0",
    "deepseek-llm-67b": "67.4",
    "moonlight-16b-a3b": "15.96",
    "minimax-m2": "229",
    "llama4-scout": "108",
    "llama4-maverick": "401",
    "smollm2-135m": "0.135",
    "smollm2-360m": "0.362",
    "smollm2-1.7b": "1.71",
    "smollm3-3b": "3.08",
    "qwen1.5-0.5b": "0.46",  # tied; the page counts the stored copy of the head too
    "qwen1.5-1.8b": "1.84",
    "qwen1.5-4b": "3.95",
    "qwen1.5-7b": "7.72",
    "qwen1.5-14b": "14.2",
    "qwen1.5-32b": "32.5",
    "qwen1.5-72b": "72.3",
    "qwen1.5-110b": "111",
    "qwen-1.8b": "1.84",
    "qwen-14b": "14.2",
    "qwen-72b": "72.3",
    "deepseek-coder-1.3b": "1.35",
    "deepseek-coder-6.7b": "6.74",
    "deepseek-coder-33b": "33.3",
    "yi-9b": "8.83",
    "internlm2-1.8b": "1.89",
    "granite-3-8b": "8.17",
    "granite-3-2b": "2.53",
    "open-llama-3b": "3.43",
    "solar-10.7b": "10.7",
    "codellama-7b": "6.74",
    "codellama-13b": "13.0",
    "codellama-70b": "69.0",
    "falcon3-7b": "7.46",
    "gemma3-270m": "0.268",
    "starcoder-15b": "15.5",
    "minicpm-2b": "2.72",
    "gpt3-2.7b": "2.65",  # arXiv 2005.14165 table D.1, as the next two
    "gpt3-6.7b": "6.66",
    "gpt3-13b": "12.85",
}

# In billions: tests of their own
PRINTED_ONLY = {"deepseek-v3", "grok-1", "gpt-oss-120b", "gpt-oss-20b", "kimi-k2", "nemotron4-15b", "nemotron4-340b"}
PRINTED_ONLY |= {name for name in preset_names() if Model.load(name).pattern}  # tests/theory/test_hybrid_theory.py

# Mixtures of experts as their authors print them, in billions: (total, active for a token), digits as printed.
PRINTED = {
    "mixtral-8x7b": ("46.7", "12.9"),  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": ("141", "39"),  # mistral.ai/news/mixtral-8x22b
    "deepseek-v2": ("236", "21"),  # arXiv 2405.04434
    "qwen3-30b-a3b": ("30.5", "3.35"),  # model card: 30.5B, 3.3B (cut off)
    "qwen3-235b-a22b": ("235", "22"),  # model NIC
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_mixture_has_its_published_total_and_active_parameters(name: str) -> None:
    model = Model.load(name)
    for count, printed in zip((model.num_parameters, model.num_active_parameters), PRINTED[name], strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{count / 1e9:.{digits}f}" == printed


def test_deepseek_v3_with_and_without_multi_token_prediction() -> None:
    """README_WEIGHTS.md: 671B in the main model, 37B active (arXiv 2412.19437); a module of 11.5B of its own.

    The module's product that joins stream and embedding, 2 D², is the tenth between its 11.6B here and their figure.
    """
    model = Model.load("deepseek-v3")
    main = model.model_copy(update={"mtp_layers": 0})
    assert main.num_parameters == 671_026_404_352  # safetensors of DeepseekV3ForCausalLM, without the router's buffers
    assert main.num_active_parameters // 10**9 == 37
    module = model.num_parameters - main.num_parameters
    assert round((module - 2 * model.d_model**2) / 1e9, 1) == 11.5


def test_kimi_k2_has_a_trillion_and_works_with_32_billion() -> None:
    """arXiv 2507.20534: 1.04T in all (its tables leave the embedding's share open), 32B active, its lookup left out."""
    model = Model.load("kimi-k2")
    assert round(model.num_parameters / 1e12, 1) == 1.0
    assert round((model.num_active_parameters - model.vocab_size * model.d_model) / 1e9) == 32


@pytest.mark.parametrize(("name", "tables", "layers"), [("nemotron4-15b", 3.1, 12.5), ("nemotron4-340b", 9.4, 331.6)])
def test_nemotron_4_is_as_its_reports_split_it(name: str, tables: float, layers: float) -> None:
    """arXiv 2402.16819 (3.2B and 12.5B) and 2406.11704 (9.4B and 331.6B); 2 × 256,000 × 6,144 is 3.146B, printed as 3.2."""
    model = Model.load(name)
    embedding = 2 * model.vocab_size * model.d_model
    assert round(embedding / 1e9, 1) == tables
    assert round((model.num_parameters - embedding) / 1e9, 1) == layers


def test_grok_1_has_314_billion_in_its_layers() -> None:
    model = Model.load("grok-1")
    assert 64 * model.num_parameters_of("layer") // 10**9 == 314


@pytest.mark.parametrize(("name", "total", "active"), [("gpt-oss-120b", 116.83, 5.13), ("gpt-oss-20b", 20.91, 3.61)])
def test_gpt_oss_counts_of_its_model_card(name: str, total: float, active: float) -> None:
    """arXiv 2508.10925, table 1: the unembedding counts as active, the embedding does not."""
    model = Model.load(name)
    assert round(model.num_parameters / 1e9, 2) == total
    embedding = model.vocab_size * model.d_model
    assert round((model.num_active_parameters - embedding) / 1e9, 2) == active


@pytest.mark.parametrize("name", sorted({*preset_names()} - PRINTED_ONLY - {*ROUNDED}))
def test_a_preset_has_its_published_number_of_parameters(name: str) -> None:
    if name == "gpt3-175b":  # arXiv 2005.14165 table D.1 prints 174,600 million
        assert round(Model.load(name).num_parameters, -8) == 174_600_000_000
        return
    assert Model.load(name).num_parameters == PUBLISHED[name]


def test_a_preset_whose_source_has_no_window_has_none() -> None:
    said = [model for model in map(Model.load, preset_names()) if "no window" in model.sources.get("shape", "")]
    assert [model.name for model in said if model.sliding_window] == []
    assert said


@pytest.mark.parametrize("name", ROUNDED)
def test_a_preset_has_the_number_of_parameters_that_is_printed(name: str) -> None:
    digits = len(ROUNDED[name].partition(".")[2])
    assert f"{Model.load(name).num_parameters / 1e9:.{digits}f}" == ROUNDED[name]


def test_learned_positions_are_parameters_in_every_benchmark_row_of_mpt() -> None:
    table = SHARED / "runs.csv"
    if not table.is_file():
        pytest.skip("the table of measured runs is not here")
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "mosaicml/llm-foundry"]
    assert rows
    for row in rows:
        stated = int(re.search(r"NumParams=(\d+)", row["notes"])[1])  # type: ignore[index]
        model = Model.load(row["model_name"]).model_copy(update={"max_positions": int(row["seq_len"])})
        assert model.num_parameters == stated, row["id"]


def test_shapes_of_the_units_sum_to_the_count() -> None:
    for name in ("llama3-8b", "mpt-7b", "falcon-7b", "gemma2-2b", "qwen3-0.6b"):
        model = Model.load(name)
        units = {u: sum(prod(s) for _, s in model.parameter_shapes(u)) for u in ("embedding", "layer", "head")}
        assert units["embedding"] + model.num_layers * units["layer"] + units["head"] == model.num_parameters


def test_parameters_of_a_llama_layer_stand_in_registration_order() -> None:
    shapes = dict(Model.load("llama3-8b").parameter_shapes("layer"))
    assert list(shapes) == [
        "attention.q.weight",
        "attention.k.weight",
        "attention.v.weight",
        "attention.out.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "norm_1.weight",
        "norm_2.weight",
    ]
    assert shapes["attention.k.weight"] == (8 * 128, 4096)
    assert shapes["mlp.down.weight"] == (4096, 14336)


def test_a_tied_head_has_only_its_norm() -> None:
    tied = Model.load("gpt2")
    assert [name for name, _ in tied.parameter_shapes("head")] == ["norm.weight", "norm.bias"]
    assert tied.num_matmul_parameters > tied.num_parameters - tied.num_parameters_of("embedding")


def test_defaults_are_llamas_and_heads_follow_from_d_model() -> None:
    model = Model(name="t", num_layers=2, d_model=64, num_heads=4, d_ff=128, vocab_size=100)
    assert (model.num_kv_heads, model.head_dim, model.mlp, model.norm) == (4, 16, "swiglu", "rms")


def test_windows_cut_the_pairs_of_windowed_layers_only() -> None:
    model = Model(
        name="t", num_layers=4, d_model=8, num_heads=2, d_ff=8, vocab_size=10, sliding_window=4, global_every=2
    )
    windowed, full = 4 * 16 - 4 * 4 // 2, 16 * 16 // 2
    assert model.attention_pairs(16) == 2 * windowed + 2 * full
    assert model.attention_pairs(4) == 4 * (4 * 4 // 2)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ModelError, match="llama3-8b"):
        Model.load("lama3-8")


def test_every_fault_of_a_file_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('num_layers = 0\nd_model = "wide"\nnum_heads = 4\nd_ff = 8\ncolour = "red"\n')
    with pytest.raises(ModelError) as caught:
        Model.load(path)
    places = " ".join(fault.place for fault in caught.value.faults)
    assert all(key in places for key in ("num_layers", "d_model", "vocab_size", "colour"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3"),
        ({"d_model": 63}, "give head_dim"),
        ({"shared_input_norm": True}, "parallel_residual"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"rotary_fraction": float("nan")}, "rotary_fraction"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], word: str) -> None:
    fields = {"name": "t", "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 100}
    with pytest.raises(ModelError, match=word):
        Model.parse({**fields, **change}, "m", ModelError)


def test_a_file_may_be_like_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "wide.toml"
    path.write_text('like = "llama3-8b"\nnum_layers = 8\n')
    model = Model.load(path)
    assert (model.name, model.num_layers, model.d_ff) == ("wide", 8, 14336)
    path.write_text('like = "nothing"\n')
    with pytest.raises(ModelError, match="is not a preset"):
        Model.load(path)


def test_a_mixture_of_one_expert_is_dense() -> None:
    """One expert to which every token goes has the dense MLP's parameters and FLOP, and a router of D."""
    dense = Model.load("llama3-8b")
    fields = dense.model_dump(exclude={"experts", "latent"})
    one = Model.model_validate({**fields, "experts": {"num_experts": 1, "top_k": 1}})
    routers = one.num_layers * one.d_model
    assert one.num_parameters == one.num_active_parameters == dense.num_parameters + routers
    assert one.num_matmul_parameters == dense.num_matmul_parameters + routers


def test_layers_with_experts_by_frequency() -> None:
    experts = {"num_experts": 4, "top_k": 1, "first_dense_layers": 1, "every": 2}
    model = Model.model_validate({**SMALL, "num_layers": 5, "experts": experts})
    assert model.layer_kinds == ("dense_layer", "layer", "dense_layer", "layer", "dense_layer")
    dense, mixture = (model.num_parameters_of(kind) for kind in ("dense_layer", "layer"))
    ends = model.num_parameters_of("embedding") + model.num_parameters_of("head")
    assert model.num_parameters == 3 * dense + 2 * mixture + ends


def test_parts_that_contradict_each_other_are_all_named() -> None:
    latent = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    fields = {
        **SMALL,
        "num_kv_heads": 2,
        "latent": latent,
        "experts": {"num_experts": 4, "top_k": 2, "first_dense_layers": 9},
    }
    with pytest.raises(ModelError) as caught:
        Model.parse({**fields, "head_dim": 8}, "model.toml", ModelError)
    for word in ("num_kv_heads", "head_dim is 6", "first_dense_layers 9"):
        assert word in str(caught.value)
    with pytest.raises(ModelError, match="top_k 9 is more than num_experts 4"):
        Model.parse({**SMALL, "experts": {"num_experts": 4, "top_k": 9}}, "model.toml", ModelError)


SMALL = {"name": "small", "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 96, "vocab_size": 512}


def test_every_preset_is_meant_by_its_own_name() -> None:
    assert {name: preset_of(name) for name in preset_names()} == {name: name for name in preset_names()}


@pytest.mark.parametrize(
    ("public", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen2.5-Coder-7B", "qwen2.5-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama3.1-70b"),  # Llama's and Qwen's weights, trained further
        ("unsloth/DeepSeek-R1-Distill-Qwen-14B-unsloth-bnb-4bit", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b"),
        ("bigscience/bloom", "bloom-176b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3.1-8b"),
        ("lmsys/vicuna-13b-v1.5", "llama2-13b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini"),
        ("Qwen/Qwen-1_8B-Chat", "qwen-1.8b"),
        ("Qwen/Qwen1.5-32B-Chat", "qwen1.5-32b"),
        ("bigcode/starcoderbase", "starcoder-15b"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite-3-8b"),
        ("openlm-research/open_llama_3b_v2", "open-llama-3b"),
        ("GPT-3 13B", "gpt3-13b"),
        ("MT-NLG 530B", "gpt-530b"),
        ("microsoft/Phi-3-medium-4k-instruct", "phi-3-medium"),
    ],
)
def test_a_public_name_is_its_preset(public: str, preset: str) -> None:
    assert Model.load(public) == Model.load(preset)


@pytest.mark.parametrize(
    "public",
    ["Qwen/Qwen2-VL-7B-Instruct", "microsoft/Phi-4-mini-instruct", "deepseek-ai/DeepSeek-V3.2", "google/gemma-3n-E4B",
     "Qwen/Qwen3-Embedding-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "mixtral", "70b"],
)  # fmt: skip
def test_a_name_of_other_layers_is_no_preset(public: str) -> None:
    with pytest.raises(ModelError, match="no preset is called"):
        Model.load(public)


def test_a_name_with_a_tower_is_told_what_would_do() -> None:
    with pytest.raises(ModelError, match=r"other layers than qwen2-7b \(a tower.*its config.json; qwen2-7b for a"):
        Model.load("Qwen/Qwen2-VL-7B-Instruct")
