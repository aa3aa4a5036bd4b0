"""Hugging Face configurations: each family, nesting, faults, hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from tests.configured import configured

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}
# The keys of the published files that decide the shape, and the preset that they must equal in parameters.
MLA = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **LLAMA,
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek-v2": {
        **MLA,
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "num_hidden_layers": 60,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        **MLA,
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "vocab_size": 129280,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "llama3-8b": LLAMA,
    "mistral-7b": {**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096},
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gemma-2b": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 16384,
        "vocab_size": 256000,
        "hidden_act": "gelu",
    },
    "gemma2-2b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "final_logit_softcapping": 30.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "pythia-1b": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 50304,
        "rotary_pct": 0.25,
    },
    "mpt-7b": {
        "model_type": "mpt",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "expansion_ratio": 4,
        "vocab_size": 50368,
        "max_seq_len": 2048,
        "no_bias": False,
        "attn_config": {"alibi": False},
    },
    "falcon-7b": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    },
}


@pytest.mark.parametrize("preset", CONFIGS)
def test_a_configuration_gives_the_preset(preset: str) -> None:
    model = configured(CONFIGS[preset], "config.json", preset)
    expected = Model.load(preset)
    assert model.num_parameters == expected.num_parameters
    differing = {
        field
        for field in Model.model_fields
        if field not in ("sources", "max_positions", "mlp") and getattr(model, field) != getattr(expected, field)
    }
    assert not differing
    assert model.gated == expected.gated


def test_mpt_7b_as_released_has_alibi_and_no_biases() -> None:
    released = {**CONFIGS["mpt-7b"], "no_bias": True, "attn_config": {"alibi": True}, "vocab_size": 50432}
    # 6,649,286,656: mosaicml/mpt-7b on Hugging Face
    assert configured(released, "config.json", "mpt-7b").num_parameters == 6_649_286_656


def test_gemma_3_keeps_its_language_model_in_text_config(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    path = tmp_path / "gemma-3-4b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    model = Model.load(path.parent)
    assert (model.name, model.global_every, model.num_heads, model.num_kv_heads) == ("gemma-3-4b", 6, 8, 4)
    # The language half of google/gemma-3-4b-pt's 4,300,079,472: without SigLIP (416,866,032) and the projector
    # (2560 × 1152 + 1152)
    assert model.num_parameters == 4_300_079_472 - 416_866_032 - (2560 * 1152 + 1152)


def test_every_fault_is_listed_with_its_key() -> None:
    bad = {**LLAMA, "hidden_size": -1, "num_hidden_layers": "many", "hidden_act": "mystery", "num_local_experts": 8}
    del bad["vocab_size"]
    with pytest.raises(ModelError) as caught:
        configured(bad, "config.json", "bad")
    places = [fault.place for fault in caught.value.faults]
    for key in ("hidden_size", "num_hidden_layers", "hidden_act", "num_local_experts", "vocab_size"):
        assert f"config.json: {key}" in places
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "lama"}, "nearest: llama"),
        ({"model_type": None}, "is missing"),
        ({"model_type": ["llama"]}, "not known"),
        ({"num_key_value_heads": 7}, "num_kv_heads 7"),
        ({"hidden_size": 4095}, "give head_dim"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": 10**40}, "vocab_size"),
    ],
)
def test_one_fault_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        configured({**LLAMA, **change}, "config.json", "bad")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"model_type": "llama", "model_type": "gpt2"}',
        '{"model_type": "llama", "hidden_size": NaN}',
        '{"model_type": "llama", "x": 1e999}',
        '{"text_config": 3}',
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        "[" * 900 + "]" * 900,
        '{"hidden_size": ' + "9" * 5000 + "}",
        '{"model_type": "llama"}' + " " * (5 * 2**20),
        "\udcff",
    ],
    ids=range(12),
)
def test_hostile_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError):
        Model.load(path)


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        Model.load(tmp_path / "nothing.json")


def test_towers_that_are_left_out_are_named(tmp_path: Path) -> None:
    """A tower that is not read is named, and the model is its language model."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    for tower in ({}, {"audio_config": {"depth": 32, "hidden_size": 1280}}, {"visual": {"width": 1664}}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "qwen2_5_vl", "num_key_value_heads": 2, **shape, **tower}))
        said = Model.load(path).sources.get("not modelled", "")
        assert ("".join(tower) + ": towers and their projectors" in said) == bool(tower)
        path.write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "llama", **shape}, **tower}))
        said = Model.load(path).sources.get("not modelled", "")  # beside a section of the language model too
        assert ("".join(tower) + ": towers and their projectors" in said) == bool(tower)
    several = {
        "model_type": "vipllava",
        "text_config": {"model_type": "llama", **shape},
        "vision_config": {"hidden_size": 64},
    }
    path.write_text(json.dumps(several))
    said = Model.load(path).sources["not modelled"]
    assert "`shardwise capture config.json --recipe fsdp2` runs both" in said
    assert said.endswith("(vipllava: its projector reads several layers of the tower)")
