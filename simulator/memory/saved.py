"""What a block leaves alive after its forward: sums over its tape, without writing a step."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.tape import GRADIENT, INPUT, Event, Tape
from simulator.memory.tapes import gradient_dtype, record_tapes
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes that a forward adds: of the embedding, a layer of each kind, a checkpointed one.

    head_peak, head_rise: the most that the head adds in its forward, and up to the end of its backward. head_gradients:
    of its parameters.

    Each is what is alive after the block less what was before, its input and its output among them. message: a layer's
    input, which a pipeline stage sends on. plain_rise, checkpointed_rise: the most that the backward of a layer, and its
    recomputation, add to what is alive when it begins.
    """

    embedding: int
    plain: dict[str, int]
    checkpointed: dict[str, int]
    head_peak: int
    head_rise: int
    head_gradients: int
    message: int
    plain_rise: dict[str, int]
    checkpointed_rise: dict[str, int]


def saved_of(blocks: ModelBlocks, plan: Plan, stack: Stack, known: dict[object, Tape]) -> Saved:
    """What the blocks of a plan save for their backwards. known: as `record_tapes`, and raises what that does."""
    tapes = record_tapes(blocks, plan, stack, keep_gradients=False, known=known)
    given = blocks.layer.input_bytes
    inputs = {block.name: block.input_bytes for block in blocks.body}
    return Saved(
        embedding=_added(tapes.embedding, 0),
        plain={kind: _added(tape, inputs[kind]) for kind, tape in tapes.plain.items()},
        checkpointed={kind: _added(tape, inputs[kind]) for kind, tape in tapes.checkpointed.items()},
        head_peak=_most(tapes.head.forward.events, {INPUT: blocks.head.input_bytes}),
        head_rise=_most([*tapes.head.forward.events, *tapes.head.backward.events], {INPUT: blocks.head.input_bytes}),
        head_gradients=sum(op.parameter_numel for op in blocks.head.ops) * DTYPE_BYTES[gradient_dtype(plan, stack)],
        message=given,
        plain_rise={kind: _rise(tape, inputs[kind]) for kind, tape in tapes.plain.items()},
        checkpointed_rise={kind: _rise(tape, inputs[kind]) for kind, tape in tapes.checkpointed.items()},
    )


def _added(tape: Tape, given: int) -> int:
    sizes, live = {INPUT: given}, 0
    for slot, num_bytes, _, _ in tape.forward.events:
        if num_bytes >= 0:
            sizes[slot] = num_bytes
            live += num_bytes
        else:
            live -= sizes.get(slot, 0)
    return live


def _rise(tape: Tape, given: int) -> int:
    made = {slot: num_bytes for slot, num_bytes, _, _ in tape.forward.events if num_bytes >= 0}
    return _most(tape.backward.events, {INPUT: given, GRADIENT: given, **made})


def _most(events: list[Event], sizes: dict[int, int]) -> int:
    """The most that events add at once. sizes: of storages that are there before, by slot."""
    live = most = 0
    for slot, num_bytes, _, _ in events:
        if num_bytes >= 0:
            sizes[slot] = num_bytes
            live += num_bytes
            most = max(most, live)
        else:
            live -= sizes.get(slot, 0)
    return most
