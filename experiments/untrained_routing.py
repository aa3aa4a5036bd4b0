"""How uneven is routing in a mixture's first steps? The busiest expert's rows over the mean, layer by layer.

    python experiments/untrained_routing.py EXPERTS [STEPS]

Benchmarks that train from random weights for some twenty steps run in this state unless they force balance. A small Llama with a
softmax top-2 router and Switch's balance loss (weight 0.01), normal(0, 0.02) weights, AdamW at 3e-4 behind a warm-up of 5 steps,
on the words of this repository's documents. A step of Adam moves a router's logit by rate times width, so the rate here is that of a
model WIDTH wide. Prints a line a step: median, mean and largest over layers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn
from torch.nn import functional

D, LAYERS, HEADS, D_FF, TOP_K, VOCAB, SEQ, BATCH = 256, 8, 8, 896, 2, 8192, 512, 3
WIDTH = 2048
_BALANCE, _RATE, _WARM = 0.01, 3e-4 * WIDTH / D, 5


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a mixture."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(D), nn.RMSNorm(D)])
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.router = nn.Linear(D, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, D, 2 * D_FF))
        self.down = nn.Parameter(torch.empty(num_experts, D_FF, D))
        self.counts, self.balance = torch.zeros(num_experts), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        return x + self.experts(self.norms[1](x).view(-1, d)).view(b, s, d)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
        self.balance = scores.shape[1] * (self.counts / chosen.numel() * scores.mean(0)).sum()
        out = torch.zeros_like(x)
        for expert in range(scores.shape[1]):
            rows, slot = torch.where(chosen == expert)
            if len(rows):
                gate, up = (x[rows] @ self.up[expert]).chunk(2, -1)
                made = (functional.silu(gate) * up) @ self.down[expert]
                out = out.index_add(0, rows, made * weights[rows, slot, None])
        return out


def words() -> torch.Tensor:
    """The repository's documents as numbers of words, the rarest together."""
    folder = Path(__file__).resolve().parents[1]
    text = "\n".join(one.read_text(errors="replace") for one in sorted(folder.glob("docs/**/*.md")))
    found = re.findall(r"\w+|[^\w\s]", text + (folder / "CHANGELOG.md").read_text())
    places = {word: place for place, (word, _) in enumerate(Counter(found).most_common(VOCAB - 1))}
    return torch.tensor([places.get(word, VOCAB - 1) for word in found])


def main() -> None:
    """Train for a few steps and say how rows fall on experts."""
    num_experts, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    torch.manual_seed(0)
    table, layers = nn.Embedding(VOCAB, D), nn.ModuleList([Layer(num_experts) for _ in range(LAYERS)])
    norm, head = nn.RMSNorm(D), nn.Linear(D, VOCAB, bias=False)
    model = nn.ModuleList([table, layers, norm, head])
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            ends = name.endswith(("out.weight", "down"))
            nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if ends else 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    data = words()
    for step in range(steps):
        starts = torch.randint(0, len(data) - SEQ - 1, (BATCH,))
        tokens = torch.stack([data[start : start + SEQ + 1] for start in starts])
        x = table(tokens[:, :-1])
        for layer in layers:
            x = layer(x)
        loss = functional.cross_entropy(head(norm(x)).flatten(0, 1), tokens[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1, (step + 1) / _WARM)
        (loss + _BALANCE * sum(layer.balance for layer in layers)).backward()
        optimizer.step()
        optimizer.zero_grad()
        uneven = [float(layer.counts.max() / layer.counts.float().mean()) for layer in layers]
        print(f"step {step:2} loss {float(loss):.2f} busiest over mean: median {median(uneven):.2f}, mean {fmean(uneven):.2f}, "
              f"largest {max(uneven):.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
