"""Families whose layers all have attention and one MLP."""

from __future__ import annotations

from simulator.spec.model.hf_config.keys import Fields, Keys, common_shape


def llama(keys: Keys) -> Fields:
    """LlamaConfig."""
    bias = keys.flag("attention_bias", default=False)
    return {
        **common_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", default=False),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def mistral(keys: Keys) -> Fields:
    """MistralConfig: every layer looks back over one window."""
    return {
        **common_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        **_window(keys, 0),
    }


def _window(keys: Keys, global_every: int) -> Fields:
    if not keys.has("sliding_window"):
        return {}
    return {"sliding_window": keys.count("sliding_window"), "global_every": global_every}


def qwen2(keys: Keys) -> Fields:
    """Qwen2Config: biases on Q, K and V."""
    if keys.flag("use_sliding_window", default=False):
        keys.fault("use_sliding_window", "windows in some layers of Qwen are not modelled", "false")
    return {
        **common_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "qkv_bias": True,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def qwen3(keys: Keys) -> Fields:
    """Qwen3Config: norms over Q and K instead."""
    bias = keys.flag("attention_bias", default=False)
    norms = {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}
    return {**qwen2(keys), "head_dim": keys.count("head_dim", default=128), **norms}


def gemma(keys: Keys) -> Fields:
    """GemmaConfig."""
    bias = keys.flag("attention_bias", default=False)
    return {
        **common_shape(keys, head_dim=256, max_positions=8192),
        "mlp": keys.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
        "embedding_scale": True,
    }


def gemma2(keys: Keys) -> Fields:
    """Gemma2Config: norms behind the branches too, every second layer with a window."""
    softcap = {"post_norms": True, "logit_softcap": keys.has("final_logit_softcapping")}
    return {**gemma(keys), **softcap, "sliding_window": keys.count("sliding_window", default=4096), "global_every": 2}


def gemma3(keys: Keys) -> Fields:
    """Gemma3TextConfig."""
    shape = common_shape(keys, num_heads=8, num_kv_heads=4, head_dim=256, vocab_size=262_208, max_positions=131_072)
    bias = keys.flag("attention_bias", default=False)
    return {
        **shape,
        "mlp": keys.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
        "embedding_scale": True,
        "qk_norm": True,
        "post_norms": True,
        "sliding_window": keys.count("sliding_window", default=4096),
        "global_every": keys.count("sliding_window_pattern", "_sliding_window_pattern", default=6),
    }


_BIASED = {"norm": "layer", "norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "fused_qkv": True}


def gpt2(keys: Keys) -> Fields:
    """GPT2Config."""
    width = keys.count("n_embd")
    return {
        **_BIASED,
        "num_layers": keys.count("n_layer"),
        "d_model": width,
        "num_heads": keys.count("n_head"),
        "d_ff": keys.count("n_inner", default=4 * width),
        "vocab_size": keys.count("vocab_size"),
        "max_positions": keys.count("n_positions", "n_ctx", default=1024),
        "mlp": keys.activation("activation_function", default="gelu_new", gated=False),
        "positions": "learned",
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
    }


def gpt_neox(keys: Keys) -> Fields:
    """GPTNeoXConfig: attention and MLP side by side."""
    bias = keys.flag("attention_bias", default=True)
    return {
        **_BIASED,
        **common_shape(keys),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp": keys.activation("hidden_act", default="gelu", gated=False),
        "rotary_fraction": keys.share("rotary_pct", "partial_rotary_factor", default=0.25),
        "parallel_residual": keys.flag("use_parallel_residual", default=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def mpt(keys: Keys) -> Fields:
    """MPTConfig."""
    attention = keys.section("attn_config")
    width, heads = keys.count("d_model"), keys.count("n_heads")
    bias = not keys.flag("no_bias", default=True)
    alibi = attention.flag("alibi", default=True)
    return {
        "num_layers": keys.count("n_layers"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": attention.count("kv_n_heads", default=heads),
        "d_ff": keys.count("expansion_ratio", default=4) * width,
        "vocab_size": keys.count("vocab_size"),
        "max_positions": keys.count("max_seq_len", default=2048),
        "mlp": "gelu",
        "norm": "layer",
        "norm_bias": bias,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "fused_qkv": True,
        "positions": "alibi" if alibi else "learned" if keys.flag("learned_pos_emb", default=True) else "none",
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
    }


def falcon(keys: Keys) -> Fields:
    """FalconConfig, both architectures."""
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads", "n_head")
    grouped = keys.flag("new_decoder_architecture", default=False)
    single = keys.flag("multi_query", default=True) and not grouped
    parallel = keys.flag("parallel_attn", default=True) or grouped
    bias = keys.flag("bias", default=False)
    return {
        "num_layers": keys.count("num_hidden_layers", "n_layer"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": 1 if single else keys.count("num_kv_heads", "n_head_kv", default=heads),
        "d_ff": keys.count("ffn_hidden_size", default=4 * width),
        "vocab_size": keys.count("vocab_size"),
        "max_positions": keys.count("max_position_embeddings", default=2048),
        "mlp": keys.activation("activation", default="gelu", gated=False),
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "fused_qkv": True,
        "positions": "alibi" if keys.flag("alibi", default=False) else "rope",
        "parallel_residual": parallel,
        "shared_input_norm": parallel and not grouped,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
    }
