"""A training script of nobody's framework: a Llama under FSDP2, under DDP, or alone. LAYERS WIDTH VOCAB SEQ [ddp|alone [lora|dora [dropout]]] [checkpoint] [compile]."""

import sys

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, VOCAB, SEQ = map(int, sys.argv[1:5])
HEADS, KV_HEADS = WIDTH // 128, max(1, WIDTH // 512)
HIDDEN = WIDTH * 7 // 2


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


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
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
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    for step in range(1000):
        tokens = torch.randint(0, VOCAB, (1, SEQ + 1)).to("cuda", non_blocking=True)
        logits = model(tokens[:, :-1])
        loss = criterion(logits, tokens[:, 1:])
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, loss.item())  # noqa: T201  as training scripts do


main()
