"""Kernels: the work a device does, with exact FLOP and bytes. No times here; `calibration` turns them into seconds.

Four shapes of work cover a training step: a matrix product, fused attention, a stream over memory, and a part of a chunked
scan, whose small products stand inside a kernel. What somebody wrote himself states its own work.
A `Kernel` is what one launch does; `launches` counts the launches where a framework splits one idea into several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
Layout = Literal["tn", "nn", "nt"]
Direction = Literal["forward", "backward"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int64": 8}
FP4_BLOCK = 16  # elements of NVFP4 that share a scale of one byte


def fp4_bytes(numel: int) -> int:
    """Bytes of one NVFP4 copy: half a byte an element, and the blocks' scales (arXiv 2509.25149, section 2)."""
    return -(-numel // 2) + -(-numel // FP4_BLOCK)


# What a stream over memory does; calibration gives each its own fraction of the memory's speed.
StreamOp = Literal[
    "elementwise",  # add, multiply, residual; simple vectorised kernels on contiguous tensors of one dtype
    "activation",  # SiLU, GELU and their like, contiguous: vectorised, with an exponential an element
    "strided",  # torch's elementwise kernel for strided or broadcast tensors: an address an element; and `contiguous`
    "join",  # torch.cat
    "cast",  # torch's dtype conversion from 32 to 16 bits, vectorised
    "widen",  # from 16 to 32 bits, sums of mixed dtypes, FSDP2's chunk_cat: torch converts an element at a time
    "quantise",  # hand-written casts to fp8 (Transformer Engine, vectorised)
    "copy",  # clone, split_with_sizes_copy: whole vectors
    "norm_forward",  # reads x, writes y
    "norm_backward",  # two launches: dx (reads dy and x, writes dx), then the weight's column sums (reads dy and x)
    "softmax",  # over rows, forward or backward, with every pass over memory: log-softmax is 3 reads and 1 write each way
    "reduce",  # column sums: bias gradients
    "embedding_forward",
    "embedding_backward",
    "optimizer",
    "memset",
]


# Calibrations that were fitted on contiguous tensors only have one curve for both.
PARENT: dict[StreamOp, StreamOp] = {
    "activation": "elementwise",
    "strided": "elementwise",
    "join": "copy",
    "widen": "cast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """`batch` independent products C[m,n] = A[m,k] B[k,n]. 2 m n k FLOP each.

    layout: tn is y = x Wᵀ (forward), nn the data gradient, nt the weight gradient (cuBLAS names, row-major inputs).
    accumulate_fp32: the output is added to an fp32 buffer (Megatron's fused weight gradient).
    grouped: the products of a rank's experts, whose rows may differ; launches: as one kernel, or one each; 0: by the
    call that launched the kernel before it.
    by_blocks: fp8 operands have a scale for each 128 elements, which the sums meet every 128 products, or for each 32 (MXFP8).
    split_accumulator: fp8 sums leave the tensor cores for fp32 registers on the way (cuBLAS without fast accumulation).
    """

    m: int
    n: int
    k: int
    dtype: Dtype
    layout: Layout = "tn"
    batch: int = 1
    accumulate_fp32: bool = False
    grouped: bool = False
    launches: int = 1
    by_blocks: bool = False
    split_accumulator: bool = False

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def tile_rows(self) -> int:
        """Rows that its kernels compute at least, where the device has instructions for as many."""
        return 16 if self.grouped else 64  # BLOCK_SIZE_M for few tokens (fused_moe.py of vLLM and SGLang)

    @property
    def num_bytes(self) -> int:
        """Bytes read and written once each, outputs in bf16 for narrower inputs."""
        read = self.m * self.k + self.k * self.n
        e = 1 if self.dtype == "fp4" else DTYPE_BYTES[self.dtype]
        out = 8 if self.accumulate_fp32 else max(2, e)
        return self.batch * ((fp4_bytes(read) if self.dtype == "fp4" else e * read) + out * self.m * self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Fused (flash) attention. Causal masks halve the FLOP; the backward does 5 products, the forward 2 (×2.5).

    head_dim: of queries and keys; v_head_dim: of values and the result (0: the same). Forward one product is of either
    kind; backward scores, dQ and dK are of the first, dP and dV of the second.
    """

    batch: int
    seq_q: int
    seq_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    direction: Direction
    dtype: Dtype
    v_head_dim: int = 0

    @property
    def flop(self) -> int:
        c, v = self.head_dim, self.v_head_dim or self.head_dim
        channels = c + v if self.direction == "forward" else 3 * c + 2 * v
        full = 2 * self.batch * self.num_heads * self.seq_q * self.seq_kv * channels
        return full // 2 if self.causal else full

    @property
    def num_bytes(self) -> int:
        """Q, K, V and O once each (forward); twice that plus the gradients of Q, K, V (backward)."""
        e = DTYPE_BYTES[self.dtype]
        channels = self.head_dim + (self.v_head_dim or self.head_dim)
        qo = self.batch * self.seq_q * self.num_heads * channels * e
        kv = self.batch * self.seq_kv * self.num_kv_heads * channels * e
        return qo + kv if self.direction == "forward" else 2 * (qo + kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A memory-bound kernel: the bytes that it must read and write.

    numel: elements of its result, which SMs limit where a kernel handles them one by one (0: not such a kernel).
    transposed_bytes: of what it writes, a second copy that tensor cores need which take fp8 in one layout only (Hopper's); a kernel
        that writes nothing else is not run elsewhere.
    untimed: no calibration has timed it or its like, so that an interval is wider for it.
    """

    op: StreamOp
    read_bytes: int
    write_bytes: int
    launches: int = 1
    numel: int = 0
    transposed_bytes: int = 0
    untimed: bool = False

    @property
    def flop(self) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """One kernel of a chunked state-space scan: products of a chunk's size, and the bytes that it reads and writes once each.

    flop: of the products. dtype: of their factors. head_dim: channels of a head. direction: of the pass that it is written for.
    """

    flop: int
    read_bytes: int
    write_bytes: int
    dtype: Dtype
    head_dim: int
    direction: Direction
    launches: int = 1

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A kernel that its author described: FLOP at `dtype` and bytes moved, or seconds, which then count on any device.

    over: what the bytes pass in place of the device's memory: to or from the host in pinned copies, either way in others, or
    the CPU's own memory. How fast that is, a program's cluster says (`simulator.play.lower.script`). together: one call of the
    host launches all of its kernels, as quickly as the device begins them.
    """

    flop: int = 0
    num_bytes: int = 0
    over: Literal["", "h2d", "d2h", "pageable", "cpu"] = ""
    seconds: float = 0.0
    dtype: Dtype = "bf16"
    launches: int = 1
    together: bool = False


Kernel = Gemm | Attention | Stream | Scan | Stated


def launches(kernel: Kernel) -> int:
    """Kernel launches that cost host time."""
    return 1 if isinstance(kernel, Attention) else kernel.launches
