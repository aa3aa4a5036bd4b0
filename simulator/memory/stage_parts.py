"""The chunks of layers that a rank holds, by their numbers there."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.parallel.model_shard import ModelShard
from simulator.spec.model import Model
from simulator.work.script.order import Chunk
from simulator.work.script.storage import ROOT


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
