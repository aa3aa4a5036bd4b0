"""Benches of torch's fused attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from validate.benches import Item, Shape, Tensor
from validate.stopwatch import Session

KERNELS: Final = ("flash_attention", "efficient_attention", "math")  # as stacks choose (`validate.players.real`)


def attention_items(s: Session) -> Iterator[Item]:
    """(batch, sequence, heads, key heads, head width), causal first."""
    gpu = [(4, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 32768, 32, 8, 128), (8, 1024, 12, 12, 64)]
    gpu += [(1, 16384, 32, 8, 128), (2, 4096, 64, 8, 128), (2, 4096, 32, 32, 64), (2, 4096, 32, 32, 96)]
    cpu = [(1, 256, 8, 4, 32), (2, 128, 6, 6, 32), (1, 512, 8, 8, 64), (4, 64, 4, 2, 32), (1, 1024, 4, 4, 32)]
    cpu += [(2, 256, 8, 8, 32), (2, 512, 4, 4, 64), (1, 128, 12, 12, 64)]
    cases = [(1, 64, 4, 2, 16), (1, 128, 4, 4, 32), (2, 64, 4, 4, 32)] if s.setting.tiny else gpu if s.gpu else cpu
    dtypes = ("bf16",) if s.gpu else ("fp32", "bf16")
    for dtype, causal, case in product(dtypes, (True, False), cases):
        if causal or case[1] <= 16384:
            yield partial(attention, s, case, causal=causal, dtype=dtype)


def attention(
    s: Session,
    case: tuple[int, int, int, int, int],
    *,
    causal: bool,
    dtype: str,
    only: str = "",
    long_s: float = 0.0,
) -> None:
    """Time torch's scaled_dot_product_attention, forward and backward."""
    batch, seq, heads, kv_heads, width = case
    torch = s.torch
    if not s.fits(8 * DTYPE_BYTES[dtype] * batch * heads * seq * width):
        return
    q, k, v = (s.random(batch, h, seq, width, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    attend = torch.nn.functional.scaled_dot_product_attention
    chosen, kernel = _chosen(torch, lambda: attend(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads))

    def forward(_: int) -> Tensor:
        return attend(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    shape: Shape = {"batch": batch, "seq_q": seq, "seq_kv": seq, "num_heads": heads, "num_kv_heads": kv_heads}
    shape |= {"head_dim": width, "causal": causal, "dtype": dtype, "kernel": kernel}
    take = partial(s.sustained, seconds=long_s) if long_s else s.record
    with chosen:
        if only != "backward":
            take("attention_forward", forward, shape)
        if only != "forward":
            out = forward(0)
            gradient = torch.randn_like(out)
            take(
                "attention_backward", lambda _: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), shape
            )


def _chosen(torch: Tensor, call: Callable[[], object]) -> tuple[AbstractContextManager[object], str]:
    """The first kernel that can run the call, forced, and its name: of itself torch may choose another on another day."""
    attention = torch.nn.attention
    for name in KERNELS:
        force = partial(attention.sdpa_kernel, getattr(attention.SDPBackend, name.upper()))
        try:
            with force(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns why a kernel cannot run, and then raises
                call()
        except RuntimeError:
            continue
        return force(), name
    return nullcontext(), "torch's choice"
