"""A capture as a StepScript: kernels in the order of the host, collectives that wait for what their streams waited for.

Streams are the program's own, and who waits for whom is read off its events and waits. Collectives of one group run one
after another, each on the group's stream. So do messages of one pair of ranks, and batches of messages of one group; the
messages of a batch run beside one another (torch 2.13, ProcessGroupNCCL::pointToPoint).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.kernels import Priced, priced
from simulator.work.captured.meetings import Column, Meetings, lattice
from simulator.work.captured.reuse import delays
from simulator.work.captured.tensors import parsed
from simulator.work.script.instructions import Allocate, Communicate, Free, Happened, Instruction, Launch

_HOOKED = "fsdp."  # operators that FSDP2's hooks run before each of its collectives
_FOLLOWED = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send_recv"}


_FREE = int(Kind.FREE)
_STORAGES = frozenset({int(Kind.ALLOCATE), _FREE})


@dataclass(slots=True)
class CapturedScript:
    """A capture's recorded step as instructions, and what came before it.

    before: storages since the program began. unpriced: operators that no rule knows -> how often. flop: of this rank's
    kernels. unmodelled: collectives that no cost model knows -> how often.
    """

    before: list[Instruction]
    step: list[Instruction]
    unpriced: Counter[str] = field(default_factory=Counter)
    unmodelled: Counter[str] = field(default_factory=Counter)
    flop: int = 0


def captured_script(capture: Capture, column: Column | None = None) -> CapturedScript:
    """The instructions of a captured rank. column: the ranks that it is played with; None: it alone."""
    writer = _Writer(capture, column or Column((capture,), capture.world_size))
    before = list(writer.storages(capture.events[: capture.steady]))
    found = CapturedScript(before=before, step=writer.instructions(capture.events, capture.steady))
    found.unpriced, found.unmodelled, found.flop = writer.unpriced, writer.unmodelled, writer.flop
    return found


class _Writer:
    def __init__(self, capture: Capture, column: Column) -> None:
        self._capture = capture
        self._meetings = Meetings(capture, column)
        self._batches: dict[int, tuple[int, list[str]]] = {}  # by group: the last batch of messages
        self._previous: dict[int, tuple[str, ...]] = {}  # by group: the messages of the batch before
        self._hooked = False  # the last operator, on whatever stream, was one of FSDP2's hooks
        self._priced: dict[int, Priced] = {}
        self._behind: dict[int, set[str]] = {}  # collectives that each stream has waited for, or that ran on it
        self._events: dict[int, set[str]] = {}
        self._computed: dict[int, str] = {}  # the last kernel of each stream
        self._found: list[Instruction] = []
        self._last: dict[int, int] = {}  # where the last op of each stream stands
        self._works: dict[int, set[str]] = {}
        self._phases: dict[str, Phase] = {}  # of each kernel, by label
        self.unpriced, self.unmodelled = Counter[str](), Counter[str]()
        self.flop = 0
        self._roles = [f"@{lattice(group)}" for group in capture.groups]

    def storages(self, events: Sequence[Sequence[int]]) -> Iterator[Instruction]:
        """Allocations and frees alone."""
        return (self._storage(event) for event in events if event[0] in _STORAGES)

    def _storage(self, event: Sequence[int]) -> Instruction:
        if event[0] == _FREE:
            return Free(f"s{event[1]}")
        _, storage, size, stream = event
        return Allocate(f"s{storage}", size, self._capture.categories.get(storage, "temporaries"), stream)

    def instructions(self, every: Sequence[Sequence[int]], steady: int) -> list[Instruction]:
        """Everything of the recorded step, which begins at `steady`."""
        write: dict[Kind, Callable[..., None]] = {
            Kind.OPERATOR: self._operator,
            Kind.COLLECTIVE: self._collective,
            Kind.MESSAGE: self._message,
        }
        writers = {int(kind): one for kind, one in write.items()}
        late, done = delays(every, steady)
        for index, event in enumerate(every[steady:]):
            kind = event[0]
            if index in done:
                self._found += [Happened(number) for number in done[index]]
            if index in late:
                self._found.append(Free(f"s{event[1]}", late[index]))
            elif kind in _STORAGES:
                self._found.append(self._storage(event))
            elif kind in writers:
                writers[kind](*event[1:])
            else:
                self._synchronised(event)
        launched = Counter(self._phases.values())
        return [self._with_host(one, launched) if isinstance(one, Launch) else one for one in self._found]

    def _with_host(self, one: Launch, launched: Counter[Phase]) -> Launch:
        """With the kernel's part of what the host did beside launches in its phase, which is spread evenly over them."""
        phase = self._phases[one.label]
        counts = self._capture.host.get(phase, ())
        return one._replace(handled=tuple(count / launched[phase] for count in counts)) if counts else one

    def _operator(self, signature: int, stream: int, module: int, phase: int) -> None:
        name, args, results = self._capture.signatures[signature]
        if signature not in self._priced:
            cost = self._capture.costs.get(signature)
            self._priced[signature] = priced(name, parsed(args), parsed(results), cost)
        one = self._priced[signature]
        self._hooked = name.startswith(_HOOKED)
        if not one.known:
            self.unpriced[name] += 1
        if not one.kernels:
            return
        self.flop += sum(kernel.flop for kernel in one.kernels)
        where = self._capture.names[module] or "step"
        label = f"{Phase(phase).name.lower()} {where}: {name.split('.')[1]} #{len(self._found)}"
        self._last[stream] = len(self._found)
        self._found.append(
            Launch(label, one.category, one.kernels, tuple(sorted(self._behind.pop(stream, ()))), stream)
        )
        self._computed[stream] = label
        self._phases[label] = Phase(phase)

    def _collective(self, number: int, kind: int, group: int, size: int, stream: int) -> None:
        name = self._capture.names[kind]
        label = f"{name} #{number}"
        if name not in _FOLLOWED:
            self.unmodelled[name] += 1
            return
        meets, members = self._meetings.collective(group)
        self._last[stream] = len(self._found)
        self._found.append(
            Communicate(
                label,
                name,
                self._roles[group],
                size,
                tuple(sorted(self._of(stream))),
                meets=meets,
                members=members,
                hooked=self._hooked,
            )
        )
        self._works[number] = {label}

    def _message(self, number: int, way: int, group: int, peer: int, size: int, stream: int, batch: int) -> None:
        """One end of a message."""
        met = self._meetings.message(way, group, peer)
        if met is None:
            self.unmodelled[f"message {'from' if way else 'to'} rank {peer}"] += 1
            return
        label, after = f"{'receive from' if way else 'send to'} {peer} #{number}", self._of(stream)
        ends = sorted((self._capture.rank, peer))
        lane = f"messages {ends[0]}-{ends[1]}"
        if batch >= 0:
            started, members = self._batches.get(group, (-1, []))
            if started != batch:
                self._previous[group], members = tuple(members), []
            after |= set(self._previous[group])
            self._batches[group] = batch, [*members, label]
            lane = f"batch {group}.{len(members)}"
        self._last[stream] = len(self._found)
        self._found.append(
            Communicate(
                label,
                "send_recv",
                met[1],
                size,
                tuple(sorted(after)),
                meets=met[0],
                members=2,
                lane=lane,
                sends=way == 0,
            )
        )
        self._works[number] = {label}

    def _synchronised(self, event: Sequence[int]) -> None:
        """Events and waits move what later kernels of a stream wait for."""
        match event:
            case [Kind.RECORD, number, stream]:
                self._events[number] = self._of(stream)
            case [Kind.WAIT_EVENT, stream, number]:
                self._waits(stream, self._events.get(number, set()))
            case [Kind.WAIT_STREAM, stream, other]:
                self._waits(stream, self._of(other))
            case [Kind.WAIT_WORK, stream, number]:
                self._waits(stream, self._works.get(number, set()))
            case [Kind.SYNCHRONIZE, stream]:
                self._host_waits(self._last if stream < 0 else [stream])
            case [Kind.WAIT_HOST, _]:
                self._host_waits(self._last)
            case _:
                pass

    def _host_waits(self, streams: Iterable[int]) -> None:
        """The host goes on when the last of what these streams have been given is over."""
        for index in {self._last[stream] for stream in streams if stream in self._last}:
            one = self._found[index]
            if isinstance(one, Launch | Communicate):
                self._found[index] = one._replace(waits=True)

    def _of(self, stream: int) -> set[str]:
        found = set(self._behind.get(stream, ()))
        if stream in self._computed:
            found.add(self._computed[stream])
        return found

    def _waits(self, stream: int, labels: set[str]) -> None:
        if labels:
            self._behind.setdefault(stream, set()).update(labels)
