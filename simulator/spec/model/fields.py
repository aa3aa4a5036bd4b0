"""The fields of a model file, how they follow from one another, and their contradictions.

Legend: D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary, L layers, s sequence length, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, Self, TypeGuard

from pydantic import Field, model_validator

from simulator.base.schema import Strict
from simulator.spec.model.experts import Experts, Latent
from simulator.spec.model.hybrid import KINDS, Mamba
from simulator.spec.model.tower import Tower

Mlp = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu"]
_NEEDS: Final = (("shared_input_norm", "parallel_residual"), ("qk_norm_wide", "qk_norm"), ("norm_bias", "norm_weight"), ("patch_numel", "num_classes"))  # fmt: skip
_WORDS: Final = {"mamba": "Mamba", "both": "Mamba and attention", "mlp": "MLP", "moe": "experts"}
_SHOWN: Final = 8  # places of wrong letters that an error lists


class ModelFields(Strict, defer_build=True):  # its own validator is never needed: that of `Model` is
    """One stack of transformer layers. Required: name, num_layers, d_model, num_heads, d_ff, vocab_size.

    Defaults are those of Llama: SwiGLU, RMSNorm, rotary positions, no biases, separate Q/K/V, untied head.
    num_kv_heads defaults to num_heads, head_dim to d_model / num_heads.

    fused_qkv: Q, K and V are one parameter. parallel_residual: attention and MLP read the same stream and are added
    together (NeoX, Falcon); shared_input_norm: they share one norm (Falcon-7B). post_norms: a norm after attention
    and after the MLP too (Gemma 2). qk_norm: a norm over each head of Q and K (Qwen 3); qk_norm_wide: its weight is as wide
    as all heads together (OLMo 2). norm_weight: norms have one (OLMo 1's have none). attention_gate: the product of the
    queries makes as many channels again, whose sigmoid multiplies attention's result (Qwen 3-Next). embedding_scale: embeddings
    are multiplied by √D (Gemma); embedding_norm: normalised (BLOOM). sliding_window: keys a token sees in a windowed layer (None: all);
    global_every: each such layer-th sees everything (0: none does, if sliding_window is given). attention_sinks: a logit a
    head that takes weight from the keys (gpt-oss). rotary_scale: a factor on rotated queries and keys (YaRN's attention
    factor). gate_clamp: gate and up are cut off there before the activation (gpt-oss' swiglu_limit; 0: nowhere).

    experts: of most layers, instead of the MLP; d_ff is then that of the layers without. latent: multi-head latent attention;
    head_dim is that of queries and keys. mtp_layers: modules that predict further tokens (arXiv 2412.19437, section
    2.2): two norms and a product that join the stream with the next embedding, a layer, a norm; embedding and head are
    the model's own. mtp_passes: how often one such module is passed, a token further each time, with the same parameters.

    tower: an encoder of images, whose features take the places of tokens.

    bidirectional: attention sees later tokens too, half of a window on either side (BERT). token_kinds: rows of a table of which
    each token adds one. patch_numel: tokens are patches of an image with so many numbers, behind a class token; a sequence is one
    image, of max_positions tokens (ViT). num_classes: the head reads one token of a sequence and tells so many classes apart (0:
    it reads all tokens). final_norm: a norm ahead of the head. head_transform: a product as wide as the stream in the head, and its
    activation, with a norm behind them or plain; it has a bias where attention's output has one (BERT).

    pattern: of a hybrid, a letter for each layer, which then is one branch: M a mixer (mamba says of what kind and shape),
    * attention, H both side by side, - an MLP, E experts. A module that predicts further tokens is attention and experts (an MLP, without any).
    """

    name: str = Field(min_length=1, max_length=200)
    family: str = Field(default="llama", max_length=100)
    num_layers: int = Field(ge=1, le=4096)
    d_model: int = Field(ge=1, le=2**20)
    num_heads: int = Field(ge=1, le=2**16)
    num_kv_heads: int = Field(ge=1, le=2**16, default=0)
    head_dim: int = Field(ge=1, le=2**16, default=0)
    d_ff: int = Field(ge=1, le=2**24)
    vocab_size: int = Field(ge=1, le=2**28)

    mlp: Mlp = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_weight: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    fused_qkv: bool = False

    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    max_positions: int = Field(ge=1, le=2**32, default=2048)
    rotary_fraction: float = Field(gt=0, le=1, default=1.0)
    rotary_scale: float = Field(gt=0, le=1000, default=1.0)

    tied_embeddings: bool = False
    embedding_scale: bool = False
    embedding_norm: bool = False
    parallel_residual: bool = False
    shared_input_norm: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    attention_gate: bool = False
    post_norms: bool = False
    logit_softcap: bool = False  # Gemma 2: logits pass through a tanh
    sliding_window: int | None = Field(ge=1, default=None)
    global_every: int = Field(ge=0, default=0)
    attention_sinks: bool = False
    bidirectional: bool = False
    token_kinds: int = Field(ge=0, le=2**16, default=0)
    patch_numel: int = Field(ge=0, le=2**24, default=0)
    num_classes: int = Field(ge=0, le=2**24, default=0)
    final_norm: bool = True
    head_transform: Literal["none", "plain", "normed"] = "none"
    gate_clamp: float = Field(ge=0, le=1e6, default=0.0)

    experts: Experts | None = None
    latent: Latent | None = None
    mamba: Mamba | None = None
    pattern: str | None = Field(min_length=1, max_length=4096, default=None)
    tower: Tower | None = None
    mtp_layers: int = Field(ge=0, le=100, default=0)
    mtp_passes: int = Field(ge=1, le=100, default=1)
    sources: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        heads, width = data.get("num_heads"), data.get("d_model")
        filled = dict(data)
        if isinstance(data.get("pattern"), str) and data.get("num_layers") is None:
            filled["num_layers"] = len(data["pattern"])
        if _is_count(heads) and data.get("num_kv_heads") is None:
            filled["num_kv_heads"] = heads
        filled |= _filled_parts(data)
        data = filled
        if _is_count(heads) and _is_count(width) and data.get("head_dim") is None:
            if width % heads:
                raise ValueError(f"d_model {width} is not a multiple of num_heads {heads}: give head_dim")
            filled["head_dim"] = width // heads
        return filled

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = []
        if self.num_heads % self.num_kv_heads:
            wrong.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.post_norms and self.parallel_residual:
            wrong.append("post_norms and parallel_residual exclude each other")
        wrong += [f"{a} needs {b}" for a, b in _NEEDS if getattr(self, a) and not getattr(self, b)]
        wrong += [*self._wrong_parts(), *_pattern_faults(self)]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _wrong_parts(self) -> list[str]:
        wrong = []
        others = {"tied_embeddings": self.tied_embeddings, "mtp_layers": self.mtp_layers, "a tower": self.tower}
        wrong += [
            f"num_classes and {name} exclude each other" for name, it in others.items() if self.num_classes and it
        ]
        if self.mtp_passes > 1 and self.mtp_layers != 1:
            wrong.append(f"mtp_passes repeats one module, and mtp_layers is {self.mtp_layers}")
        if self.latent is not None:
            if self.num_kv_heads != self.num_heads:
                wrong.append("latent attention has as many keys as heads: leave num_kv_heads out")
            if self.head_dim != self.latent.qk_head_dim:
                wrong.append(f"latent attention's head_dim is {self.latent.qk_head_dim}: leave it out")
            if self.fused_qkv or self.qk_norm or self.qkv_bias or self.out_bias:
                wrong.append("latent attention has its own projections: no fused_qkv, qk_norm, qkv_bias, out_bias")
            if self.attention_gate:
                wrong.append("latent attention has no attention_gate")
        if self.experts is not None and self.experts.first_dense_layers >= self.num_layers:
            dense = self.experts.first_dense_layers
            wrong.append(f"first_dense_layers {dense} leaves no layer of {self.num_layers} with experts")
        return wrong

    @property
    def gated(self) -> bool:
        """The MLP has a gate and an up projection."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def q_width(self) -> int:
        """Columns of Q: H C."""
        return self.num_heads * self.head_dim

    @property
    def q_columns(self) -> int:
        """Columns of the product that makes Q: as many again with a gate."""
        return self.q_width * (2 if self.attention_gate else 1)

    @property
    def kv_width(self) -> int:
        """Columns of K, and of V: K C."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_columns(self) -> int:
        """Columns of the weights that make K, and V: a part of `kv_width` where ranks share a head."""
        return self.kv_width

    @property
    def o_width(self) -> int:
        """Columns of attention's result, which the output projection reads."""
        return self.q_width if self.latent is None else self.num_heads * self.latent.v_head_dim

    @property
    def num_norms(self) -> int:
        """Norms over D in a layer."""
        if self.post_norms:
            return 4
        return 1 if self.shared_input_norm else 2


def _pattern_faults(model: ModelFields) -> Iterator[str]:
    """Every contradiction between a model's pattern, its parts and its other fields."""
    pattern = model.pattern
    if pattern is None:
        if model.mamba is not None:
            yield "mamba needs a pattern that says which layers are mixers: M, with * - E for the others"
        return
    wrong = [(place, letter) for place, letter in enumerate(pattern) if letter not in KINDS]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        listed = ", ".join(f"{letter!r} at {place}" for place, letter in wrong[:_SHOWN])
        known = ", ".join(f"{letter} ({_WORDS.get(kind, kind)})" for letter, kind in KINDS.items())
        yield f"pattern has {listed}{more}: {known} are known"
    if len(pattern) != model.num_layers:
        yield f"pattern has {len(pattern)} letters for {model.num_layers} layers"
    for letters, part, given in (("MH", "mamba", model.mamba), ("E", "experts", model.experts)):
        there = any(letter in pattern for letter in letters)
        if there != (given is not None):
            has = "has" if there else "has no"
            yield f"pattern {has} {' or '.join(letters)}, and the model {'no ' if given is None else ''}{part}"
    if model.experts is not None and (model.experts.first_dense_layers or model.experts.every != 1):
        yield "the pattern says which layers have experts: leave first_dense_layers and every out"
    fields = ("parallel_residual", "post_norms", "shared_input_norm", "global_every")
    yield from (f"layers of one branch have no {name}" for name in fields if getattr(model, name))


def _filled_parts(data: dict[str, Any]) -> dict[str, Any]:
    """What a model's parts leave to the model's fields, and the other way round."""
    filled: dict[str, Any] = {}
    latent, experts = data.get("latent"), data.get("experts")
    if isinstance(latent, dict) and data.get("head_dim") is None:
        channels = latent.get("qk_nope_head_dim"), latent.get("qk_rope_head_dim")
        filled["head_dim"] = sum(c for c in channels if _is_count(c)) or None
    if isinstance(experts, dict) and not experts.get("d_ff") and _is_count(data.get("d_ff")):
        filled["experts"] = {**experts, "d_ff": data["d_ff"]}
    if isinstance(experts, Experts) and not experts.d_ff and _is_count(data.get("d_ff")):
        filled["experts"] = experts.model_copy(update={"d_ff": data["d_ff"]})
    return filled


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
