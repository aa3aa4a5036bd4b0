"""A pool over several tiers in a step: tensors leave HBM when a moment needs more than there is, and return when used.

Tensors are what a unit keeps: its parameters, gradients and optimizer states, and what it saves of a micro-batch. Ops use them in the
order in which they are launched, the optimizer unit by unit; what else a moment holds has to be in HBM, and they have the room beside
it. An op waits for what it uses, and that for what makes room for it; on demand both begin when the op could, else one use earlier.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, Protocol, Self

from simulator.memory import MemoryUse, device_history, moment_of, outside_torch_bytes, step_live_bytes, window_bytes
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.history import History
from simulator.memory.tape import TAG
from simulator.memory.use import history_memory
from simulator.parallel.model_shard import body_names, shard_of
from simulator.play.lower.host_lead import Lowered, passes_ahead
from simulator.play.lower.pool_moves import Change, Key, Mover, Use
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.tiers import HostTier
from simulator.spec.model import Model
from simulator.spec.plan import Offload
from simulator.work.offload import Tier, Transfers, hierarchy
from simulator.work.offload.tiered import POLICIES, Moves, Tensor, filled, restacked
from simulator.work.program import Compute, Program
from simulator.work.script import resident_tensors
from simulator.work.trace import MemoryTrace

_USE: Final = re.compile(r"(all-gather|forward|backward) (embedding|head|layer\d+) mb(\d+)( backward)?")
_OPTIMIZER: Final = "optimizer"
_STATES: Final = ("parameters", "gradients", "optimizer_state")
_STEPS: Final = 3  # the first fills the tiers, the second counts, the third is its future


class Pooled(Lowered, Protocol):
    """What a pool depends on of a plan made concrete (`Lowering`)."""

    @property
    def model(self) -> Model: ...
    @property
    def device(self) -> Device: ...
    @property
    def calibration(self) -> Calibration: ...
    @property
    def untiered(self) -> Self: ...
    def program(self, num_micro_batches: int) -> Program: ...
    def transfers_under(self, offload: Offload, tier: HostTier, lent_bytes_per_s: float) -> Transfers: ...


@dataclass(slots=True)
class Residency:
    """A step on the tiers. changes: before each use; peaks: by tier.

    below: bytes by category that are not in HBM at a use; totals: those that its moment needs in all.
    over: bytes that HBM lacks for what is used at once; lost: bytes for which no tier has room.
    """

    changes: list[list[Change]] = field(default_factory=list)
    below: list[Counter[str]] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    peaks: Counter[str] = field(default_factory=Counter)
    over: int = 0
    lost: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolTiers:
    """The tiers of one rank's pool. memory, trace: as if HBM had no end; live: (phase, unit, micro-batch) -> bytes that it needs."""

    memory: MemoryUse
    trace: MemoryTrace
    live: Mapping[tuple[str, str, int], int]
    sizes: Mapping[Key, int]
    program: Program
    tiers: tuple[Tier, ...]
    moves: Moves
    evict: str
    transfers: Transfers

    @classmethod
    def of(cls, lowering: Pooled) -> PoolTiers:
        """Of a plan whose policy has tiers."""
        plan, model, device, plain = lowering.plan, lowering.model, lowering.device, lowering.untiered
        history = device_history(model, plan, lowering.stack, device, passes_ahead(plain))
        live = step_live_bytes(history)
        outside = outside_torch_bytes(device, plan, stack=lowering.stack) + window_bytes(model, plan, lowering.stack)
        memory, trace = history_memory(history, live, plan, device, outside)
        program = plain.program(min(plan.num_micro_batches, 2))
        needs = Counter[tuple[str, str, int]]()
        for most, index in live.most:
            phase, micro_batch, unit, _ = moment_of(history, index)
            needs[phase, unit, micro_batch] = max(needs[phase, unit, micro_batch], most)
        return cls(
            memory=memory, trace=trace, live=needs, sizes=_sizes(lowering, history, program), program=program,
            tiers=_tiers(lowering), moves=_moves(lowering), evict=plan.memory.evict, transfers=_transfers(lowering),
        )  # fmt: skip

    @property
    def limit(self) -> int:
        """Bytes of HBM that the pool can have."""
        return self.memory.capacity_bytes - self.memory.outside_torch_bytes

    @property
    def spills(self) -> bool:
        """HBM alone does not hold the step; pages that are free are given back before anything leaves."""
        return not self.memory.fit.runs

    @cached_property
    def residency(self) -> Residency:
        """Of a step of two micro-batches at most, which has the peaks of all."""
        return self._played(list(self._uses(self.program)))

    def of_memory(self) -> tuple[MemoryUse, MemoryTrace]:
        """What is in HBM, and over the step; what no move makes fit stays too much."""
        memory, found, most = self.memory, self.residency, self.limit + self.residency.over
        if not self.spills:
            return memory, self.trace
        peak = max(range(len(found.totals)), key=found.totals.__getitem__)
        below = found.below[peak]
        left = {name: max(0, size - below[name]) for name, size in memory.by_category.items()}
        use = replace(
            memory,
            by_category={name: size for name, size in left.items() if size},
            peak_allocated_bytes=sum(left.values()),
            peak_reserved_bytes=most,
            low_reserved_bytes=min(memory.low_reserved_bytes, most),
            high_reserved_bytes=most,
            spilled_bytes=sum(below.values()),
            pressure=None,
        )
        samples = tuple(
            one._replace(allocated_bytes=min(one.allocated_bytes, most), reserved_bytes=min(one.reserved_bytes, most))
            for one in self.trace.samples
        )
        return use, replace(self.trace, samples=samples, by_category=use.by_category)

    def moved(self, program: Program, rank: int | None = None) -> Program:
        """The program with its moves as ops; unchanged where nothing moves."""
        if not self.spills:
            return program
        uses = list(self._uses(program))
        mover = Mover(
            tiers=[one.name for one in self.tiers], moves=self.moves, transfers=self.transfers, size_of=self.size_of,
            program=program, rank=rank,
        )  # fmt: skip
        return mover.moved(uses, self._played(uses).changes)

    # -- which op uses what

    def _uses(self, program: Program) -> Iterator[Use]:
        found = [_USE.fullmatch(op.label) for op in program.ops]
        gathered = {one[2] for one in found if one and one[1] == "all-gather"}
        for at, (op, visit) in enumerate(zip(program.ops, found, strict=True)):
            if visit:
                phase = "backward" if visit[1] == "backward" or visit[4] else "forward"
                yield self._use(at, phase, visit[2], int(visit[3]), self._visited(visit, visit[2] in gathered))
            elif op.label == _OPTIMIZER and isinstance(op, Compute):
                yield from self._optimized(at)

    def _visited(self, visit: re.Match[str], gathered: bool) -> tuple[Key, ...]:  # noqa: FBT001
        action, unit, number = visit[1], visit[2], int(visit[3])
        if action == "all-gather":
            return ((unit, "parameters", -1),)
        weights = () if gathered else ((unit, "parameters", -1),)
        gradients = ((unit, "gradients", -1),) if action == "backward" else ()
        return (*weights, *gradients, (unit, "activations", number))

    def _optimized(self, at: int) -> Iterator[Use]:
        units = list(dict.fromkeys(unit for unit, category, _ in self.sizes if category == "parameters"))
        total = sum(self.sizes[unit, "parameters", -1] for unit in units)
        for unit in units:
            tensors = tuple((unit, category, -1) for category in _STATES)
            share = self.sizes[unit, "parameters", -1] / total
            yield replace(self._use(at, _OPTIMIZER, "", 1, tensors), unit=unit, share=share)

    def _use(self, at: int, phase: str, unit: str, micro_batch: int, tensors: Sequence[Key]) -> Use:
        while micro_batch and (phase, unit, micro_batch) not in self.live:
            micro_batch -= 1  # two micro-batches stand for any number
        total = self.live.get((phase, unit, micro_batch), 0)
        sized = tuple(one for one in tensors if self.size_of(one))
        return Use(at=at, unit=unit, share=1.0, total=total, tensors=sized)

    def size_of(self, key: Key) -> int:
        """Bytes of a tensor, of whatever micro-batch."""
        return self.sizes.get(key) or self.sizes.get((key[0], key[1], -2), 0)

    def _played(self, uses: Sequence[Use]) -> Residency:
        """Play equal steps; tensors made in a step are freed after their last use."""
        return _Steps(self, uses).played()


