"""Torch modules of a Model, operator by operator as `simulator.work.ops` lists them for the plan's software stack.

Modules are registered in the order of `Model.parameter_shapes`, under its names.
Shapes: b sequences, s positions, H heads, K kv heads, C head_dim, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from validate.experts import Routed, Router
from validate.torch_private import efficient_attention, flash_attention

NORM_EPS = 1e-5
ROPE_BASE = 500_000.0
SOFTCAP = 30.0
INITIAL_STD = 0.02

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "squared_relu": lambda x: functional.relu(x).square(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How the operators are written: what of stack and plan reaches the modules.

    dtype: of the parameters. expand_kv: K and V are repeated to all heads before attention. direct_flash: call the
    flash operator itself, because the dispatcher of a CPU build would not choose it for a device it does not have. ep: ranks
    that the experts of a layer are dealt to.
    """

    stack: Stack
    dtype: torch.dtype
    seq_len: int
    expand_kv: bool
    direct_flash: bool = False
    ep: int = 1


class Norm(nn.Module):  # type: ignore[misc]
    """RMSNorm or LayerNorm over the last dim, fused or operator by operator in fp32."""

    def __init__(self, width: int, model: Model, style: Style, *, biased: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=style.dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=style.dtype)) if model.norm_bias and biased else None
        self.rms = model.norm == "rms"
        self.written_out = self.rms and style.stack.kernels.norm == "eager"
        self.wide = style.stack.kernels.norm_dtype == "fp32"

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        if self.written_out:
            return self._operators(x)
        if self.wide and x.dtype != torch.float32:
            bias = None if self.bias is None else self.bias.float()
            return self._fused(x.float(), self.weight.float(), bias).to(x.dtype)
        return self._fused(x, self.weight, self.bias)

    def _fused(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.rms:
            return functional.rms_norm(x, weight.shape, weight, NORM_EPS)
        return functional.layer_norm(x, weight.shape, weight, bias, NORM_EPS)

    def _operators(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)
        return (scaled * self.weight).to(x.dtype)


class Rotary:
    """Rotary positions, rotate-half or as complex numbers in fp32, over the first `width` channels of a head."""

    def __init__(self, model: Model, style: Style) -> None:
        self.width = int(model.head_dim * model.rotary_fraction)
        self.whole = self.width == model.head_dim
        self.complex = style.stack.kernels.rope == "complex_fp32"

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [b, H, s, C]; cos, sin: [s, width] in the dtype of x, or the halves of a complex table in fp32."""
        if self.complex:
            return self._turned(x, cos, sin)
        part = x if self.whole else x[..., : self.width]
        rotated = part * cos + _swapped(part) * sin
        return rotated if self.whole else torch.cat((rotated, x[..., self.width :]), dim=-1)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1] // 2
        table = torch.complex(cos[..., :half].float(), sin[..., :half].float())
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


def _swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):  # type: ignore[misc]
    """Projections, positions, the kernel, output projection. Head counts are inferred, so local heads work too.

    across: attends to tokens of other ranks, in the kernel's place.
    """

    def __init__(self, model: Model, style: Style) -> None:
        super().__init__()
        d, q, kv, bias = model.d_model, model.q_width, model.kv_width, model.qkv_bias
        self.head_dim, self.split = model.head_dim, (q, kv, kv)
        self.style, self.fused = style, model.fused_qkv
        self.repeats = model.num_heads // model.num_kv_heads
        if model.fused_qkv:
            self.qkv = nn.Linear(d, q + 2 * kv, bias=bias, dtype=style.dtype)
        else:
            self.q = nn.Linear(d, q, bias=bias, dtype=style.dtype)
            self.k = nn.Linear(d, kv, bias=bias, dtype=style.dtype)
            self.v = nn.Linear(d, kv, bias=bias, dtype=style.dtype)
        self.out = nn.Linear(q, d, bias=model.out_bias, dtype=style.dtype)
        self.q_norm = Norm(model.head_dim, model, style, biased=False) if model.qk_norm else None
        self.k_norm = Norm(model.head_dim, model, style, biased=False) if model.qk_norm else None
        self.rotary = Rotary(model, style) if model.positions == "rope" else None
        self.across: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
        """[b, s, D] -> [b, s, D]."""
        q, k, v = self._projections(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None and cos is not None and sin is not None:
            if not self.rotary.complex:
                cos, sin = cos.to(q.dtype), sin.to(q.dtype)
            q = self.rotary(q, cos, sin)
            k = self.rotary(k, cos, sin)
        if self.style.expand_kv and self.repeats > 1:
            k = k.repeat_interleave(self.repeats, dim=1)
            v = v.repeat_interleave(self.repeats, dim=1)
        o = self._core(q, k, v, mask)
        return self.out(o.transpose(1, 2).reshape(*x.shape[:2], -1))

    def _projections(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.fused:
            return tuple(self._heads(part) for part in self.qkv(x).split(self.split, dim=-1))
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.kernel(q, k, v, mask) if self.across is None else self.across(q, k, v, mask)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Causal attention of [b, H, s, C] to keys and values of as many tokens."""
        if self.style.direct_flash and mask is None:
            if q.dtype == torch.float32:  # what a CUDA build takes where flash attention has no kernel
                return efficient_attention()(q, k, v, None, True, 0.0, True)[0]  # noqa: FBT003  positional in its schema
            return flash_attention()(q, k, v, 0.0, True)[0]  # noqa: FBT003
        if mask is not None:
            mask = mask.to(q.dtype)
        grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


class Mlp(nn.Module):  # type: ignore[misc]
    """act(gate x) * up x, or act(up x), projected down."""

    def __init__(self, model: Model, style: Style, width: int = 0) -> None:
        super().__init__()
        d, f, bias = model.d_model, width or model.d_ff, model.mlp_bias
        if model.gated:
            self.gate = nn.Linear(d, f, bias=bias, dtype=style.dtype)
        self.up = nn.Linear(d, f, bias=bias, dtype=style.dtype)
        self.down = nn.Linear(f, d, bias=bias, dtype=style.dtype)
        self.gated, self.activation = model.gated, _ACTIVATIONS[model.mlp]

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, D] -> [b, s, D]."""
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):  # type: ignore[misc]
    """One layer: pre-norm residual branches in sequence, or both on one stream."""

    def __init__(self, model: Model, style: Style, number: int = 0) -> None:
        super().__init__()
        makers: dict[str, Callable[[], nn.Module]] = {
            "attention": lambda: Attention(model, style),
            "mlp": lambda: Mlp(model, style),
            "router": lambda: Router(model, style.dtype),
            "experts": lambda: _routed(model, style),
            "shared": lambda: Mlp(model, style, model.experts.shared_d_ff if model.experts else 0),
        }
        for name in _registration_order(model, number):
            self.add_module(name, makers[name]() if name in makers else Norm(model.d_model, model, style))
        self.mixture, self.style = hasattr(self, "router"), style
        self.parallel, self.same, self.post = model.parallel_residual, model.shared_input_norm, model.post_norms

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[b, s, D] -> [b, s, D]."""
        if self.parallel:
            normed = self.norm_1(x)
            return x + (self.attention(normed, cos, sin, mask) + self._mlp(normed if self.same else self.norm_2(x)))
        if self.post:
            x = x + self.norm_2(self.attention(self.norm_1(x), cos, sin, mask))
            return x + self.norm_4(self._mlp(self.norm_3(x)))
        x = x + self.attention(self.norm_1(x), cos, sin, mask)
        return x + self._mlp(self.norm_2(x))

    def _mlp(self, x: Tensor) -> Tensor:
        if not self.mixture:
            return self.mlp(x)
        tokens = x.flatten(0, 1)
        weights = self.router(tokens, self.experts.choices(len(tokens), x.device))
        out = self.experts(tokens, weights).view_as(x)
        return out + self.shared(x) if hasattr(self, "shared") else out


