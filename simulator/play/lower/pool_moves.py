"""Moves between tiers as ops of a program: an op waits for what it uses, and that for what makes room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from simulator.work.offload import Transfers
from simulator.work.offload.tiered import Moves
from simulator.work.program import Collective, Program, ProgramOp

_UP: Final = {"peer": ("from_peer",), "host": ("h2d",), "nvme": ("nvme_read", "h2d")}
_DOWN: Final = {"peer": ("to_peer",), "host": ("d2h",), "nvme": ("d2h", "nvme_write")}

Key = tuple[str, str, int]  # unit, category, micro-batch; -1: of every one
Change = tuple[Key, int, int]  # of a tensor, from a tier, to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What an op uses, or a part of it. at: index of the op; share: of its work; total: bytes that the moment needs of HBM in all."""

    at: int
    unit: str
    share: float
    total: int
    tensors: tuple[Key, ...]


@dataclass(kw_only=True)
class Mover:
    """Writes a program with moves. Each kind of transfer has a stream of its own, as offload's have. tiers: by name, HBM first."""

    tiers: Sequence[str]
    moves: Moves
    transfers: Transfers
    size_of: Callable[[Key], int]
    program: Program
    rank: int | None
    _used: dict[Key, int] = field(default_factory=dict)  # by which op last
    _ends: list[int] = field(default_factory=list)  # of uses
    _ops: list[ProgramOp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids = count(max(op.id for op in self.program.ops) + 1)

    def moved(self, uses: Sequence[Use], changes: Sequence[Sequence[Change]]) -> Program:
        """The program with the moves before each use."""
        todo: dict[int, list[tuple[Use, Sequence[Change]]]] = {}
        for use, one in zip(uses, changes, strict=True):
            todo.setdefault(use.at, []).append((use, one))
        last: dict[str, int] = {}
        for at, op in enumerate(self.program.ops):
            for part, used, one in _parts(op, todo.get(at, []), self._ids):
                gate = [*part.after, *((last[part.stream],) if part.stream in last else ())]
                waits = self._all(one, gate, part.label)
                self._ops.append(replace(part, after=tuple(sorted({*part.after, *waits}))))
                last[part.stream] = part.id
                if used is not None:
                    self._used |= dict.fromkeys(used.tensors, part.id)
                    self._ends.append(part.id)
        links = {**self.program.links, **self.transfers.links(self.rank)}
        return replace(self.program, ops=tuple(self._ops), links=links)

    def _all(self, changes: Sequence[Change], gate: Sequence[int], label: str) -> list[int]:
        """Append all moves before an op and return its dependencies. gate: its dependencies without moves."""
        if self.moves.ahead:
            gate = self._ends[-2:-1]
        found: list[int] = []
        moves = sorted({(was, tier) for _, was, tier in changes}, key=lambda move: (move[1] == 0, move))
        for was, tier in moves:  # what leaves first
            keys = [key for key, *move in changes if tuple(move) == (was, tier)]
            after = [*gate, *found, *(self._used[key] for key in keys if key in self._used)]
            if kinds := self._way(was, tier):
                found.append(self._move(keys, kinds, after, f"{'evict' if tier else 'fetch'} for {label}"))
        return found

    def _way(self, was: int, tier: int) -> tuple[str, ...]:
        last = len(self.tiers) - 1
        was = min(was, last)  # what found no place is as far as it could go
        return () if tier > last or tier == was else transfers_between(self.tiers[was], self.tiers[tier])

    def _move(self, keys: Sequence[Key], kinds: Sequence[str], after: Sequence[int], label: str) -> int:
        end, size, number = tuple(sorted(set(after))), sum(map(self.size_of, keys)), -1
        for kind in kinds:
            cost = self.transfers.cost(kind, size, self.rank)
            if not kind.startswith("nvme"):
                cost = replace(cost, latency_s=len(keys) * self.moves.unit_s)
            number = next(self._ids)
            self._ops.append(
                Collective(
                    id=number, stream=kind, after=end, label=label, kind=kind, key=f"{kind}:{number} of {self.program.name}",
                    cost=cost, size_bytes=size,
                )
            )  # fmt: skip
            end = (number,)
        return number


def transfers_between(tier: str, other: str) -> tuple[str, ...]:
    """Kinds of transfers from one tier to another: by way of HBM, but for those that meet in the host's memory."""
    up, down = _UP.get(tier, ()), _DOWN.get(other, ())
    return (*up[:-1], *down[1:]) if up[-1:] == ("h2d",) and down[:1] == ("d2h",) else (*up, *down)


def _parts(
    op: ProgramOp, uses: Sequence[tuple[Use, Sequence[Change]]], ids: Iterator[int]
) -> Iterator[tuple[ProgramOp, Use | None, Sequence[Change]]]:
    """An op, or where things move between its uses, a part of it for each of them; the last one has its id."""
    if not uses:
        yield op, None, ()
        return
    if len(uses) == 1 or isinstance(op, Collective):
        yield op, uses[0][0], uses[0][1]
        return
    before: tuple[int, ...] = op.after
    for index, (use, changes) in enumerate(uses):
        ends = index == len(uses) - 1
        part = replace(
            op, id=op.id if ends else next(ids), after=before, label=f"{op.label} {use.unit}",
            duration_s=op.duration_s * use.share, parts=tuple((name, part_s * use.share) for name, part_s in op.parts),
            host_s=op.host_s * use.share, first_s=None, blocking=op.blocking and ends,
        )  # fmt: skip
        yield part, use, changes
        before = ()
