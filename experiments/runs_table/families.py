"""Families of models by name, for those that no preset describes: structure, vocabulary, activation. First match first.

Facts of the families' config.json on huggingface.co and of their papers. Names are small, without an owner, words joined by
`-` (`published.plain_name`).
"""

from __future__ import annotations

from typing import Any, Final

_GPT_LIKE: Final[dict[str, Any]] = {
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "fused_qkv": True,
    "positions": "learned",
    "tied_embeddings": True,
}
_LAYER_NORM: Final = {"norm": "layer", "norm_bias": True}
_GEMMA: Final = {"tied_embeddings": True, "embedding_scale": True}
_NEOX: Final = {**_GPT_LIKE, "positions": "rope", "tied_embeddings": False, "rotary_fraction": 0.25}

GPT: Final[dict[str, object]] = {**_GPT_LIKE, "family": "gpt3"}
LLAMA: Final[dict[str, object]] = {"family": "llama"}

# How a family is built, where the table's columns do not say
FAMILIES: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    (r"^mpt", {**_GPT_LIKE, "family": "mpt"}),
    (r"gpt-?neox|pythia|^neox", {**_NEOX, "family": "gpt_neox", "parallel_residual": True}),
    (
        r"gpt-?j(?![a-z])",
        {**_LAYER_NORM, "family": "gptj", "mlp_bias": True, "lm_head_bias": True, "parallel_residual": True,
         "shared_input_norm": True, "rotary_fraction": 0.25},
    ),
    (r"^gpt", GPT),
    (r"^opt-", {**_GPT_LIKE, "family": "opt", "fused_qkv": False}),
    (r"bloom", {**_GPT_LIKE, "family": "bloom", "positions": "alibi", "embedding_norm": True}),
    (
        r"falcon-?(7|11|40|180)b|^falcon$",
        {**_LAYER_NORM, "family": "falcon", "fused_qkv": True, "parallel_residual": True, "tied_embeddings": True},
    ),
    (
        r"phi-?(1|1\.5|2)(?![\d.])",
        {**_GPT_LIKE, "family": "phi", "positions": "rope", "fused_qkv": False, "tied_embeddings": False,
         "lm_head_bias": True, "parallel_residual": True, "shared_input_norm": True, "rotary_fraction": 0.4},
    ),
    (r"phi-?[34]", {"family": "phi3", "fused_qkv": True}),
    (r"starcoder-?2", {**_GPT_LIKE, "family": "starcoder2", "positions": "rope", "fused_qkv": False}),
    (r"stablelm", {**_LAYER_NORM, "family": "stablelm", "rotary_fraction": 0.25}),
    (r"gemma-?3", {**_GEMMA, "family": "gemma3", "qk_norm": True, "post_norms": True}),
    (r"gemma-?2(?!b)", {**_GEMMA, "family": "gemma2", "post_norms": True, "logit_softcap": True}),
    (r"gemma", {**_GEMMA, "family": "gemma"}),
    (r"smollm|minicpm", {"family": "llama", "tied_embeddings": True}),
    (r"olmo-?2|olmoe", {"family": "olmo2", "qk_norm": True}),
    (r"olmo", {"family": "olmo", "norm": "layer"}),
    (r"chatglm|glm-?4", {"family": "chatglm", "qkv_bias": True, "fused_qkv": True, "rotary_fraction": 0.5}),
    (r"baichuan", {"family": "baichuan", "fused_qkv": True}),
    (r"^nemotron", {"family": "nemotron", "norm": "layer", "norm_bias": True, "rotary_fraction": 0.5}),
    (r"^qwen-?3", {"family": "qwen3", "qk_norm": True}),
    (r"^qwen", {"family": "qwen2", "qkv_bias": True}),
    (r"internlm-?[23]", {"family": "internlm2", "fused_qkv": True}),
    (r"internlm", {"family": "internlm", "qkv_bias": True, "out_bias": True, "fused_qkv": True}),
    (r"llama|mistral", LLAMA),
)  # fmt: skip

# Vocabularies of tokenizers that a family is known by, before padding
GPT2_BPE: Final = 50_257
VOCABULARIES: Final[tuple[tuple[str, int], ...]] = (
    (r"^gpt-?3-\d|^megatron-\d|^gpt-?2", GPT2_BPE),  # Megatron's papers pad it to 51,200 (arXiv 2104.04473, 2205.05198)
    (r"^nemotron-?(?!3\D)\d", 256_000),  # SentencePiece of Nemotron-4 (arXiv 2402.16819)
    (r"^grok-?1\b", 131_072),  # github.com/xai-org/grok-1
    (r"code-?llama|tinyllama|openllama|open-llama", 32_000),
    (r"llama-?2", 32_000),
    (r"llama-?3", 128_256),
    (r"llama-?4", 202_048),
    (r"^llama-?1?-?\d+b", 32_000),
    (r"deepseek-?(v3|r1)", 129_280),
    (r"deepseek", 102_400),
    (r"kimi-?k2|moonlight", 163_840),
    (r"gpt-oss", 201_088),
    (r"qwen-?2\.5-?(7|14|32|72)b|qwen-?2-?7b|qwen-?2-?72b", 152_064),
    (r"qwen", 151_936),
    (r"mistral-?(nemo|small)", 131_072),
    (r"mistral-?large", 32_768),
    (r"mistral|mixtral", 32_000),
    (r"gemma-?3", 262_144),
    (r"gemma", 256_000),
    (r"^yi-", 64_000),
    (r"falcon-?(7|40|180)b", 65_024),
    (r"olmo-?2", 100_352),
    (r"olmo", 50_304),
    (r"baichuan-?2", 125_696),
    (r"baichuan", 64_000),
    (r"chatglm-?[23]", 65_024),
    (r"glm-?4", 151_552),
    (r"internlm-?[23]", 92_544),
    (r"internlm", 103_168),
    (r"minimax", 200_064),
    (r"^opt-", 50_272),
    (r"bloom", 250_880),
    (r"pythia|stablelm|^redpajama", 50_304),
    (r"gpt-?neox", 50_432),
    (r"gpt-?j(?![a-z])", 50_400),
    (r"phi-?(1|1\.5|2)(?![\d.])", 51_200),
    (r"phi-?3", 32_064),
    (r"phi-?4", 100_352),
    (r"starcoder|smollm", 49_152),
    (r"dbrx", 100_352),
    (r"^mpt", 50_368),
)

MLPS: Final[tuple[tuple[str, str], ...]] = (
    (r"^nemotron-?\d", "squared_relu"),  # arXiv 2402.16819
    (r"^opt-", "relu"),
    (r"^gpt-?[23]|^megatron-\d|gpt-?(j|neox)|pythia|bloom|falcon-?(7|40|180)b|^mpt|phi-?[12](?!\d)|starcoder", "gelu"),
    (
        r"llama|mistral|mixtral|qwen|deepseek|kimi|moonlight|gpt-oss|grok|gemma|^yi-|baichuan|internlm|glm|minimax",
        "swiglu",
    ),
    (r"olmo|phi-?[34]|smollm|minicpm|stablelm|dbrx", "swiglu"),
)