class _Steps:
    """Uses of equal steps, one after another, and where each tensor lies at each of them. Tensors have numbers; what a step makes, one a step."""

    def __init__(self, pool: PoolTiers, uses: Sequence[Use]) -> None:
        self._pool, self._uses = pool, uses
        self._first, self._last = dict[Key, int](), dict[Key, int]()
        for index, use in enumerate(uses):
            for key in use.tensors:
                self._first.setdefault(key, index)
                self._last[key] = (
                    len(uses) - 1 if key[1] == "gradients" else index
                )  # freed together, behind the optimizer
        self._keys: list[Key] = []
        self._numbers: list[dict[Key, int]] = []
        for step in range(_STEPS):
            new = [key for key in self._last if not step or key not in pool.sizes]
            own = {key: len(self._keys) + at for at, key in enumerate(new)}
            self._numbers.append({**self._numbers[0], **own} if step else own)
            self._keys += new
        self._bytes = [pool.size_of(key) for key in self._keys]

    def played(self) -> Residency:
        """The second step. A use puts its tensors on top of the stack, and all that lives is dealt to the tiers from there."""
        rank, rooms, found = self._policy(), self._rooms(), Residency()
        place, stack, at = dict[int, int](), list[int](), 0
        for numbers in self._numbers[:-1]:
            for index, use in enumerate(self._uses):
                mine = {numbers[key]: float("-inf") for key in use.tensors}
                for used in mine:
                    stack = restacked(stack, used, lambda one: mine.get(one) or rank(one, at))  # noqa: B023
                    at += 1
                after = self._placed(stack, place, mine, rooms[index])
                if numbers is not self._numbers[0]:
                    self._note(found, place, after, mine)
                    found.totals.append(use.total)
                    found.over = max(found.over, -rooms[index])
                stack = [
                    one for one in stack if self._keys[one] in self._pool.sizes or self._last[self._keys[one]] > index
                ]
                place = {one: after[one] for one in stack}
        return found

    def _policy(self) -> Callable[[int, int], float]:
        """(tensor, number of a use) -> rank."""
        order = [
            (float(step * len(self._uses) + index), numbers[key])
            for step, numbers in enumerate(self._numbers)
            for index, use in enumerate(self._uses)
            for key in use.tensors
        ]
        tensors = [Tensor(name="", gpu=0, num_bytes=size, uses_s=()) for size in self._bytes]
        return POLICIES[self._pool.evict](tensors, order, self._pool.tiers, self._pool.moves)

    def _rooms(self) -> list[int]:
        """Bytes of HBM for tensors at each use: all that live, less what the moment needs too much."""
        limit = self._pool.limit
        alive = [0] * (len(self._uses) + 1)
        for key, first in self._first.items():
            resident = key in self._pool.sizes
            alive[0 if resident else first] += self._pool.size_of(key)
            alive[-1 if resident else self._last[key] + 1] -= self._pool.size_of(key)
        return [
            live if use.total <= limit else min(limit, live - use.total + limit)
            for live, use in zip(accumulate(alive), self._uses, strict=False)
        ]

    def _placed(
        self, stack: Sequence[int], place: Mapping[int, int], mine: Mapping[int, float], room: int
    ) -> dict[int, int]:
        """Tensor -> tier. Tensors below HBM stay there until used."""
        rooms = (max(0, room), *(one.num_bytes for one in self._pool.tiers[1:]))
        lowest = filled(self._bytes, rooms, stack)
        return {one: tier if one in mine else max(tier, place.get(one, 0)) for one, tier in lowest.items()}

    def _note(
        self, found: Residency, place: Mapping[int, int], after: Mapping[int, int], mine: Mapping[int, float]
    ) -> None:
        resident, below = Counter[int](), Counter[str]()
        for number, tier in after.items():
            resident[tier] += self._bytes[number]
            below[self._keys[number][1]] += self._bytes[number] if tier else 0
        moved = ((number, place.get(number, tier), tier) for number, tier in after.items())
        found.changes.append([(self._keys[number], was, tier) for number, was, tier in moved if was != tier])
        found.below.append(below)
        found.over = max([found.over, *(self._bytes[number] for number in mine if after[number])])
        found.lost = max(found.lost, resident.pop(len(self._pool.tiers), 0))
        for tier, size in resident.items():
            name = self._pool.tiers[tier].name
            found.peaks[name] = max(found.peaks[name], size)


