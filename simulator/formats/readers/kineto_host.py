"""The host's side of a profiler's trace: launches, operators with their shapes, and waits."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from simulator.formats.readers.kernel_names import collective_of
from simulator.formats.readers.kineto_events import MAX_EVENTS, MAX_NAMES, NAME_LENGTH, Events, _integer, _text, _time

_CALLS = ("cuda_runtime", "cuda_driver")
_MOST_TENSORS = 4096  # of one operator: foreach kernels take lists of every parameter
GLOO = "gloo:"


@dataclass(frozen=True, slots=True)
class HostOp:
    """An operator, an annotation or a call of the driver on a thread of the host; microseconds of the file's clock.

    external: the profiler's number of an operator, which its kernels bear too. shapes: number in `HostEvents.shapes`, or -1.
    """

    name: str
    thread: int
    start: float
    end: float
    external: int
    shapes: int = -1


@dataclass(slots=True)
class HostEvents(Events):
    """Events of the device, and those of the host that are needed to issue them again."""

    correlations: array[int] = field(default_factory=lambda: array("q"))  # of each event on a device; -1: none
    externals: array[int] = field(default_factory=lambda: array("q"))
    calls: dict[int, HostOp] = field(default_factory=dict)  # correlation -> the driver's call
    operators: list[HostOp] = field(default_factory=list)
    gloo: list[HostOp] = field(default_factory=list)
    ranges: list[HostOp] = field(default_factory=list)  # Optimizer.step on the host
    shapes: dict[str, int] = field(default_factory=dict)  # arguments of operators -> their number
    arguments: list[tuple[tuple[Any, ...], ...]] = field(default_factory=list)  # each as (dims, type, strides, value)
    # external -> a collective
    described: dict[int, tuple[str, int | None, int | None, str, str]] = field(default_factory=dict)
    # cudaStreamWaitEvent: correlation, that of its event's record, stream that waits, stream waited for
    synchronised: list[tuple[int, int, int, int]] = field(default_factory=list)
    step_thread: int = -1

    @override
    def add(self, event: object) -> None:
        """Keep what matters of one event."""
        Events.add(self, event)
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, args = _text(event.get("cat")), event.get("args")
        args = args if isinstance(args, dict) else {}
        if len(self.correlations) < len(self.starts):
            self.correlations.append(_integer(args.get("correlation")))
            self.externals.append(_integer(args.get("External id")))
        if category == "cuda_sync":
            self._synchronises(args, str(event.get("name", "")))
        elif category in (*_CALLS, "cpu_op", "user_annotation"):
            self._host(event, category, args)

    def _host(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> None:
        start, duration = _time(event.get("ts")), _time(event.get("dur"))
        if start is None or duration is None or duration < 0 or len(self.operators) >= MAX_EVENTS:
            return
        name, external = str(event.get("name", ""))[:NAME_LENGTH], _integer(args.get("External id"))
        one = HostOp(name, _integer(event.get("tid")), start, start + duration, external)
        if category in _CALLS:
            if len(self.calls) < MAX_EVENTS:
                self.calls[_integer(args.get("correlation"))] = one
        elif name.startswith(GLOO):
            self.gloo.append(HostOp(name, one.thread, one.start, one.end, external, self._shapes(args)))
        elif category == "cpu_op":
            if "Collective name" in args and external >= 0:
                self._describe(external, name, args)
            self.operators.append(HostOp(name, one.thread, one.start, one.end, external, self._shapes(args)))
        elif name.startswith("ProfilerStep"):
            self.step_thread = one.thread
        elif name.startswith("Optimizer.step"):
            self.ranges.append(one)

    def _describe(self, external: int, name: str, args: dict[str, Any]) -> None:
        """A collective's arguments on the host's side (record_param_comms), where its kernel bears none."""
        self._collective(-1, f"nccl:{name}", args)
        self.described[external] = self.collectives.pop(-1)

    def _shapes(self, args: dict[str, Any]) -> int:
        dims, types = args.get("Input Dims"), args.get("Input type")
        if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
            return -1
        if len(dims) > _MOST_TENSORS or len(self.shapes) >= MAX_NAMES:
            return -1
        more = (args.get("Input Strides"), args.get("Concrete Inputs"))
        key = repr((dims, types, *more))
        if key not in self.shapes:
            same = [one if isinstance(one, list) and len(one) == len(dims) else [None] * len(dims) for one in more]
            self.shapes[key] = len(self.arguments)
            self.arguments.append(tuple(zip(dims, types, *same, strict=True)))
        return self.shapes[key]

    def _synchronises(self, args: dict[str, Any], name: str) -> None:
        """What `enable_cuda_sync_events` adds (Kineto's CuptiActivity: eventSyncInfo)."""
        if "stream wait event" in f"{name} {args.get('cuda_sync_kind', '')}".lower():
            names = ("correlation", "wait_on_cuda_event_record_corr_id", "stream", "wait_on_stream")
            wait, record, waits, on = (_integer(args.get(one)) for one in names)
            self.synchronised.append((wait, record, waits, on))


def kind_of(operator: str) -> str | None:
    """The kind of collective that an operator such as c10d::allreduce_ asks for."""
    if not operator.startswith("c10d::") or "barrier" in operator:
        return None
    kind = collective_of("nccl:", operator)
    return None if kind in ("collective", "send_recv") else kind
