"""Three steps of a GPT as teaching scripts write it (DDP, autocast, gradient scaler, clipping), or with an operator of its own."""

import os
import sys
from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, SEQ, VOCAB = 64, 4, 32, 128


@torch.library.custom_op("own::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


squared_relu.register_autograd(
    lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].relu(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Block(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(SEQ, SEQ)).view(1, 1, SEQ, SEQ))
        self.activation = squared_relu if own else functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (one.view(b, s, HEADS, -1).transpose(1, 2) for one in self.qkv(self.norm1(x)).split(WIDTH, 2))
        scores = (q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf")).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).contiguous().view(b, s, WIDTH))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block(own=own) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), targets.view(-1))


def main(kind: str) -> None:
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    model = DistributedDataParallel(GPT(own=kind == "own").to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        for last in (False, True):  # two micro-batches, reduced with the second
            tokens = torch.randint(0, VOCAB, (2, SEQ + 1)).to(device)
            with nullcontext() if last else model.no_sync():
                (model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


main(sys.argv[1])
