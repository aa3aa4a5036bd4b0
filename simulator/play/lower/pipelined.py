"""The order in which a pipeline stage issues a step: its schedule's actions, what it sends and receives, the end.

Non-interleaved schedules of Megatron and DeepSpeed exchange with their neighbours between two pieces of compute and wait
for both directions (megatron/core/pipeline_parallel/p2p_communication.py: batch_isend_irecv, wait, then
torch.cuda.synchronize(), so the host starts anew each time); interleaved ones, and torch's, send and receive beside
compute (overlap_p2p_comm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

from simulator.parallel.pipeline import Action, neighbours, order
from simulator.play.lower.builder import Builder
from simulator.play.lower.paired import paired
from simulator.play.lower.schedule import (
    ScheduledUnit,
    StageStep,
    gather_late,
    inputs_backward,
    replicated_backward,
    replicated_forward,
    sharded_backward,
    sharded_forward,
    weights_backward,
)
from simulator.play.lower.work import Phase, Segment
from simulator.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline rank: its chunks in their order, each with its units.

    message_bytes: activations of a micro-batch, or their gradients, that pass between chunks. tied_bytes: gradients of
    the matrix that the first and the last stage both hold. folds: what no data-parallel traffic touches is one op.
    """

    index: int
    plan: Plan
    chunks: tuple[StageStep, ...]
    message_bytes: int
    tied_bytes: int = 0
    folds: bool = True

    @property
    def waits_for_messages(self) -> bool:
        """Compute, and the host, stand still while messages travel."""
        return waits_for_messages(self.plan)


def waits_for_messages(plan: Plan) -> bool:
    """The plan's stages exchange synchronously."""
    plain = plan.pp > 1 and plan.pipeline_schedule in ("gpipe", "1f1b")
    return plain and plan.implementation in ("megatron", "deepspeed")


def pipelined_step(build: Builder, stage: Stage, num_micro_batches: int) -> None:
    """All of a stage's actions, then what all stages agree on, and the optimizer."""
    plan = stage.plan
    actions = order(
        plan.pipeline_schedule,
        plan.pp,
        num_micro_batches,
        stage.index,
        plan.virtual_stages,
        paired=plan.expert_overlap,
    )
    first = {action.chunk: action for action in reversed(actions) if action.kind == "F"}
    last = {action.chunk: action for action in actions if action.kind != "F"}
    reduced: list[int | None] = []
    waiting: Action | None = None  # a forward that runs with the backward behind it
    for action, then in zip_longest(actions, actions[1:]):
        if waiting is not None:
            _together(build, stage, waiting, action)
            waiting = None
        elif then is not None and _pairs(stage, action, then, first, last):
            waiting = action
        else:
            _receive(build, stage, action)
            ends = action == last[action.chunk]
            end, reductions = _act(build, stage, action, first=action == first[action.chunk], ends=ends)
            reduced += reductions
            _send(build, stage, action, end)
    _finish(build, stage, reduced)


def _pairs(stage: Stage, action: Action, then: Action, first: Mapping[int, Action], last: Mapping[int, Action]) -> bool:
    """Two actions run as one: experts' exchanges of either beside the other, and nothing of data parallelism in them."""
    plan = stage.plan
    quiet = stage.folds and not plan.syncs_every_micro_batch
    alone = action == first[action.chunk] or then == last[then.chunk]
    return plan.expert_overlap and then.beside and quiet and not alone


def _together(build: Builder, stage: Stage, forward: Action, backward: Action) -> None:
    """A forward and a backward as one op: both wait for what either receives, and what they make leaves at the end."""
    for action in (forward, backward):
        _receive(build, stage, action)
    kind = forward.chunk, backward.chunk, backward.whole, backward.micro_batch == 0
    phases = _by_unit(stage, forward), _by_unit(stage, backward)
    work = build.once(kind, lambda: paired(build, *phases))
    end = build.compute(f"{forward} with {backward}", work, early=stage.chunks[forward.chunk].turns)
    for action in (forward, backward):
        _send(build, stage, action, end)


def _by_unit(stage: Stage, action: Action) -> list[Phase]:
    """A phase for each of a chunk's units; a kept gradient belongs to its unit's backward."""
    phases = _phases(stage, action)
    per_unit = len(phases) // len(stage.chunks[action.chunk].units)
    return [reduce(Phase.__add__, phases[i : i + per_unit]) for i in range(0, len(phases), per_unit)]


