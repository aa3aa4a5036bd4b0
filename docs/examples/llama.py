"""A Llama in plain PyTorch, trained under any mix of FSDP2, tensor, context and pipeline parallelism.

torchrun --nproc-per-node 8 llama.py --tp 2 --pp 2                 for real
shardwise capture llama.py -o llama.capture.gz -- --tp 2 --pp 2    without a GPU
"""

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--hidden", type=int, default=3584)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--kv-heads", type=int, default=4)
parser.add_argument("--vocab", type=int, default=32768)
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--cp", type=int, default=1)
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--schedule", default="1F1B", help="of torch.distributed.pipelining")
parser.add_argument("--chunks", type=int, default=1, help="stages of a rank, for interleaved schedules")
parser.add_argument("--zero", type=int, default=3, choices=(1, 2, 3), help="1: no FSDP2 around the layers")
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()


class Attention(nn.Module):
    """Grouped heads with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.size = args.width // args.heads
        self.q = nn.Linear(args.width, args.heads * self.size, bias=False)
        self.k = nn.Linear(args.width, args.kv_heads * self.size, bias=False)
        self.v = nn.Linear(args.width, args.kv_heads * self.size, bias=False)
        self.o = nn.Linear(args.heads * self.size, args.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=args.kv_heads != args.heads)
        return self.o(y.transpose(1, 2).flatten(-2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions; angles: [seq, head size]."""
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(args.width, args.hidden, bias=False)
        self.up = nn.Linear(args.width, args.hidden, bias=False)
        self.down = nn.Linear(args.hidden, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(args.width, 1e-5), Attention()
        self.norm2, self.feed_forward = nn.RMSNorm(args.width, 1e-5), FeedForward()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Layers [first, last) and, at the ends of the model, the embedding and the head."""

    def __init__(self, first: int = 0, last: int = args.layers) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width) if first == 0 else None
        self.layers = nn.ModuleDict({str(i): Block() for i in range(first, last)})
        self.norm = nn.RMSNorm(args.width, 1e-5) if last == args.layers else None
        self.head = nn.Linear(args.width, args.vocab, bias=False) if last == args.layers else None
        self.register_buffer("angles", torch.empty(args.seq, args.width // args.heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return x if self.head is None else self.head(self.norm(x))

    def start(self) -> None:
        """Values, once the model is on its device."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        size = args.width // args.heads
        rates = 1e4 ** (-torch.arange(0, size, 2, device=DEVICE) / size)
        self.angles.copy_(torch.outer(torch.arange(args.seq, device=DEVICE), rates).repeat(1, 2))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism with sequence parallelism between the products."""
    ends = {}
    if model.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.head is not None:
        ends["norm"] = SequenceParallel()
        ends["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, ends)
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    both = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**both), "feed_forward": PrepareModuleInput(**gathered),
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip


def build(first: int, last: int, mesh: DeviceMesh) -> Llama:
    """A stage, split and sharded as the arguments say, with values on its device."""
    with torch.device("meta"):
        model = Llama(first, last)
    if args.tp > 1:
        split(model, mesh["tp"])
    low = torch.float32 if args.fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    over = mesh["dp", "cp"]._flatten("dp_cp") if args.cp > 1 else mesh["dp"]  # noqa: SLF001
    sharded = {"mesh": over, "mp_policy": policy}
    whole = args.zero < 3 or args.pp > 1  # from forward to backward; the ends of the model always are
    for layer in model.layers.values() if args.zero > 1 else ():
        fully_shard(layer, reshard_after_forward=not whole, **sharded)
    fully_shard(model, **sharded)
    model.to_empty(device=DEVICE)
    model.start()
    return model


def stages(rank: int) -> list[int]:
    """The stages that a pipeline rank holds; ZBV schedules run them forth and back."""
    count = args.pp * args.chunks
    if args.schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, count - 1 - rank]
    return list(range(rank, count, args.pp))


def main() -> None:
    """Train on random tokens."""
    distributed.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dp = distributed.get_world_size() // (args.pp * args.cp * args.tp)
    mesh = init_device_mesh(DEVICE, (args.pp, dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    count = args.pp * args.chunks
    cuts = [args.layers * i // count for i in range(count + 1)]
    mine = stages(mesh["pp"].get_local_rank()) if args.pp > 1 else [0]
    models = [build(cuts[i], cuts[i + 1], mesh) for i in mine]
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if args.pp > 1:
        group, device = mesh.get_group("pp"), torch.device(DEVICE)
        pieces = [PipelineStage(m, i, count, device, group=group) for i, m in zip(mine, models, strict=True)]
        schedule = schedules.get_schedule_class(args.schedule)
        several = issubclass(schedule, schedules.PipelineScheduleMulti)
        pipeline = schedule(pieces if several else pieces[0], args.micro_batches, loss_fn=loss_of)
    for _ in range(args.steps):
        rows = args.batch * (args.micro_batches if args.pp > 1 else 1)
        tokens = torch.randint(0, args.vocab, (rows, args.seq + 1)).to(DEVICE, non_blocking=True)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if args.pp > 1:
            first, last = 0 in mine, count - 1 in mine
            pipeline.step(*((inputs,) if first else ()), **({"target": labels} if last else {}), return_outputs=False)
        elif args.cp > 1:
            tables = [model.angles for model in models]
            with context_parallel(
                mesh["cp"],
                buffers=[inputs, labels, *tables],
                buffer_seq_dims=[1, 1, 0],
                no_restore_buffers={inputs, labels},
            ):
                loss_of(models[0](inputs), labels).backward()
        else:
            for index in range(args.micro_batches):
                models[0].set_is_last_backward(index == args.micro_batches - 1)
                models[0].set_requires_gradient_sync(index == args.micro_batches - 1)
                loss_of(models[0](inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    distributed.destroy_process_group()


main()
