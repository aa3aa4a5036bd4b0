"""What a block leaves alive after its forward: sums over its tape, without writing a step."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.memory.step import record_tapes
from simulator.memory.tape import INPUT, Part, Tape
from simulator.ops import ModelBlocks
from simulator.plan import Plan
from simulator.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes that a forward adds: of the embedding, a layer of each kind, a checkpointed one; the most that the head adds meanwhile.

    Each is what is alive after the block less what was before, its input and its output among them. message: a layer's
    input, which a pipeline stage sends on.
    """

    embedding: int
    plain: dict[str, int]
    checkpointed: dict[str, int]
    head_peak: int
    message: int


def saved_of(blocks: ModelBlocks, plan: Plan, stack: Stack) -> Saved:
    """What the blocks of a plan save for their backwards. Raises what `record_tapes` does."""
    tapes = record_tapes(blocks, plan, stack, keep_gradients=False)
    given = blocks.layer.input_bytes
    return Saved(
        embedding=_added(tapes.embedding, 0),
        plain={kind: _added(tape, given) for kind, tape in tapes.plain.items()},
        checkpointed={kind: _added(tape, given) for kind, tape in tapes.checkpointed.items()},
        head_peak=_most(tapes.head.forward, blocks.head.input_bytes),
        message=given,
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


def _most(part: Part, given: int) -> int:
    sizes, live, most = {INPUT: given}, 0, 0
    for slot, num_bytes, _, _ in part.events:
        if num_bytes >= 0:
            sizes[slot] = num_bytes
            live += num_bytes
            most = max(most, live)
        else:
            live -= sizes.get(slot, 0)
    return most
