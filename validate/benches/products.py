"""Benches of products of matrices, in bursts and at the power limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from simulator.base.kernels import DTYPE_BYTES
from validate.benches import ROTATE_BYTES, Item, Shape, Tensor, spread
from validate.benches.attention import attention
from validate.stopwatch import Session

LAYOUTS = ("tn", "nn", "nt")
FIRST_SHAPES = 8  # in every layout before the others: what a fit needs at least
GPU_WIDTHS = ((768, 3072), (2048, 8192), (4096, 14336), (5120, 13824), (8192, 28672))
GPU_TOKENS = (512, 2048, 4096, 8192, 16384)
CPU_WIDTHS = ((128, 352), (256, 704), (512, 1408), (768, 2048))
CPU_TOKENS = (128, 256, 512, 1024)
COLD_BYTES, COLD_SETS = 2**26, 256  # of a product's right operands, and of its results, on a CPU: beyond the last cache
FP8_CAPABILITY = (8, 9)


def gemm_items(s: Session) -> Iterator[Item]:
    """Shapes by FLOP, spread; the first few in each of three layouts, then all; other dtypes on squares; then long repeats for the power limit."""
    main = "bf16" if s.gpu else "fp32"
    shapes = spread(gemm_shapes(s))
    for few, layout in product((shapes[:FIRST_SHAPES], shapes[FIRST_SHAPES:]), LAYOUTS):
        for m, n, k in few:
            yield partial(gemm, s, *_by_layout(m, n, k, layout), main, layout)
    others = ("fp16", "tf32", "fp32", *(("fp8",) if has_fp8(s) else ())) if s.gpu else ("bf16",)
    sides = (64,) if s.setting.tiny else (1024, 4096, 8192) if s.gpu else (128, 256, 512)
    for dtype, side in product(others, spread(sides)):
        yield partial(gemm, s, side, side, side, dtype, "tn")
    if not s.gpu:
        for m, n, k in spread(gemm_shapes(s)):
            for layout in LAYOUTS:
                yield partial(gemm, s, *_by_layout(m, n, k, layout), "bf16", layout)


def sustained_items(s: Session) -> Iterator[Item]:
    """One second a shape at the power limit, in the three layouts; attention too."""
    if not s.gpu:
        return
    long_s, widths, tokens = (0.01, ((64, 128),), 64) if s.setting.tiny else (1.0, GPU_WIDTHS[1:], 8192)
    for (d, f), layout in product(spread(widths), LAYOUTS):
        yield partial(gemm, s, *_by_layout(tokens, f, d, layout), "bf16", layout, long_s=long_s)
    for dtype in ("tf32", *(("fp8",) if has_fp8(s) else ())):
        yield partial(gemm, s, tokens, tokens, tokens, dtype, "tn", long_s=long_s)
    case = (1, 64, 4, 2, 16) if s.setting.tiny else (1, 8192, 32, 8, 128)
    for direction in ("forward", "backward"):
        yield partial(attention, s, case, causal=True, dtype="bf16", only=direction, long_s=long_s)


def has_fp8(s: Session) -> bool:
    """Tensor cores multiply fp8 from compute capability 8.9 on (Ada, Hopper)."""
    return bool(s.gpu and tuple(s.torch.cuda.get_device_capability()) >= FP8_CAPABILITY)


def gemm_shapes(s: Session) -> list[tuple[int, int, int]]:
    """(m, n, k) of forward products, by FLOP: those of models, squares, skinny ones, sides off the tile."""
    if s.setting.tiny:
        return [(64, 64, 64), (64, 256, 64), (64, 64, 256), (256, 256, 256)]
    widths, tokens = (GPU_WIDTHS, GPU_TOKENS) if s.gpu else (CPU_WIDTHS, CPU_TOKENS)
    found = {(t, n, k) for t, (d, f) in product(tokens, widths) for n, k in ((d, d), (f, d), (d, f), (d // 4, d))}
    if s.gpu:
        found |= {(8192, v, d) for v, d in ((128256, 4096), (50257, 2048), (32000, 4096))}
        found |= {(4095, 4096, 4096), (4096, 4095, 4096), (4096, 4096, 4095), (4104, 4104, 4104)}
        found |= {(128, 8192, 8192), (16, 8192, 8192), (1024, 1024, 1024), (4096, 4096, 4096)}
    else:
        found |= {(t, v, d) for t, v, d in product((128, 512), (1000, 4096, 8192), (128, 256))}
        found |= {(127, 256, 256), (129, 257, 255), (64, 64, 64), (1024, 1024, 1024), (8, 512, 512), (512, 16, 512)}
    return sorted(found, key=lambda x: (x[0] * x[1] * x[2], x))


def _by_layout(t: int, n: int, k: int, layout: str) -> tuple[int, int, int]:
    """Sides of the product in a layout: forward [t,k][k,n], data gradient [t,n][n,k], weight gradient [n,t][t,k]."""
    return {"tn": (t, n, k), "nn": (t, k, n), "nt": (n, k, t)}[layout]


def gemm(s: Session, m: int, n: int, k: int, dtype: str, layout: str, long_s: float = 0.0) -> None:
    """Time one product. tn: x Wᵀ; nn: x W; nt: xᵀ y."""
    set_bytes = DTYPE_BYTES[dtype] * (m * k + k * n)
    sets = max(1, min(4, int(ROTATE_BYTES / set_bytes)))
    if not s.fits(set_bytes * sets + 4 * m * n + (0 if s.gpu else 2 * COLD_BYTES)):
        return
    s.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    a = [s.random(*((k, m) if layout == "nt" else (m, k)), dtype=dtype) for _ in range(sets)]
    b = _operands(s, (n, k) if layout == "tn" else (k, n), dtype, sets)
    left = [x.t() if layout == "nt" else x for x in a]
    right = [x.t() if layout == "tn" else x for x in b]
    count = len(right)

    def multiply(i: int) -> Tensor:
        return left[i % sets] @ right[i % count]

    if dtype == "fp8":
        call = scaled(s, left, right)
    else:
        call = multiply if s.gpu else _kept(multiply, DTYPE_BYTES[dtype] * m * n, layout)
    shape: Shape = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout, "flop": 2 * m * n * k}
    if long_s:
        s.sustained("gemm", call, shape, seconds=long_s)
    else:
        s.record("gemm", call, shape, graph=True)


def _operands(s: Session, shape: tuple[int, int], dtype: str, sets: int) -> list[Tensor]:
    """Right operands in turn: on a CPU so many that none of them is in a cache when its turn comes.

    In a step a weight, or the input that a weight gradient needs, was last touched a whole step ago; the other operand
    has just been made.
    """
    if s.gpu:
        return [s.random(*shape, dtype=dtype) for _ in range(sets)]
    first = s.random(*shape, dtype=dtype)
    count = max(sets, min(COLD_SETS, COLD_BYTES // (DTYPE_BYTES[dtype] * shape[0] * shape[1])))
    return [first, *(first.clone() for _ in range(count - 1))]


def _kept(multiply: Callable[[int], Tensor], num_bytes: int, layout: str) -> Callable[[int], object]:
    """The product on a CPU, whose results lie in memory that no cache holds, but for the gradient of an input.

    A step keeps what a layer makes for the backward, and the gradients of weights: the next result goes elsewhere, into
    memory that the step before has had.
    """
    if layout == "nn":
        return multiply
    first = multiply(0)
    results = [first, *(first.clone() for _ in range(min(COLD_SETS, COLD_BYTES // num_bytes)))]

    def call(i: int) -> None:
        results[i % len(results)] = multiply(i)

    return call


def scaled(s: Session, left: list[Tensor], right: list[Tensor]) -> Callable[[int], object]:
    """fp8 product with one scale a tensor, fast accumulation, bf16 out."""
    one, multiply = s.torch.ones((), device=s.setting.device), s.torch._scaled_mm  # noqa: SLF001  no public name
    bf16, count = s.torch.bfloat16, len(left)
    return lambda i: multiply(left[i % count], right[i % count], one, one, out_dtype=bf16, use_fast_accum=True)
