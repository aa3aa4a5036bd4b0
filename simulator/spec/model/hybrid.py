"""Hybrids: Mamba-2 mixers, and the pattern in which layers of one branch each follow one another.

A layer of a hybrid is a norm, one branch and a residual sum: a Mamba-2 mixer, attention, an MLP, or a mixture of experts
(Nemotron-H, arXiv 2504.03624, section 2). The pattern is Megatron-LM's string (core/ssm/mamba_hybrid_layer_allocation.py).

Legend: D d_model, H heads, P head_dim, G groups, N state_dim; I = H P inner channels.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.schema import Strict

HybridKind = Literal["mamba", "attention", "mlp", "moe"]
KINDS: Final[dict[str, HybridKind]] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class Mamba(Strict):
    """A Mamba-2 mixer (arXiv 2405.21060, section 7.1).

    One product into z, x, B, C and dt, a causal convolution over x, B and C, the scan, a gated norm, one product back. Heads of a group share B and C. chunk_size: tokens that the scan works on as matrices (Q); states pass from one chunk to
    the next. conv_kernel: taps of the convolution.
    """

    num_heads: int = Field(ge=1, le=2**16)
    head_dim: int = Field(ge=1, le=2**16, default=64)
    num_groups: int = Field(ge=1, le=2**16, default=8)
    state_dim: int = Field(ge=1, le=2**16, default=128)
    conv_kernel: int = Field(ge=1, le=64, default=4)
    chunk_size: int = Field(ge=1, le=2**16, default=128)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.num_heads % self.num_groups:
            msg = f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}"
            raise ValueError(msg)
        return self

    @property
    def inner(self) -> int:
        """I: channels of z, and of x."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def projected(self) -> int:
        """Columns of the product into the mixer: z, x, B, C, dt."""
        return self.inner + self.convolved + self.num_heads

    @property
    def scan_flop_per_token(self) -> int:
        """FLOP of the recurrence forward: B xᵀ into the state and C out of it, a multiply and an add each: 4 I N.

        What chunks add is a choice of the implementation, and no work of the model's.
        """
        return 4 * self.inner * self.state_dim


def parameter_shapes(mamba: Mamba, d_model: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Of a mixer, as Megatron-LM registers them (core/ssm/mamba_mixer.py); the norm of the stream is not among them."""
    heads = (mamba.num_heads,)
    return (
        ("mamba.dt_bias", heads),
        ("mamba.A_log", heads),
        ("mamba.D", heads),
        ("mamba.in_proj.weight", (mamba.projected, d_model)),
        ("mamba.conv.weight", (mamba.convolved, 1, mamba.conv_kernel)),
        ("mamba.conv.bias", (mamba.convolved,)),
        ("mamba.norm.weight", (mamba.inner,)),
        ("mamba.out_proj.weight", (d_model, mamba.inner)),
    )
