"""A training script of nobody's framework: a Llama under FSDP2, under DDP, or alone. LAYERS WIDTH VOCAB SEQ [ddp|alone [lora|dora [dropout]]] [checkpoint] [compile].

images: with a tower of four layers ahead of it; frozen: which is not trained."""

import sys

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, VOCAB, SEQ = map(int, sys.argv[1:5])
HEADS, KV_HEADS = WIDTH // 128, max(1, WIDTH // 512)
HIDDEN, TOWER = WIDTH * 7 // 2, WIDTH // 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * 128, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * 128, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * 128, bias=False)
        self.o = nn.Linear(HEADS * 128, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, -1, 128).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = Norm(), Attention(), Norm()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Seeing(nn.Module):
    """A layer of a tower: LayerNorm, attention both ways, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(TOWER, TOWER) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(TOWER), nn.LayerNorm(TOWER)
        self.up, self.down = nn.Linear(TOWER, 4 * TOWER), nn.Linear(4 * TOWER, TOWER)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(b, s, -1, 64).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Tower(nn.Module):
    """Patches with a class token and positions, layers, and a projector of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, TOWER, 14, 14, bias=False)
        self.class_token = nn.Parameter(torch.zeros(TOWER))
        self.positions = nn.Embedding(257, TOWER)
        self.norm = nn.LayerNorm(TOWER)
        self.layers = nn.ModuleList(Seeing() for _ in range(4))
        self.joins = nn.Sequential(nn.Linear(TOWER, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], 1, TOWER), x), 1)
        x = self.norm(x + self.positions(torch.arange(257, device=x.device)[None]))
        for layer in self.layers:
            x = layer(x)
        return self.joins(x[:, 1:])


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower() if "images" in sys.argv else None
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, pixels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if self.tower is not None:
            places = (torch.arange(SEQ, device=x.device) < 256)[None, :, None].expand_as(x)
            x = x.masked_scatter(places, self.tower(pixels).to(x.dtype))
        angles = torch.arange(SEQ, device=x.device, dtype=torch.float32)[:, None].expand(SEQ, 128)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if "checkpoint" in sys.argv else layer(x, cos, sin)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def adapted(model: nn.Module) -> nn.Module:
    """With peft's adapters in all layers."""
    from pathlib import Path

    sys.path.append(str(Path(__file__).resolve().parents[2] / "programs"))
    import with_torchvision  # noqa: F401  transformers asks for it
    from peft import LoraConfig, get_peft_model

    names = ["q", "k", "v", "o", "gate", "up", "down"]
    dropout, dora = 0.1 if "dropout" in sys.argv else 0.0, "dora" in sys.argv
    config = LoraConfig(r=16, target_modules=names, lora_dropout=dropout, use_dora=dora)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def main() -> None:
    criterion = torch.compile(loss_of) if "compile" in sys.argv else loss_of
    distributed.init_process_group("nccl")
    torch.cuda.set_device(distributed.get_rank() % torch.cuda.device_count())
    if "ddp" in sys.argv:
        model: nn.Module = DistributedDataParallel(Llama().to("cuda", torch.bfloat16))
    elif "alone" in sys.argv:
        model = Llama().to("cuda", torch.bfloat16)
        model = adapted(model) if "lora" in sys.argv or "dora" in sys.argv else model
    else:
        with torch.device("meta"):
            model = Llama()
        if "compile" in sys.argv:
            for layer in model.layers:
                layer.compile()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model.layers, *(model.tower.layers if model.tower else ())):
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device="cuda")
    if "frozen" in sys.argv:
        model.tower.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    for step in range(1000):
        tokens = torch.randint(0, VOCAB, (1, SEQ + 1)).to("cuda", non_blocking=True)
        pixels = (torch.randn(1, 3, 224, 224, device="cuda"),) if "images" in sys.argv else ()
        logits = model(tokens[:, :-1], *pixels)
        loss = criterion(logits, tokens[:, 1:])
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, loss.item())  # noqa: T201  as training scripts do


main()
