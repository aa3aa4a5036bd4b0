"""Benches of what a step has beside its blocks: loss, embedding, optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from simulator.base.kernels import DTYPE_BYTES
from validate.benches import Item, Shape, Tensor
from validate.stopwatch import Session


def loss_items(s: Session) -> Iterator[Item]:
    """Cross-entropy as eager software runs it: a cast to fp32, log-softmax, pick."""
    gpu, cpu = [(4096, 32000), (4096, 128256), (8192, 50257)], [(128, 1000), (512, 8192), (256, 4096), (1024, 4096)]
    for tokens, vocab in [(64, 256), (128, 512)] if s.setting.tiny else gpu if s.gpu else cpu:
        yield partial(cross_entropy, s, tokens, vocab)
    tokens_of, widths, rows = ((512, 8192), (1024, 4096), 32000) if s.gpu else ((512, 8192), (64, 256), 1000)
    if s.setting.tiny:
        tokens_of, widths, rows = (64, 256), (64, 256), 1000
    for tokens, width in product(tokens_of, widths):
        yield partial(embedding, s, tokens, width, rows)


def cross_entropy(s: Session, tokens: int, vocab: int) -> None:
    """The whole loss, forward and backward."""
    if not s.fits(24 * tokens * vocab):
        return
    torch, dtype = s.torch, "bf16" if s.gpu else "fp32"
    logits = s.random(tokens, vocab, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=s.setting.device)

    def loss(_: int) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    shape: Shape = {"tokens": tokens, "vocab": vocab, "dtype": dtype}
    s.record("cross_entropy_forward", loss, shape)
    made = loss(0)
    s.record("cross_entropy_backward", lambda _: torch.autograd.grad(made, logits, retain_graph=True), shape)


def embedding(s: Session, tokens: int, width: int, vocab: int) -> None:
    """Rows of a table: looked up, and their gradients scattered into a zeroed table."""
    torch, dtype = s.torch, "bf16" if s.gpu else "fp32"
    table = s.random(vocab, width, dtype=dtype).requires_grad_()
    ids = torch.randint(0, vocab, (tokens,), device=s.setting.device)
    rows, table_bytes = tokens * width * DTYPE_BYTES[dtype], vocab * width * DTYPE_BYTES[dtype]
    shape: Shape = {"elements": tokens * width, "width": width, "vocab": vocab, "dtype": dtype}
    shape |= {"read_bytes": rows, "write_bytes": rows}
    looked_up = {"op": "embedding", "stream_op": "embedding_forward", "launches": 1}
    s.record("stream", lambda _: torch.nn.functional.embedding(ids, table), shape | looked_up)
    gradient, scatter = s.random(tokens, width, dtype=dtype), torch.ops.aten.embedding_dense_backward
    scattered = {
        "op": "embedding_backward",
        "stream_op": "embedding_backward",
        "launches": 6,
        "zeroed_bytes": table_bytes,
    }
    s.record("stream", lambda _: scatter(gradient, ids, vocab, -1, False), shape | scattered)  # noqa: FBT003


def optimizer_items(s: Session) -> Iterator[Item]:
    """AdamW on fp32 parameters in tensors of a model's sizes."""
    sizes = (2**14, 2**16) if s.setting.tiny else (2**24, 2**28) if s.gpu else (2**18, 2**23, 2**21)
    for parameters, impl in product(sizes, ("fused", "foreach")):
        yield partial(adamw, s, parameters, impl)


def adamw(s: Session, parameters: int, impl: str) -> None:
    """One optimizer step over 16 tensors."""
    if not s.fits(24 * parameters):
        return
    torch = s.torch
    tensors = [torch.nn.Parameter(s.random(parameters // 16)) for _ in range(16)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, **{impl: True})
    shape: Shape = {"impl": impl, "parameters": parameters, "tensors": len(tensors), "dtype": "fp32"}
    s.record("adamw", lambda _: optimizer.step(), shape)
