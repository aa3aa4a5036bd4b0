"""Three steps of a small network by DeepSpeed's engine in bf16: STAGE of ZeRO."""

import sys
from importlib import import_module

import deepspeed
import torch
from torch import Tensor, nn

WIDTH, VOCAB, SEQ = 64, 128, 32


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def main(stage: int) -> None:
    on_gpu = torch.cuda.is_available()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if not on_gpu:  # collectives by gloo, not by an operator that DeepSpeed compiles for ranks of one host
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(3):
        tokens = torch.randint(0, VOCAB, (2, SEQ), device=engine.device)
        engine.backward(engine(tokens))
        engine.step()


main(int(sys.argv[1]))
