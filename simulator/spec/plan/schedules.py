"""Names of the pipeline schedules, and of the ways to deal layers to stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "dualpipe", "dualpipe_v"]
SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How layers are dealt to stages. By default as equally as possible, the first positions getting one more.

    first, last: layers of the first and the last stage, over all their chunks; the others share the rest equally
        (Megatron's --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers).
    explicit: layers of every position, in order (what --pipeline-model-parallel-layout amounts to); zeros are legal.
    embedding_as_layer, head_as_layer: the first (last) position has one layer less, as if the embedding (the head and
        loss) were a layer (--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split).
    even: refuse layers that do not divide equally, as Megatron-LM does.
    """

    first: int | None = None
    last: int | None = None
    explicit: tuple[int, ...] | None = None
    embedding_as_layer: bool = False
    head_as_layer: bool = False
    even: bool = False

    @property
    def ends_as_layers(self) -> int:
        """How many of embedding and head count as a layer."""
        return self.embedding_as_layer + self.head_as_layer


EQUAL = Split()