def _sizes(lowering: Pooled, history: History, program: Program) -> dict[Key, int]:
    """Bytes by tensor. Micro-batch -1: it stays from step to step; -2: of any micro-batch, or of a step."""
    units = list(dict.fromkeys(visit[2] for op in program.ops if (visit := _USE.fullmatch(op.label))))
    found: dict[Key, int] = {}
    shard = shard_of(lowering.stack.stored(lowering.model), lowering.plan, 0)
    totals = {name: sum(sizes) for name, sizes in resident_tensors(shard, lowering.plan).items()}
    weights, saved = {unit: weight_of(lowering.model, unit) for unit in units}, saved_by_unit(history)
    for unit in units:
        for name in _STATES:
            if size := totals[name] * weights[unit] // sum(weights.values()):
                found[unit, name, -1] = size
        for name, sizes in saved.items():
            if sizes[unit] and (unit, name, -1) not in found:
                found[unit, name, -2] = sizes[unit]
    return found


def weight_of(model: Model, unit: str) -> int:
    """Parameters of a unit, by which the states of a rank are dealt to its units."""
    if unit in ("embedding", "head"):
        return model.num_parameters_of(unit)  # type: ignore[arg-type]
    return model.num_parameters_of(model.body[body_names(model).index(unit)])


def saved_by_unit(history: History) -> dict[str, Counter[str]]:
    """Category -> unit -> bytes: activations of a micro-batch from its forward to its backward, gradients from there to the optimizer."""
    passes = {
        (TAG["activations"], "forward"): ("activations", "backward"),
        (TAG["gradients"], "backward"): ("gradients", _OPTIMIZER),
    }
    made: dict[int, tuple[str, str, str, int]] = {}
    found = {"activations": Counter[str](), "gradients": Counter[str]()}
    for index in range(history.steady, len(history.events)):
        slot, num_bytes, _, tag = history.events[index]
        phase, micro_batch, unit, _ = moment_of(history, index)
        if num_bytes >= 0 and (tag, phase) in passes and not micro_batch:
            made[slot] = (*passes[tag, phase], unit, num_bytes)
        elif num_bytes < 0 and slot in made:
            category, until, unit, size = made.pop(slot)
            found[category][unit] += size if phase == until else 0
    return found


