"""A pipeline by hand over all ranks, one stage each: shapes are sent before tensors, on the device. [FAULT]."""

import sys

import torch
from torch import Tensor, distributed, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ROWS, WIDTH, MICRO_BATCHES = 32, 64, 2


def send(tensor: Tensor, rank: int) -> None:
    distributed.send(torch.tensor(tensor.shape, device=DEVICE), rank)
    if FAULT != "lost" or rank == 0:
        distributed.send(tensor, rank)


def receive(rank: int) -> Tensor:
    shape = torch.empty(2, dtype=torch.int64, device=DEVICE)
    distributed.recv(shape, rank)
    if FAULT == "never" and rank == 0:
        distributed.recv(shape, rank)
    tensor = torch.empty(shape.tolist(), device=DEVICE)
    distributed.recv(tensor, rank)
    return tensor


def crossed(other: int) -> None:
    """Both send before they receive."""
    mine, theirs = torch.ones(1 << 20, device=DEVICE), torch.empty(1 << 20, device=DEVICE)
    if FAULT == "batched":
        both = [distributed.P2POp(distributed.isend, mine, other), distributed.P2POp(distributed.irecv, theirs, other)]
        for work in distributed.batch_isend_irecv(both):
            work.wait()
    else:
        distributed.send(mine, other)
        distributed.recv(theirs, other)


def main() -> None:
    distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    for _ in range(4):
        held = []
        for index in range(MICRO_BATCHES):
            rows = ROWS * (index + 1)  # of a shape that only the first stage knows
            x = torch.ones(rows, WIDTH, device=DEVICE) if rank == 0 else receive(rank - 1).requires_grad_()
            y = stage(x)
            held.append((x, y))
            if rank < last:
                send(y.detach(), rank + 1)
        for x, y in held:
            y.backward(torch.ones_like(y) if rank == last else receive(rank + 1))
            if rank:
                send(x.grad, rank - 1)
        if FAULT == "raises" and rank:
            raise ValueError("no labels")
        if FAULT in ("crossed", "batched"):
            crossed(last - rank)
        optimizer.step()
        optimizer.zero_grad()


main()
