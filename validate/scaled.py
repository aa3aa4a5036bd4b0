"""Linear layers whose three products run in fp8 by torch's own scaled product, as torchao's dynamic scaling casts for them.

A scale is the largest element of a tensor, or of a row of what a product reads, over the largest number of the format; it is
found anew for each product (torchao, float8/float8_linear.py, config.py). Operands keep their 16 bits between forward and
backward. Compiled, casts are kernels of their own, as they are predicted; eager ones are several operators each.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from simulator.spec.plan import Plan
from validate.models import Decoder
from validate.torch_private import scaled_product

_SMALLEST: Final = 1e-12  # of a maximum, so that rows of zeros have a scale


def scale_products(module: Decoder, plan: Plan) -> None:
    """Linear layers inside blocks become scaled ones, but for the plan's first and last blocks, in place."""
    wide, by_row = plan.precision, plan.precision.fp8_recipe == "rowwise"
    numbers = range(wide.first_layers_bf16, module.model.num_layers - wide.last_layers_bf16)
    for number, block in zip(module.part.layers, module.layers, strict=True):
        for parent in list(block.modules()) if number in numbers else ():
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, ScaledLinear(child, by_row=by_row))


class ScaledLinear(nn.Module):  # type: ignore[misc]
    """A linear layer with the parameters of another one. by_row: a scale a row, not one a tensor."""

    def __init__(self, linear: nn.Linear, *, by_row: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.by_row = linear.weight, linear.bias, by_row

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in autocast's dtype where it is on."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = _Products.apply(x.to(dtype), self.weight.to(dtype), self.by_row)
        return y if self.bias is None else y + self.bias.to(dtype)


class _Products(torch.autograd.Function):  # type: ignore[misc]
    """x Wᵀ and its two gradients. Gradients have the format of the wider range where one scale stands for a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:  # noqa: ANN401, FBT001  torch's
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        rows = _narrow(x.flatten(0, -2), torch.float8_e4m3fn, by_row)
        y = _multiply(rows, _narrow(weight, torch.float8_e4m3fn, by_row), x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        kind = torch.float8_e4m3fn if ctx.by_row else torch.float8_e5m2
        rows, dtype, by_row = gradient.flatten(0, -2), x.dtype, ctx.by_row
        by_rows = _narrow(rows, kind, by_row)
        into = _multiply(by_rows, _narrow(weight.t(), torch.float8_e4m3fn, by_row), dtype, fast=by_row)
        by_columns = _narrow(rows.t(), kind, by_row=True) if by_row else (by_rows[0].t().contiguous(), by_rows[1])
        read = _narrow(x.flatten(0, -2).t(), torch.float8_e4m3fn, by_row)
        return into.view_as(x), _multiply(by_columns, read, dtype, fast=by_row), None


def _narrow(x: Tensor, kind: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """[M, K] in fp8, row by row in memory, and what it has to be multiplied by: one fp32, or [M, 1]."""
    largest = x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax()
    scale = largest.float().clamp(min=_SMALLEST) / torch.finfo(kind).max
    return (x / scale.to(x.dtype)).to(kind).contiguous(), scale


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool) -> Tensor:
    """[M, K], [N, K] -> [M, N]. fast: tensor cores add up in fewer bits."""
    (left, left_scale), (right, right_scale) = a, b
    scales = left_scale, right_scale.t() if right_scale.dim() else right_scale
    return scaled_product()(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