def _act(build: Builder, stage: Stage, action: Action, *, first: bool, ends: bool) -> tuple[int, list[int | None]]:
    """The action's compute and its data-parallel collectives: its last op, and the reductions."""
    step, index = stage.chunks[action.chunk], action.micro_batch
    sharded = step.plan.gathers
    sync = action.kind != "F" and (step.plan.syncs_every_micro_batch or ends)
    if stage.folds and not sharded and not sync and not (first and action.kind == "F"):
        return _folded(build, stage, action), []
    if action.kind == "F":
        if sharded:
            return sharded_forward(build, step, index), []
        return replicated_forward(build, step, index, first=first), []
    if action.kind == "W":
        return weights_backward(build, step, index, sync=sync)
    if not action.whole:
        return inputs_backward(build, step, index), []
    backward = sharded_backward if sharded else replicated_backward
    reductions = backward(build, step, index, sync=sync, final=ends)
    end = build.found("backward", step.units[0].name, index)
    assert end is not None
    return end, reductions


def _folded(build: Builder, stage: Stage, action: Action) -> int:
    """A micro-batch through a chunk without data-parallel traffic: one op, the same in each but the first."""
    kind = action.chunk, action.kind, action.whole, action.micro_batch == 0
    synchronous = stage.chunks[action.chunk].synchronous
    work = build.once(kind, lambda: build.folded(*_phases(stage, action), synchronous=synchronous))
    return build.compute(str(action), work, early=stage.chunks[action.chunk].turns)


def _phases(stage: Stage, action: Action) -> list[Phase]:
    units = stage.chunks[action.chunk].units
    match action.kind:
        case "F":
            return [unit.work.forward for unit in units]
        case "W":
            return [phase for unit in reversed(units) for phase in (unit.work.weights, _kept(unit, action))]
        case _ if action.whole:
            return [phase for unit in reversed(units) for phase in (unit.backward, _kept(unit, action))]
        case _:
            return [unit.inputs for unit in reversed(units)]


def _kept(unit: ScheduledUnit, action: Action) -> Phase:
    """What it takes to keep a unit's gradient for the micro-batches to come."""
    return Phase(segments=(Segment(work=unit.add if action.micro_batch else unit.keep),))


def _receive(build: Builder, stage: Stage, action: Action) -> None:
    plan = stage.plan
    near = neighbours(plan.pipeline_schedule, plan.pp, stage.index, action, plan.virtual_stages)
    if near.receives is not None:
        gate = build.last_compute if stage.waits_for_messages else None
        source, _ = near.receives
        label = f"receive {action} from stage {source}"
        message, pair = _message(stage.index, action), (source, stage.index)
        build.hold(build.send_message(label, message, stage.message_bytes, pair, gate, lane=_lane(plan, action)))


def _send(build: Builder, stage: Stage, action: Action, end: int) -> None:
    plan = stage.plan
    near = neighbours(plan.pipeline_schedule, plan.pp, stage.index, action, plan.virtual_stages)
    if near.sends is not None:
        target, then = near.sends
        label = f"send {then} to stage {target}"
        message, pair = _message(target, then), (stage.index, target)
        sent = build.send_message(label, message, stage.message_bytes, pair, end, lane=_lane(plan, then))
        if stage.waits_for_messages:
            build.hold(sent)


def _lane(plan: Plan, action: Action) -> str:
    """Activations and gradients that go the same way do not wait for each other's turn.

    Their senders group all that goes and comes (deepseek-ai/DualPipe, dualpipe.py: one batch_isend_irecv).
    """
    both = plan.expert_overlap or plan.pipeline_schedule in ("dualpipe", "dualpipe_v")
    return f" {action.kind}" if both else ""


def _message(target: int, action: Action) -> str:
    return f"{action.kind}{action.micro_batch} chunk {action.chunk} of stage {target}"


def _finish(build: Builder, stage: Stage, reduced: list[int | None]) -> None:
    """Gradients of a tied matrix are summed, the gradients' norm is agreed upon, the optimizer steps."""
    plan, ready = stage.plan, [*reduced, build.last_compute]
    if stage.tied_bytes:
        ends = (0, plan.pp - 1)
        ready.append(build.all_reduce_stages("all-reduce tied embeddings", "tied", stage.tied_bytes, ends, *ready))
    if plan.pp > 1:
        ready = [build.all_reduce_stages("gradient norm", "norm", 4, tuple(range(plan.pp)), *ready)]
    done = build.compute("optimizer", stage.chunks[0].optimizer, *ready)
    for step in stage.chunks:
        gather_late(build, step, done)
