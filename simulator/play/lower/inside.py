"""Collectives inside compute ops: those of blocks, which folding joined with the kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typing_extensions import override

from simulator.play.lower.builder import Builder
from simulator.play.lower.work import Work

Exchanges = Counter[tuple[str, str, int]]  # (kind, role, bytes) -> how many


class RecordingBuilder(Builder):
    """Builds the same program. inside: of each compute op with any, its collectives."""

    def __init__(self, *inputs: Any) -> None:  # noqa: ANN401  as Builder has them
        super().__init__(*inputs)
        self.inside: dict[int, Exchanges] = {}
        self._before: Exchanges = Counter()

    @override
    def compute(self, label: str, work: Work, *after: int | None, **how: Any) -> int:
        number = super().compute(label, work, *after, **how)
        if more := self._exchanged - self._before:
            self.inside[number], self._before = more, self._exchanged.copy()
        return number
