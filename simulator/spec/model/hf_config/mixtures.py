"""Families with experts."""

from __future__ import annotations

import math

from simulator.spec.model.hf_config.dense import mistral, qwen2, qwen3
from simulator.spec.model.hf_config.keys import Fields, Keys, common_shape


def mixtral(keys: Keys) -> Fields:
    """MixtralConfig."""
    experts = {
        "num_experts": keys.count("num_local_experts", default=8),
        "top_k": keys.count("num_experts_per_tok", default=2),
    }
    return {**mistral(keys), "experts": experts}


def qwen3_moe(keys: Keys) -> Fields:
    """Qwen3MoeConfig."""
    if keys.has("mlp_only_layers") and keys.value("mlp_only_layers") != []:
        keys.fault("mlp_only_layers", "single layers without experts are not modelled", "[]")
    every = keys.count("decoder_sparse_step", default=1)
    experts = {
        "num_experts": keys.count("num_experts", "num_local_experts", default=128),
        "top_k": keys.count("num_experts_per_tok", default=8),
        "d_ff": keys.count("moe_intermediate_size", default=768),
        "first_dense_layers": every - 1,
        "every": every,
    }
    return {**qwen3(keys), "experts": experts}


def qwen2_moe(keys: Keys) -> Fields:
    """Qwen2MoeConfig: a shared expert behind a gate."""
    experts = {
        **qwen3_moe(keys)["experts"],
        "num_experts": keys.count("num_experts", default=60),
        "top_k": keys.count("num_experts_per_tok", default=4),
        "d_ff": keys.count("moe_intermediate_size", default=1408),
        "shared_d_ff": keys.count("shared_expert_intermediate_size", default=5632),
        "shared_gate": True,
    }
    return {**qwen2(keys), "experts": experts}


def deepseek(keys: Keys, *, score: str) -> Fields:
    """DeepSeek-V2 and V3. V3's correction of the router by its load is no parameter with a gradient."""
    width, every = keys.count("moe_intermediate_size"), keys.count("moe_layer_freq", default=1)
    dense = keys.amount("first_k_dense_replace")
    experts = {
        "num_experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "d_ff": width,
        "shared_d_ff": width * keys.amount("n_shared_experts"),
        "first_dense_layers": -(-dense // every) * every,  # the first multiple of moe_layer_freq from there on
        "every": every,
        "score": keys.word("scoring_func", ("softmax", "sigmoid"), score),
    }
    latent = {
        "q_lora_rank": keys.amount("q_lora_rank"),
        "kv_lora_rank": keys.count("kv_lora_rank"),
        "qk_nope_head_dim": keys.count("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.count("qk_rope_head_dim"),
        "v_head_dim": keys.count("v_head_dim"),
    }
    shape = common_shape(keys)
    return {
        **{name: shape[name] for name in shape if name not in ("head_dim", "num_kv_heads")},
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        "experts": experts,
        "latent": latent,
        "mtp_layers": keys.amount("num_nextn_predict_layers"),
    }


def _yarn_factor(keys: Keys, factor: float) -> float:
    """What scales rotated queries and keys where positions are stretched (arXiv 2309.00071, section 3.4).

    factor: of a file that says nothing, which GptOssConfig takes for YaRN.
    """
    scaling = keys.section("rope_scaling")
    if keys.has("rope_scaling") and scaling.value("rope_type") not in (None, "yarn"):
        return 1.0
    stretched = scaling.positive("factor", default=factor)
    return scaling.positive("attention_factor", default=round(0.1 * math.log(max(stretched, 1.0)) + 1, 4))


def gpt_oss(keys: Keys) -> Fields:
    """GptOssConfig."""
    bias = keys.flag("attention_bias", default=True)
    experts = {
        "num_experts": keys.count("num_local_experts", default=128),
        "top_k": keys.count("num_experts_per_tok", "experts_per_token", default=4),
        "bias": True,
        "router_bias": True,
    }
    return {
        **common_shape(keys, num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=201_088, max_positions=131_072),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        "sliding_window": keys.count("sliding_window", default=128),
        "global_every": 2,
        "attention_sinks": True,
        "rotary_scale": _yarn_factor(keys, 32.0),
        "gate_clamp": keys.positive("swiglu_limit", default=7.0),
        "experts": experts,
    }
