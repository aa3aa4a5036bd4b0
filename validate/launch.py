"""How this process was started: by itself, or by torchrun (or another launcher in its words) as one rank of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from simulator.base.errors import Fault, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """outside: a launcher gave this process its rank. local_rank, local_size: among the ranks of this machine."""

    outside: bool
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first_here(self) -> bool:
        """Whether this process answers for its machine: one that starts ranks itself does."""
        return self.local_rank == 0

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """What torchrun's variables say. Raises InputError where they contradict each other."""
        told = os.environ if environment is None else environment
        if "RANK" not in told or "WORLD_SIZE" not in told:
            return cls(outside=False)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        usual = {"LOCAL_RANK": told["RANK"], "LOCAL_WORLD_SIZE": told["WORLD_SIZE"]}
        text = {name: told.get(name, usual.get(name, "")) for name in names}
        faults = [
            Fault(place=f"environment: {name}", problem=f"{value!r} is not a whole number", remedy="torchrun sets it")
            for name, value in text.items()
            if not value.isdigit()
        ]
        if faults:
            raise InputError(faults)
        rank, size, local_rank, local_size = (int(text[name]) for name in names)
        if rank >= size or local_rank >= local_size:
            problem = f"rank {rank} of {size}, local rank {local_rank} of {local_size}"
            raise InputError(Fault(place="environment: RANK", problem=problem, remedy="as torchrun sets them"))
        return cls(outside=True, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
