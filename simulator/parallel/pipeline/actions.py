"""What a stage can issue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

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
