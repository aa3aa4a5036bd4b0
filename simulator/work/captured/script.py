"""A capture as a StepScript: kernels in the order of the host, collectives that wait for what their streams waited for.

Streams are the program's own, and who waits for whom is read off its events and waits. Collectives of one group run one
after another, each on the group's stream. So do messages of one pair of ranks, and batches of messages of one group; the
messages of a batch run beside one another (torch 2.13, ProcessGroupNCCL::pointToPoint).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from simulator.base.kernels import Kernel
from simulator.work.captured.capture import CPU, Capture, Kind, Phase
from simulator.work.captured.kernels import priced
from simulator.work.captured.meetings import Column, Meetings, lattice
from simulator.work.captured.products import Priced
from simulator.work.captured.reuse import delays
from simulator.work.captured.tensors import parsed
from simulator.work.script.instructions import Communicate, Free, Happened, Instruction, Launch, Storages

_HOOKED = "fsdp."  # operators that FSDP2's hooks run before each of its collectives
_FOLLOWED = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send_recv"}
_STORAGES = frozenset({int(Kind.ALLOCATE), int(Kind.FREE)})
Prices = dict[int, Priced]  # by signature of one table


@dataclass(slots=True)
class CapturedScript:
    """A capture's recorded step as instructions, and what came before it.

    before: storages since the program began, as the capture's events, and categories of all of them. products: how many of
    them precede the first product of a forward, and of a backward; 0 where nobody saw. unpriced: operators that no rule knows -> how often. flop: of this rank's
    kernels. unmodelled: collectives that no cost model knows -> how often. kernels: of each operator once, in order of
    their first launch; launches: of all of them. memory_uses: by workspaces and pool.
    """

    before: Sequence[Sequence[int]]
    products: tuple[int, int]
    categories: Mapping[int, str]
    step: list[Instruction]
    unpriced: Counter[str] = field(default_factory=Counter)
    unmodelled: Counter[str] = field(default_factory=Counter)
    flop: int = 0
    kernels: list[tuple[Kernel, ...]] = field(default_factory=list)
    launches: int = 0
    memory_uses: dict[Any, Any] = field(default_factory=dict)


def captured_script(
    capture: Capture, column: Column | None = None, prices: dict[int, Prices] | None = None
) -> CapturedScript:
    """The instructions of a captured rank. column: the ranks that it is played with; None: it alone.

    prices: of operators that other ranks run, too, by id of their signatures, which live meanwhile; filled.
    """
    writer = _Writer(capture, column or Column((capture,), capture.world_size), {} if prices is None else prices)
    writer.write(capture.events, capture.steady)
    return writer.script


def _until_the_step(capture: Capture) -> tuple[list[Sequence[int]], tuple[int, int]]:
    """Storages since the program began, and how many of them precede the products that are kept of the steps before.

    A product's result is among them: torch has it before it asks for cuBLAS's handle, and so for the workspace.
    """
    found: list[Sequence[int]] = []
    products = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0)
    for event, after in pairwise(capture.events[: capture.steady + 1]):
        if event[0] in _STORAGES:
            found.append(event)
        elif event[0] == Kind.OPERATOR:
            products[Phase(event[4])] = len(found) + (after[0] == Kind.ALLOCATE)
    return found, (products[Phase.FORWARD], products[Phase.BACKWARD])


class _Writer:
    def __init__(self, capture: Capture, column: Column, prices: dict[int, Prices]) -> None:
        self._capture, self._joined = capture, 0  # storages behind the first of each row, which labels count
        self._meetings = Meetings(capture, column)
        self._batches: dict[int, tuple[int, list[str]]] = {}  # by group: the last batch of messages
        self._previous: dict[int, tuple[str, ...]] = {}  # by group: the messages of the batch before
        self._hooked = False  # the last operator, on whatever stream, was one of FSDP2's hooks
        self._prices = prices.setdefault(id(capture.signatures), {})
        # by operator, module, phase; whether hooked
        self._labels: dict[tuple[int, int, int], tuple[str, bool, Priced]] = {}
        self._handled: dict[int, tuple[float, ...]] = {}  # by phase: a kernel's part of what the host does besides
        self._behind: dict[int, set[str]] = {}  # collectives that each stream has waited for, or that ran on it
        self._events: dict[int, set[str]] = {}
        self._computed: dict[int, str] = {}  # the last kernel of each stream
        before, products = _until_the_step(capture)
        self.script = CapturedScript(before=before, products=products, categories=capture.categories, step=[])
        self._found = self.script.step
        self._last: dict[int, int] = {}  # where the last op of each stream stands
        self._works: dict[int, set[str]] = {}
        self._roles = [f"@{lattice(group)}" for group in capture.groups]

    def write(self, every: Sequence[Sequence[int]], steady: int) -> None:
        """Everything of the recorded step, which begins at `steady`."""
        writers: dict[int, Callable[..., None]] = {
            Kind.OPERATOR: self._operator,
            Kind.COLLECTIVE: self._collective,
            Kind.MESSAGE: self._message,
        }
        late, done = delays(every, steady)
        events, begin = every[steady:], 0
        others = [index for index, event in enumerate(events) if event[0] not in _STORAGES]
        self._count([events[index] for index in others])
        for index in (*(sorted({*others, *late, *done}) if late or done else others), len(events)):
            if begin < index:  # most of a capture is storages
                self._found.append(Storages(events[begin:index]))
                self._joined += index - begin - 1
            begin = index
            if index in done:
                self._found += [Happened(number) for number in done[index]]
            if index == len(events) or ((event := events[index])[0] in _STORAGES and index not in late):
                continue
            begin = index + 1
            if index in late:
                self._found.append(Free(event[1], late[index]))
            elif event[0] in writers:
                writers[event[0]](*event[1:])
            else:
                self._synchronised(event)

    def _count(self, events: Sequence[Sequence[int]]) -> None:
        """What kernels compute and what is unknown; what the host did beside launches is spread evenly over a phase's kernels."""
        launched = Counter[int]()
        calls = Counter((event[1], event[4]) for event in events if event[0] == Kind.OPERATOR)
        for (signature, phase), times in calls.items():
            name, args, results = self._capture.signatures[signature]
            if signature not in self._prices:
                cost = self._capture.costs.get(signature)
                self._prices[signature] = priced(name, parsed(args), parsed(results), cost)
            one = self._prices[signature]
            if not one.known:
                self.script.unpriced[name] += times
            if one.kernels:
                self.script.launches += times
                self.script.kernels.append(one.kernels)
                self.script.flop += times * sum(kernel.flop for kernel in one.kernels)
                launched[phase] += times
        for phase, counts in self._capture.host.items():
            if launched[phase]:
                self._handled[phase] = tuple(count / launched[phase] for count in counts)

    def _operator(self, signature: int, stream: int, module: int, phase: int) -> None:
        key = signature, module, phase
        if key not in self._labels:
            where, name = self._capture.names[module] or "step", self._capture.signatures[signature][0]
            label = f"{Phase(phase).name.lower()} {where}: {name.split('.')[1]} #"
            self._labels[key] = label, name.startswith(_HOOKED), self._prices[signature]
        label, self._hooked, one = self._labels[key]
        if not one.kernels:
            return
        found, handled = self._found, self._handled.get(phase, ())
        self._computed[stream] = label = f"{label}{len(found) + self._joined}"
        self._last[stream] = len(found)
        after = tuple(sorted(self._behind.pop(stream))) if stream in self._behind else ()
        found.append(Launch(label, one.category, one.kernels, after, stream, one.waits, None, handled))

    def _collective(self, number: int, kind: int, group: int, size: int, stream: int) -> None:
        name = self._capture.names[kind]
        label = f"{name} #{number}"
        if name not in _FOLLOWED:
            self.script.unmodelled[name] += 1
            return
        meets, members = self._meetings.collective(group)
        after = tuple(sorted(self._of(stream)))
        one = Communicate(
            label, name, self._roles[group], size, after, meets=meets, members=members, hooked=self._hooked
        )
        self._communicates(number, stream, one)

    def _communicates(self, number: int, stream: int, one: Communicate) -> None:
        """A collective or an end of a message, which later kernels may wait for."""
        self._last[stream] = len(self._found)
        self._found.append(one)
        self._works[number] = {one.label}

    def _message(self, number: int, pair: int, group: int, peer: int, size: int, stream: int, batch: int) -> None:
        """One end of a message."""
        met = self._meetings.message(pair, group, peer)
        if met is None:
            self.script.unmodelled[f"message {'from' if pair else 'to'} rank {peer}"] += 1
            return
        label, after = f"{'receive from' if pair else 'send to'} {peer} #{number}", self._of(stream)
        ends = sorted((self._capture.rank, peer))
        lane = f"messages {ends[0]}-{ends[1]}"
        if batch >= 0:
            started, members = self._batches.get(group, (-1, []))
            if started != batch:
                self._previous[group], members = tuple(members), []
            after |= set(self._previous[group])
            self._batches[group] = batch, [*members, label]
            lane = f"batch {group}.{len(members)}"
        meets, role = met
        one = Communicate(
            label, "send_recv", role, size, tuple(sorted(after)), meets=meets, members=2, lane=lane, sends=pair == 0
        )
        self._communicates(number, stream, one)

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
            case [Kind.WAIT_HOST, number]:
                self._host_waits_for(self._events.get(number, set()))
            case _:
                pass

    def _host_waits(self, streams: Iterable[int]) -> None:
        """The host waits until all work issued to these streams is done."""
        newest = max(self._last.values(), default=-1)
        indices = {self._last[stream] for stream in streams if stream in self._last}
        issued = {index: one for index in indices if isinstance(one := self._found[index], Launch | Communicate)}
        if indices == {newest}:
            self._found[newest] = issued[newest]._replace(waits=True)
        else:
            self._host_waits_for({one.label for one in issued.values()})

    def _host_waits_for(self, labels: set[str]) -> None:
        """The host waits for work of some time ago, as FSDP1 does for the unit before the last: what came later goes on."""
        if labels:
            label, after = f"the host waits #{len(self._found) + self._joined}", tuple(sorted(labels))
            self._found.append(Launch(label, "host", (), after, CPU, waits=True))

    def _of(self, stream: int) -> set[str]:
        found = set(self._behind.get(stream, ()))
        if stream in self._computed:
            found.add(self._computed[stream])
        return found

    def _waits(self, stream: int, labels: set[str]) -> None:
        if labels:
            self._behind.setdefault(stream, set()).update(labels)
