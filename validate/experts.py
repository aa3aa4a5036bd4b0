"""A mixture of experts in plain torch: router, rows to the ranks of their experts by all-to-all, their products, and back.

Rows are (token, expert) pairs. They are dealt evenly whatever the router says, as benchmarks force it: token t goes to experts
t k ... t k + k - 1, modulo their number; its weights are the router's all the same. So a rank's experts have as many rows each,
and one batched product of all is what grouped products come to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from simulator.spec.model import Model
from simulator.spec.model.experts import Experts


class Routed(nn.Module):  # type: ignore[misc]
    """The experts of a layer that are here. group: of the ranks that the layer's experts are dealt to; None: all are here."""

    group: dist.ProcessGroup | None = None

    def __init__(self, model: Model, num_experts: int, dtype: torch.dtype, activation: Any) -> None:  # noqa: ANN401
        super().__init__()
        experts = _of(model)
        d, f = model.d_model, experts.d_ff
        if model.gated:
            self.gate = _Matrices(num_experts, f, d, dtype)
        self.up, self.down = _Matrices(num_experts, f, d, dtype), _Matrices(num_experts, d, f, dtype)
        self.gated, self.activation = model.gated, activation
        self.num_experts, self.top_k = experts.num_experts, experts.top_k

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """[t, D] tokens and [t, k] weights -> [t, D]."""
        order, back = self._places(len(x), x.device)
        rows = x[order // self.top_k].unflatten(0, (self.num_experts, -1))
        rows = self._returned(self._products(self._sent(rows))).flatten(0, 1)
        chosen = rows[back].unflatten(0, (-1, self.top_k))
        return torch.bmm(weights.to(chosen.dtype).unsqueeze(1), chosen).squeeze(1)

    def choices(self, num_tokens: int, device: torch.device) -> Tensor:
        """[t, k]: the experts of each token."""
        return (torch.arange(num_tokens * self.top_k, device=device) % self.num_experts).view(-1, self.top_k)

    def _places(self, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows by expert, as numbers of (token, choice); and where each stands among them."""
        numbers = torch.arange(num_tokens * self.top_k, device=device).view(-1, self.num_experts)
        back = torch.arange(numbers.numel(), device=device).view(self.num_experts, -1)
        return numbers.t().flatten(), back.t().flatten()

    def _sent(self, rows: Tensor) -> Tensor:
        """[E, rows, D] of this rank's tokens -> [held, rows of all ranks, D]."""
        if self.group is None:
            return rows
        came = _Travel.apply(self.group, rows).unflatten(0, (dist.get_world_size(self.group), -1))
        return came.transpose(0, 1).flatten(1, 2)

    def _returned(self, rows: Tensor) -> Tensor:
        if self.group is None:
            return rows
        by_rank = rows.unflatten(1, (dist.get_world_size(self.group), -1)).transpose(0, 1).flatten(0, 1)
        back: Tensor = _Travel.apply(self.group, by_rank)
        return back

    def _products(self, rows: Tensor) -> Tensor:
        hidden = self.activation(self.gate(rows)) * self.up(rows) if self.gated else self.activation(self.up(rows))
        return self.down(hidden)


class Router(nn.Linear):  # type: ignore[misc]
    """Each token's weight of its experts, [t, D] -> [t, k], in fp32."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        experts = _of(model)
        super().__init__(model.d_model, experts.num_experts, bias=experts.router_bias, dtype=dtype)
        self.wide, self.sigmoid = experts.router_dtype == "fp32", experts.score == "sigmoid"

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        """choices: [t, k]."""
        with torch.autocast(x.device.type, enabled=False) if self.wide else torch.autocast(x.device.type, x.dtype):
            weight = self.weight.float() if self.wide else self.weight.to(x.dtype)
            bias = None if self.bias is None else self.bias.to(weight.dtype)
            logits = functional.linear(x.to(weight.dtype), weight, bias).float()
        scores = torch.sigmoid(logits) if self.sigmoid else torch.softmax(logits, -1)
        return scores.gather(1, choices)


class _Matrices(nn.Module):  # type: ignore[misc]
    """A matrix of each expert: [E, rows, K] -> [E, rows, N]."""

    def __init__(self, num_experts: int, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, n, k, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows, self.weight.transpose(1, 2))


class _Travel(torch.autograd.Function):  # type: ignore[misc]
    """As many rows to every rank, and their gradients back the same way."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, rows: Tensor) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, _exchanged(gradient, ctx.group)


def _exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    came = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(came, rows.contiguous(), group=group)
    return came


def _of(model: Model) -> Experts:
    assert model.experts is not None
    return model.experts
