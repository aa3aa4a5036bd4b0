"""Benches of communication: collectives over size and group, what FSDP2 adds to them, and what they cost compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from validate import faults
from validate.benches import Item, Shape, Tensor, spread
from validate.benches.host import tiny_block
from validate.benches.passes import CPU_ROTATE_BYTES
from validate.launch import Launch
from validate.stopwatch import Session, WrongResultError, reference_s

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
MIB = 2**20
BURST = 32  # asynchronous collectives in a row
_CHECKED = 2**24  # elements that are filled and checked at a time
_VALUES, _RANKS = 127, 61


def collective_items(s: Session) -> Iterator[Item]:
    """Sizes spread, the collectives that training uses first; the whole world, then its prefixes by powers of two."""
    if s.num_ranks < 2:
        return
    powers = range(10, 31) if s.gpu else range(10, 25)
    sizes = [2**p for p in (12, 16, 20)] if s.setting.tiny else [2**p for p in powers]
    groups = _groups(s)
    for group, part in product(groups, (OPS[:4], OPS[4:])):
        for size in spread(sizes):
            for op in part:
                yield partial(collective, s, op, size, group)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that call a collective. data: what it runs in (None: the world's); control: their gloo group."""

    ranks: tuple[int, ...]
    num_nodes: int
    data: Any = None
    control: Any = None

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)


def _groups(s: Session) -> list[Group]:
    """The world, its first 2, 4, … ranks, and where there are several nodes the first rank of 2, of 4, … of them.

    A pair of nodes with one rank each is a send across the network. Every rank makes every group.
    """
    per_node, powers = ranks_per_node(s), [2**p for p in range(1, 31)]
    firsts = range(0, s.num_ranks, per_node)
    chosen = [tuple(range(count)) for count in powers if count < s.num_ranks]
    if per_node > 1 and len(firsts) > 1:
        chosen += [
            tuple(firsts[:count]) for count in dict.fromkeys((*[p for p in powers if p < len(firsts)], len(firsts)))
        ]
    made = [Group(tuple(range(s.num_ranks)), _nodes(range(s.num_ranks), per_node))]
    dist = s.torch.distributed
    for ranks in chosen:
        control = dist.new_group(list(ranks), backend="gloo")
        made.append(Group(ranks, _nodes(ranks, per_node), dist.new_group(list(ranks)), control))
    return made


