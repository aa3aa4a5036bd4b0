"""What the host spends on eager PyTorch, measured without a GPU: CPU time of calls whose arithmetic is nothing.

    python experiments/host_costs.py
    python experiments/host_costs.py deepspeed      its engine's stage 3 beside plain modules, where it is installed
    python experiments/host_costs.py bitsandbytes   its AdamW's step of a tensor, and an operator, where it is installed

CPU seconds of the process, not of the clock, so that neighbours on the machine do not count; the smallest of nine means.
Collectives go to torch's fake process group, which does nothing. On a GPU's host each launch comes on top, and the host's own
speed (docs/background/host.md, eager PyTorch).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

RANKS, WIDTH, HEADS, LAYERS = 4, 32, 4, 4
_COLUMNS, _ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")


def cpu_us(call: Callable[[], object], count: int = 200) -> float:
    """CPU microseconds of one call."""
    for _ in range(10):
        call()
    means = []
    for _ in range(9):
        begin = time.process_time()
        for _ in range(count):
            call()
        means.append((time.process_time() - begin) / count * 1e6)
    return min(means)


class Identity(torch.autograd.Function):
    """A node in Python that does nothing."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


class Block(nn.Module):
    """A layer like Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = nn.Module(), nn.Module()
        for name in ("q", "k", "v", "out"):
            self.attention.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        for name in ("gate", "up"):
            self.mlp.add_module(name, nn.Linear(WIDTH, 4 * WIDTH, bias=False))
        self.mlp.add_module("down", nn.Linear(4 * WIDTH, WIDTH, bias=False))
        self.attention.forward, self.mlp.forward = self._attention, self._mlp

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        part = self.attention
        q, k, v = (getattr(part, name)(x) for name in ("q", "k", "v"))
        heads = [y.view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for y in (q, k, v)]
        o = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return part.out(o.transpose(1, 2).reshape(*q.shape))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        part = self.mlp
        return part.down(functional.silu(part.gate(x)) * part.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def layer_us(kind: str) -> tuple[float, float]:
    """CPU microseconds of a layer: forward, and forward with backward. kind: plain, again (re-entrant checkpoints), units (FSDP2), sums, or tokens."""
    mesh, blocks = init_device_mesh("cpu", (RANKS,)), [Block() for _ in range(LAYERS)]
    tokens = kind == "tokens"
    for block in blocks if kind == "units" else []:
        fully_shard(block, mesh=mesh)
    for block in blocks if kind in ("sums", "tokens") else []:
        rows = RowwiseParallel(output_layouts=Shard(1) if tokens else Replicate())
        parts = {"attention": ("q", "k", "v", "out"), "mlp": ("gate", "up", "down")}
        plan = {f"{part}.{n}": rows if n in _ROWS else ColwiseParallel() for part, ns in parts.items() for n in ns}
        if tokens:
            gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {
                "norms.0": SequenceParallel(),
                "norms.1": SequenceParallel(),
                "attention": gathered,
                "mlp": gathered,
            }
        parallelize_module(block, mesh, plan)

    def model(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True) if kind == "again" else block(x)
        return x

    x = torch.randn(1, 8 // RANKS if tokens else 8, WIDTH, requires_grad=True)

    def both() -> None:
        out = model(x)
        (out.to_local() if isinstance(out, DTensor) else out).sum().backward()

    return cpu_us(lambda: model(x), 4) / LAYERS, cpu_us(both, 4) / LAYERS


def node_us(call: Callable[[torch.Tensor], torch.Tensor], count: int = 50) -> float:
    """CPU microseconds of a node's backward."""
    x = torch.ones(8, 8, requires_grad=True)
    out = x
    for _ in range(count):
        out = call(out)
    gradient = torch.ones_like(out)
    return cpu_us(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True), 20) / count


