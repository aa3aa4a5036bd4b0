"""Offload in a schedule: dependencies of ops on transfers. Each kind of transfer has its own stream.

Copies go on their own streams, so they are hidden under compute where nothing waits for them: parameters come before
their gather, gradients leave after their reduction, activations leave after a block's forward (the block after the next
waits until they have) and come back before its backward; the CPU updates when every gradient is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.play.lower.builder import Builder
from simulator.play.lower.work import Work
from simulator.work.offload import Moves

_OUT, _BACK = {"host": "d2h", "peer": "to_peer"}, {"host": "h2d", "peer": "from_peer"}


def _place(moves: Moves) -> str:
    """Where activations go; where none do, nothing asks."""
    return "peer" if moves.plan.offload.activations == "peer" else "host"


def fetch(build: Builder, moves: Moves, unit: str, index: int, done: list[int], gate: int | None) -> int | None:
    """Parameters of a unit for its forward: read from NVMe `prefetch` units ahead, copied up when `gate` ends.

    done: ends of the units before it. On demand (prefetch 0), both wait for the unit before.
    """
    return _fetch(build, moves, f"{unit} mb{index}", moves.units[unit].fetch_forward_bytes, done, gate)


def fetch_again(build: Builder, moves: Moves, unit: str, index: int, done: list[int], gate: int | None) -> int | None:
    """The same for its backward."""
    return _fetch(build, moves, f"{unit} mb{index} backward", moves.units[unit].fetch_backward_bytes, done, gate)


def _fetch(build: Builder, moves: Moves, label: str, size: int, done: list[int], gate: int | None) -> int | None:
    offload = moves.plan.offload
    before = done[-1] if done and offload.prefetch == 0 else None
    read = None
    if offload.parameters == "nvme":
        room = done[-1 - offload.prefetch] if len(done) > offload.prefetch else None
        read = build.transfer(f"read {label}", "nvme_read", size, room)
    return build.transfer(f"fetch {label}", "h2d", size, read, gate, before)


def send_gradient(
    build: Builder, moves: Moves, unit: str, index: int, reduced: int | None, *, final: bool
) -> int | None:
    """A unit's reduced gradient leaves; to be added in HBM, those of earlier micro-batches come up before.

    reduced: its reduction, None where one rank has nothing to reduce. What the CPU adds, the host waits for. The last
    op that the optimizer must wait for.
    """
    move = moves.units[unit]
    ready: int | None = build.last_compute if reduced is None else reduced
    if index > 0:
        ready = _first(build.transfer(f"fetch gradient {unit} mb{index}", "h2d", move.accumulated_bytes, ready), ready)
    sent = build.transfer(f"gradient {unit} mb{index}", "d2h", move.gradient_bytes, ready)
    if index > 0:
        added = build.transfer(f"add gradient {unit} mb{index}", "cpu_add", move.added_numel, sent)
        build.hold(added)
        sent = _first(added, sent)
    if final:
        sent = _first(build.transfer(f"write gradient {unit}", "nvme_write", move.swapped_bytes, sent), sent)
    return _first(sent, reduced)


def _first(op: int | None, other: int | None) -> int | None:
    return other if op is None else op


def before_forward(build: Builder, moves: Moves, unit: str, index: int) -> None:
    """The next compute waits until the activations of the block before the last have left."""
    position = moves.order.index(unit)
    if position >= 2:
        build.hold(build.found("evict", moves.order[position - 2], index))


def after_forward(build: Builder, moves: Moves, unit: str, index: int, computed: int) -> None:
    """A block's activations leave."""
    size = moves.units[unit].activation_bytes
    build.remember("evict", unit, index, build.transfer(f"evict {unit} mb{index}", _OUT[_place(moves)], size, computed))


def before_backward(build: Builder, moves: Moves, unit: str, index: int, fetches: Sequence[tuple[str, str]]) -> None:
    """The next compute waits for its activations. fetches: blocks whose activations come now, and whose room they take."""
    for name, room in fetches:
        after = build.found("evict", name, index), build.found("backward", room, index)
        size = moves.units[name].activation_bytes
        restored = build.transfer(f"restore {name} mb{index}", _BACK[_place(moves)], size, *after)
        build.remember("restore", name, index, restored)
    build.hold(build.found("restore", unit, index))


def delayed_updates(build: Builder, moves: Moves) -> list[int | None]:
    """The CPU's updates that start with the step, on the gradients of the step before; none unless they are delayed."""
    if not moves.plan.offload.delayed:
        return []
    return [build.transfer(f"update {n}", "cpu_adam", group.numel) for n, group in enumerate(moves.groups)]


def update(build: Builder, moves: Moves, rest: Work, *last: int | None, delayed: Sequence[int | None] = ()) -> int:
    """The CPU's optimizer, a sub-group at a time, then `rest` on the GPU; its op.

    Reading, updating, writing and sending up run beside each other, at most three sub-groups at once; without overlap
    they take turns. Where `delayed` updates run since the step began, what they send up still waits for `last`: the
    backward reads the old parameters.
    """
    rounds: list[tuple[int | None, ...]] = []
    back = 3 if moves.plan.offload.overlap else 1
    for number, group in enumerate(moves.groups):
        room = rounds[number - back] if number >= back else ()
        read = build.transfer(f"read states {number}", "nvme_read", group.read_bytes, *last, *room)
        updated = (
            delayed[number]
            if delayed
            else build.transfer(f"update {number}", "cpu_adam", group.numel, *last, *room, read)
        )
        written = build.transfer(f"write states {number}", "nvme_write", group.write_bytes, updated)
        sent = build.transfer(f"send parameters {number}", "h2d", group.upload_bytes, updated, *last)
        rounds.append((updated, written, sent))
    return build.compute("optimizer", rest, *last, *(op for ops in rounds for op in ops))
