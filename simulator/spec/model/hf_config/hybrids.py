"""Families whose layers follow a pattern."""

from __future__ import annotations

from simulator.spec.model.hf_config.keys import Fields, Keys, common_shape, short

_BLOCKS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}  # layers_block_type


def _pattern(keys: Keys) -> str:
    """hybrid_override_pattern, or the same as a list of words."""
    value = keys.value("hybrid_override_pattern")
    if isinstance(value, str) and value:
        return value
    words = value if value is not None else keys.value("layers_block_type")
    if isinstance(words, list) and words and all(isinstance(word, str) and word in _BLOCKS for word in words):
        return "".join(_BLOCKS[word] for word in words)
    key = "hybrid_override_pattern" if value is not None or words is None else "layers_block_type"
    problem = "is missing" if words is None else f"{short(words)} is no pattern of layers"
    keys.fault(key, problem, f"letters M * - E, or a list of {', '.join(_BLOCKS)}")
    return "M"


def nemotron_h(keys: Keys) -> Fields:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2, attention without positions, MLPs and experts by a pattern."""
    pattern, bias = _pattern(keys), keys.flag("mlp_bias", default=False)
    shape = common_shape(keys, head_dim=keys.count("attention_head_dim", default=128), num_kv_heads=8)
    if not keys.has("num_hidden_layers"):
        shape["num_layers"] = len(pattern)
    if keys.flag("mamba_proj_bias", "use_bias", default=False):
        keys.fault("mamba_proj_bias", "biases of a mixer's products are not modelled", "false")
    if not keys.flag("use_conv_bias", default=True):
        keys.fault("use_conv_bias", "a convolution without bias is not modelled", "true")
    mixers = {
        "num_heads": keys.count("mamba_num_heads"),
        "head_dim": keys.count("mamba_head_dim", default=64),
        "num_groups": keys.count("n_groups", "mamba_num_groups", default=8),
        "state_dim": keys.count("ssm_state_size", "mamba_state_dim", default=128),
        "conv_kernel": keys.count("conv_kernel", default=4),
        "chunk_size": keys.count("chunk_size", default=128),
    }
    attention_bias = keys.flag("attention_bias", default=False)
    return {
        **shape,
        "pattern": pattern,
        "mlp": keys.activation("mlp_hidden_act", default="relu2", gated=False),
        "positions": "none",
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": bias,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        **({"mamba": mixers} if "M" in pattern else {}),
        **({"experts": _nemotron_experts(keys, bias=bias)} if "E" in pattern else {}),
        "mtp_layers": _nemotron_mtp(keys),
    }


def _nemotron_experts(keys: Keys, *, bias: bool) -> Fields:
    return {
        "num_experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "d_ff": keys.count("moe_intermediate_size"),
        "shared_d_ff": keys.amount("moe_shared_expert_intermediate_size") * keys.amount("n_shared_experts", default=1),
        "latent_dim": keys.amount("moe_latent_size"),
        "score": "sigmoid",
        "bias": bias,
    }


def _nemotron_mtp(keys: Keys) -> int:
    """Modules that predict further tokens: attention and experts each, which `*E` says."""
    modules = keys.amount("num_nextn_predict_layers")
    if modules and keys.value("mtp_hybrid_override_pattern") not in (None, "*E"):
        keys.fault("mtp_hybrid_override_pattern", "other modules than attention and experts are not modelled", "*E")
    return modules
