"""Storages as a script's implementations ask for them: allocated, freed, and owned by streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

COMPUTE, GATHER, REDUCE, ALL_REDUCE = range(4)  # streams that own memory
ROOT: Final = -1  # the unit of the embedding and the head, where they are one; layers count from 0
HEAD: Final = -2  # that of the head, where it is in another chunk of the rank than the embedding


class Storages(Protocol):
    """Who keeps account of a step's storages. A slot names one."""

    def alloc(self, num_bytes: int, category: str, stream: int = COMPUTE) -> int:
        """A storage begins: its slot."""
        ...

    def alloc_each(self, sizes: Sequence[int], category: str) -> list[int]:
        """Storages of the compute stream begin, one after the other: their slots."""
        ...

    def free(self, *slots: int) -> None:
        """Storages end."""
        ...

    def free_later(self, event: int, *slots: int) -> None:
        """Storages are freed, but the allocator waits for an event of another stream before it uses them again."""
        ...

    def happened(self, event: int) -> None:
        """That event has come."""
        ...
