"""Hugging Face `config.json` -> Model. It is read as data: code that `auto_map` names is never fetched or run.

What a family's configuration class would fill in when a key is missing is filled in here too (its documented
default); keys without a default are required. Every fault of the file is reported at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from simulator.errors import Fault, InputError, ModelError
from simulator.model import MAX_FILE_BYTES, Model
from simulator.schema import read_json, unreadable

_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def read_hf_config(path: str | Path) -> Model:
    """The model of a config.json. Raises ModelError with every fault; nested `text_config` is followed."""
    file = Path(path)
    data = _object(_load(file), str(file))
    name = data.get("_name_or_path")
    if not isinstance(name, str) or not name:
        name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    nested = data.get("text_config")
    place = str(file) if nested is None else f"{file}: text_config"
    return model_from_config(data if nested is None else _object(nested, place), place, name[:200])


def model_from_config(config: Mapping[str, Any], place: str, name: str) -> Model:
    """A model from the configuration's keys. Raises ModelError with every fault, each with `place` and its key."""
    keys = _Keys(config, place)
    family = config.get("model_type")
    reader = _FAMILIES.get(family) if isinstance(family, str) else None
    if reader is None:
        raise ModelError(_unknown_family(family, place))
    if family not in _MIXTURES:
        for key in _EXPERTS:
            if isinstance(config.get(key), int) and config[key] > 1:
                keys.fault(key, f"experts of model_type {family!r} are not known", f"one of {', '.join(_MIXTURES)}")
    fields = {"name": name, "family": str(family).removesuffix("_text"), **reader(keys)}
    if keys.faults:
        raise ModelError(dict.fromkeys(keys.faults))
    return Model.parse(fields, place, ModelError)


def _load(file: Path) -> object:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(Fault(place=str(file), problem=f"larger than {MAX_FILE_BYTES} bytes", remedy="a config"))
        return read_json(file, ModelError)
    except InputError:
        raise
    except OSError as exc:
        raise ModelError(unreadable(file, exc)) from None
    except (RecursionError, ValueError) as exc:  # nested too deep; an integer of thousands of digits
        raise ModelError(Fault(place=str(file), problem=f"not a configuration: {exc}")) from None


def _object(data: object, place: str) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    raise ModelError(Fault(place=place, problem="is not a JSON object", remedy="the config.json of a model"))


def _unknown_family(family: object, place: str) -> Fault:
    known = ", ".join(sorted(_FAMILIES))
    if family is None:
        return Fault(place=f"{place}: model_type", problem="is missing", remedy=f"one of {known}")
    near = difflib.get_close_matches(str(family)[:100], _FAMILIES, n=2)
    remedy = f"nearest: {', '.join(near)}; known: {known}" if near else f"known: {known}"
    return Fault(place=f"{place}: model_type", problem=f"{str(family)[:100]!r} is not known", remedy=remedy)


