"""Model: a decoder-only transformer's shape, its exact parameter count, and the FLOP a token costs.

A `Model` is data: a preset in `topologies/models`, a Hugging Face `config.json`, or a TOML file of the same fields.
Every parameter is listed with its shape, since sharding pads each one and buckets follow their order.

Legend: D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary, L layers, s sequence length, E experts.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeGuard, cast

from pydantic import Field, model_validator

from simulator.errors import ModelError
from simulator.experts import Experts, Latent
from simulator.hybrid import KINDS, HybridKind, Mamba, pattern_faults
from simulator.hybrid import parameter_shapes as mamba_shapes
from simulator.model_files import PRESETS, model_fields, preset_names, unknown_model
from simulator.schema import Strict

Mlp = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu"]
# dense_layer: without experts, in a model that has some; the others: layers of one branch, of hybrids
LayerKind = Literal["layer", "dense_layer"] | HybridKind
# Layers whose products stay in bf16, where those of the others are narrower
WideKind = Literal["layer_bf16", "dense_layer_bf16", "mamba_bf16", "attention_bf16", "mlp_bf16", "moe_bf16"]
BodyKind = LayerKind | WideKind | Literal["mtp"]  # what stands between embedding and head
Unit = BodyKind | Literal["embedding", "head"]
Shape = tuple[int, ...]
Parameter = tuple[str, Shape]

# Where a family registers its norms among a layer's parameters: buckets are filled in registration order.
_NORMS_BETWEEN = ("gpt2", "gpt3", "mpt")  # ln_1, attention, ln_2, mlp
_NORMS_FIRST = ("gpt_neox", "falcon")  # all norms, attention, mlp; every other family: attention, mlp, norms


class Model(Strict):
    """A decoder-only transformer. Required: name, num_layers, d_model, num_heads, d_ff, vocab_size.

    Defaults are those of Llama: SwiGLU, RMSNorm, rotary positions, no biases, separate Q/K/V, untied head.
    num_kv_heads defaults to num_heads, head_dim to d_model / num_heads.

    fused_qkv: Q, K and V are one parameter. parallel_residual: attention and MLP read the same stream and are added
    together (NeoX, Falcon); shared_input_norm: they share one norm (Falcon-7B). post_norms: a norm after attention
    and after the MLP too (Gemma 2). qk_norm: a norm over each head of Q and K (Qwen 3). embedding_scale: embeddings
    are multiplied by √D (Gemma); embedding_norm: normalised (BLOOM). sliding_window: keys a token sees in a windowed layer (None: all);
    global_every: each such layer-th sees everything (0: none does, if sliding_window is given). attention_sinks: a logit a
    head that takes weight from the keys (gpt-oss). rotary_scale: a factor on rotated queries and keys (YaRN's attention
    factor). gate_clamp: gate and up are cut off there before the activation (gpt-oss' swiglu_limit; 0: nowhere).

    experts: of most layers, instead of the MLP; d_ff is then that of the layers without. latent: multi-head latent attention;
    head_dim is that of queries and keys. mtp_layers: modules that predict further tokens (arXiv 2412.19437, section
    2.2): two norms and a product that join the stream with the next embedding, a layer, a norm; embedding and head are
    the model's own. mtp_passes: how often one such module is passed, a token further each time, with the same parameters.

    pattern: of a hybrid, a letter for each layer, which then is one branch: M a Mamba-2 mixer (mamba says of what shape),
    * attention, - an MLP, E experts. A module that predicts further tokens is attention and experts (an MLP, without any).
    """

    name: str = Field(min_length=1, max_length=200)
    family: str = Field(default="llama", max_length=100)
    num_layers: int = Field(ge=1, le=10_000)
    d_model: int = Field(ge=1, le=2**20)
    num_heads: int = Field(ge=1, le=2**16)
    num_kv_heads: int = Field(ge=1, le=2**16, default=0)
    head_dim: int = Field(ge=1, le=2**16, default=0)
    d_ff: int = Field(ge=1, le=2**24)
    vocab_size: int = Field(ge=1, le=2**28)

    mlp: Mlp = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
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
    post_norms: bool = False
    logit_softcap: bool = False  # Gemma 2: logits pass through a tanh
    sliding_window: int | None = Field(ge=1, default=None)
    global_every: int = Field(ge=0, default=0)
    attention_sinks: bool = False
    gate_clamp: float = Field(ge=0, le=1e6, default=0.0)

    experts: Experts | None = None
    latent: Latent | None = None
    mamba: Mamba | None = None
    pattern: str | None = Field(min_length=1, max_length=10_000, default=None)
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
                msg = f"d_model {width} is not a multiple of num_heads {heads}: give head_dim"
                raise ValueError(msg)
            filled["head_dim"] = width // heads
        return filled

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = []
        if self.num_heads % self.num_kv_heads:
            wrong.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.shared_input_norm and not self.parallel_residual:
            wrong.append("shared_input_norm needs parallel_residual")
        if self.post_norms and self.parallel_residual:
            wrong.append("post_norms and parallel_residual exclude each other")
        wrong += [*self._wrong_parts(), *pattern_faults(self)]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _wrong_parts(self) -> list[str]:
        wrong = []
        if self.mtp_passes > 1 and self.mtp_layers != 1:
            wrong.append(f"mtp_passes repeats one module, and mtp_layers is {self.mtp_layers}")
        if self.latent is not None:
            if self.num_kv_heads != self.num_heads:
                wrong.append("latent attention has as many keys as heads: leave num_kv_heads out")
            if self.head_dim != self.latent.qk_head_dim:
                wrong.append(f"latent attention's head_dim is {self.latent.qk_head_dim}: leave it out")
            if self.fused_qkv or self.qk_norm or self.qkv_bias or self.out_bias:
                wrong.append("latent attention has its own projections: no fused_qkv, qk_norm, qkv_bias, out_bias")
        if self.experts is not None and self.experts.first_dense_layers >= self.num_layers:
            dense = self.experts.first_dense_layers
            wrong.append(f"first_dense_layers {dense} leaves no layer of {self.num_layers} with experts")
        return wrong

    # -- parameters ----------------------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """The MLP has a gate and an up projection."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def q_width(self) -> int:
        """Columns of Q: H C."""
        return self.num_heads * self.head_dim

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
    def multi_query(self) -> bool:
        """All heads share one K and V."""
        return self.num_kv_heads == 1 < self.num_heads

    @property
    def num_norms(self) -> int:
        """Norms over D in a layer."""
        if self.post_norms:
            return 4
        return 1 if self.shared_input_norm else 2

    def parameter_shapes(self, unit: Unit) -> tuple[Parameter, ...]:
        """(name, shape) of every parameter of one `unit`, in registration order. Weights are (out, in) as in torch."""
        match plain(unit):
            case "embedding":
                return self._embedding()
            case "head":
                return self._head()
            case "mtp":
                return self._mtp()
            case "layer" | "dense_layer" as layer:
                return self._layer(dense=layer == "dense_layer")
            case "mamba" | "attention" | "mlp" | "moe" as branch:
                return (*self._norm_of("norm", self.d_model), *self._branch(branch))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        if self.pattern is not None:
            return tuple(KINDS[self.pattern[number]] for number in self.layer_numbers)
        kinds: dict[bool, LayerKind] = {True: "layer", False: "dense_layer"}
        experts = self.experts
        if experts is None:
            return (kinds[True],) * self.num_layers
        return tuple(kinds[experts.in_layer(number)] for number in self.layer_numbers)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in the whole model."""
        return tuple(range(self.num_layers))

    @property
    def body(self) -> tuple[BodyKind, ...]:
        """What stands between embedding and head, in order: layers, then modules of multi-token prediction."""
        module: BodyKind = "mtp"
        return (*self.layer_kinds, *[module for _ in range(self.mtp_layers)])

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts, the modules of multi-token prediction among them."""
        if self.experts is None:
            return 0
        return self.layer_kinds.count("layer" if self.pattern is None else "moe") + self.mtp_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention; modules of multi-token prediction are not among them."""
        return self.num_layers if self.pattern is None else self.layer_kinds.count("attention")

    def num_parameters_of(self, unit: Unit) -> int:
        """Parameters of one embedding, one layer, or the head (a tied head has only its norm)."""
        return sum(prod(shape) for _, shape in self.parameter_shapes(unit))

    @property
    def num_parameters(self) -> int:
        """Trained parameters, exactly; a tied matrix counts once."""
        ends = self.num_parameters_of("embedding") + self.num_parameters_of("head")
        layers = sum(count * self.num_parameters_of(kind) for kind, count in Counter(self.body).items())
        return ends + layers

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: of the routed experts, those it is sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.top_k
        return self.num_parameters - self.num_expert_layers * idle * self.num_parameters_of_expert

    @property
    def num_parameters_of_expert(self) -> int:
        """Parameters of one routed expert."""
        return 0 if self.experts is None else sum(prod(shape[1:]) for _, shape in self._routed(self.experts))

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply a token's activations: the layers' matrices and the LM head (tied or not), no biases.

        A convolution's taps are left out, as in Megatron-LM's count. Of the routed experts, those it is sent to. A module of multi-token prediction has the LM head once more.
        """
        heads = (1 + self.mtp_layers * self.mtp_passes) * self.vocab_size * self.d_model
        passes = {"mtp": self.mtp_passes}
        return heads + sum(
            count * passes.get(kind, 1) * self._matmul_parameters_of(kind) for kind, count in Counter(self.body).items()
        )

    def _matmul_parameters_of(self, unit: Unit) -> int:
        matrices = ((name, shape) for name, shape in self.parameter_shapes(unit) if name.endswith(".weight"))
        top_k = 0 if self.experts is None else self.experts.top_k
        return sum(
            top_k * prod(shape[1:]) if name.startswith("experts.") else prod(shape)
            for name, shape in matrices
            if len(shape) > 1 and name != "mamba.conv.weight"
        )

    def _embedding(self) -> tuple[Parameter, ...]:
        tokens: Parameter = ("embedding.weight", (self.vocab_size, self.d_model))
        positions: Parameter = ("positions.weight", (self.max_positions, self.d_model))
        norm = self._norm_of("embedding_norm", self.d_model) if self.embedding_norm else ()
        return (tokens, *([positions] if self.positions == "learned" else []), *norm)

    def _head(self) -> tuple[Parameter, ...]:
        parameters = [*self._norm_of("norm", self.d_model)]
        if not self.tied_embeddings:
            parameters.append(("lm_head.weight", (self.vocab_size, self.d_model)))
        if self.lm_head_bias:
            parameters.append(("lm_head.bias", (self.vocab_size,)))
        return tuple(parameters)

    def _mtp(self) -> tuple[Parameter, ...]:
        d = self.d_model
        norms = [p for name in ("embedding_norm", "stream_norm") for p in self._norm_of(f"mtp.{name}", d)]
        joined = _linear("mtp.join", d, 2 * d, bias=False)
        return (*norms, *joined, *self._layer(dense=False), *self._norm_of("mtp.norm", d))

    def _layer(self, *, dense: bool) -> tuple[Parameter, ...]:
        norms = [self._norm_of(f"norm_{i + 1}", self.d_model) for i in range(self.num_norms)]
        attention = self._attention() if self.latent is None else self._latent_attention(self.latent)
        mlp = self._mlp() if self.experts is None or dense else self._experts(self.experts)
        if self.family in _NORMS_BETWEEN:
            return (*norms[0], *attention, *(p for norm in norms[1:] for p in norm), *mlp)
        flat = tuple(p for norm in norms for p in norm)
        return (*flat, *attention, *mlp) if self.family in _NORMS_FIRST else (*attention, *mlp, *flat)

    def _branch(self, kind: HybridKind) -> tuple[Parameter, ...]:
        """The one branch of a hybrid's layer."""
        if kind == "mamba" and self.mamba is not None:
            return mamba_shapes(self.mamba, self.d_model)
        if kind == "moe" and self.experts is not None:
            return self._experts(self.experts)
        return self._attention() if kind == "attention" else self._mlp()

    def _attention(self) -> tuple[Parameter, ...]:
        q, kv, d = self.q_width, self.kv_columns, self.d_model
        widths = {"qkv": q + 2 * kv} if self.fused_qkv else {"q": q, "k": kv, "v": kv}
        parameters = [p for name, n in widths.items() for p in _linear(f"attention.{name}", n, d, bias=self.qkv_bias)]
        parameters += _linear("attention.out", d, q, bias=self.out_bias)
        if self.qk_norm:
            parameters += [("attention.q_norm.weight", (self.head_dim,)), ("attention.k_norm.weight", (self.head_dim,))]
        if self.attention_sinks:
            parameters.append(("attention.sinks", (self.num_heads,)))
        return tuple(parameters)

    def _latent_attention(self, latent: Latent) -> tuple[Parameter, ...]:
        d, q_rank, kv_rank = self.d_model, latent.q_lora_rank, latent.kv_lora_rank
        kv_width = self.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        queries = [*_linear("attention.q", self.q_width, d, bias=False)]
        if q_rank:
            norm = self._norm_of("attention.q_norm", q_rank)
            down = _linear("attention.q_down", q_rank, d, bias=False)
            queries = [*down, *norm, *_linear("attention.q_up", self.q_width, q_rank, bias=False)]
        return (
            *queries,
            *_linear("attention.kv_down", kv_rank + latent.qk_rope_head_dim, d, bias=False),
            *self._norm_of("attention.kv_norm", kv_rank),
            *_linear("attention.kv_up", kv_width, kv_rank, bias=False),
            *_linear("attention.out", d, self.o_width, bias=False),
        )

    def _mlp(self) -> tuple[Parameter, ...]:
        return self._dense("mlp", self.d_ff, bias=self.mlp_bias)

    def _dense(self, name: str, width: int, *, bias: bool, of: int = 0) -> tuple[Parameter, ...]:
        """of: channels that it reads and writes, if not the stream's."""
        d = of or self.d_model
        into = ("gate", "up") if self.gated else ("up",)
        parameters = [p for part in into for p in _linear(f"{name}.{part}", width, d, bias=bias)]
        return (*parameters, *_linear(f"{name}.down", d, width, bias=bias))

    def _experts(self, experts: Experts) -> tuple[Parameter, ...]:
        """Router, routed experts (all in one parameter, by expert), shared experts."""
        d = self.d_model
        router = _linear("router", experts.num_experts, d, bias=experts.router_bias)
        shared = self._dense("shared", experts.shared_d_ff, bias=experts.bias) if experts.shared_d_ff else ()
        gate = _linear("shared_gate", 1, d, bias=False) if experts.shared_gate else ()
        latent = experts.latent_dim
        low = (
            (*_linear("latent_down", latent, d, bias=False), *_linear("latent_up", d, latent, bias=False))
            if latent
            else ()
        )
        return (*router, *low, *self._routed(experts), *shared, *gate)

    def _routed(self, experts: Experts) -> tuple[Parameter, ...]:
        one = self._dense("experts", experts.d_ff, bias=experts.bias, of=experts.latent_dim)
        return tuple((name, (experts.num_held, *shape)) for name, shape in one)

    def _norm_of(self, name: str, width: int) -> tuple[Parameter, ...]:
        weight: Parameter = (f"{name}.weight", (width,))
        return (weight, (f"{name}.bias", (width,))) if self.norm_bias else (weight,)

    # -- FLOP ----------------------------------------------------------------------------------------------------

    def attention_pairs(self, seq_len: int, *, causal: bool = True) -> int:
        """(query, key) pairs of one head over all layers and one sequence.

        Causal counts half the square, s²/2, by convention (exactly s(s+1)/2); a window w < s leaves w s - w²/2.
        """
        square = seq_len * seq_len
        full = square // 2 if causal else square
        if self.sliding_window is None or self.sliding_window >= seq_len:
            return self.num_attention_layers * full
        window = self.sliding_window
        band = window * seq_len - window * window // 2
        num_global = self.num_layers // self.global_every if self.global_every else 0
        return num_global * full + (self.num_attention_layers - num_global) * band

    def model_flop_per_sequence(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOP of one sequence, forward and backward, without recomputation: 6 N_matmul s + 12 H C pairs.

        6 FLOP a parameter and token: a multiply and an add, once forward and twice backward; the embedding lookup is
        free. Attention: two products forward (4 FLOP a pair and channel), twice that backward; where values have
        channels of their own number, 2 FLOP for each of theirs and 2 for each of the queries'. A Mamba-2 mixer's recurrence:
        4 I N a token, twice that backward.
        """
        matmul = 6 * self.num_matmul_parameters * seq_len
        if self.mamba is not None:
            matmul += 3 * self.mamba.scan_flop_per_token * self.layer_kinds.count("mamba") * seq_len
        pairs = self.attention_pairs(seq_len, causal=causal)
        more = self.mtp_layers * self.mtp_passes * (seq_len * seq_len // 2 if causal else seq_len * seq_len)
        return matmul + 6 * (self.q_width + self.o_width) * (pairs + more)

    def model_flop_per_token(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOP a token: 6 N_matmul + 12 L s H C, attention halved if causal (PaLM's appendix B counts it in full)."""
        return self.model_flop_per_sequence(seq_len, causal=causal) // seq_len

    # -- making one ----------------------------------------------------------------------------------------------

    def with_max_positions(self, max_positions: int) -> Self:
        """The same model with another context length: learned positions are parameters, and grow with it."""
        return self.model_copy(update={"max_positions": max_positions})

    @classmethod
    def load(cls, name_or_path: str | Path) -> Model:
        """A preset by name, or a model from a config.json (Hugging Face), a folder that holds one, or a TOML file.

        Raises ModelError: with the nearest names if nothing is called so, with every fault of the file otherwise.
        """
        text = str(name_or_path)
        if text in preset_names():
            return cls._from_toml(PRESETS / f"{text}.toml")
        path = Path(text)
        if path.is_dir():
            path = path / "config.json"
        if path.suffix == ".toml":
            return cls._from_toml(path)
        if path.suffix == ".json" or path.is_file():
            from simulator.hf_config import file_fields  # noqa: PLC0415  only what is asked for is loaded

            fields, place = file_fields(path)
            return Model.parse(fields, place, ModelError)
        raise ModelError(unknown_model(text))

    @staticmethod
    def _from_toml(path: Path) -> Model:
        return Model.parse(model_fields(path), str(path), ModelError)


WIDE: Final = "_bf16"


def wide(kind: LayerKind) -> WideKind:
    """The same layer with products in bf16."""
    return cast("WideKind", f"{kind}{WIDE}")


def plain(unit: Unit) -> LayerKind | Literal["embedding", "mtp", "head"]:
    """A unit by what it holds, whatever its products are in."""
    return cast("LayerKind", unit.removesuffix(WIDE))


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


def _linear(name: str, width_out: int, width_in: int, *, bias: bool) -> list[Parameter]:
    weight: Parameter = (f"{name}.weight", (width_out, width_in))
    return [weight, (f"{name}.bias", (width_out,))] if bias else [weight]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
