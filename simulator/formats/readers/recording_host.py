"""A step that ran on a CPU as a recording: its operators are the kernels, gloo's threads the streams beside them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.base.errors import InputError
from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.formats.readers.kineto import chosen_step, traced_steps
from simulator.formats.readers.kineto_host import HostEvents, HostOp, kind_of
from simulator.formats.readers.recording_parts import arguments, job
from simulator.work.captured.tensors import tensors
from simulator.work.recorded.recording import Carried, RecordedOp, Recording

WRAPPERS = re.compile(r"^(autograd::|torch::autograd|FSDP::|c10d::|record_param_comms)|^[^:]*$")
_FIRST_LANE = 1001  # of gloo's threads, beside those of operators


def host_recording(path: Path, events: HostEvents, head: Mapping[str, Any], number: int | None) -> Recording:
    """Operators of the CPU, one after another as its thread ran them; gloo's collectives on gloo's own threads."""
    steps = traced_steps(events)
    step = chosen_step(path, steps, number)
    first = min(one.start for one in events.operators) if step is None else step.start_s * 1e6
    last = max(one.end for one in events.operators) if step is None else step.end_s * 1e6
    inside = [one for one in events.operators if first <= one.start < last]
    main = events.step_thread if events.step_thread >= 0 or not inside else _busiest(inside)
    ops = [*_operators(events, inside, main, first), *_gloo(events, head, first, last)]
    if not ops:
        raise InputError.at(str(path), "no operator ran in that step")
    ops.sort(key=lambda op: (op.start_s, op.end_s, op.stream))
    whole = ["no ProfilerStep in it: all that was recorded is taken as one step"] if step is None else []
    no_gpu = "no GPU in it: the CPU's operators are played as kernels, Python between them as gaps"
    return Recording(
        name=path.name, ops=tuple(ops), waits=(), step=step.number if step else None, step_s=(last - first) * 1e-6,
        step_times_s={one.number: one.duration_s for one in steps}, origin_s=first * 1e-6, host_ahead_s=0.0, host_end_s=None,
        on_host=True, device="", peaks=None, notes=(*events.notes, *whole, no_gpu), **job(head),
    )  # fmt: skip


def _busiest(ops: list[HostOp]) -> int:
    busy: dict[int, float] = {}
    for one in ops:
        busy[one.thread] = busy.get(one.thread, 0.0) + one.end - one.start
    return max(busy, key=lambda thread: (busy[thread], -thread))


def _operators(events: HostEvents, inside: list[HostOp], main: int, first: float) -> Iterator[RecordedOp]:
    """The outermost operators of each thread that are work, not wrappers of it; time of a wrapper is a gap."""
    threads = {main: 0}
    free: dict[int, float] = {}
    for one in sorted(inside, key=lambda op: (op.start, -op.end)):
        if WRAPPERS.match(one.name) or one.start < free.get(one.thread, 0.0):
            continue
        free[one.thread] = one.end
        ours = any(low.start <= one.start < low.end for low in events.ranges)
        yield RecordedOp(
            name=one.name, category="optimizer" if ours else category_of(one.name),
            stream=threads.setdefault(one.thread, len(threads)), start_s=(one.start - first) * 1e-6,
            end_s=(one.end - first) * 1e-6,
            operator=None if one.shapes < 0 else (one.name, arguments(events.arguments[one.shapes])),
        )  # fmt: skip


def _gloo(events: HostEvents, head: Mapping[str, Any], first: float, last: float) -> Iterator[RecordedOp]:
    """Gloo's collectives. Kind and size are those of the operator that issued each: they run in the order of issue."""
    operators = deque(sorted((one for one in events.operators if kind_of(one.name)), key=lambda one: one.start))
    ranks, name = _only_group(head)
    lanes: dict[int, int] = {}
    for one in sorted(events.gloo, key=lambda op: op.start):
        asks = operators.popleft() if operators and operators[0].start <= one.start else None
        if not first <= one.start < last:
            continue
        kind = (asks and kind_of(asks.name)) or collective_of(one.name) or "collective"
        sizes = [_numel_bytes(events, which) for which in (asks, one) if which is not None]
        size = max((numel for numel, _ in sizes), default=0) * max((item for _, item in sizes), default=0)
        lane = lanes.setdefault(one.thread, len(lanes) + _FIRST_LANE)
        yield RecordedOp(
            name=one.name, category=kind, stream=lane, start_s=(one.start - first) * 1e-6, end_s=(one.end - first) * 1e-6,
            carried=Carried(kind=kind, size_bytes=size or None, group_size=len(ranks) or None, ranks=ranks, group=name),
        )  # fmt: skip


def _numel_bytes(events: HostEvents, one: HostOp) -> tuple[int, int]:
    """(elements of the largest tensor, bytes of an element; 0: not said) among an operator's arguments."""
    found = list(tensors(arguments(events.arguments[one.shapes]))) if one.shapes >= 0 else []
    kinds = [kind for _, kind, _, _ in events.arguments[one.shapes]] if one.shapes >= 0 else []
    listed = "TensorList" in kinds
    return max((t.numel for t in found), default=0), 0 if listed else max((t.item_bytes for t in found), default=0)


def _only_group(head: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """Ranks and name of the job's process group, where there is one; gloo's events do not name theirs."""
    job = head.get("distributedInfo")
    groups = job.get("pg_config") if isinstance(job, dict) else None
    tables = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    ranks = tables[0].get("ranks") if len(tables) == 1 else None
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        return (), ""
    return tuple(ranks), str(tables[0].get("pg_desc", ""))
