"""What a step's groups and stages send: the calls that a placement is priced by."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from simulator.play.lower import Lowering
from simulator.play.lower.messages import calls_of

Where = str | tuple[int, int]  # a mesh axis, or two pipeline stages
_MESSAGE: Final = re.compile(r"pp (\d+) to (\d+)")
_PLAYED: Final = 4  # micro-batches a stage, from which on one more adds what the last ones did


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or message that a step repeats. count: times in a step, the mean over pipeline stages."""

    kind: str
    where: Where
    size_bytes: int
    count: float


def step_calls(lowering: Lowering) -> tuple[Call, ...]:
    """Everything that a step's ranks send each other, in a fixed order; groups of one rank left out."""
    plan = lowering.plan
    longer = _PLAYED * plan.pp
    if plan.num_micro_batches <= longer:
        counts: dict[tuple[str, Where, int], float] = dict(_counts(lowering, plan.num_micro_batches))
    else:
        long, short = _counts(lowering, longer), _counts(lowering, longer // 2)
        more = (plan.num_micro_batches - longer) / (longer - longer // 2)
        counts = {call: count + more * (count - short[call]) for call, count in long.items()}
    return tuple(
        Call(kind=kind, where=where, size_bytes=size_bytes, count=count / plan.pp)
        for (kind, where, size_bytes), count in sorted(counts.items(), key=lambda item: str(item[0]))
        if count > 0 and (isinstance(where, tuple) or len(lowering.mesh.group_of(where, 0)) > 1)
    )


def _counts(lowering: Lowering, num_micro_batches: int) -> Counter[tuple[str, Where, int]]:
    """Calls of all stages together; a message is its sender's."""
    found: Counter[tuple[str, Where, int]] = Counter()
    for stage in range(lowering.plan.pp):
        for kind, role, size_bytes, count in calls_of(lowering.program(num_micro_batches, stage=stage), stage):
            message = _MESSAGE.match(role)
            if message is None:
                found[kind, lowering.fabric.axis(role), size_bytes] += count
            else:
                found[kind, (stage, int(message[2])), size_bytes] += count
    return found
