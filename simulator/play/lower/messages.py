"""Messages between pipeline stages: what an action receives and sends.

Non-interleaved schedules of Megatron and DeepSpeed exchange with their neighbours between two pieces of compute and wait
for both directions (megatron/core/pipeline_parallel/p2p_communication.py: batch_isend_irecv, wait, then
torch.cuda.synchronize(), so the host starts anew each time); interleaved ones, and torch's, send and receive beside
compute (overlap_p2p_comm). nanotron's stages wait like Megatron's, and send one message at a time, behind its tensors'
shapes, which the receiver's host reads (parallel/pipeline_parallel/state.py, run_communication; p2p.py, _recv_meta).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypedDict

from simulator.parallel.pipeline import Action, neighbours
from simulator.play.lower.builder import Builder
from simulator.play.lower.stage import Stage, waits_for_messages
from simulator.spec.plan import Plan
from simulator.work.collectives import KINDS
from simulator.work.program import Collective, Program

_PAIR: Final = re.compile(r"nccl:pp (\d+) (?:to|and) (\d+)")
_SENDS: Final = "send "


def calls_of(program: Program, stage: int) -> Iterator[tuple[str, str, int, int]]:
    """(kind, role, bytes, times) of every collective of a stage's program, those inside folded work too."""
    for op in program.ops:
        if isinstance(op, Collective) and op.kind in KINDS and (role := role_of(op, stage)) is not None:
            yield op.kind, role, op.size_bytes, 1
    yield from program.exchanges


def role_of(op: Collective, stage: int) -> str | None:
    """The role of a stage's op: a mesh role, or "pp 0 to 1" of a sent message; None for a received one."""
    pair = _PAIR.match(op.stream)
    if pair is None:
        return op.stream.removeprefix("nccl:")
    if not op.label.startswith(_SENDS):
        return None
    return f"pp {stage} to {int(pair[1]) + int(pair[2]) - stage}"


def receive(build: Builder, stage: Stage, action: Action) -> None:
    """The next compute waits for the action's message from another stage."""
    plan = stage.plan
    near = neighbours(plan.pipeline_schedule, plan.pp, stage.index, action, plan.pipeline.virtual_stages)
    if near.receives is not None:
        gate = build.last_compute if waits_for_messages(plan) else None
        source, _ = near.receives
        label = f"receive {action} from stage {source}"
        message, pair = _message(stage.index, action), (source, stage.index)
        build.hold(build.send_message(label, message, stage.message_bytes, pair, gate, **_way(stage, action)))


def send(build: Builder, stage: Stage, action: Action, end: int) -> None:
    """Send the action's result after op `end`."""
    plan = stage.plan
    near = neighbours(plan.pipeline_schedule, plan.pp, stage.index, action, plan.pipeline.virtual_stages)
    if near.sends is not None:
        target, then = near.sends
        label = f"{_SENDS}{then} to stage {target}"
        message, pair = _message(target, then), (stage.index, target)
        sent = build.send_message(label, message, stage.message_bytes, pair, end, **_way(stage, then))
        if waits_for_messages(plan):
            build.hold(sent)


class _Way(TypedDict):
    """How a message travels."""

    lane: str
    tensors: int
    in_turn: bool


def _way(stage: Stage, action: Action) -> _Way:
    plan = stage.plan
    turn = plan.traits.messages_in_turn and waits_for_messages(plan)
    return {"lane": _lane(plan, action), "tensors": stage.tensors(action), "in_turn": turn}


def _lane(plan: Plan, action: Action) -> str:
    """Activations and gradients that go the same way do not wait for each other's turn.

    Their senders group all that goes and comes (deepseek-ai/DualPipe, dualpipe.py: one batch_isend_irecv).
    """
    both = plan.experts.overlap or plan.pipeline_schedule in ("dualpipe", "dualpipe_v")
    return f" {action.kind}" if both else ""


def _message(target: int, action: Action) -> str:
    return f"{action.kind}{action.micro_batch} chunk {action.chunk} of stage {target}"