def _tiers(lowering: Pooled) -> tuple[Tier, ...]:
    """One rank's part of each; unified memory knows HBM and the host's alone."""
    tiers = hierarchy(lowering.cluster, lowering.plan.num_devices)
    return tuple(one for one in tiers if one.name in ("hbm", "host") or lowering.plan.memory.policy != "unified")


def _moves(lowering: Pooled) -> Moves:
    """The cost of a move besides its bytes. Rounds of page faults are in the rate of their link."""
    host, memory = lowering.cluster.host_tier, lowering.plan.memory
    assert host is not None  # a rule asks for it
    unit_s = 0.0 if memory.policy == "unified" and not memory.prefetch else host.copy_latency_s
    if memory.policy == "overcommit":
        unit_s += DriverCosts.of(lowering.calibration).malloc.call_s
    return Moves(unit_s=unit_s, ahead=memory.prefetch)


def _transfers(lowering: Pooled) -> Transfers:
    plan, cluster = lowering.plan, lowering.cluster
    assert cluster.host_tier is not None
    faults = plan.memory.policy == "unified" and not plan.memory.prefetch
    busy = min(plan.num_devices, cluster.gpus_per_node)
    lenders = cluster.idle_gpus + (cluster.gpus_per_node - busy if cluster.intra.shape != "pcie" else 0)
    offload = Offload(migration="fault" if faults else "copy")
    return lowering.transfers_under(offload, cluster.host_tier, lenders * cluster.intra.bytes_per_s / busy)