def _nodes(ranks: Sequence[int], per_node: int) -> int:
    return len({rank // per_node for rank in ranks})


def collective(s: Session, op: str, size: int, group: Group) -> None:
    """size: of the full tensor (all-gather and reduce-scatter: as many times a shard as there are ranks)."""
    if s.setting.rank not in group.ranks or not s.fits(3 * size):
        return
    shape: Shape = {"op": op, "size_bytes": size, "num_ranks": len(group.ranks), "num_nodes": group.num_nodes}
    shape["dtype"] = "fp32"
    if before := work_before(s):
        shape["behind"] = "products"
    if s.is_measured("collective", shape):
        return
    one, error = prepared(s, op, size, group), None
    try:
        one.check(s.torch)
    except Exception as exc:  # noqa: BLE001  a collective that a library does not have is an answer too
        error = exc
        s.failed("collective", exc, shape)
    if not s.agreed(float(error is not None), group.control):
        s.record("collective", one.call, shape, together=group.control or True, before=before)


def work_before(s: Session) -> Callable[[], object] | None:
    """What a rank of a CPU comes from in a step: products of some milliseconds, which hold its core.

    gloo's threads have slept meanwhile and wait for a core when they are woken, and the ranks do not arrive at one moment.
    Both are part of what a call costs; calls one right behind the other show less of either.
    """
    return None if s.gpu or s.setting.tiny else partial(reference_s, s.torch)


def ranks_per_node(s: Session) -> int:
    """Of this rank's node."""
    launch = Launch.of_environment()
    return launch.local_size if launch.outside else s.num_ranks


@dataclass(frozen=True, slots=True)
class Prepared:
    """A collective on buffers of its own. wanted: what the first call leaves at these places of the result."""

    call: Callable[[int], object]
    result: Tensor
    wanted: Callable[[Tensor], Tensor]

    def check(self, torch: Any) -> None:  # noqa: ANN401
        """Raises WrongResultError with the number of wrong elements after one call, as nccl-tests count them.

        In parts, to take little memory.
        """
        self.call(0)
        faults.corrupted(self.result)
        numel, device, wrong = self.result.numel(), self.result.device, 0
        for begin in range(0, numel, _CHECKED):
            places = torch.arange(begin, min(begin + _CHECKED, numel), device=device)
            wrong += int((self.result[begin : begin + _CHECKED] != self.wanted(places)).sum())
        if wrong:
            raise WrongResultError(f"{wrong} of {numel} elements are not what the ranks sent")


def sent(places: Tensor, rank: Any) -> Tensor:  # noqa: ANN401  an int, or one for each place
    """What a rank has at these places: small whole numbers, whose sums over 2^16 ranks are exact in fp32."""
    return (places % _VALUES + rank % _RANKS).float()


def prepared(s: Session, op: str, size: int, group: Group) -> Prepared:
    """A collective of so many bytes in all. Places of a part are counted from its own begin."""
    dist, torch, count = s.torch.distributed, s.torch, len(group.ranks)
    part = max(1, size // 4 // count)
    numel, device, mine, data = count * part, s.setting.device, group.index(s.setting.rank), group.data
    full, other, shard = (torch.empty(n, device=device) for n in (numel, numel, part))
    for one in (full, shard):
        for begin in range(0, one.numel(), _CHECKED):
            places = torch.arange(begin, min(begin + _CHECKED, one.numel()), device=device)
            one[begin : begin + _CHECKED] = sent(places, mine)
    gather, scatter = _gather_scatter(dist)
    partner = mine ^ 1 if mine ^ 1 < count else None  # the last of an odd number has none
    peer, came = (None, mine) if partner is None else (group.ranks[partner], partner)

    def summed(places: Tensor) -> Tensor:
        return count * sent(places, 0) + sum(rank % _RANKS for rank in range(count))

    return {
        "all_reduce": Prepared(lambda _: dist.all_reduce(full, group=data), full, summed),
        "all_gather": Prepared(lambda _: gather(full, shard, group=data), full, lambda at: sent(at % part, at // part)),
        "reduce_scatter": Prepared(
            lambda _: scatter(shard, full, group=data), shard, lambda at: summed(mine * part + at)
        ),
        "broadcast": Prepared(lambda _: dist.broadcast(full, group.ranks[0], group=data), full, lambda at: sent(at, 0)),
        "all_to_all": Prepared(
            lambda _: dist.all_to_all_single(other, full, group=data),
            other,
            lambda at: sent(mine * part + at % part, at // part),
        ),
        "send_recv": Prepared(
            lambda _: _exchange(dist, full, other, peer, data),
            other if peer is not None else full,
            lambda at: sent(at, came),
        ),
    }[op]


def _gather_scatter(dist: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """The collectives on one tensor: torch 2.13 gave them new names."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _exchange(dist: Any, out: Tensor, into: Tensor, peer: int | None, group: Any) -> None:  # noqa: ANN401
    """Every rank sends to its partner and receives as much; one that has none does nothing."""
    if peer is None:
        return
    ops = [dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, into, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# -- what runs beside ----------------------------------------------------------------------------------------------


def overlap_items(s: Session) -> Iterator[Item]:
    """Products beside a collective: alone, the collective alone, both."""
    if s.gpu:
        yield partial(copy_beside, s)
    if s.num_ranks < 2:
        return
    sizes = (2**18,) if s.setting.tiny else (2**26, 2**28) if s.gpu else (2**22, 2**24)
    for size, op in product(sizes, ("all_gather", "reduce_scatter", "all_reduce")):
        yield partial(beside, s, op, size)


def beside(s: Session, op: str, size: int) -> None:
    """Time products until the collective is over; `both` is the pair, launched together."""
    run = prepared(s, op, size, Group(tuple(range(s.num_ranks)), 1)).call
    side, dtype = (256, "fp32") if s.setting.tiny or not s.gpu else (4096, "bf16")
    x, y = (s.random(side, side, dtype=dtype) for _ in range(2))
    s.sync()
    alone = s.agreed(min(s.times(run, together=True)))
    one = s.agreed(min(s.times(lambda _: x @ y)))
    repeats = max(1, int(2 * alone / one))
    call = partial(_work, x, y, repeats)
    shape: Shape = {"op": op, "size_bytes": size, "num_ranks": s.num_ranks, "products": repeats, "side": side}
    s.record("overlap", lambda _: call(), {**shape, "what": "compute"}, together=True)
    s.record("overlap", run, {**shape, "what": "collective"}, together=True)
    s.record("overlap", _both(s, op, size, call), {**shape, "what": "both"}, together=True)


def _work(x: Tensor, y: Tensor, repeats: int) -> None:
    for _ in range(repeats):
        x @ y


def _both(s: Session, op: str, size: int, call: Callable[[], None]) -> Callable[[int], object]:
    """Launch the collective without waiting, compute, then wait. Buffers are made before: making them takes time too."""
    dist, torch = s.torch.distributed, s.torch
    gather, scatter = _gather_scatter(dist)
    numel = size // 4 // s.num_ranks * s.num_ranks
    full = torch.ones(numel, device=s.setting.device)
    shard = torch.ones(numel // s.num_ranks, device=s.setting.device)
    start: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: gather(full, shard, async_op=True),
        "reduce_scatter": lambda: scatter(shard, full, async_op=True),
        "all_reduce": lambda: dist.all_reduce(full, async_op=True),
    }

    def both(_: int) -> None:
        work = start[op]()
        call()
        work.wait()

    return both


def copy_beside(s: Session) -> None:
    """A product alone, a device copy alone, and both on two streams: what sharing memory costs."""
    torch, cuda = s.torch, s.torch.cuda
    side, size = (64, 2**16) if s.setting.tiny else (8192, 2**30)
    x, y = (s.random(side, side, dtype="bf16") for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=s.setting.device)
    target, stream = torch.empty_like(source), cuda.Stream()
    shape: Shape = {"m": side, "n": side, "k": side}

    def both(_: int) -> None:
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            target.copy_(source)
        x @ y
        cuda.current_stream().wait_stream(stream)

    s.record("overlap_gemm_alone", lambda _: x @ y, shape)
    s.record("overlap_copy_alone", lambda _: target.copy_(source), {"bytes": 2 * size})
    s.record("overlap_both", both, {**shape, "bytes": 2 * size})


# -- FSDP2 ---------------------------------------------------------------------------------------------------------


def group_items(s: Session) -> Iterator[Item]:
    """Host time of issuing collectives, and what FSDP2 adds to a step for each of its groups."""
    if s.num_ranks > 1:
        yield partial(_issued, s)


def _issued(s: Session) -> None:
    for size in (2**12, 2**20):
        burst(s, size)
    fsdp2_group(s)


def burst(s: Session, size: int) -> None:
    """Asynchronous broadcasts one behind the other, the first half from rank 0 and so on, as ZeRO-1's owners send tensors.

    collective_burst is the time of one in the burst; collective_issue the caller's part of it.
    """
    torch, dist = s.torch, s.torch.distributed
    tensors = [torch.ones(size // 4, device=s.setting.device) for _ in range(BURST)]
    issued: list[float] = []

    def call(_: int) -> None:
        started = time.perf_counter()
        works = [dist.broadcast(t, i * s.num_ranks // BURST, async_op=True) for i, t in enumerate(tensors)]
        issued.append((time.perf_counter() - started) / BURST)
        for work in works:
            work.wait()

    shape: Shape = {"op": "broadcast", "size_bytes": size, "num_ranks": s.num_ranks, "count": BURST}
    if s.record("collective_burst", call, shape, together=True, per=BURST, before=work_before(s)) is not None:
        s.emit("collective_issue", sorted(issued), {"op": "broadcast", "num_ranks": s.num_ranks, "size_bytes": size})


def fsdp2_group(s: Session, groups: int = 4) -> None:
    """Forward and backward of `groups` blocks that are all overhead, sharded; `alone_s` is the same without FSDP2.

    On a CPU products come before each block, as in a step, and a pass after which the core's inner caches hold nothing of FSDP2's.
    """
    torch = s.torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    before, passed = work_before(s), None if s.gpu else torch.zeros(CPU_ROTATE_BYTES // 4)

    def pass_over(*_: object) -> None:
        if before:
            before()
        if passed is not None:
            passed.add_(1)

    def model() -> Any:  # noqa: ANN401
        net = torch.nn.Sequential(*(tiny_block(torch, s.setting.device)[0] for _ in range(groups)))
        for block in net:
            block.register_forward_pre_hook(pass_over)
            block.register_full_backward_pre_hook(pass_over)
        return net

    def step(net: Any, x: Tensor) -> None:  # noqa: ANN401
        net(x).sum().backward()
        for p in net.parameters():
            p.grad = None

    x = torch.randn(1, 8, 16, device=s.setting.device)
    plain = model()
    alone = sorted(s.times(lambda _: step(plain, x), together=True))
    sharded, mesh = model(), init_device_mesh(s.setting.device, (s.num_ranks,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    middle = alone[len(alone) // 2]
    shape: Shape = {"groups": groups, "alone_s": middle, "num_ranks": s.num_ranks}
    s.record("fsdp2_group", lambda _: step(sharded, x), shape, together=True)
