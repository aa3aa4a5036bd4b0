"""What a script's order comes to, whatever its units weigh: read once by those who bound a step without playing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.script.instructions import GatherUpdated, Instruction, Pass, Run, UnitInstruction, Unshard, Update
from simulator.work.script.order import Chunk
from simulator.work.script.step import step_script

_CHUNK: Final = Chunk(num_layers=2)  # an embedding, a first and a last layer, a head


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSums:
    """Collectives of parameters that every unit has in a step.

    gathers: one in each forward and each backward. updated_last: one of what shards updated, behind the optimizer.
    waits_for_gather, waits_for_updated: what the first compute of a step waits for.
    """

    gathers: bool
    updated_last: bool
    waits_for_gather: bool
    waits_for_updated: bool


def order_sums(plan: Plan, stack: Stack) -> OrderSums:
    """Read off a script of one micro-batch through a small model, without a pipeline around it."""
    alone = plan if not plan.acts_in_order else plan.copy_with(pp=1, expert_overlap=False)
    script = list(step_script(alone, stack, [_CHUNK], 1))
    forward = _instructions(script[:1])
    first = list(takewhile(lambda one: not isinstance(one, Run), forward))
    update = next(at for at, one in enumerate(script) if isinstance(one, Update))
    return OrderSums(
        gathers=any(_gathered(one) for one in forward),
        updated_last=any(isinstance(one, GatherUpdated) for one in script[update:]),
        waits_for_gather=any(_gathered(one) for one in first),
        waits_for_updated=any(isinstance(one, GatherUpdated) for one in first),
    )


def _instructions(script: Sequence[Instruction]) -> list[UnitInstruction]:
    passes: Iterable[Pass] = (one for one in script if isinstance(one, Pass))
    return [instruction for one in passes for group in one.units for instruction in group]


def _gathered(one: UnitInstruction) -> bool:
    return isinstance(one, Unshard) and bool(one.gathers)
