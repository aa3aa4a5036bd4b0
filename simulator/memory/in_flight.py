"""InFlight: what a micro-batch holds between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.memory.offloading import Evictor
from simulator.memory.tape import GRADIENT, INPUT, Tape
from simulator.memory.tapes import Tapes
from simulator.memory.writer import Writer
from simulator.parallel.model_shard import ModelShard
from simulator.spec.model import Model
from simulator.work.script.instructions import UnitInstruction, Unshard
from simulator.work.script.order import Chunk
from simulator.work.script.storage import ROOT


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward.

    saved: (tape, base, input slot) of each unit that it passed; gradients: slots of their outputs' gradients, where a
    backward is split. value: slot of what the last one made, an activation
    or a gradient. coming: units whose evicted activations were sent for. own: gradients of the unit that ran last; head: those of the head. ones, loss: of the loss.
    sent: slot of what the next stage got, where it is kept. units: of the chunk, as `StepWriter._unit` has them.
    """

    index: int
    part: StagePart
    tapes: Tapes
    evictor: Evictor | None
    value: int = 0
    saved: dict[int, tuple[Tape, int, int]] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    own: list[tuple[int, int]] = field(default_factory=list)
    head: list[tuple[int, int]] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    ones: int = 0
    loss: int = 0
    sent: int | None = None
    adds: bool = False
    units: dict[int, tuple[int, str, Tape]] = field(default_factory=dict)

    def slots(self) -> set[int]:
        """Of tensors that may wait for the backward."""
        kept = {slot for tape, base, _ in self.saved.values() for slot in range(base, base + tape.num_slots)}
        return (
            kept
            | {given for _, _, given in self.saved.values()}
            | {self.value, self.loss, -1 if self.sent is None else self.sent}
        )

    def logits(self) -> list[int]:
        """What the model returned, where a schedule holds it (torch/distributed/pipelining/stage.py: fwd_cache)."""
        tape, base, _ = self.saved[max(self.saved)]
        return [] if tape.result == INPUT else [base + tape.result]

    def restore(self, number: int, units: list[int]) -> None:
        """What the head sends for arrives behind its own backward: nothing of the head's has left."""
        assert self.evictor is not None
        self.coming += units
        if not self.part.chunk.is_head(number):
            self.evictor.restore(self.coming)
            self.coming = []

    def add_to_head(self, writer: Writer, table: int, parts: int, element_bytes: int, *, sums: bool) -> None:
        """A tied matrix of `table` elements has one gradient: the embedding's is added to the head's, and goes.

        DTensor's is the whole table's, of `parts`: the rank's part of it and the sum are tensors of their own. So is the sum where no
        cast stands between the head's product and the matrix (`sums`): its gradient is then the transposed view of another
        tensor, which autograd does not add to in place (torch 2.13, input_buffer.cpp, can_accumulate_inplace).
        """
        size = table * element_bytes
        # Positions, and a norm beside a table of one row, may be as large: theirs is another gradient
        at = next((i for i, (_, numel) in enumerate(self.own) if numel in (table, table * parts)), None)
        if at is None:
            return
        slot, numel = self.own[at]
        head = next((i for i, one in enumerate(self.head) if one[1] == table), None)
        if sums and numel == table and head is not None:
            total = writer.alloc(size, "gradients")
            writer.free(self.head[head][0])
            self.head = [*self.head[:head], (total, table), *self.head[head + 1 :]]
        if numel > table:
            writer.free(*[writer.alloc(size, "temporaries") for _ in range(2)])
        writer.free(slot)
        self.own = [*self.own[:at], *self.own[at + 1 :]]


def outside(slot: int, base: int, given: int, gradient: int) -> int:
    """A tape's slot as a slot of the step."""
    return base + slot if slot >= 0 else {INPUT: given, GRADIENT: gradient}[slot]


@dataclass(frozen=True, slots=True)
class StagePart:
    """A chunk of the rank's layers, by their numbers on the rank."""

    chunk: Chunk
    layers: range

    def unit(self, number: int, head: int = ROOT) -> int:
        """A unit of the chunk as ROOT, the head's number or a layer of the rank."""
        if self.chunk.is_embedding(number) or self.chunk.is_head(number):
            return head if self.chunk.is_head(number) else ROOT
        return self.layers[number - self.chunk.embedding]

    def first_ahead(self, groups: Sequence[Sequence[UnitInstruction]]) -> list[int]:
        """What is gathered beside the root of a stage without the head: the first layers of the backward."""
        first = next((one for one in groups[0] if isinstance(one, Unshard)), None) if groups else None
        return [] if first is None else [self.unit(number) for number, _ in first.gathers[:-1]]


def parts_of(model: Model) -> tuple[StagePart, ...]:
    """The whole model, or a pipeline stage's chunks."""
    if not isinstance(model, ModelShard):
        layers = range(len(model.body))
        return (StagePart(Chunk(len(layers)), layers),)
    parts, begin = [], 0
    for number, num_layers in enumerate(model.body_chunks):
        layers = range(begin, begin + len(num_layers))
        chunk = Chunk(len(num_layers), model.embedding_chunk == number, model.head_chunk == number)
        parts.append(StagePart(chunk, layers))
        begin = layers.stop
    return tuple(parts)
