"""A plan's context parallelism: each rank has a part of every sequence, and attention reaches the others'.

ring: torch's own ring attention (torch.distributed.tensor.experimental), its loop called with the kernel of the device: torch
itself wires it to CUDA's kernels alone, and a CPU's has the same results. Keys and values are gathered, as it does by default.
all_to_all: heads are swapped for tokens around the kernel (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from simulator.spec.plan import Plan
from validate.models import Attention, Decoder
from validate.torch_private import attention_kernels, ring_attention

_HEADS, _TOKENS = 1, 2  # dims of [b, H, s, C]


def tokens_of(plan: Plan, rank: int) -> tuple[range, ...]:
    """Positions of a sequence that rank `rank` of cp has.

    A ring deals 2 cp parts from both ends, so that ranks have equal parts of the causal triangle; behind an all-to-all every
    rank sees all positions in order.
    """
    if plan.cp == 1 or plan.cp_exchange == "all_to_all":
        length = plan.seq_len // plan.cp
        return (range(rank * length, (rank + 1) * length),)
    length = plan.seq_len // (2 * plan.cp)
    return tuple(range(part * length, (part + 1) * length) for part in (rank, 2 * plan.cp - 1 - rank))


def spread(module: Decoder, plan: Plan, group: dist.ProcessGroup) -> None:
    """Attention of all tokens of the group's ranks in a decoder that holds this rank's, in place."""
    for block in module.layers:
        block.attention.across = _across(block.attention, plan, group)
    module.tokens = tokens_of(plan, dist.get_rank(group))
    if plan.cp_exchange == "all_to_all":
        module.head_part = dist.get_rank(group), plan.cp
    with torch.device("meta"):
        module.register_tables()


def _across(attention: Attention, plan: Plan, group: dist.ProcessGroup) -> Any:  # noqa: ANN401  a function of q, k, v, mask
    if plan.cp_exchange == "ring":
        return lambda q, k, v, _mask: _Ring.apply(group, q, k, v)

    def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[b, H, s, C] of a part of the tokens, through all tokens of a part of the heads."""
        q, k, v = (_Swap.apply(group, x, _HEADS) for x in (q, k, v))
        o: Tensor = _Swap.apply(group, attention.kernel(q, k, v, mask), _TOKENS)
        return o

    return swapped


class _Ring(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention to the keys and values of every rank."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ANN401
        forward, _ = ring_attention()
        kernel, options, _ = attention_kernels(q)
        o, lse, *rest = forward(group, _TOKENS, kernel, query=q, key=k, value=v, is_causal=True, **options)
        ctx.group, ctx.rest = group, [... if isinstance(one, Tensor) else one for one in rest]
        ctx.save_for_backward(q, k, v, o, lse, *(one for one in rest if isinstance(one, Tensor)))
        return o

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        _, backward = ring_attention()
        q, k, v, o, lse, *saved = ctx.saved_tensors
        _, _, back = attention_kernels(q)
        kernel, name, options = back(q, _filled(ctx.rest, saved))
        found = backward(
            ctx.group, _TOKENS, kernel, grad_out=gradient, grad_out_name=name, query=q, key=k, value=v, out=o,
            logsumexp=lse, is_causal=True, **options,
        )  # fmt: skip
        return (None, *found[:3])


def _filled(rest: list[Any], saved: list[Tensor]) -> list[Any]:
    """What a kernel returned besides its result, with the tensors of it in their places."""
    left = iter(saved)
    return [next(left) if one is ... else one for one in rest]


class _Swap(torch.autograd.Function):  # type: ignore[misc]
    """Cut `dim` over the ranks and join the other of heads and tokens: one all-to-all between two copies."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, dim: int) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.dim = group, dim
        return _swapped(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        other = _TOKENS if ctx.dim == _HEADS else _HEADS
        return None, _swapped(gradient, ctx.group, other), None


def _swapped(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    other = _TOKENS if dim == _HEADS else _HEADS
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim))
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    del sent
    return torch.cat(came.unbind(), other)
