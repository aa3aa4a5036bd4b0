"""Model: a decoder-only transformer's shape, its exact parameter count, and the FLOP a token costs.

A `Model` is data: a preset in `topologies/models`, a Hugging Face `config.json`, or a TOML file of the same fields.
Every parameter is listed with its shape, since sharding pads each one and buckets follow their order.

Legend: D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary, L layers, s sequence length.
"""

from __future__ import annotations

import difflib
from math import prod
from pathlib import Path
from typing import Any, Literal, Self, TypeGuard

from pydantic import Field, model_validator

from simulator.errors import Fault, ModelError
from simulator.schema import Strict, read_toml

Mlp = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu"]
Unit = Literal["embedding", "layer", "head"]
Shape = tuple[int, ...]
Parameter = tuple[str, Shape]

PRESETS = Path(__file__).resolve().parent.parent / "topologies" / "models"
MAX_FILE_BYTES = 4 * 2**20  # a config.json has some kilobytes; what is larger is not one

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
    are multiplied by √D (Gemma). sliding_window: keys a token sees in a windowed layer (None: all);
    global_every: each such layer-th sees everything (0: none does, if sliding_window is given).
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

    tied_embeddings: bool = False
    embedding_scale: bool = False
    parallel_residual: bool = False
    shared_input_norm: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    logit_softcap: bool = False  # Gemma 2: logits pass through a tanh
    sliding_window: int | None = Field(ge=1, default=None)
    global_every: int = Field(ge=0, default=0)
    sources: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        heads, width = data.get("num_heads"), data.get("d_model")
        filled = dict(data)
        if _is_count(heads) and data.get("num_kv_heads") is None:
            filled["num_kv_heads"] = heads
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
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

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
        if unit == "embedding":
            return self._embedding()
        return self._layer() if unit == "layer" else self._head()

    def num_parameters_of(self, unit: Unit) -> int:
        """Parameters of one embedding, one layer, or the head (a tied head has only its norm)."""
        return sum(prod(shape) for _, shape in self.parameter_shapes(unit))

    @property
    def num_parameters(self) -> int:
        """Trained parameters, exactly; a tied matrix counts once."""
        layers = self.num_layers * self.num_parameters_of("layer")
        return self.num_parameters_of("embedding") + layers + self.num_parameters_of("head")

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply activations: the layers' matrices and the LM head (tied or not), no biases."""
        layer = sum(prod(shape) for _, shape in self._layer() if len(shape) == 2)
        return self.num_layers * layer + self.vocab_size * self.d_model

    def _embedding(self) -> tuple[Parameter, ...]:
        tokens: Parameter = ("embedding.weight", (self.vocab_size, self.d_model))
        if self.positions != "learned":
            return (tokens,)
        return (tokens, ("positions.weight", (self.max_positions, self.d_model)))

    def _head(self) -> tuple[Parameter, ...]:
        parameters = [*self._norm_of("norm", self.d_model)]
        if not self.tied_embeddings:
            parameters.append(("lm_head.weight", (self.vocab_size, self.d_model)))
        if self.lm_head_bias:
            parameters.append(("lm_head.bias", (self.vocab_size,)))
        return tuple(parameters)

    def _layer(self) -> tuple[Parameter, ...]:
        norms = [self._norm_of(f"norm_{i + 1}", self.d_model) for i in range(self.num_norms)]
        attention, mlp = self._attention(), self._mlp()
        if self.family in _NORMS_BETWEEN:
            return (*norms[0], *attention, *(p for norm in norms[1:] for p in norm), *mlp)
        flat = tuple(p for norm in norms for p in norm)
        return (*flat, *attention, *mlp) if self.family in _NORMS_FIRST else (*attention, *mlp, *flat)

    def _attention(self) -> tuple[Parameter, ...]:
        q, kv, d = self.q_width, self.kv_width, self.d_model
        widths = {"qkv": q + 2 * kv} if self.fused_qkv else {"q": q, "k": kv, "v": kv}
        parameters = [p for name, n in widths.items() for p in _linear(f"attention.{name}", n, d, bias=self.qkv_bias)]
        parameters += _linear("attention.out", d, q, bias=self.out_bias)
        if self.qk_norm:
            parameters += [("attention.q_norm.weight", (self.head_dim,)), ("attention.k_norm.weight", (self.head_dim,))]
        return tuple(parameters)

    def _mlp(self) -> tuple[Parameter, ...]:
        d, f, bias = self.d_model, self.d_ff, self.mlp_bias
        into = ("gate", "up") if self.gated else ("up",)
        parameters = [p for name in into for p in _linear(f"mlp.{name}", f, d, bias=bias)]
        return (*parameters, *_linear("mlp.down", d, f, bias=bias))

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
            return self.num_layers * full
        window = self.sliding_window
        band = window * seq_len - window * window // 2
        num_global = self.num_layers // self.global_every if self.global_every else 0
        return num_global * full + (self.num_layers - num_global) * band

    def model_flop_per_sequence(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOP of one sequence, forward and backward, without recomputation: 6 N_matmul s + 12 H C pairs.

        6 FLOP a parameter and token: a multiply and an add, once forward and twice backward; the embedding lookup is
        free. Attention: two products forward (4 FLOP a pair and channel), twice that backward.
        """
        matmul = 6 * self.num_matmul_parameters * seq_len
        return matmul + 12 * self.q_width * self.attention_pairs(seq_len, causal=causal)

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
            return _from_toml(PRESETS / f"{text}.toml")
        path = Path(text)
        if path.is_dir():
            path = path / "config.json"
        if path.suffix == ".toml":
            return _from_toml(path)
        if path.suffix == ".json" or path.is_file():
            from simulator.readers.hf_config import read_hf_config  # noqa: PLC0415  readers stand above the nouns

            return read_hf_config(path)
        raise ModelError(_unknown(text))


def preset_names() -> tuple[str, ...]:
    """Names that `Model.load` knows, sorted."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def _unknown(name: str) -> Fault:
    nearest = difflib.get_close_matches(name.lower(), preset_names(), n=3, cutoff=0.4)
    close = f"nearest: {', '.join(nearest)}; " if nearest else ""
    remedy = f"{close}or the path of a config.json or .toml"
    return Fault(place="model", problem=f"no preset and no file is called {name!r}", remedy=remedy)


def _from_toml(path: Path) -> Model:
    return Model.parse(_merged(path, depth=0), str(path), ModelError)


def _merged(path: Path, depth: int) -> dict[str, Any]:
    """The file's fields over those of the preset it is `like`. Its name defaults to the file's."""
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(Fault(place=str(path), problem=f"larger than {MAX_FILE_BYTES} bytes", remedy="a model file"))
    data = {"name": path.stem, **read_toml(path, ModelError)}
    like = data.pop("like", None)
    if like is None:
        return data
    if not isinstance(like, str) or like not in preset_names() or depth > 3:
        raise ModelError(Fault(place=f"{path}: like", problem=f"{like!r} is no preset", remedy="a preset's name"))
    return {**_merged(PRESETS / f"{like}.toml", depth + 1), **data}


def _linear(name: str, width_out: int, width_in: int, *, bias: bool) -> list[Parameter]:
    weight: Parameter = (f"{name}.weight", (width_out, width_in))
    return [weight, (f"{name}.bias", (width_out,))] if bias else [weight]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
