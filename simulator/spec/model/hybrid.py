"""Hybrids: mixers with a state, and the pattern in which layers of one branch each follow one another.

A layer of a hybrid is a norm, one branch and a residual sum: a mixer, attention, both side by side, an MLP, or a mixture of
experts (Nemotron-H, arXiv 2504.03624, section 2; Falcon-H1, arXiv 2507.22448, section 2.1). The pattern is Megatron-LM's
string (core/ssm/mamba_hybrid_layer_allocation.py); H is ours.

Legend: D d_model, H heads, P head_dim, G groups, N state_dim; I = H P inner channels.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.schema import Strict

HybridKind = Literal["mamba", "attention", "both", "mlp", "moe"]
KINDS: Final[dict[str, HybridKind]] = {"M": "mamba", "*": "attention", "H": "both", "-": "mlp", "E": "moe"}
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Mamba(Strict):
    """A mixer with a state: one product into its parts, a causal convolution, a scan, a gated norm, one product back.

    kind: mamba2 (arXiv 2405.21060, section 7.1): z, x, B, C, dt; heads of a group share B and C. gated_delta (arXiv
    2412.06464): value, key and query are x, B and C, and dt is two numbers a head. mamba1 (arXiv 2312.00752, section 3.4): z
    and x; dt of dt_rank, B and C come out of x after the convolution; a head is a channel. lightning (arXiv 2501.08313,
    section 2.2): gate, value, key and query, without convolution.

    chunk_size: tokens that the scan works on as matrices (Q); states pass from one chunk to the next. conv_kernel: taps of the
    convolution. norm: of the gated result. inner_norms: over dt, B and C (Jamba).
    """

    kind: Literal["mamba2", "gated_delta", "mamba1", "lightning"] = "mamba2"
    num_heads: int = Field(ge=1, le=2**20)
    head_dim: int = Field(ge=1, le=2**16, default=64)
    num_groups: int = Field(ge=1, le=2**16, default=8)
    state_dim: int = Field(ge=1, le=2**16, default=128)
    conv_kernel: int = Field(ge=1, le=64, default=4)
    chunk_size: int = Field(ge=1, le=2**16, default=128)
    conv_bias: bool = True
    norm: bool = True
    dt_rank: int = Field(ge=0, le=2**20, default=0)
    inner_norms: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}")
        if (self.kind == "mamba1") != (self.dt_rank > 0):
            raise ValueError(f"a {self.kind} mixer has {'a' if self.kind == 'mamba1' else 'no'} dt_rank")
        return self

    @property
    def called(self) -> str:
        """The name of its kind."""
        return {"mamba2": "Mamba", "mamba1": "Mamba-1", "gated_delta": "gated delta"}.get(self.kind, self.kind)

    @property
    def inner(self) -> int:
        """I: channels of z, and of x."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of x, B and C; of x alone where B and C come out of it."""
        return self.inner if self.kind == "mamba1" else self.inner + 2 * self.num_groups * self.state_dim

    @property
    def steps(self) -> int:
        """Numbers of dt a token that the product makes."""
        return {"mamba2": 1, "gated_delta": 2}.get(self.kind, 0) * self.num_heads

    @property
    def projected(self) -> int:
        """Columns of the product into the mixer: z, x, B, C, dt."""
        return self.inner + self.convolved + self.steps

    @property
    def low_rank(self) -> int:
        """Columns of a mamba1 mixer's product out of x: dt, B, C; 0 of the others."""
        return self.dt_rank + 2 * self.state_dim if self.dt_rank else 0

    @property
    def scan_flop_per_token(self) -> int:
        """FLOP of the recurrence forward: B xᵀ into the state and C out of it, a multiply and an add each: 4 I N.

        The delta rule reads the state once more, at the key: 6 I N. What chunks add is a choice of the implementation, and
        no work of the model's.
        """
        return (6 if self.kind == "gated_delta" else 4) * self.inner * self.state_dim

    @property
    def small_shapes(self) -> Shapes:
        """Parameters beside the products: of the convolution, dt, A, D and the norms."""
        heads, inner, state = (self.num_heads,), (self.inner,), (self.state_dim,)
        conv: Shapes = (("mamba.conv.weight", (self.convolved, 1, self.conv_kernel)),)
        if self.conv_bias:
            conv = (*conv, ("mamba.conv.bias", (self.convolved,)))
        norm: Shapes = (("mamba.norm.weight", inner),) if self.norm else ()
        dt: Shapes = (("mamba.dt_bias", heads), ("mamba.A_log", heads))
        match self.kind:
            case "lightning":
                return norm
            case "gated_delta":  # a norm over each head
                return (*dt, *conv, ("mamba.norm.weight", (self.head_dim,)))
            case "mamba1":
                low = (("dt", (self.dt_rank,)), ("b", state), ("c", state)) if self.inner_norms else ()
                return (
                    ("mamba.A_log", inner + state),
                    ("mamba.D", inner),
                    *conv,
                    *((f"mamba.{name}_norm.weight", shape) for name, shape in low),
                )
            case _:
                return (*dt, ("mamba.D", heads), *conv, *norm)


def parameter_shapes(mamba: Mamba, d_model: int) -> Shapes:
    """Of a mixer; the norm of the stream is not among them.

    Of mamba2 in the order in which Megatron-LM registers them (core/ssm/mamba_mixer.py): small ones, and the products around.
    """
    low: Shapes = (
        ("mamba.x_proj.weight", (mamba.low_rank, mamba.inner)),
        ("mamba.dt_proj.weight", (mamba.inner, mamba.dt_rank)),
        ("mamba.dt_proj.bias", (mamba.inner,)),
    )
    small = mamba.small_shapes
    first = sum(not name.startswith(("mamba.conv", "mamba.norm")) for name, _ in small)
    return (
        *small[:first],
        ("mamba.in_proj.weight", (mamba.projected, d_model)),
        *small[first:],
        *(low if mamba.low_rank else ()),
        ("mamba.out_proj.weight", (d_model, mamba.inner)),
    )
