"""A mixer with a state: product into z, x, B, C, dt; causal convolution; chunked scan; gated norm; product back.

The scan is mamba_ssm's (ops/triton/ssd_combined.py, after arXiv 2405.21060, section 6): it cuts the sequence into chunks of Q
tokens. Inside a chunk it works as attention does, with a decay for the softmax; between chunks states are passed on. FLOP,
for T tokens, I = H P inner channels, N states, G groups (masked products are computed below the diagonal):

    forward   B xᵀ into states 2 T I N, C out of states 2 T I N, C Bᵀ 2 T Q G N, (C Bᵀ) x T (Q + R) I
    backward  C Bᵀ and the states again; gradients of states, x, B, C by way of states 8 T I N; of x, of C Bᵀ and of the decay
              inside chunks 3 T (Q + R) I; of B and C inside chunks 4 T Q G N

R: rows of a tile, 64 of most tunings. Tiles that the diagonal crosses are multiplied whole, so masked squares cost Q + R where
half of them were Q.

Bytes are those that each kernel reads and writes once: states are written in fp32, read back, and kept in 16 bits for the
last kernel; C Bᵀ is fp32.

Kept for the backward: the product's result (z, x, B, C, dt) and the scan's, before z gates it. The convolution, C Bᵀ and the
states are made again. Megatron-LM (core/ssm/mamba_mixer.py, _ssm_training) gates inside the scan and norms outside, which
keeps the norm's input and that of the product back; Hugging Face's mixers leave norm and product to the same function, which
makes their inputs again.

The gated delta rule (arXiv 2412.06464, section 3.3) is the same with three products more a chunk: keys with each other, the
inverse of that triangle with values, and the state at the keys. Lightning attention has decays that are no parameters of a
token. A Mamba-1 mixer's scan is one kernel that keeps states in registers (state-spaces/mamba, csrc/selective_scan): 9 T I N FLOP
in fp32, and it reads and writes each channel once; its backward runs the recurrence again. These three are priced by those
formulas alone: no published measurement of them was compared.

Under context parallelism heads are swapped for tokens around convolution and scan (core/ssm/mamba_context_parallel.py); groups
of which there are fewer than ranks are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

from simulator.base.kernels import Direction, Dtype, Kernel, Scan
from simulator.spec.model.hybrid import Mamba
from simulator.work.ops.context_parallel import swap
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import FED, enter, leave

_TILE_ROWS: Final = 64  # BLOCK_SIZE_M of most tunings (ssd_chunk_scan.py)
# Kernels of torch around the scan's own on tensors of a number a head and token: decays from their logarithm, casts of D and of
# dt's bias; backward dt's copy, zeros that atomics add to, sums over programs, flips and running sums (ssd_combined.py)
_SMALL_FORWARD: Final = 6
_SMALL_BACKWARD: Final = 20


def mamba(g: Graph, s: OpContext, x: Value) -> Value:
    """The mixer of one layer, [T, D] -> [T, D], without its norm and residual."""
    assert s.model.mamba is not None
    m, given = s.model.mamba, x
    x = enter(g, s, "mamba.enter", x, FED)
    mixed = linear(g, s, "in_proj", x, m.projected, bias=False, split="columns")
    scan = _Sizes.of(s, m)
    if m.kind == "mamba1":
        return linear(g, s, "out_proj", _selective(g, s, mixed, scan), s.model.d_model, bias=False, split="rows")
    mixed = _ordered(g, s, "in_proj.ordered", _heads_here(g, s, mixed, scan))
    gated = s.stack.traits.gates_in_scan
    y = _ordered(g, s, "scan.ordered", _scan(g, s, mixed, scan, gated=gated))
    if s.plan.cp > 1:
        (y,) = swap(g, "tokens", y)
    if gated:
        y = _norm(g, y, scan)
    out = linear(g, s, "out_proj", y, s.model.d_model, bias=False, split="rows", keeps_input=gated)
    if s.stack.traits.holds_locals:
        g.hold("mamba.scope", [given, x])
    return leave(g, s, "mamba.leave", out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What a rank scans, as sums over its tokens: channels and heads of its own, groups at least one a rank of cp.

    element: bytes of an activation. padded: tokens with the last chunk of each sequence filled up.
    """

    mamba: Mamba
    tokens: int
    padded: int
    groups: int
    element: int

    @classmethod
    def of(cls, s: OpContext, m: Mamba) -> _Sizes:
        sequence = -(-s.plan.seq_len // m.chunk_size) * m.chunk_size
        padded = -(-s.batch * sequence // s.plan.cp)
        groups = max(m.num_groups, s.plan.cp)  # of all ranks of cp together: each has its part of the groups
        return cls(mamba=m, tokens=s.tokens, padded=padded, groups=groups, element=s.element_bytes)

    @property
    def inner(self) -> int:
        """Bytes of z, of x, or of the result."""
        return self.tokens * self.mamba.inner * self.element

    @property
    def grouped(self) -> int:
        """Bytes of B, or of C."""
        return self.tokens * self.groups * self.mamba.state_dim * self.element

    @property
    def convolved(self) -> int:
        """Bytes of x, B and C."""
        return self.inner + 2 * self.grouped

    @property
    def steps(self) -> int:
        """Bytes of dt: a number a head and token."""
        return self.tokens * self.mamba.num_heads * self.element

    @property
    def decays(self) -> int:
        """Bytes of dt and of the decay summed up, in fp32."""
        return 2 * 4 * self.tokens * self.mamba.num_heads

    @property
    def states(self) -> int:
        """Elements of all chunks' states."""
        return self.padded // self.mamba.chunk_size * self.mamba.inner * self.mamba.state_dim

    @property
    def scores(self) -> int:
        """Bytes of C Bᵀ of all chunks and groups, in fp32."""
        return 4 * self.padded * self.mamba.chunk_size * self.groups

    @property
    def by_state(self) -> int:
        """FLOP of a product by way of states: 2 T I N."""
        return 2 * self.padded * self.mamba.inner * self.mamba.state_dim

    @property
    def inside(self) -> int:
        """FLOP of a product with the masked square of each chunk, in whole tiles: T (Q + R) I."""
        rows = min(_TILE_ROWS, self.mamba.chunk_size)
        return self.padded * (self.mamba.chunk_size + rows) * self.mamba.inner

    @property
    def squares(self) -> int:
        """FLOP of the chunks' C Bᵀ, or of a gradient by way of it: 2 T Q G N."""
        return 2 * self.padded * self.mamba.chunk_size * self.groups * self.mamba.state_dim


def _heads_here(g: Graph, s: OpContext, mixed: Value, scan: _Sizes) -> Value:
    """All tokens of a part of the heads, where context parallelism has a part of the tokens."""
    if s.plan.cp == 1:
        return mixed
    groups = scan.mamba.num_groups
    if scan.groups > groups:
        numel = mixed.numel + 2 * s.tokens * (scan.groups - groups) * scan.mamba.state_dim
        out = g.value("in_proj.repeated", numel, mixed.dtype)
        g.op(
            out.name,
            inputs=(mixed,),
            outputs=(out,),
            forward=(stream("join", mixed.num_bytes, out.num_bytes, numel=numel),),
            backward=(stream("reduce", out.num_bytes, mixed.num_bytes),),
        )
        mixed = out
    (mixed,) = swap(g, "heads", mixed)
    return mixed


def _ordered(g: Graph, s: OpContext, name: str, x: Value) -> Value:
    """Megatron's stream has tokens first, the scan sequences: a copy where there are several."""
    if s.batch == 1 or not s.stack.traits.tokens_first:
        return x
    return g.pointwise(name, [x], op="copy")


def _scan(g: Graph, s: OpContext, mixed: Value, scan: _Sizes, *, gated: bool) -> Value:
    """Convolution and scan. gated: by z in the last kernel; else z's gate and the norm follow in the same function.

    That one's backward makes the norm's result again for the product behind.
    """
    y, plain = (g.value(name, s.tokens * scan.mamba.inner, mixed.dtype) for name in ("scan.out", "scan.plain"))
    inner, forward, made, parameters = (
        scan.inner,
        _forward(s, scan, gated=gated),
        [plain],
        _small_parameters(scan.mamba),
    )
    if gated:
        back = stream("activation", 4 * inner, 2 * inner)  # dz, and the gradient of what z gated
    else:
        rstd = g.value("scan.statistics", s.tokens * scan.groups, "fp32")
        made.append(rstd)
        forward = (*forward, stream("norm_forward", 2 * inner, inner + rstd.num_bytes))
        # reads the gradient, the scan's result and z; writes their two gradients and the result again
        back = stream("norm_backward", 3 * inner + rstd.num_bytes, 3 * inner)
        parameters += _norm_parameters(scan.mamba)
    return g.op(
        "scan",
        "scan",
        inputs=(mixed,),
        outputs=(y, *made),
        forward=forward,
        backward=_backward(s, scan, back),
        saved=(mixed, *made),
        forward_temporary_bytes=_forward_bytes(scan),
        backward_temporary_bytes=_backward_bytes(scan),
        parameter_numel=parameters,
        selective_save=True,
    )


def _selective(g: Graph, s: OpContext, mixed: Value, scan: _Sizes) -> Value:
    """Mamba-1: the convolution of x; dt, B and C out of what it made; the scan, gated by z."""
    m, inner, dtype = scan.mamba, scan.inner, mixed.dtype
    x, y = (g.value(name, s.tokens * m.inner, dtype) for name in ("conv", "scan.out"))
    conv = (stream("activation", inner, inner),), (stream("activation", 2 * inner, inner),)
    taps = m.inner * (m.conv_kernel + m.conv_bias)
    g.op("conv", "scan", inputs=(mixed,), outputs=(x,), forward=conv[0], backward=conv[1], saved=(mixed,),
         parameter_numel=taps)  # fmt: skip
    low = linear(g, s, "x_proj", x, m.low_rank, bias=False, split="none")
    if m.inner_norms:
        low = norm(g, s, "inner_norm", low, m.low_rank)
    rank = g.view("dt.low", low, s.tokens * m.dt_rank)
    joined = (stream("copy", low.num_bytes, low.num_bytes),)
    g.op("low.split", inputs=(low,), backward=joined, views=(rank,))
    dt = linear(g, s, "dt_proj", rank, m.inner, bias=True, split="none")
    flop, grouped = 9 * s.tokens * m.inner * m.state_dim, 2 * s.tokens * m.state_dim * s.element_bytes
    forward = _part(s, scan, "forward", "fp32")(flop, 3 * inner + grouped, inner)
    backward = _part(s, scan, "backward", "fp32")(3 * flop, 4 * inner + grouped, 3 * inner + grouped)
    return g.op("scan", "scan", inputs=(mixed, x, low, dt), outputs=(y,), forward=(forward,), backward=(backward,),
         saved=(mixed, x, low, dt), parameter_numel=m.inner * (m.state_dim + 1),
         selective_save=True)  # fmt: skip


def _small_parameters(m: Mamba) -> int:
    """Of the convolution, dt's bias, A and D."""
    return sum(prod(shape) for name, shape in m.small_shapes if not name.startswith("mamba.norm"))


def _norm_parameters(m: Mamba) -> int:
    return sum(prod(shape) for name, shape in m.small_shapes if name.startswith("mamba.norm"))


_Part = Callable[[int, int, int], Scan]  # of FLOP, bytes read, bytes written


def _part(s: OpContext, scan: _Sizes, direction: Direction, dtype: Dtype | None = None) -> _Part:
    """Makes kernels of the scan."""

    def part(flop: int, read: int, write: int) -> Scan:
        return Scan(
            flop=flop,
            read_bytes=read,
            write_bytes=write,
            dtype=dtype or s.wide_dtype,
            head_dim=scan.mamba.head_dim,
            direction=direction,
        )

    return part


def _chunks(s: OpContext, scan: _Sizes, *, state_bytes: int, small: int = 1) -> tuple[Kernel, ...]:
    """Convolution, decays, states of chunks, their passing on, C Bᵀ.

    kept: bytes of an element of the states passed on. small: launches that make the decays.
    """
    states, part = 4 * scan.states, _part(s, scan, "forward")
    return (
        stream("activation", scan.convolved, scan.convolved),
        stream("elementwise", scan.steps, scan.decays, small),
        part(scan.by_state, scan.inner + scan.grouped + scan.decays, states),
        stream("elementwise", states, state_bytes * scan.states),
        part(scan.squares, 2 * scan.grouped, scan.scores),
        *_delta(scan, part),
    )


def _delta(scan: _Sizes, part: _Part) -> tuple[Kernel, ...]:
    """What the delta rule adds to a chunk; twice in the backward, where each product has two gradients."""
    if scan.mamba.kind != "gated_delta":
        return ()
    return (
        part(scan.squares, 2 * scan.grouped, scan.scores),
        part(scan.inside, scan.scores + scan.inner, scan.inner),
        part(scan.by_state, scan.inner + scan.grouped + scan.element * scan.states, scan.inner),
    )


def _forward(s: OpContext, scan: _Sizes, *, gated: bool) -> tuple[Kernel, ...]:
    """gated: the last kernel reads z, and writes the gated result beside its own."""
    gate = scan.inner if gated else 0
    read = scan.scores + scan.inner + scan.grouped + scan.decays + scan.element * scan.states
    last = _part(s, scan, "forward")(scan.by_state + scan.inside, read + gate, scan.inner + gate)
    return (*_chunks(s, scan, state_bytes=scan.element, small=_SMALL_FORWARD), last)


def _backward(s: OpContext, scan: _Sizes, gradient: Kernel) -> tuple[Kernel, ...]:
    """gradient: what makes the gradient of the scan's own result."""
    inner, grouped, decays = scan.inner, scan.grouped, scan.decays
    wide, narrow = 4 * scan.states, scan.element * scan.states
    part = _part(s, scan, "backward")
    return (
        *_chunks(s, scan, state_bytes=4),
        gradient,
        part(scan.by_state, inner + grouped + decays, wide),  # of the states
        stream("elementwise", 2 * wide, 2 * narrow),  # passed back; both cast for the products behind
        part(scan.by_state + scan.inside, 2 * inner + grouped + scan.scores + decays + narrow, inner + decays),  # of x
        part(scan.by_state, inner + grouped + decays + narrow, 2 * grouped + decays),  # of B by way of states
        part(scan.by_state, inner + grouped + decays + narrow, 2 * grouped + decays),  # of C
        part(scan.inside, 2 * inner + decays, scan.scores),  # of C Bᵀ
        part(scan.squares, scan.scores + 3 * grouped, grouped),  # of B inside chunks
        part(scan.squares, scan.scores + 3 * grouped, grouped),  # of C
        part(scan.inside, 2 * inner + scan.scores + decays, decays),  # of the decays
        *_delta(scan, part),
        *_delta(scan, part),
        stream("elementwise", 3 * decays, scan.steps, _SMALL_BACKWARD),
        stream("activation", 2 * scan.convolved, scan.convolved),  # of the convolution
    )


def _forward_bytes(scan: _Sizes) -> int:
    """Where states are passed on they stand twice; behind, C Bᵀ beside the narrow ones."""
    passing = (4 + scan.element) * scan.states
    return scan.convolved + scan.decays + max(passing, scan.element * scan.states + scan.scores)


def _backward_bytes(scan: _Sizes) -> int:
    """Made again and its gradient: x, B, C and C Bᵀ; the gradient that z gated; states and theirs, wide and narrow."""
    return 2 * scan.convolved + scan.inner + 2 * scan.decays + scan.scores + 2 * (4 + scan.element) * scan.states


def _norm(g: Graph, y: Value, scan: _Sizes) -> Value:
    """RMSNorm of each group's channels."""
    rows, size = scan.tokens * scan.mamba.num_groups, y.num_bytes
    out, rstd = g.value("mamba.norm", y.numel, y.dtype), g.value("mamba.norm.statistics", rows, "fp32")
    small = rstd.num_bytes
    return g.op(
        out.name,
        "norm",
        inputs=(y,),
        outputs=(out, rstd),
        forward=(stream("norm_forward", size, size + small),),
        backward=(stream("norm_backward", 2 * size + small, size),),  # the weight's gradient in the same kernel
        saved=(y, rstd),
        parameter_numel=_norm_parameters(scan.mamba),
    )