def _routed(model: Model, style: Style) -> Routed:
    assert model.experts is not None
    return Routed(model, model.experts.num_experts // style.ep, style.dtype, _ACTIVATIONS[model.mlp])


def _registration_order(model: Model, number: int) -> list[str]:
    """Children of a block in the order in which `Model.parameter_shapes` lists their parameters."""
    names = model.parameter_shapes(model.layer_kinds[number])
    return list(dict.fromkeys(name.split(".")[0] for name, _ in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a model stands in one chunk of a pipeline: its layers by number, and which of the ends."""

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, layers, head: token ids [b, s] -> logits [b, s, V]. A part of it takes and gives [b, s, D] at its cuts.

    heads: of the model's, those that are here. head_part: which part of them, of how many, the attention kernel sees. tokens:
    positions that are here, as ranges. first_token: of those, the first one of the residual stream here.
    """

    heads: range
    head_part: tuple[int, int]
    tokens: tuple[range, ...]
    first_token: int

    def __init__(self, model: Model, style: Style, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part(layers=tuple(range(model.num_layers)))
        self.model, self.style, self.part = model, style, part
        if part.embedding:
            self.embedding = nn.Embedding(model.vocab_size, model.d_model, dtype=style.dtype)
            if model.positions == "learned":
                self.positions = nn.Embedding(model.max_positions, model.d_model, dtype=style.dtype)
            self.embedding_norm = Norm(model.d_model, model, style) if model.embedding_norm else None
        self.layers = nn.ModuleList(Block(model, style, number) for number in part.layers)
        if part.head:
            self.norm = Norm(model.d_model, model, style)
            self.lm_head = nn.Linear(model.d_model, model.vocab_size, bias=model.lm_head_bias, dtype=style.dtype)
        if self.is_tied:
            self.lm_head.weight = self.embedding.weight
        self.heads, self.head_part = range(model.num_heads), (0, 1)
        self.tokens, self.first_token = (range(style.seq_len),), 0
        self.register_tables()

    @property
    def is_tied(self) -> bool:
        """Both ends are here and share their table."""
        return bool(self.model.tied_embeddings and self.part.embedding and self.part.head)

    def register_tables(self) -> None:
        """Tables of positions, and of the heads that are here."""
        for name, table in zip(("cos", "sin", "mask"), self._tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        cos, sin = _rope_tables(self.model, self.tokens)
        part, parts = self.head_part
        count = len(self.heads) // parts
        return cos, sin, _mask(self.model, self.style.seq_len, self.heads[part * count : (part + 1) * count])

    def initialise(self) -> None:
        """Fill parameters and tables in place; whatever holds the parameters now (shards included)."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if "norm" in name.rsplit(".", 2)[-2]:
                    local.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    local.normal_(0.0, INITIAL_STD)
            for buffer, table in zip((self.cos, self.sin, self.mask), self._tables(), strict=True):
                if buffer is not None and table is not None:
                    buffer.copy_(table)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s], or [b, s, D] from the part before -> [b, s, V], or [b, s, D] for the part behind."""
        length = x.shape[1]
        if self.part.embedding:
            x = self._embedded(x)
        cos = None if self.cos is None else self.cos[:length]
        sin = None if self.sin is None else self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin, self.mask)
        if not self.part.head:
            return x
        logits = self.lm_head(self.norm(x))
        return SOFTCAP * torch.tanh(logits / SOFTCAP) if self.model.logit_softcap else logits

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.model.positions == "learned":
            x = x + self.positions(self._positions(x.shape[1], ids.device))
        if self.model.embedding_scale:
            x = x * math.sqrt(self.model.d_model)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _positions(self, length: int, device: torch.device) -> Tensor:
        first = self.first_token
        if len(self.tokens) == 1:
            start = self.tokens[0].start + first
            return torch.arange(start, start + length, device=device)
        return _numbers(self.tokens, device)[first : first + length]


def _numbers(tokens: tuple[range, ...], device: torch.device | None = None) -> Tensor:
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in tokens])


def _rope_tables(model: Model, tokens: tuple[range, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines of position times frequency, fp32 [s, rotated channels]; None without rotary positions."""
    if model.positions != "rope":
        return None, None
    width = int(model.head_dim * model.rotary_fraction)
    frequencies = ROPE_BASE ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(_numbers(tokens).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _mask(model: Model, seq_len: int, heads: range) -> Tensor | None:
    """What is added to the scores where plain causal attention is not enough: ALiBi's slopes, or a window's edge."""
    window = model.sliding_window
    windowed = window is not None and window < seq_len
    if model.positions != "alibi" and not windowed:
        return None
    distance = torch.arange(seq_len).view(-1, 1) - torch.arange(seq_len)
    seen = distance >= 0
    if window is not None and windowed:
        seen = seen & (distance < window)
    mask = torch.zeros(1, seq_len, seq_len)
    if model.positions == "alibi":
        slopes = 2.0 ** (-8.0 * torch.arange(heads.start + 1, heads.stop + 1) / model.num_heads)
        mask = -slopes.view(-1, 1, 1) * distance
    return mask.masked_fill(~seen, float("-inf"))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of [b, s, V] logits, taken in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
