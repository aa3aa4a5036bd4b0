"""Benches of what no fit reads yet: kept with the other samples, each under a kind of its own (docs/gpu-queue.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from validate.benches import Item, Shape, Tensor
from validate.benches.products import has_fp8
from validate.stopwatch import Session

DECODED: Final = ((1, 1024), (1, 8192), (8, 8192), (64, 2048), (64, 8192), (1, 131072))  # sequences, cached tokens
LONG_S: Final = 5.0  # a power limit that is reached slowly is reached


def decoding_items(s: Session) -> Iterator[Item]:
    """Attention of one new token a sequence over what is cached, with 8 heads of queries to one of keys and with one."""
    cases = ((1, 64), (4, 128)) if s.setting.tiny else DECODED if s.gpu else ((1, 512), (8, 512))
    heads = ((4, 1), (4, 4)) if s.setting.tiny else ((32, 4), (32, 32)) if s.gpu else ((8, 1), (8, 8))
    for (batch, cached), (queries, keys) in product(cases, heads):
        yield partial(decode, s, batch, cached, queries, keys)


def decode(s: Session, batch: int, cached: int, heads: int, kv_heads: int, width: int = 128) -> None:
    """Attention of one step of decoding."""
    dtype = "bf16" if s.gpu else "fp32"
    if not s.fits(2 * DTYPE_BYTES[dtype] * batch * kv_heads * cached * width):
        return
    q = s.random(batch, heads, 1, width, dtype=dtype)
    k, v = (s.random(batch, kv_heads, cached, width, dtype=dtype) for _ in range(2))
    attend = s.torch.nn.functional.scaled_dot_product_attention
    shape: Shape = {"batch": batch, "seq_q": 1, "seq_kv": cached, "num_heads": heads, "num_kv_heads": kv_heads}
    shape |= {"head_dim": width, "causal": False, "dtype": dtype}
    s.record("decode_attention", lambda _: attend(q, k, v, enable_gqa=heads != kv_heads), shape)


def variant_items(s: Session) -> Iterator[Item]:
    """fp8 products as no stack runs them, one second a shape; and a product of bf16 for several."""
    side = 64 if s.setting.tiny else 8192
    if s.gpu:
        yield partial(long_product, s, side)
        for by_row, fast in product((False, True), (True, False)) if has_fp8(s) else ():
            yield partial(scaled_product, s, side, by_row=by_row, fast=fast)


def long_product(s: Session, side: int) -> None:
    """One bf16 product over and over: the log of clocks and power beside it says where the limit lies."""
    a, b = (s.random(side, side, dtype="bf16") for _ in range(2))
    shape: Shape = {"m": side, "n": side, "k": side, "layout": "tn", "dtype": "bf16", "flop": 2 * side**3}
    s.sustained("gemm_long", lambda _: a @ b.t(), shape, seconds=0.01 if s.setting.tiny else LONG_S)


def scaled_product(s: Session, side: int, *, by_row: bool, fast: bool) -> None:
    """torch._scaled_mm with a scale a tensor or a row, and with or without fast accumulation."""
    shape: Shape = {"m": side, "n": side, "k": side, "dtype": "fp8", "layout": "tn", "flop": 2 * side**3}
    shape |= {"scaled_by": "row" if by_row else "tensor", "fast_accumulation": fast}
    s.sustained(
        "gemm_scaled", scaled(s, side, by_row=by_row, fast=fast), shape, seconds=0.01 if s.setting.tiny else 1.0
    )


def scaled(s: Session, side: int, *, by_row: bool, fast: bool) -> Callable[[int], Tensor]:
    """The call itself. Where the device has no such product, it raises what torch does, and is written as a failure."""
    torch = s.torch
    a, b = (s.random(side, side, dtype="fp8") for _ in range(2))
    sizes = ((side, 1), (1, side)) if by_row else ((), ())
    one, other = (torch.ones(size, device=s.setting.device) for size in sizes)
    multiply, bf16 = torch._scaled_mm, torch.bfloat16  # noqa: SLF001  no public name
    return lambda _: multiply(a, b.t(), one, other, out_dtype=bf16, use_fast_accum=fast)
