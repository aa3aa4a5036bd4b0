"""Benches of what the host costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from validate.benches import Item, Tensor
from validate.stopwatch import Session, torch_dtype

DISPATCH_CALLS = 200


def host_items(s: Session) -> Iterator[Item]:
    """Host time of one operator, and of one eager Llama block that is all overhead."""
    yield partial(dispatch, s)
    yield partial(eager_block, s)
    if s.gpu:
        yield partial(graph_launches, s)


def dispatch(s: Session) -> None:
    """Host seconds of one eager operator on eight numbers, and of a small linear layer with its module."""
    torch = s.torch
    a = torch.ones(8, device=s.setting.device)
    x, linear = torch.ones(8, 8, device=s.setting.device), torch.nn.Linear(8, 8).to(s.setting.device)
    calls: dict[str, Callable[[], object]] = {"add_": lambda: a.add_(1), "mul_out": lambda: a * 1}
    calls["linear_8x8"] = lambda: linear(x)
    for name, call in calls.items():
        s.record("host_dispatch", partial(_many, call), {"op": name}, per=DISPATCH_CALLS)


def _many(call: Callable[[], object], _: int) -> None:
    for _ in range(DISPATCH_CALLS):
        call()


def graph_launches(s: Session) -> None:
    """Interval of tiny kernels in a CUDA graph: what a launch costs the device."""
    torch = s.torch
    a, graph = torch.ones(8, device=s.setting.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _many(lambda: a.add_(1), 0)
    s.record("graph_kernel_200", lambda _: graph.replay(), {})


def eager_block(s: Session) -> None:
    """One Llama block of eight tokens and width 16, forward and backward: nothing but overhead.

    checkpointed: of a CPU, forward and backward together under torch's non-reentrant checkpointing.
    """
    block, x = tiny_block(s.torch, s.setting.device)
    s.record("eager_block", lambda _: block(x), {"phase": "forward"})
    out = block(x)
    gradient, inputs, grad = s.torch.ones_like(out), [x, *block.parameters()], s.torch.autograd.grad
    s.record("eager_block", lambda _: grad(out, inputs, gradient, retain_graph=True), {"phase": "backward"})
    if s.gpu:
        return
    from torch.utils.checkpoint import checkpoint

    def again(_: int) -> object:
        return grad(checkpoint(block, x, use_reentrant=False), inputs, gradient)

    s.record("eager_block", again, {"phase": "checkpointed"})


def tiny_block(torch: Any, device: str) -> tuple[Any, Tensor]:  # noqa: ANN401
    """A block whose arithmetic is nothing, so that its time is the host's."""
    functional, nn = torch.nn.functional, torch.nn
    width, heads = 16, 2

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.qkvo = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

        def _rotated(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * 0.5 + torch.cat((-b, a), -1) * 0.5

        def forward(self, x: Tensor) -> Tensor:
            y = self.norms[0](x)
            q, k, v = (p(y).view(1, -1, heads, width // heads).transpose(1, 2) for p in self.qkvo[:3])
            o = functional.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
            x = x + self.qkvo[3](o.transpose(1, 2).reshape(1, -1, width))
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    dtype = torch_dtype(torch, "fp32")
    return Block().to(device), torch.randn(1, 8, width, device=device, dtype=dtype, requires_grad=True)
