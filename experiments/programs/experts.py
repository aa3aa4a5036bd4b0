"""A plain PyTorch training script of Llamas and of their mixtures of experts: nothing of this project is imported.

    torchrun --nproc-per-node 8 experts.py --experts 8 --top-k 2 --joined

Norms are written out in fp32, halves of heads are rotated, K and V are repeated to all heads. Tokens are sorted by their
expert, padded to the fullest one and multiplied by torch._grouped_mm; weights of experts are modules of their own, stacked in
every forward, or `--joined` parameters. `experiments/captured_runs.py` says whose programs do so, and captures it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--hidden", type=int, default=7168)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--kv-heads", type=int, default=4)
parser.add_argument("--vocab", type=int, default=128256)
parser.add_argument("--seq", type=int, default=4096)
parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: one feed-forward")
parser.add_argument("--top-k", type=int, default=2)
parser.add_argument("--joined", action="store_true", help="weights of a layer's experts are one parameter each")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--ep", type=int, default=1)
parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
args = parser.parse_args()
SIZE = args.width // args.heads


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(args.width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scaled * self.weight).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (one[None, None].to(x.dtype) for one in (cos, sin))
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(args.width, args.heads * SIZE, bias=False)
        self.k = nn.Linear(args.width, args.kv_heads * SIZE, bias=False)
        self.v = nn.Linear(args.width, args.kv_heads * SIZE, bias=False)
        self.out = nn.Linear(args.heads * SIZE, args.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], -1, SIZE)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if args.heads > args.kv_heads:
            k, v = (one.repeat_interleave(args.heads // args.kv_heads, dim=1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(shape[0], y.shape[2], -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(args.width, args.hidden, bias=False)
        self.up = nn.Linear(args.width, args.hidden, bias=False)
        self.down = nn.Linear(args.hidden, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(args.width, args.experts, bias=False)
        self.balance = torch.tensor(0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        shares = functional.softmax(logits, dim=-1)
        weights, chosen = torch.topk(shares, k=args.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = functional.one_hot(chosen, num_classes=args.experts).float().sum(dim=(0, 1))
        self.balance = args.experts * (counts / (x.shape[0] * args.top_k) * shares.mean(dim=0)).sum()
        self.large = (torch.logsumexp(logits, dim=-1) ** 2).mean()  # kept, and not trained on
        return weights, chosen


class AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group; their gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (leaving, arriving), group
        return moved(x, arriving, leaving, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        arriving, leaving = ctx.sizes
        return moved(grad, arriving, leaving, ctx.group), None, None, None


def moved(x: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
    found = torch.empty(sum(arriving), *x.shape[1:], dtype=x.dtype, device=x.device)
    distributed.all_to_all_single(found, x.contiguous(), arriving, leaving, group=group)
    return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.first, self.count = 0, args.experts
        self.group: Any = None  # whose ranks share the experts
        if args.joined:
            inward, outward = (args.experts, args.width, args.hidden), (args.experts, args.hidden, args.width)
            self.gate, self.up = (nn.Parameter(torch.empty(inward)) for _ in range(2))
            self.down = nn.Parameter(torch.empty(outward))
        else:
            self.experts = nn.ModuleList(FeedForward() for _ in range(args.experts))

    def deal(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the experts."""
        self.count, self.group = args.experts // mesh.size(), mesh.get_group()
        self.first = self.count * mesh.get_local_rank()
        if not args.joined:
            self.experts = self.experts[self.first : self.first + self.count]
            return
        for name in ("gate", "up", "down"):
            own = getattr(self, name).data[self.first : self.first + self.count].clone().contiguous()
            setattr(self, name, nn.Parameter(own))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, args.width)
        weights, chosen = self.router(rows)
        found = self.here(rows, weights, chosen) if self.group is None else self.elsewhere(rows, weights, chosen)
        return found.view(x.shape)

    def here(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts are on this rank."""
        tokens = torch.arange(len(rows), device=rows.device).unsqueeze(1).expand(-1, args.top_k).reshape(-1)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        tokens, shares = tokens[order], weights.reshape(-1)[order]
        counts = torch.bincount(flat[order], minlength=args.experts).tolist()
        y = self.multiplied(rows[tokens], counts) * shares.unsqueeze(-1)
        found = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        return found.scatter_add_(0, tokens.unsqueeze(-1).expand_as(y), y)

    def elsewhere(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Experts are dealt out: tokens go to them and come back."""
        tokens = torch.arange(len(rows), device=rows.device).unsqueeze(1).expand(-1, args.top_k).reshape(-1)
        flat, ranks = chosen.reshape(-1), distributed.get_world_size(self.group)
        to = flat // self.count
        order = torch.argsort(to, stable=True)
        leaving = torch.bincount(to[order], minlength=ranks)
        sent, arriving = leaving.tolist(), torch.zeros_like(leaving)
        distributed.all_to_all_single(arriving, leaving, group=self.group)
        got = arriving.tolist()
        inputs = AllToAll.apply(rows[tokens[order]], got, sent, self.group)
        wanted = moved(flat[order].float().unsqueeze(-1), got, sent, self.group).squeeze(-1).long()
        by_expert = torch.argsort(wanted, stable=True)
        counts = torch.bincount(wanted[by_expert] - self.first, minlength=self.count).tolist()
        y = self.multiplied(inputs[by_expert], counts)[torch.argsort(by_expert)]
        for index in () if args.joined else (index for index, count in enumerate(counts) if not count):
            for parameter in self.experts[index].parameters():  # so that every gradient exists
                y = y + parameter.sum() * 0
        y = y + inputs.sum() * 0
        y = AllToAll.apply(y, sent, got, self.group)[torch.argsort(order)]
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        found = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        return found.scatter_add_(0, tokens.unsqueeze(-1).expand_as(y), y)

    def multiplied(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Sorted rows through their experts, padded to the fullest one."""
        if args.joined:
            gate, up, down = self.gate, self.up, self.down
        else:
            up, down, gate = (
                torch.stack([getattr(one, name).weight.t() for one in self.experts]) for name in ("up", "down", "gate")
            )
        padded, begin = rows.new_zeros(self.count, max(counts), args.width), 0
        for index, count in enumerate(counts):
            if count:
                padded[index, :count] = rows[begin : begin + count]
            begin += count
        gated = torch._grouped_mm(padded, gate)
        y = torch._grouped_mm(functional.silu(gated) * torch._grouped_mm(padded, up), down)
        found, begin = torch.zeros_like(rows), 0
        for index, count in enumerate(counts):
            if count:
                found[begin : begin + count] = y[index, :count]
            begin += count
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = Norm(), Attention()
        self.norm_2, self.mlp = Norm(), Mixture() if args.experts else FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(args.layers)})
        self.norm = Norm()
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.empty(args.seq, SIZE // 2, device=ids.device)
        x, cos, sin = self.embedding(ids), angles, angles
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism; every projection gathers its own input, and logits are whole."""

    def sequences(_module: nn.Module, _inputs: object, output: Tensor) -> DTensor:
        return output if isinstance(output, DTensor) else DTensor.from_local(output, mesh, [Shard(1)])

    def wholes(_module: nn.Module, _inputs: object, output: Tensor) -> DTensor:
        return DTensor.from_local(output, mesh, [Replicate()])

    model.embedding.register_forward_hook(wholes)
    columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.out", "mlp.down")
    for block in model.layers.values():
        plan: dict[str, Any] = {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
        parallelize_module(block, mesh, plan)
        block.attention.register_forward_hook(sequences)
        block.mlp.register_forward_hook(sequences)
    ends = {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    parallelize_module(model, mesh, ends)


def built() -> nn.Module:
    sizes = {"data": distributed.get_world_size() // (args.tp * args.ep), "ep": args.ep, "tp": args.tp}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "data")
    mesh = init_device_mesh("cuda", tuple(sizes[name] for name in names), mesh_dim_names=names)
    with torch.device("meta"):
        model = Llama()
    if args.tp > 1:
        split(model, mesh["tp"])
    else:
        model = model.to(torch.bfloat16).to_empty(device="cuda")
    if args.ep > 1:
        for block in model.layers.values():
            block.mlp.deal(mesh["ep"])
    for name, block in model.layers.items():
        if args.compile:
            block.compile()
        model.layers[name] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    shard(model, mesh["data"])
    return model.to_empty(device="cuda").to(torch.bfloat16) if args.tp > 1 else model


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        for unit in (block.attention, block.mlp) if args.ep > 1 else (block,):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def clip(model: nn.Module) -> None:
    """Gradients on several meshes are normed a mesh at a time."""
    groups = defaultdict(list)
    for parameter in model.parameters():
        groups[id(parameter.grad._spec.mesh)].append(parameter.grad.detach())
    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0, foreach=True)
        return
    total = torch.tensor(0.0, device="cuda")
    for grads in groups.values():
        total = total + torch.stack([one.norm(2.0) for one in grads]).pow(2).sum().full_tensor()
    factor = torch.clamp(1.0 / (total.sqrt() + 1e-6), max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits, flat = model(ids), labels.view(-1)
    if (flat == -100).all():
        return torch.tensor(0.0, device=ids.device)
    loss = functional.cross_entropy(logits.view(-1, args.vocab), flat, ignore_index=-100)
    if args.experts:
        total = torch.tensor(0.0, device=ids.device)
        for block in model.layers.values():
            total = total + block.mlp.router.balance
        loss = loss + 0.01 * total
    return loss


def main() -> None:
    distributed.init_process_group("nccl")
    model = built()
    wide = [one for one in model.parameters() if one.ndim > 1]
    narrow = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    while True:
        for index in range(args.accumulate):
            ids, labels = (torch.randint(0, args.vocab, (args.batch, args.seq), device="cuda") for _ in range(2))
            model.set_requires_gradient_sync(index == args.accumulate - 1)
            loss = loss_of(model, ids, labels)
            (loss / args.accumulate).backward()
            loss.item()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


main()
