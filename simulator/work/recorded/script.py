"""A recording as a StepScript: every op with its measured time, and what it waits for.

An op starts when the op before it on its stream has ended, when what it waits for has ended, and when the host has issued it;
what is left until its recorded start is its gap. So a script played unchanged gives the recording back, and what a changed
script gives depends on the waits alone. They are, in this order: those that the profiler recorded; of a collective, the last
compute that was issued before it; where the host made a stream wait for events, as many of the oldest collectives that nobody has
waited for; where an op starts late, the op of another stream whose end came last before it. A collective that nothing is found to wait
for is waited for by the optimizer, if it reduces; else by the compute behind its end.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.work.recorded.ranks import role_of
from simulator.work.recorded.recording import HOST_CATEGORY, HostWait, RecordedOp, Recording
from simulator.work.script.instructions import Communicate, Launch, Measured

HOST_STREAM = -1
BEGIN, END = "begin of the step", "end of the step"
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
# Within which a kernel starts that an event held back: assumed, launches queued on one stream take 1 to 2 us
_LETS_GO_S = 5e-6
_SLACK_S = 1e-9  # within which two times of a trace are one


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScript:
    """Instructions of a step, the last of which is its end. sources: index of the recording's op of each label."""

    name: str
    rank: int
    shift_s: float  # of its begin against the first rank's
    step: list[Launch | Communicate]
    sources: dict[str, int] = field(default_factory=dict)


def recorded_script(recording: Recording, *, rank: int = 0, shift_s: float = 0.0) -> RecordedScript:
    """The instructions of a recording. shift_s: how much later than the first rank it begins."""
    return _Writer(recording, rank, shift_s).script()


