"""A plain PyTorch training script of Llamas, as somebody would write it: nothing of this project is imported.

    torchrun --nproc-per-node 8 llama.py --model llama3-8b --seq-len 8192 --recompute full

Its options are those of the plans in `experiments/measured`; `experiments/captured_plans.py` captures it under each.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# layers, width, feed-forward, heads, heads of K and V, channels of a head, vocabulary, tied
MODELS = {
    "llama3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama3.2-3b": (28, 3072, 8192, 24, 8, 128, 128256, True),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "l1B": (16, 2048, 8192, 32, 8, 64, 128256, False),
    "l3B": (28, 3072, 8192, 24, 8, 128, 128256, False),
    "l8B": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "l8B_v1k": (32, 4096, 14336, 32, 8, 128, 1024, False),
    "l13B_v32k": (40, 5120, 13824, 40, 40, 128, 32000, False),
    "l70B_8L": (8, 8192, 28672, 64, 8, 128, 128256, False),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + swapped(x) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, channels: int, *, repeat: bool) -> None:
        super().__init__()
        self.channels, self.repeats = channels, heads // kv_heads if repeat else 1
        self.q = nn.Linear(width, heads * channels, bias=False)
        self.k = nn.Linear(width, kv_heads * channels, bias=False)
        self.v = nn.Linear(width, kv_heads * channels, bias=False)
        self.out = nn.Linear(heads * channels, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.repeats > 1:
            k, v = k.repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1)
        grouped = q.shape[1] != k.shape[1]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.channels)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, attention: Attention) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = Norm(width), attention, Norm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, name: str, seq_len: int, *, repeat: bool) -> None:
        super().__init__()
        layers, width, hidden, heads, kv_heads, channels, vocabulary, tied = MODELS[name]
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Block(width, hidden, Attention(width, heads, kv_heads, channels, repeat=repeat)) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("cos", torch.empty(seq_len, channels), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, channels), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def products_kept() -> Any:
    """Selective checkpoints: what products and attention made is kept, everything else is made again."""
    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }

    def policy(_context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def built(options: argparse.Namespace) -> nn.Module:
    with torch.device("meta"):
        model = Llama(options.model, options.seq_len, repeat=options.repeat_kv)
    if options.recompute != "none":
        more = {"context_fn": products_kept} if options.recompute == "selective" else {}
        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(
                block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **more
            )
    if options.compile:
        for block in model.layers:
            block.compile()
    if options.parallel in ("fsdp", "hsdp"):
        shard(model, options)
    model.to_empty(device="cuda")
    if MODELS[options.model][-1] and options.parallel not in ("fsdp", "hsdp"):
        model.head.weight = model.embedding.weight
    if options.parallel == "ddp":
        return DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
    return model


def shard(model: Llama, options: argparse.Namespace) -> None:
    world = distributed.get_world_size()
    size = (world // options.shards, options.shards) if options.parallel == "hsdp" else (world,)
    mesh = init_device_mesh("cuda", size, mesh_dim_names=("replicas", "shards")[-len(size) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not options.keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False if options.keep_gathered else None)


def synchronised(model: nn.Module, *, last: bool) -> Any:
    """Gradients are reduced in the last micro-batch alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--sync-last", action="store_true", help="reduce in the last micro-batch alone")
    parser.add_argument("--parallel", choices=("single", "ddp", "fsdp", "hsdp"), default="fsdp")
    parser.add_argument("--shards", type=int, default=8, help="of hsdp: ranks among which parameters are sharded")
    parser.add_argument("--keep-gathered", action="store_true", help="parameters stay whole until backward is over")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    parser.add_argument("--repeat-kv", action="store_true", help="K and V repeated to all heads before attention")
    parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
    parser.add_argument("--eager-loss", action="store_true", help="and not the loss")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.parallel != "single":
        distributed.init_process_group("nccl")
    model = built(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{options.optimizer: True})
    shape = (options.batch, options.seq_len)
    vocabulary = MODELS[options.model][6]
    ids, labels = (torch.randint(0, vocabulary, shape, device="cuda") for _ in range(2))
    mixed = options.parallel in ("single", "ddp")
    criterion = torch.compile(loss_of) if options.compile and not options.eager_loss else loss_of
    while True:
        for index in range(options.accumulate):
            with synchronised(model, last=not options.sync_last or index == options.accumulate - 1):
                with torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext():
                    logits = model(ids)
                loss = criterion(logits, labels)
                del logits
                if options.accumulate > 1:
                    loss = loss / options.accumulate
                loss.backward()
                del loss
        optimizer.step()
        optimizer.zero_grad()


main()
