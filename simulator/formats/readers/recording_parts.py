"""Pieces of recordings: operators by the profiler's number, their arguments, groups of ranks, the head of the file."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any

from simulator.formats.readers.kineto import KinetoTrace, about
from simulator.formats.readers.kineto_events import Events
from simulator.formats.readers.kineto_host import HostEvents, HostOp
from simulator.work.captured.tensors import CapturedTensor
from simulator.work.program import COMPUTE_STREAM
from simulator.work.recorded.recording import Recording
from simulator.work.trace import Span, Timeline

_DTYPES = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "long": "int64", "long int": "int64",
    "int": "int32", "short": "int16", "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip


def by_external(events: HostEvents) -> dict[int, HostOp]:
    """Operators by the profiler's number, each as the innermost one around it that says its shapes."""
    found: dict[int, HostOp] = {}
    open_ones: dict[int, list[HostOp]] = {}
    for one in sorted(events.operators, key=lambda op: (op.start, -op.end)):
        stack = open_ones.setdefault(one.thread, [])
        while stack and stack[-1].end <= one.start:
            stack.pop()
        stack.append(one)
        found[one.external] = one if one.shapes >= 0 else next((up for up in reversed(stack) if up.shapes >= 0), one)
    return found


def arguments(described: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """An operator's arguments as the profiler has them: (dims, type, strides, value) each."""
    return tuple(_argument(*one) for one in described)


def _argument(dims: Any, kind: Any, strides: Any, value: Any) -> Any:  # noqa: ANN401
    if kind == "TensorList" and isinstance(dims, list):
        return tuple(_tensor(one, "float", None) for one in dims)
    if isinstance(kind, str) and kind in _DTYPES:
        return _tensor(dims, kind, strides)
    try:
        return literal_eval(value) if isinstance(value, str) and 0 < len(value) < 1000 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _tensor(dims: Any, kind: str, strides: Any) -> CapturedTensor | None:  # noqa: ANN401
    if not isinstance(dims, list) or not all(type(one) is int and 0 <= one < 2**40 for one in dims):
        return None
    known = (
        isinstance(strides, list)
        and len(strides) == len(dims)
        and all(type(one) is int and one >= 0 for one in strides)
    )
    one = CapturedTensor(_DTYPES[kind], tuple(dims), tuple(strides) if known else None)
    step = 1
    for size, stride in zip(reversed(one.shape), reversed(one.strides or ()), strict=False):
        if size > 1 and stride != step:
            return one
        step *= size
    return CapturedTensor(one.dtype, one.shape)  # contiguous


def ranks(text: str, size: int | None) -> tuple[int, ...]:
    """Ranks of a group as NCCL's events name them: a list, of which long ones leave out the middle."""
    numbers = [int(one) for one in re.findall(r"\d{1,9}", text)]
    if size is None or not numbers:
        return tuple(numbers) if "..." not in text else ()
    if len(numbers) == size:
        return tuple(numbers)
    if len(numbers) < 2 or size > 2**20:
        return ()
    return tuple(numbers[0] + i * (numbers[1] - numbers[0]) for i in range(size))


def job(head: Mapping[str, Any]) -> dict[str, int | None]:
    """Rank and world size, where the head says them."""
    stated = about(head)
    return {
        key: one if type(one := stated.get(key)) is int and 0 <= one < 2**24 else None for key in ("rank", "world_size")
    }


def device_name(head: Mapping[str, Any]) -> str:
    """The first device of the head; empty: it names none."""
    found = about(head).get("devices") or [""]
    return str(found[0])


def peaks(events: Events, first: float, last: float) -> tuple[int, int] | None:
    """Most allocated and reserved bytes of the step, as the profiler counted them."""
    rows = zip(*events.memory, strict=True)
    inside = [(allocated, reserved) for time, allocated, reserved in rows if first <= time < last]
    return (max(a for a, _ in inside), max(r for _, r in inside)) if inside else None


def as_trace(one: Recording) -> KinetoTrace:
    """A recording as a trace of one step."""
    name = f"rank {one.rank or 0}"
    spans = [
        Span(
            program=name, stream=COMPUTE_STREAM if not op.stream else f"{'nccl' if op.carried else 'stream'}:{op.stream}",
            id=index, label=op.name, category=op.category, start_s=op.start_s, end_s=op.end_s, nominal_s=op.duration_s,
            parts=() if op.carried else ((op.category, op.duration_s),), joined_s=op.start_s if op.carried else None,
        )
        for index, op in enumerate(one.ops)
    ]  # fmt: skip
    collectives = tuple(op.carried for op in one.ops if op.carried is not None)
    stated = {"rank": one.rank, "world_size": one.world_size}
    return KinetoTrace(
        name=one.name, timeline=Timeline(spans=tuple(spans), step_s=one.step_s), memory=None, collectives=collectives, step=None,
        steps=(), about={key: value for key, value in stated.items() if value is not None}, notes=one.notes,
    )  # fmt: skip