class _Writer:
    def __init__(self, recording: Recording, rank: int, shift_s: float) -> None:
        self._one, self._rank, self._shift = recording, rank, shift_s
        self._found: list[Launch | Communicate] = []
        self._sources: dict[str, int] = {}
        self._labels: list[str] = []  # of the ops so far
        self._stream_end: dict[int, float] = {}
        self._last: dict[int, int] = {}  # op issued last on each stream
        self._ends: list[tuple[float, int]] = []  # of ops so far, by time
        self._owed: list[int] = []  # collectives that no stream has waited for
        self._awaited: set[int] = set()
        self._host = 0.0  # when the host is through with what it has issued
        self._collective_streams = {op.stream for op in recording.ops if op.carried is not None}

    def script(self) -> RecordedScript:
        """All of it."""
        if self._shift:
            self._found.append(
                Launch(BEGIN, HOST_CATEGORY, (), (), HOST_STREAM, waits=True, measured=Measured(self._shift))
            )
        waits = deque(sorted(self._one.waits, key=lambda wait: wait.start_s))
        late = self._late_waits()
        for index, op in enumerate(self._one.ops):
            while waits and waits[0].before <= index:
                self._host_wait(waits.popleft())
            self._op(index, op, late.get(index, ()))
        while waits:
            self._host_wait(waits.popleft())
        self._end(late.get(len(self._one.ops), ()))
        return RecordedScript(
            name=self._one.name, rank=self._rank, shift_s=self._shift, step=self._found, sources=self._sources
        )

    # -- ops

    def _op(self, index: int, op: RecordedOp, late: Sequence[int]) -> None:
        host_s = self._issue(op.issued_s)
        ready = max(self._stream_end.get(op.stream, 0.0), 0.0 if op.issued_s is None else self._host)
        waits = {*late, *self._known(index, op)}
        ready = max([ready, *(self._one.ops[one].end_s for one in waits)])
        delayed_by = self._held_by(op, ready)
        if delayed_by is not None:
            waits.add(delayed_by)
            ready = self._one.ops[delayed_by].end_s
        self._awaited |= waits
        seconds = op.duration_s if op.alone_s is None else op.alone_s
        measured = Measured(seconds, max(0.0, op.start_s - ready), host_s, f"{op.stream}")
        label = f"{op.name} #{index}"
        after = tuple(self._labels[one] for one in sorted(waits))
        self._append(index, op, label, after, measured)

    def _append(self, index: int, op: RecordedOp, label: str, after: tuple[str, ...], measured: Measured) -> None:
        self._labels.append(label)
        self._sources[label] = index
        if op.carried is None:
            self._found.append(Launch(label, op.category, (), after, op.stream, op.blocks, measured))
        else:
            size = op.carried.size_bytes or 0
            one = Communicate(label, op.carried.kind, role_of(op), size, after, op.blocks, measured=measured)
            self._found.append(one)
            self._owed.append(index)
        self._stream_end[op.stream] = op.end_s
        self._last[op.stream] = index
        insort(self._ends, (op.end_s, index))
        if op.blocks:
            self._host = max(self._host, op.end_s)

    def _issue(self, at_s: float | None) -> float:
        """What the host takes until then; the step's begin finds it ahead."""
        begun = self._host
        self._host = max(begun, at_s or 0.0)
        return self._host - begun

    def _known(self, index: int, op: RecordedOp) -> set[int]:
        """What it waits for by the order of launches: it had ended, or the order would be wrong."""
        found = {one for one in op.after if one < index}
        before = self._last.get(op.stream)
        if before is not None and (self._one.ops[before].carried is None) != (op.carried is None):
            found.add(before)  # streams that hold both: collectives are played on streams of their own
        if op.carried is not None and not op.after and op.stream != 0:
            found |= {one for one in (self._last.get(0),) if one is not None}
        elif op.marks and op.carried is None and not op.after:
            found |= set(self._collected(op))
        return {one for one in found if self._one.ops[one].end_s <= op.start_s + _SLACK_S}

    def _collected(self, op: RecordedOp) -> list[int]:
        """Collectives that a stream which waited for as many events may have waited for, the oldest first.

        Results before reductions: those are for the optimizer, which takes all that are left.
        """
        ops, updates = self._one.ops, op.category == "optimizer"
        self._owed = [one for one in self._owed if one not in self._awaited and ops[one].stream != op.stream]
        over = [one for one in self._owed if ops[one].end_s <= op.start_s + _SLACK_S]
        over.sort(key=lambda one: _reduces(ops[one]))
        return over if updates else over[: op.marks]

    def _held_by(self, op: RecordedOp, ready: float) -> int | None:
        """The op of another stream that ended last while this one could have run; just before it, where launches are known."""
        place = bisect_right(self._ends, (op.start_s + _SLACK_S, len(self._one.ops)))
        for end_s, index in reversed(self._ends[max(0, place - 16) : place]):
            late = op.issued_s is not None and end_s < op.start_s - _LETS_GO_S
            if late or end_s <= ready + _SLACK_S:
                return None
            if self._one.ops[index].stream != op.stream:
                return index
        return None

    def _late_waits(self) -> dict[int, list[int]]:
        """Who waits for collectives of which no waiter is recorded, as far as their kind tells: op -> collectives.

        Known only once all other waits are: they are looked up by what the recording's times and marks leave open.
        """
        ops = self._one.ops
        if any(op.marks or op.after for op in ops):
            return {}
        compute = [(op.start_s, i) for i, op in enumerate(ops) if op.stream == 0 and op.carried is None]
        optimizer = [(op.start_s, i) for i, op in enumerate(ops) if op.stream == 0 and op.category == "optimizer"]
        found: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            if op.carried is None or op.stream == 0:
                continue
            takers = optimizer if _reduces(op) else compute
            place = bisect_right(takers, (op.end_s - _SLACK_S, -1))
            taker = next((i for _, i in takers[place:] if i > index), len(ops))
            found.setdefault(taker, []).append(index)
        return found

    # -- the host

    def _host_wait(self, wait: HostWait) -> None:
        """The host stands until what it has issued is over, and then some."""
        host_s = self._issue(wait.start_s)
        done = [one for one in self._last.values() if self._one.ops[one].end_s <= wait.end_s + _SLACK_S]
        over = max([self._host, *(self._one.ops[one].end_s for one in done)])
        label = f"{wait.name} #h{len(self._found)}"
        tail = Measured(max(0.0, wait.end_s - over), 0.0, host_s)
        after = tuple(self._labels[one] for one in sorted(done))
        self._found.append(Launch(label, HOST_CATEGORY, (), after, HOST_STREAM, waits=True, measured=tail))
        self._host = max(self._host, wait.end_s)

    def _end(self, late: Sequence[int]) -> None:
        """When the next step would begin: everything has run, and the host has been through a step of its own."""
        one = self._one
        awaited = sorted({*late, *self._last.values()})
        done = max(one.ops[i].end_s for i in awaited)
        host_s = 0.0
        if one.host_end_s is not None:
            begun = self._host
            through = max(begun, min(one.host_end_s + one.host_ahead_s, one.step_s))
            host_s, self._host = through - begun, through
        gap_s = max(0.0, one.step_s - max(done, self._host if host_s else 0.0))
        measured = Measured(0.0, gap_s, host_s)
        after = tuple(self._labels[i] for i in awaited)
        self._found.append(Launch(END, HOST_CATEGORY, (), after, measured=measured))


def _reduces(op: RecordedOp) -> bool:
    return op.carried is not None and op.carried.kind in _REDUCTIONS
