"""A mixture layer by hand: experts on their own ranks, tokens by all-to-all both ways, in equal parts. [functional]."""

import sys

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 64, 32


class Exchange(torch.autograd.Function):
    """Equal parts of the rows to every rank."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        distributed.all_to_all_single(y, x)
        return y

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return Exchange.apply(gradient.contiguous())


def exchange(x: Tensor) -> Tensor:
    if "functional" in sys.argv:
        parts = [ROWS // distributed.get_world_size()] * distributed.get_world_size()
        return functional.all_to_all_single_autograd(x, parts, parts, distributed.group.WORLD)
    return Exchange.apply(x)


def main() -> None:
    distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    router, expert = nn.Linear(WIDTH, WIDTH).to(DEVICE), nn.Linear(WIDTH, WIDTH).to(DEVICE)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], 0.1)
    for _ in range(4):
        x = router(torch.ones(ROWS, WIDTH, device=DEVICE))
        exchange(expert(exchange(x))).sum().backward()
        for parameter in router.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


main()
