"""Batch: what one step computes, in the numbers that its price depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Decoding batches are padded to a captured size: 1, 2, 4 and multiples of 8 (vLLM, worker/model_runner.py,
# _BATCH_SIZES_TO_CAPTURE); the V1 engine captures up to 512.
GRAPH_ALIGNMENT, MOST_CAPTURED = 8, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prompt: `new` tokens behind `cached` ones. last: its end is the prompt's, so a token is sampled.

    first: of this prompt, before which its images are encoded.
    """

    new: int
    cached: int
    last: bool = True
    first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes. keys: of each of the model's windows, what all decoding sequences see, new tokens included.

    out, back: cache blocks that go to the host's memory before it, and that come back.
    """

    decodes: int
    keys: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    out: int = 0
    back: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + sum(chunk.new for chunk in self.chunks)

    def tokens_of(self, pcp: int) -> int:
        """Of one of so many GPUs that part prompts among them."""
        return self.decodes + sum(-(-chunk.new // pcp) for chunk in self.chunks)

    @property
    def rows(self) -> int:
        """Sequences that sample a token."""
        return self.decodes + sum(chunk.last for chunk in self.chunks)


def padded(decodes: int, sizes: Sequence[int] = ()) -> int:
    """The captured batch size that such a step runs in. sizes: that are captured, in order; empty: the usual ones."""
    if sizes:
        return next((size for size in sizes if decodes <= size), decodes)
    if decodes > MOST_CAPTURED:
        return decodes
    return next((size for size in (1, 2, 4) if decodes <= size), -(-decodes // GRAPH_ALIGNMENT) * GRAPH_ALIGNMENT)


def causal_pairs(chunk: Chunk, window: int | None) -> int:
    """(query, key) pairs of one head: token i of the piece sees cached + i + 1 keys, at most `window` of them."""
    n, c = chunk.new, chunk.cached
    if window is None or c + n <= window:
        return n * c + n * (n + 1) // 2
    full = max(0, min(n, window - c))  # tokens that see everything before them
    return full * c + full * (full + 1) // 2 + (n - full) * window


def busiest_rank(batch: Batch, ranks: int) -> Batch:
    """What the busiest of so many GPUs has of a step, each with sequences of its own: pieces go to where the fewest tokens are."""
    if ranks == 1:
        return batch
    bins: list[list[Chunk]] = [[] for _ in range(min(ranks, len(batch.chunks)))]
    for chunk in sorted(batch.chunks, key=lambda one: -one.new):
        min(bins, key=lambda each: sum(one.new for one in each)).append(chunk)
    most = max(bins, key=lambda each: sum(one.new for one in each), default=[])
    decodes = -(-batch.decodes // ranks)
    keys = tuple(-(-each * decodes // batch.decodes) if decodes else 0 for each in batch.keys)
    return Batch(decodes=decodes, keys=keys, chunks=tuple(most))
