"""The order in which a stage issues its work. Written from the papers and the published implementations.

gpipe: Huang et al., arXiv 1811.06965; with chunks, the breadth-first loop of Lamy-Poirier, arXiv 2211.05953.
1f1b, interleaved: Narayanan et al., arXiv 2104.04473; order and warm-up as Megatron-LM `core/pipeline_parallel/
    schedules.py` has them (`get_pp_rank_microbatches`, `get_schedule_table`).
zb_h1: Qi et al., arXiv 2401.10241, section 2.1.
dualpipe, dualpipe_v: DeepSeek-V3, arXiv 2412.19437, section 3.2.1; deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from typing_extensions import override

from simulator.base.errors import PlanError
from simulator.parallel.legality.pipeline import schedule_faults
from simulator.parallel.legality.rule import Pipeline
from simulator.spec.plan.schedules import Schedule

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of a stage's work: forward, backward or weight gradients of a micro-batch in a chunk.

    Two actions are equal if they are the same piece of work; how it is run does not count:
    whole: of a B: it computes the gradients of the weights too. Otherwise they are a W of its own, later.
    beside: it runs together with the action before it, each hiding the other's communication (DualPipe's F&B).
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    whole: bool = field(default=True, compare=False)
    beside: bool = field(default=False, compare=False)

    @override
    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.chunk}"


def order(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    paired: bool = False,
) -> tuple[Action, ...]:
    """What a stage issues in one step, first to last.

    paired: a backward runs beside the forward before it, so one more forward comes ahead of the first pair (interleaved,
    and one stage of 1f1b; get_pp_rank_microbatches and combined_1f1b.py with overlap_moe_expert_parallel_comm).
    Interleaving runs p consecutive micro-batches through a chunk before the next chunk. Raises PlanError where the
    schedule cannot run so.
    """
    if found := schedule_faults(Pipeline(schedule, num_stages, num_micro_batches, num_chunks)):
        raise PlanError(found)
    p, m = num_stages, num_micro_batches
    match schedule:
        case "gpipe":
            return _alternate(_table(m, num_chunks, m), num_chunks, m * num_chunks)
        case "1f1b":
            return _alternate(_table(m, 1, m), 1, p - stage - 1 + paired, paired=paired)
        case "interleaved":
            warm_up = interleaved_warm_up(p, stage, num_chunks, paired=paired)
            return _alternate(_table(m, num_chunks, p), num_chunks, warm_up, paired=paired)
        case "zb_h1":
            return _delay_weights(_alternate(_table(m, 1, m), 1, p - stage - 1), m, stage)
        case "dualpipe":
            return _mirrored(_bidirectional(p // 2, min(stage, p - 1 - stage), m // 2), stage >= p // 2, m // 2)
        case "dualpipe_v":
            return _bidirectional(p, stage, m)


def interleaved_warm_up(num_stages: int, stage: int, num_chunks: int, *, paired: bool = False) -> int:
    """Forwards before the first backward, over all chunks, where there are enough."""
    return 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages + paired


def _table(m: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of the forwards: chunk by chunk within each group of micro-batches."""
    return [
        (micro_batch, chunk)
        for first in range(0, m, group_size)
        for chunk in range(num_chunks)
        for micro_batch in range(first, min(first + group_size, m))
    ]


def _alternate(
    table: list[tuple[int, int]], num_chunks: int, warm_up: int, *, paired: bool = False
) -> tuple[Action, ...]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards left: chunks in reverse."""
    forwards = [Action("F", micro_batch, chunk) for micro_batch, chunk in table]
    backwards = [Action("B", micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in table]
    steady = zip(forwards[warm_up:], backwards, strict=False)
    turns = [action for f, b in steady for action in (f, replace(b, beside=paired))]
    return (*forwards[:warm_up], *turns, *backwards[len(turns) // 2 :])


def _delay_weights(actions: tuple[Action, ...], m: int, stage: int) -> tuple[Action, ...]:
    """ZB-H1: the weights' gradients come `stage` backwards late, so that all stages hold as many micro-batches."""
    split: list[Action] = []
    for action in actions:
        split.append(replace(action, whole=action.kind == "F"))
        if action.kind == "B" and action.micro_batch >= stage:
            split.append(Action("W", action.micro_batch - stage))
    return (*split, *(Action("W", late) for late in range(max(m - stage, 0), m)))


@dataclass(slots=True)
class _Issue:
    """Actions as they are issued, each phase counting its own micro-batches, weights first in first out."""

    actions: list[Action] = field(default_factory=list)
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    backwards: list[int] = field(default_factory=lambda: [0, 0])
    weights: deque[Action] = field(default_factory=deque)

    def forward(self, phase: int) -> None:
        self.actions.append(Action("F", self.forwards[phase], phase))
        self.forwards[phase] += 1

    def backward(self, phase: int, *, split: bool = False, beside: bool = False) -> None:
        micro_batch = self.backwards[phase]
        self.backwards[phase] += 1
        self.actions.append(Action("B", micro_batch, phase, whole=not split, beside=beside))
        if split:
            self.weights.append(Action("W", micro_batch, phase))

    def weight(self) -> None:
        self.actions.append(self.weights.popleft())

    def both(self, forward: int, backward: int) -> None:
        """A forward and the backward that runs beside it."""
        self.forward(forward)
        self.backward(backward, beside=True)


def _bidirectional(h: int, r: int, n: int) -> tuple[Action, ...]:
    """The eight steps of DualPipe on the r-th of h stages, counted from an end to the middle, n micro-batches a phase.

    Chunks are phases: 0 enters from the near end, 1 comes back from the middle (DualPipeV) or from the far end.
    """
    issue = _Issue()
    for _ in range(2 * (h - r - 1)):  # 1
        issue.forward(0)
    for _ in range(r + 1):  # 2
        issue.forward(0)
        issue.forward(1)
    for _ in range(h - r - 1):  # 3
        issue.backward(1, split=True)
        issue.weight()
        issue.forward(1)
    for i in range(n - 2 * h + r + 1):  # 4
        if i == 0 and r == h - 1:  # in the middle the first two run one after the other: less bubble
            issue.forward(0)
            issue.backward(1)
        else:
            issue.both(0, 1)
        issue.both(1, 0)
    for _ in range(h - r - 1):  # 5
        issue.backward(1)
        issue.both(1, 0)
    for i in range(r + 1):  # 6: the second half of these 2 (r + 1) backwards leaves the weights for later
        issue.backward(1, split=2 * i >= r + 1)
        issue.backward(0, split=2 * i + 1 >= r + 1)
    for _ in range(h - r - 1):  # 7
        issue.weight()
        issue.backward(0, split=True)
    for _ in range(r + 1):  # 8
        issue.weight()
    return tuple(issue.actions)


def _mirrored(actions: tuple[Action, ...], far: bool, half: int) -> tuple[Action, ...]:  # noqa: FBT001
    """Renumbers DualPipe's phases as directions: in the far half of the stages, phase 0 comes from the last stage."""
    directed = (replace(action, chunk=action.chunk ^ far) for action in actions)
    return tuple(replace(action, micro_batch=action.micro_batch + half * action.chunk) for action in directed)
