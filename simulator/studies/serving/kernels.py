"""Kernels that only serving has: attention against a paged cache, and products with quantised weights only.

Both are the training kernels with their own bytes, so the same calibrated curves price them. What no microbenchmark
backs is said in docs/background/inference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Attention, Dtype, Gemm, Kernel, Stream
from simulator.spec.cluster.device import Device

# Bits a weight takes with its scales: int8 has one 16-bit scale a row (left out: 16 / k bits), int4 a 16-bit scale and a
# 4-bit zero for each group of 128 (AWQ and GPTQ checkpoints), nvfp4 a scale of one byte for each 16 (arXiv 2509.25149, section 2),
# mxfp4 one for each 32 (OCP Microscaling Formats 1.0, section 5.2).
WEIGHT_BITS = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4 + 20 / 128,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
}

# Queries of one head of keys that a decoding kernel computes whatever there are: Hopper's matrix instructions take 64 rows
# (flash-attention, hopper/flash_fwd_kernel_sm90.h). Others are taken as bound by the cache alone.
TILE_ROWS = {"flash3": 64}
# Speed of prompts' attention in fp8 over 16 bits: flash-attention 3 on H100, long sequences of heads of 128 (arXiv 2407.08608,
# figures 5 to 7: some 1.2 PFLOP/s beside 0.74).
FP8_PROMPTS = 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention(Attention):
    """Attention of new tokens over what is cached, for a whole batch of sequences of any lengths.

    pairs: (query, key) pairs of one head, over the batch. queries: new tokens. cached_bytes: of K and V of all tokens that
    are seen, the new ones among them, in the dtype that they are kept in. rows: that one tile of matrix instructions takes, queries of one head of keys
    or none; 0: as many as there are. The inherited shape only says how well the kernel fills the device: seq_q
    and seq_kv of a mean sequence, whose queries see seq_kv / 2 keys on average.
    """

    pairs: int
    queries: int
    cached_bytes: int
    rows: int = 0

    @property
    @override
    def flop(self) -> int:
        heads = max(self.num_heads, self.rows * self.num_kv_heads)
        return 2 * self.pairs * heads * (self.head_dim + (self.v_head_dim or self.head_dim))

    @property
    @override
    def num_bytes(self) -> int:
        """Q and O of the new tokens, and what is cached, once each."""
        channels = self.head_dim + (self.v_head_dim or self.head_dim)
        return self.queries * self.num_heads * channels * DTYPE_BYTES[self.dtype] + self.cached_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowWeights(Gemm):
    """A product whose weights [n, k] are stored in `weight_bits` and widened in registers.

    Its kernels have the instructions of 16 rows on every device (vLLM, csrc/quantization/marlin: mma.m16n8k16).
    """

    weight_bits: float

    @property
    @override
    def tile_rows(self) -> int:
        return 16

    @property
    @override
    def num_bytes(self) -> int:
        e = DTYPE_BYTES[self.dtype]
        return self.batch * (e * (self.m * self.k + self.m * self.n) + int(self.k * self.n * self.weight_bits / 8))


Multiplied = Mapping[str, tuple[Dtype, float]]


def multiplied(device: Device) -> Multiplied:
    """Weights that the GPU multiplies as they are stored: the dtype of both operands, and bytes of a number with its scale."""
    known: Multiplied = {"fp8": ("fp8", 1.0), "nvfp4": ("fp4", WEIGHT_BITS["nvfp4"] / 8)}
    return {weights: (dtype, each) for weights, (dtype, each) in known.items() if device.peak(dtype) > 0}


def stored_as(
    kernels: tuple[Kernel, ...], weights: str, dtypes: Multiplied, *, cast: bool = True, rows: int | None = None
) -> tuple[Kernel, ...]:
    """The kernels of a layer with its weights stored so: narrower reads, or narrow products behind quantised activations.

    dtypes: of `multiplied`. cast: activations are quantised by kernels of their own. rows: of those; None: of the products. mxfp4 is of
    experts alone.
    """
    found: list[Kernel] = []
    for kernel in kernels:
        if not isinstance(kernel, Gemm) or weights in ("bf16", "fp16") or (weights == "mxfp4" and not kernel.grouped):
            found.append(kernel)
        elif weights in dtypes:
            dtype, each = dtypes[weights]
            numbers = (kernel.batch * kernel.m if rows is None else rows) * kernel.k
            if cast:
                read = numbers * DTYPE_BYTES[kernel.dtype]
                found.append(Stream(op="quantise", read_bytes=read, write_bytes=int(numbers * each)))
            found.append(replace(kernel, dtype=dtype))
        else:
            same = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
            found.append(NarrowWeights(**same, weight_bits=WEIGHT_BITS[weights]))
    return tuple(found)
