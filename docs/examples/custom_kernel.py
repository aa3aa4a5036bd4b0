"""A training script with a kernel of its own: a Triton kernel behind a custom operator, and what it costs.

    shardwise capture docs/examples/custom_kernel.py -o custom.capture.gz --ranks 1

Triton is needed to run it on a GPU, and not to capture it: the operator's fake says what it makes, `kernel_cost` what it
takes, and neither computes anything.
"""

import torch
from torch import Tensor, nn

import shardwise

try:
    import triton
    import triton.language as tl

    @triton.jit
    def swiglu_kernel(gate, up, out, numel, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(gate + at, mask=at < numel).to(tl.float32)
        u = tl.load(up + at, mask=at < numel).to(tl.float32)
        tl.store(out + at, g * tl.sigmoid(g) * u, mask=at < numel)

except ImportError:
    swiglu_kernel = None


@torch.library.custom_op("example::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    swiglu_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024)
    return out


@swiglu.register_fake
def swiglu_fake(gate, up):
    return torch.empty_like(gate)


@torch.library.custom_op("example::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


@swiglu_backward.register_fake
def swiglu_backward_fake(gradient, gate, up):
    return torch.empty_like(gate), torch.empty_like(up)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(lambda ctx, gradient: swiglu_backward(gradient, *ctx.saved_tensors), setup_context=save)


@shardwise.kernel_cost("example::swiglu")
def swiglu_cost(gate, up):
    """Two tensors are read and one is written."""
    return shardwise.KernelCost(bytes=3 * gate.numel() * gate.element_size(), category="elementwise")


@shardwise.kernel_cost("example::swiglu_backward")
def swiglu_backward_cost(gradient, gate, up):
    """Three are read and two are written."""
    return shardwise.KernelCost(bytes=5 * gate.numel() * gate.element_size(), category="elementwise")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4096, 14336, bias=False), nn.Linear(4096, 14336, bias=False)
        self.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.ops.example.swiglu(self.gate(x), self.up(x)))


def main() -> None:
    model = nn.Sequential(*(Mlp() for _ in range(4))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    while True:
        x = torch.randn(8, 1024, 4096, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