def calls() -> Iterator[tuple[str, float]]:
    """What each kind of call takes."""
    x, y, out = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8), torch.empty(8 * RANKS, 8)
    yield "operator, recorded by autograd", cpu_us(lambda: x * y)
    yield "its backward", node_us(lambda z: z * y)
    yield "view, recorded", cpu_us(lambda: x.transpose(0, 1))
    yield "its backward", node_us(lambda z: z.transpose(0, 1))
    yield "autograd function in Python", cpu_us(lambda: Identity.apply(x))
    yield "its backward", node_us(Identity.apply)
    yield "view, not recorded", cpu_us(lambda: y.transpose(0, 1))
    nothing = nn.Identity()
    yield "module", cpu_us(lambda: nothing(x))
    yield "collective and its wait", cpu_us(lambda: dist.all_gather_into_tensor(out, y, async_op=True).wait())
    sliced = torch.ones(64)
    yield "slice of a flat tensor", cpu_us(lambda: sliced[8:16])
    weights = [nn.Parameter(torch.ones(8)) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.ones(8)
    step = torch.optim.AdamW([{"params": [weight]} for weight in weights], fused=True).step
    yield "fused AdamW, a group a parameter: one", cpu_us(step, 3) / 100


def layouts() -> Iterator[tuple[str, float, float]]:
    """What DTensor takes by itself: forward, and backward."""
    mesh, part = init_device_mesh("cpu", (RANKS,)), torch.ones(8, 8, requires_grad=True)

    def made(placement: Placement) -> DTensor:
        return DTensor.from_local(part.detach(), mesh, [placement], run_check=False).requires_grad_()

    def both(call: Callable[[], torch.Tensor], of: torch.Tensor) -> tuple[float, float]:
        gradient, forward = call().detach(), cpu_us(call, 50)
        return forward, cpu_us(lambda: torch.autograd.grad(call(), of, gradient), 50) - forward

    gathered, rows, sums = made(Replicate()), made(Shard(0)), made(Partial())
    plain = rows.detach()
    yield "operator of two DTensors, not recorded", cpu_us(lambda: plain * plain), 0.0
    yield "from_local", *both(lambda: DTensor.from_local(part, mesh, [Shard(0)], run_check=False), part)
    yield "to_local", *both(rows.to_local, rows)
    yield "redistribute, rows to whole", *both(lambda: rows.redistribute(mesh, gathered.placements), rows)
    yield "redistribute, sums to rows", *both(lambda: sums.redistribute(mesh, rows.placements), sums)
    yield "redistribute, sums to whole", *both(lambda: sums.redistribute(mesh, gathered.placements), sums)


class _Layer(nn.Module):
    """The modules of a decoder layer: seven linear layers, two norms. Its arithmetic is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, out, gate, up, down = self.linears
        y = torch.cat([self.norms[0](half) for half in x.chunk(2, -1)], -1)
        x = x + out(q(y) + k(y) + v(y))
        y = torch.cat([self.norms[1](half) for half in x.chunk(2, -1)], -1)
        return x + down(gate(y) * up(y))


def stage_3() -> Iterator[tuple[str, float, float]]:
    """Of a layer in DeepSpeed's stage 3 and of the same without: forward, and backward."""
    import deepspeed

    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # collectives by gloo
    deepspeed.init_distributed("gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 10**6, "bf16": {"enabled": True}}
    x = torch.randn(4, 64, dtype=torch.bfloat16)

    def engine_us(layers: int, *, sharded: bool) -> tuple[float, float]:
        model = nn.Sequential(*(_Layer() for _ in range(layers))).bfloat16()
        if not sharded:
            forward = cpu_us(lambda: model(x), 20)
            return forward, cpu_us(lambda: model(x).float().mean().backward(), 20) - forward
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {**settings, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        forward = cpu_us(lambda: engine(x), 20)
        return forward, cpu_us(lambda: engine.backward(engine(x).float().mean()), 20) - forward

    for name, sharded in (("layer, plain", False), ("layer, stage 3", True)):
        few, many = (engine_us(layers, sharded=sharded) for layers in (4, 12))
        yield name, (many[0] - few[0]) / 8, (many[1] - few[1]) / 8


def low_bits() -> Iterator[tuple[str, float]]:
    """Of bitsandbytes' AdamW a tensor, whose Python is the same for states of 8 and of 32 bits; and an operator."""
    weights = [nn.Parameter(torch.ones(8)) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.ones(8)
    yield "bitsandbytes' AdamW: a tensor", cpu_us(import_module("bitsandbytes").optim.AdamW(weights).step, 2) / 100
    x, y = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    yield "operator, recorded by autograd", cpu_us(lambda: x * y)


def main() -> None:
    """Print all of it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if "bitsandbytes" in sys.argv[1:]:
        for name, us in low_bits():
            print(f"{name:40} {us:8.1f}")
        return
    if "deepspeed" in sys.argv[1:]:
        for name, forward, backward in stage_3():
            print(f"{name:40} {forward:8.0f} {backward:8.0f}")
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(f"torch {torch.__version__}, microseconds of CPU time")
    for name, us in calls():
        print(f"{name:40} {us:8.1f}")
    for name, forward, backward in layouts():
        print(f"{name:40} {forward:8.1f} {backward:8.1f}")
    for kind in ("plain", "again", "units", "sums", "tokens"):
        forward, both = layer_us(kind)
        print(f"layer, {kind:33} {forward:8.0f} {both - forward:8.0f}")


if __name__ == "__main__":
    main()
