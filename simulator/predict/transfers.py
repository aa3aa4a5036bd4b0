"""The schedule of a step's transfers: time, deadline, and when the memory is free again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from simulator.play.lower import lowered
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import COMPUTE_STREAM, Collective, Program
from simulator.work.trace import Span

Action = Literal["prefetch", "evict", "reduce", "exchange", "message", "update"]
_ACTIONS: Final[Mapping[str, Action]] = {
    **dict.fromkeys(("all_gather", "h2d", "nvme_read", "from_peer", "broadcast"), "prefetch"),
    **dict.fromkeys(("d2h", "nvme_write", "to_peer"), "evict"),
    **dict.fromkeys(("reduce_scatter", "all_reduce", "reduce"), "reduce"),
    **dict.fromkeys(("cpu_adam", "cpu_add"), "update"),
    "send_recv": "message",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of one class of ranks.

    action: prefetch fills memory ahead of use, evict empties it, reduce joins gradients. size_bytes: of the full tensor (nccl-tests'
    convention), of a copy what one rank moves. needed_s: when the first op begins that waits for it; None where none
    does. released_s: when what it brought, or took away, occupies no room any more.
    """

    ranks: str
    start_s: float
    end_s: float
    needed_s: float | None
    released_s: float
    size_bytes: int
    action: Action
    stream: str
    kind: str
    what: str

    @property
    def slack_s(self) -> float | None:
        """How much later it could arrive without delaying an op."""
        return None if self.needed_s is None else self.needed_s - self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The transfers by class of ranks and time. num_shown: micro-batches; those beyond repeat the last but one."""

    transfers: tuple[Transfer, ...]
    num_shown: int
    num_micro_batches: int


def transfer_schedule(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> Schedule:
    """The transfers of a step as it is simulated. Raises as `predict` does."""
    lowering = lowered(model, plan, cluster, calibration, stack)
    played = play(lowering)
    found: list[Transfer] = []
    for program in lowering.programs(played.num_played):
        spans = {span.id: span for span in played.timeline.of(program.name)}
        found += sorted(_transfers(program, spans), key=lambda one: (one.start_s, one.end_s, one.stream, one.what))
    return Schedule(transfers=tuple(found), num_shown=played.num_played, num_micro_batches=plan.num_micro_batches)


def _transfers(program: Program, spans: Mapping[int, Span]) -> Iterator[Transfer]:
    waiting: dict[int, list[Span]] = {}
    for op in program.ops:
        if op.stream == COMPUTE_STREAM:
            for before in op.after:
                waiting.setdefault(before, []).append(spans[op.id])
    moves = [op for op in program.ops if isinstance(op, Collective)]
    gathers = {op.label for op in moves if op.kind == "all_gather"}
    computes = {op.label: spans[op.id] for op in program.ops if op.stream == COMPUTE_STREAM}
    for op in moves:
        span, users = spans[op.id], waiting.get(op.id, [])
        action = _ACTIONS.get(op.kind, "exchange")
        blocked_ops = users if action in ("prefetch", "message", "exchange") else []
        last = computes.get(_user(op.label, gathers)) if op.kind == "all_gather" else None
        yield Transfer(
            ranks=program.name,
            start_s=float(span.start_s),
            end_s=float(span.end_s),
            needed_s=min((float(user.start_s) for user in users), default=None),
            released_s=max(float(one.end_s) for one in (span, *blocked_ops, *([last] if last else []))),
            size_bytes=op.size_bytes,
            action=action,
            stream=op.stream,
            kind=op.kind,
            what=op.label,
        )


def _user(label: str, gathers: Collection[str]) -> str:
    """The pass that uses gathered parameters last: the forward where the backward gathers them again."""
    subject = label.removeprefix("all-gather ")
    unit = subject.removesuffix(" backward")
    again = unit == subject and f"{label} backward" in gathers
    return f"{'forward' if again else 'backward'} {unit}"
