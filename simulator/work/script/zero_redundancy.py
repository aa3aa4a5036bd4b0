"""torch's ZeRO-1: DDP whose optimizer's state is dealt to ranks by whole parameters (ZeroRedundancyOptimizer)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.work.script.ddp import DDP

ZERO_REDUNDANCY: Final = replace(
    DDP,
    traits=replace(
        DDP.traits,
        name="zero_redundancy",
        zero_stages=(1,),
        default_for=(1,),
        reduces_among_all=True,
        takes_local_steps=False,
    ),
)
