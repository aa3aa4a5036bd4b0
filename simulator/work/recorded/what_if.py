"""What if: changes of a recorded script. Each returns a new list of instructions; the recording is unchanged."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from simulator.work.recorded.script import END
from simulator.work.script.instructions import Communicate, Launch, Measured

Op = Launch | Communicate
Step = list[Op]
# What brings parameters and sends gradients (FSDP2's copies), whatever the layers do and however many tokens there are
OF_PARAMETERS = re.compile(r"split_with_sizes|chunk_cat|^Memcpy")


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
        after = one.after if one.label == END else tuple(label for label in one.after if label not in sent)
        waits = one.waits and isinstance(one, Launch)
        found.append(one._replace(after=after, waits=waits))
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


def without_recompute(step: Sequence[Op]) -> tuple[Step, int]:
    """Layers' forwards are not run again in the backward, and how many were: what they launched takes no time.

    A forward's attention that is followed by a backward's, with no loss between them, is a repetition. It reaches as far as the
    kernels around it are those around a first forward's, within one layer; gathered parameters are copied out in either case.
    """
    main = [index for index, one in enumerate(step) if isinstance(one, Launch) and one.stream == 0]
    names = [step[index].label.rpartition(" #")[0] for index in main]
    kinds = [kind_of(step[index]) for index in main]
    attends = [at for at, kind in enumerate(kinds) if kind == "attention"]
    forward = [at for at in attends if names[at] == names[attends[0]]]
    again = [at for at in forward if _is_repeated(at, attends, names, kinds)]
    first = [at for at in forward if at not in set(again)]
    if len(first) < 2 or not again:
        return list(step), 0
    layer = min(b - a for a, b in pairwise(first))
    middle = first[len(first) // 2]
    dropped = {main[at + k] for at in again for k in _alike(names, at, middle, layer)}
    none = {"seconds": 0.0, "gap_s": 0.0, "host_s": 0.0}
    return [_with(one, **none) if index in dropped else one for index, one in enumerate(step)], len(again)


def _is_repeated(at: int, attends: Sequence[int], names: Sequence[str], kinds: Sequence[str]) -> bool:
    behind = attends[bisect_right(attends, at) :]
    return bool(behind) and names[behind[0]] != names[at] and "loss" not in kinds[at : behind[0]]


def _alike(names: Sequence[str], at: int, first: int, layer: int) -> range:
    """Offsets around two places within which the kernels have equal names."""

    def same(offset: int) -> bool:
        places = at + offset, first + offset
        inside = all(0 <= place < len(names) for place in places)
        return inside and names[places[0]] == names[places[1]] and not OF_PARAMETERS.search(names[places[0]])

    low = next(k for k in range(0, -layer - 1, -1) if k == -layer or not same(k - 1))
    high = next(k for k in range(layer + 1) if k - low + 1 >= layer or not same(k + 1))
    return range(low, high + 1)