class _Keys:
    """Typed access to a configuration that collects faults instead of stopping at the first."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self._config, self._place = config, place
        self.faults: list[Fault] = []

    def fault(self, key: str, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(place=f"{self._place}: {key}", problem=problem, remedy=remedy))

    def value(self, key: str) -> object:
        """What stands there, whatever it is."""
        return self._config.get(key)

    def has(self, key: str) -> bool:
        """The key is present and not null."""
        return self._config.get(key) is not None

    def section(self, key: str) -> _Keys:
        """A nested object, empty if missing; its faults are collected here."""
        inner = self._config.get(key)
        if inner is not None and not isinstance(inner, dict):
            self.fault(key, "is not an object")
        nested = _Keys(inner if isinstance(inner, dict) else {}, f"{self._place}: {key}")
        nested.faults = self.faults
        return nested

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of `names` that is present and not null."""
        key, value = self._first(names)
        if value is None:
            if default is None:
                self.fault(names[0], "is missing", "a positive integer")
            return default or 1
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fault(key, f"{_short(value)} is not a positive integer")
            return 1
        return value

    def amount(self, *names: str, default: int = 0) -> int:
        """A number from 0 on."""
        key, value = self._first(names)
        if value is None or value == 0:
            return default if value is None else 0
        return self.count(key)

    def flag(self, *names: str, default: bool) -> bool:
        key, value = self._first(names)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.fault(key, f"{_short(value)} is neither true nor false")
        return default

    def positive(self, *names: str, default: float) -> float:
        """A number above 0."""
        key, value = self._first(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.fault(key, f"{_short(value)} is not a number above 0")
            return default
        return float(value)

    def share(self, *names: str, default: float) -> float:
        """A number in (0, 1]."""
        key, value = self._first(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            self.fault(key, f"{_short(value)} is not in (0, 1]")
            return default
        return float(value)

    def word(self, name: str, legal: tuple[str, ...], default: str) -> str:
        value = self._config.get(name)
        if value is None or value in legal:
            return default if value is None else str(value)
        self.fault(name, f"{_short(value)} is not known", f"one of {', '.join(legal)}")
        return default

    def activation(self, *names: str, default: str, gated: bool) -> str:
        table = _GATED if gated else _PLAIN
        key, value = self._first(names)
        value = default if value is None else value
        if isinstance(value, str) and value in table:
            return table[value]
        self.fault(key, f"activation {_short(value)} is not known", f"one of {', '.join(table)}")
        return table[default]

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(((n, self._config[n]) for n in names if self._config.get(n) is not None), (names[0], None))


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."


Fields = dict[str, Any]


def _shape(keys: _Keys, **defaults: int) -> Fields:
    """The names that most families share. `defaults`: what the family's class fills in."""
    heads = keys.count("num_attention_heads", default=defaults.get("num_heads"))
    width = keys.count("hidden_size")
    fields = {
        "num_layers": keys.count("num_hidden_layers"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": keys.count("num_key_value_heads", default=defaults.get("num_kv_heads", heads)),
        "d_ff": keys.count("intermediate_size"),
        "vocab_size": keys.count("vocab_size", default=defaults.get("vocab_size")),
        "max_positions": keys.count("max_position_embeddings", default=defaults.get("max_positions", 2048)),
    }
    fallback = defaults.get("head_dim", width // heads if width % heads == 0 else 0)
    if keys.has("head_dim") or fallback:
        fields["head_dim"] = keys.count("head_dim", default=fallback)
    return fields


def _llama(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", default=False)
    return {
        **_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", default=False),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def _mistral(keys: _Keys) -> Fields:
    return {
        **_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        **_window(keys, 0),
    }


def _window(keys: _Keys, global_every: int) -> Fields:
    if not keys.has("sliding_window"):
        return {}
    return {"sliding_window": keys.count("sliding_window"), "global_every": global_every}


def _qwen2(keys: _Keys) -> Fields:
    if keys.flag("use_sliding_window", default=False):
        keys.fault("use_sliding_window", "windows in some layers of Qwen are not modelled", "false")
    return {
        **_shape(keys),
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "qkv_bias": True,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def _qwen3(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", default=False)
    norms = {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}
    return {**_qwen2(keys), "head_dim": keys.count("head_dim", default=128), **norms}


def _gemma(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", default=False)
    return {
        **_shape(keys, head_dim=256, max_positions=8192),
        "mlp": keys.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh", gated=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
        "embedding_scale": True,
    }


def _gemma2(keys: _Keys) -> Fields:
    softcap = {"post_norms": True, "logit_softcap": keys.has("final_logit_softcapping")}
    return {**_gemma(keys), **softcap, "sliding_window": keys.count("sliding_window", default=4096), "global_every": 2}


def _gemma3(keys: _Keys) -> Fields:
    shape = _shape(keys, num_heads=8, num_kv_heads=4, head_dim=256, vocab_size=262_208, max_positions=131_072)
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


def _gpt2(keys: _Keys) -> Fields:
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


def _gpt_neox(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", default=True)
    return {
        **_BIASED,
        **_shape(keys),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp": keys.activation("hidden_act", default="gelu", gated=False),
        "rotary_fraction": keys.share("rotary_pct", "partial_rotary_factor", default=0.25),
        "parallel_residual": keys.flag("use_parallel_residual", default=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def _mpt(keys: _Keys) -> Fields:
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


def _falcon(keys: _Keys) -> Fields:
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


def _mixtral(keys: _Keys) -> Fields:
    experts = {
        "num_experts": keys.count("num_local_experts", default=8),
        "top_k": keys.count("num_experts_per_tok", default=2),
    }
    return {**_mistral(keys), "experts": experts}


def _qwen3_moe(keys: _Keys) -> Fields:
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
    return {**_qwen3(keys), "experts": experts}


def _qwen2_moe(keys: _Keys) -> Fields:
    experts = {
        **_qwen3_moe(keys)["experts"],
        "num_experts": keys.count("num_experts", default=60),
        "top_k": keys.count("num_experts_per_tok", default=4),
        "d_ff": keys.count("moe_intermediate_size", default=1408),
        "shared_d_ff": keys.count("shared_expert_intermediate_size", default=5632),
        "shared_gate": True,
    }
    return {**_qwen2(keys), "experts": experts}


def _deepseek(keys: _Keys, *, score: str) -> Fields:
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
    shape = _shape(keys)
    return {
        **{name: shape[name] for name in shape if name not in ("head_dim", "num_kv_heads")},
        "mlp": keys.activation("hidden_act", default="silu", gated=True),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        "experts": experts,
        "latent": latent,
        "mtp_layers": keys.amount("num_nextn_predict_layers"),
    }


def _yarn_factor(keys: _Keys, factor: float) -> float:
    """What scales rotated queries and keys where positions are stretched (arXiv 2309.00071, section 3.4).

    factor: of a file that says nothing, which GptOssConfig takes for YaRN.
    """
    scaling = keys.section("rope_scaling")
    if keys.has("rope_scaling") and scaling.value("rope_type") not in (None, "yarn"):
        return 1.0
    stretched = scaling.positive("factor", default=factor)
    return scaling.positive("attention_factor", default=round(0.1 * math.log(max(stretched, 1.0)) + 1, 4))


def _gpt_oss(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", default=True)
    experts = {
        "num_experts": keys.count("num_local_experts", default=128),
        "top_k": keys.count("num_experts_per_tok", "experts_per_token", default=4),
        "bias": True,
        "router_bias": True,
    }
    return {
        **_shape(keys, num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=201_088, max_positions=131_072),
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


_BLOCKS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}  # layers_block_type


def _pattern(keys: _Keys) -> str:
    """hybrid_override_pattern, or the same as a list of words."""
    value = keys.value("hybrid_override_pattern")
    if isinstance(value, str) and value:
        return value
    words = value if value is not None else keys.value("layers_block_type")
    if isinstance(words, list) and words and all(isinstance(word, str) and word in _BLOCKS for word in words):
        return "".join(_BLOCKS[word] for word in words)
    key = "hybrid_override_pattern" if value is not None or words is None else "layers_block_type"
    problem = "is missing" if words is None else f"{_short(words)} is no pattern of layers"
    keys.fault(key, problem, f"letters M * - E, or a list of {', '.join(_BLOCKS)}")
    return "M"


def _nemotron_h(keys: _Keys) -> Fields:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2, attention without positions, MLPs and experts by a pattern."""
    pattern, bias = _pattern(keys), keys.flag("mlp_bias", default=False)
    shape = _shape(keys, head_dim=keys.count("attention_head_dim", default=128), num_kv_heads=8)
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


def _nemotron_experts(keys: _Keys, *, bias: bool) -> Fields:
    return {
        "num_experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "d_ff": keys.count("moe_intermediate_size"),
        "shared_d_ff": keys.amount("moe_shared_expert_intermediate_size") * keys.amount("n_shared_experts", default=1),
        "latent_dim": keys.amount("moe_latent_size"),
        "score": "sigmoid",
        "bias": bias,
    }


def _nemotron_mtp(keys: _Keys) -> int:
    """Modules that predict further tokens: attention and experts each, which `*E` says."""
    modules = keys.amount("num_nextn_predict_layers")
    if modules and keys.value("mtp_hybrid_override_pattern") not in (None, "*E"):
        keys.fault("mtp_hybrid_override_pattern", "other modules than attention and experts are not modelled", "*E")
    return modules


_FAMILIES: dict[str, Callable[[_Keys], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mpt": _mpt,
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": partial(_deepseek, score="softmax"),
    "deepseek_v3": partial(_deepseek, score="sigmoid"),
    "kimi_k2": partial(_deepseek, score="sigmoid"),
    "gpt_oss": _gpt_oss,
    "nemotron_h": _nemotron_h,
}
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "nemotron_h")
