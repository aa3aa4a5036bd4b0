"""step_script: the order of one rank's step, written once for everybody who reads it.

Micro-batches one after another, or in the order of a pipeline schedule; in each the units of a chunk, forward and back;
then the optimizer. What an implementation issues around a unit is its own `Order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from simulator.parallel.pipeline import Action, order
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.script.implementation import implementation_of
from simulator.work.script.instructions import (
    Agree,
    Direction,
    GatherUpdated,
    Instruction,
    Pass,
    Receive,
    Send,
    Together,
    Update,
)
from simulator.work.script.order import Chunk, UnitGroups


@dataclass(slots=True, kw_only=True)
class _Passes:
    """The passes of one rank's micro-batches. Those that differ in nothing but the micro-batch share their instructions."""

    plan: Plan
    stack: Stack
    chunks: Sequence[Chunk]
    _made: dict[tuple[int, Direction, bool], UnitGroups] = field(default_factory=dict)

    def forward(self, index: int, chunk: int = 0, *, first: bool, action: Action | None = None) -> Pass:
        units = self._units(chunk, "forward", flag=first)
        return Pass(chunk=chunk, micro_batch=index, direction="forward", units=units, first=first, action=action)

    def backward(
        self, index: int, chunk: int = 0, *, last: bool, direction: Direction = "backward", action: Action | None = None
    ) -> Pass:
        syncs = self.plan.syncs_every_micro_batch or last
        units = self._units(chunk, direction, flag=syncs)
        return Pass(
            chunk=chunk, micro_batch=index, direction=direction, units=units, last=last, syncs=syncs, action=action
        )

    def _units(self, chunk: int, direction: Direction, *, flag: bool) -> UnitGroups:
        key = chunk, direction, flag
        if key not in self._made:
            around, one = implementation_of(self.plan).order(self.plan), self.chunks[chunk]
            if direction == "forward":
                self._made[key] = around.forward(self.plan, self.stack, one, first=flag)
            else:
                self._made[key] = around.backward(self.plan, self.stack, one, direction, syncs=flag)
        return self._made[key]


def step_script(
    plan: Plan, stack: Stack, chunks: Sequence[Chunk], num_micro_batches: int, stage: int = 0
) -> Iterator[Instruction]:
    """One rank's step. chunks: of the pipeline stage, each with the ends of the model that it holds."""
    passes = _Passes(plan=plan, stack=stack, chunks=chunks)
    if plan.acts_in_order:
        yield from _scheduled(passes, num_micro_batches, stage)
    else:
        for index in range(num_micro_batches):
            yield passes.forward(index, first=index == 0)
            yield passes.backward(index, last=index == num_micro_batches - 1)
    yield Update()
    if not implementation_of(plan).order(plan).gathers_before_use:
        for number, chunk in enumerate(chunks):
            yield from (GatherUpdated(unit, number) for unit in range(chunk.num_units))
    if not plan.acts_in_order:
        yield Agree()


def _scheduled(passes: _Passes, num_micro_batches: int, stage: int) -> Iterator[Instruction]:
    """The actions of a pipeline schedule, each between what it receives and what it sends."""
    plan = passes.plan
    actions = order(
        plan.pipeline_schedule,
        plan.pp,
        num_micro_batches,
        stage,
        plan.pipeline.virtual_stages,
        paired=plan.experts.overlap,
    )
    first = {action.chunk: action for action in reversed(actions) if action.kind == "F"}
    last = {action.chunk: action for action in actions if action.kind != "F"}
    ahead: Pass | None = None  # a forward that runs with the backward behind it
    received: Action | None = None  # what the stage has received before it sent what came before
    for action, then in zip_longest(actions, actions[1:]):
        one = _pass(passes, action, first=action == first[action.chunk], last=action == last[action.chunk])
        if one is None:
            yield Receive(action)
        elif ahead is not None:
            yield Together(ahead, one, by_layer=plan.pipeline_schedule not in ("dualpipe", "dualpipe_v"))
            ahead = None
        elif plan.experts.overlap and then is not None and then.beside:
            ahead = one
        else:
            if action != received:
                yield Receive(action)
            yield one
            if plan.traits.messages_in_turn and action.kind == "B" and then is not None and then.kind == "F":
                received = then
                yield Receive(then)
            yield Send(action)


def _pass(passes: _Passes, action: Action, *, first: bool, last: bool) -> Pass | None:
    """None: nothing is done. torch leaves all of its first stage's backward to the W, as tokens have no gradients."""
    index, chunk = action.micro_batch, action.chunk
    if action.kind == "F":
        return passes.forward(index, chunk, first=first, action=action)
    direction: Direction = "weights" if action.kind == "W" else "backward" if action.whole else "inputs"
    if passes.chunks[chunk].embedding and passes.plan.traits.uses_torch_pipelines:  # stage.py, backward_one_chunk
        if direction == "inputs":
            return None
        direction = "backward"
    return passes.backward(index, chunk, last=last, direction=direction, action=action)
