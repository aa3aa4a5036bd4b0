"""Benches of single links: what each rank sends to each other one of its node, and over its network card to the next node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

from validate.benches import Item, Shape, spread
from validate.benches.collectives import ranks_per_node
from validate.stopwatch import Session

Sends = Sequence[tuple[int, int]]  # (from, to) of ranks that send at the same time


def pair_items(s: Session) -> Iterator[Item]:
    """Sizes spread; of each every link in turn, so that any prefix of the items has seen all of them."""
    if s.num_ranks < 2:
        return
    powers = (12, 16) if s.setting.tiny else range(22, 28) if s.gpu else range(16, 22)
    per_node = ranks_per_node(s)
    if s.agreed(per_node) != -s.agreed(-per_node):
        return  # nodes of different sizes have no pairs in common
    s.torch.distributed.all_reduce(s.torch.ones(1, device=s.setting.device))  # NCCL's first call needs every rank
    for size in spread([2**p for p in powers]):
        for sends in within_nodes(s.num_ranks, per_node):
            yield partial(send, s, "pair", sends, size)
        for sends in between_nodes(s.num_ranks, per_node):
            yield partial(send, s, "rail", sends, size)


def within_nodes(num_ranks: int, per_node: int) -> Iterator[Sends]:
    """One pair of every node at a time, each way by itself: what it gets is the link's, and nobody else's."""
    firsts = range(0, num_ranks - per_node + 1, per_node)
    for one, other in permutations(range(per_node), 2):
        yield [(first + one, first + other) for first in firsts]


def between_nodes(num_ranks: int, per_node: int) -> Iterator[Sends]:
    """One card of every node at a time, to the same place of the next node, round to the first."""
    if num_ranks < 2 * per_node:
        return
    for place in range(per_node):
        there = range(place, num_ranks - num_ranks % per_node, per_node)
        yield list(zip(there, [*there[1:], there[0]], strict=True))


def send(s: Session, kind: str, sends: Sends, size: int) -> None:
    """Every rank repeats it equally often; those that send or receive write it down, a card's the one that sends."""
    rank = s.setting.rank
    to, source = dict(sends).get(rank), {target: one for one, target in sends}.get(rank)
    shape: Shape = {"size_bytes": size, "num_nodes": 1 if kind == "pair" else 2}
    if kind == "pair":  # a link is known by its ends, a card by the rank that it belongs to
        shape |= dict(zip(("source", "target"), (rank, to) if to is not None else (source, rank), strict=True))
    if s.is_measured(kind, shape):
        return
    call = _call(s, size, to, source)
    if to is None and source is None:
        s.times(call, together=True)
    else:
        s.record(kind, call, shape, together=True)


def _call(s: Session, size: int, to: int | None, source: int | None) -> Callable[[int], object]:
    torch, dist = s.torch, s.torch.distributed
    out, into = (torch.ones(size // 4, device=s.setting.device) for _ in range(2))

    def call(_: int) -> None:
        ops = [dist.P2POp(dist.isend, out, to)] if to is not None else []
        ops += [dist.P2POp(dist.irecv, into, source)] if source is not None else []
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    return call
