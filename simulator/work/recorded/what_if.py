"""What if: changes of a recorded script. Each gives a new list of instructions; what the recording says stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median

from simulator.work.recorded.script import END
from simulator.work.script.instructions import Communicate, Launch, Measured

Op = Launch | Communicate
Step = list[Op]


def matches(pattern: re.Pattern[str], one: Op) -> bool:
    """Whether a pattern is found in an op's name or is in that of its category or kind; the step's end is no op."""
    return one.label != END and bool(pattern.search(one.label.rpartition(" #")[0]) or pattern.fullmatch(kind_of(one)))


def kind_of(one: Op) -> str:
    """Category of a launch, kind of a collective."""
    return one.kind if isinstance(one, Communicate) else one.category


def scaled(step: Sequence[Op], factor: Callable[[Op], float]) -> Step:
    """Every op takes `factor` times as long; gaps and the host's time stay."""
    return [_with(one, seconds=_measured(one).seconds * factor(one)) for one in step]


def hidden(step: Sequence[Op]) -> Step:
    """Nothing waits for a collective but the step's end: as if all of it lay under compute."""
    sent = {one.label for one in step if isinstance(one, Communicate)}
    found: Step = []
    for one in step:
        kept = one.after if one.label == END else tuple(label for label in one.after if label not in sent)
        waits = one.waits and isinstance(one, Launch)
        found.append(one._replace(after=kept, waits=waits))
    return found


def free(step: Sequence[Op]) -> Step:
    """Collectives take no time once their members have come."""
    return [_with(one, seconds=0.0, gap_s=0.0) if isinstance(one, Communicate) else one for one in step]


def without_host(step: Sequence[Op], *, on_host: bool) -> Step:
    """As from a CUDA graph: no launch takes the host any time, and no gap is longer than the usual one of this recording.

    on_host: operators of a CPU, between which is nothing but the host's time.
    """
    gaps = [gap for one in step if (gap := _measured(one).gap_s) > 0 and isinstance(one, Launch) and one.stream == 0]
    longest = 0.0 if on_host or not gaps else median(gaps)
    return [_with(one, host_s=0.0, gap_s=min(_measured(one).gap_s, longest)) for one in step]


def _measured(one: Op) -> Measured:
    return one.measured or Measured(0.0)


def _with(one: Op, **fields: float) -> Op:
    return one._replace(measured=Measured(**{**_measured(one)._asdict(), **fields}))
