"""What schedules demand of stages, micro-batches and chunks, with the nearest legal values."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from simulator.base.errors import Fault
from simulator.parallel.legality.layers import LAYERS, MICRO_BATCHES, NUM_CHUNKS, NUM_STAGES
from simulator.parallel.legality.rule import Pipeline, PipelineRule
from simulator.parallel.schedule_traits import played_of


def _interleaved(line: Pipeline) -> bool:
    return line.has_passes and line.schedule == "interleaved"


def _dual(line: Pipeline) -> bool:
    return line.has_passes and line.schedule in ("dualpipe", "dualpipe_v")


def _mirrored(line: Pipeline) -> bool:
    return line.has_passes and line.schedule == "dualpipe"


def _nearest_multiple(line: Pipeline) -> str:
    p, m = line.num_stages, line.num_micro_batches
    return f"num_micro_batches = {f'{m // p * p} or {m // p * p + p}' if m > p else p}"


def _nearest_even(line: Pipeline) -> str:
    p, m = line.num_stages, line.num_micro_batches
    return f"num_micro_batches = {' or '.join(map(str, sorted({max(m - 1, 2 * p), max(m + 1, 2 * p)})))}"


_CHUNKS: Final = (
    PipelineRule(
        where="virtual_stages",
        applies=lambda line: line.has_passes and line.schedule in ("1f1b", "zb_h1"),
        holds=lambda line: line.num_chunks == 1,
        equation=lambda line: f"{line.schedule} has one chunk a stage, virtual_stages = {line.num_chunks}",
        remedy='virtual_stages = 1, or schedule = "interleaved"',
    ),
    PipelineRule(
        where="virtual_stages",
        applies=_interleaved,
        holds=lambda line: line.num_chunks >= 2,
        equation="interleaving needs several chunks per stage, and virtual_stages = 1",
        remedy='virtual_stages = 2 or more, or schedule = "1f1b"',
    ),
    PipelineRule(
        where="virtual_stages",
        applies=_dual,
        holds=lambda line: line.num_chunks == 2,
        equation=lambda line: f"{line.schedule} has two chunks a stage, virtual_stages = {line.num_chunks}",
        remedy="virtual_stages = 2",
    ),
)

_INTERLEAVED: Final = (  # Megatron-LM: schedules.py, forward_backward_pipelining_with_interleaving; arguments.py
    PipelineRule(
        where="pp",
        applies=_interleaved,
        holds=lambda line: line.num_stages >= 2,
        equation="interleaving needs pipeline stages, and pp = 1",
        remedy="pp = 2 or more",
    ),
    PipelineRule(
        where="num_micro_batches",
        applies=_interleaved,
        holds=lambda line: line.num_micro_batches % line.num_stages == 0,
        equation=lambda line: (
            f"micro-batches go in groups of pp: num_micro_batches = {line.num_micro_batches} "
            f"is not a multiple of pp = {line.num_stages}"
        ),
        remedy=_nearest_multiple,
    ),
)

_DUALPIPE: Final = (  # what dualpipe.py and dualpipev.py of deepseek-ai/DualPipe assert
    PipelineRule(
        where="pp",
        applies=_mirrored,
        holds=lambda line: line.num_stages % 2 == 0,
        equation=lambda line: f"DualPipe mirrors stages in pairs, pp = {line.num_stages} is odd",
        remedy=lambda line: f"pp = {line.num_stages - 1} or {line.num_stages + 1}" if line.num_stages > 1 else "pp = 2",
    ),
    PipelineRule(
        where="num_micro_batches",
        applies=_mirrored,
        holds=lambda line: line.num_micro_batches % 2 == 0,
        equation=lambda line: (
            f"half of the micro-batches go each way, num_micro_batches = {line.num_micro_batches} is odd"
        ),
        remedy=_nearest_even,
    ),
    PipelineRule(
        where="num_micro_batches",
        applies=_dual,
        holds=lambda line: line.num_micro_batches >= 2 * line.num_stages,
        equation=lambda line: (
            f"{line.schedule} needs num_micro_batches ≥ 2 × pp: {line.num_micro_batches} < {2 * line.num_stages}"
        ),
        remedy=lambda line: f"num_micro_batches = {2 * line.num_stages}",
    ),
)


def _num_played(line: Pipeline) -> int:
    """Passes of a micro-batch through a chunk that a prediction plays: of the step, and of one that is a repetition shorter."""
    more, last, period = played_of(line.schedule, line.num_stages, line.num_micro_batches)
    return line.num_stages * line.num_chunks * (2 * last - period if more else last)


def _fewer_stages(line: Pipeline) -> str:
    counts = range(min(line.num_stages, MOST_PLAYED), 0, -1)
    most = next((s for s in counts if _num_played(replace(line, num_stages=s)) <= MOST_PLAYED), 0)
    return f"pp = {most} or fewer" if most else "fewer virtual_stages"


# A pass is some 8 ops of 0.9 kB where layers are folded (measured: 1F1B of 64 to 128 stages), and those of the two plays and of
# one on another network are held together: below 1 GB. No model has as many layers as this takes
MOST_PLAYED: Final = 100_000
_PLAYED: Final = PipelineRule(
    where="pp",
    applies=lambda line: line.has_passes,
    holds=lambda line: _num_played(line) <= MOST_PLAYED,
    equation=lambda line: (
        f"{line.num_stages:,} stages take {_num_played(line):,} passes of micro-batches to play, even where those that repeat are "
        f"left out; at most {MOST_PLAYED:,} are played"
    ),
    remedy=_fewer_stages,
)

SCHEDULES: Final = (NUM_STAGES, MICRO_BATCHES, NUM_CHUNKS, *_CHUNKS, *_INTERLEAVED, *_DUALPIPE)
PIPELINE: Final = tuple(dict.fromkeys((*SCHEDULES, *LAYERS, _PLAYED)))


# a search asks about the same few pipelines thousands of times
@lru_cache(maxsize=4096)
def broken_by(line: Pipeline, rules: tuple[PipelineRule, ...] = PIPELINE) -> tuple[PipelineRule, ...]:
    """The rules that keep a pipeline from running: its schedule's demands, and how the layers are dealt."""
    return tuple(rule for rule in rules if rule.broken(line))


def schedule_faults(line: Pipeline) -> list[Fault]:
    """What the schedule demands of stages, micro-batches and chunks. Empty: it runs."""
    return [rule.fault(line) for rule in broken_by(line, SCHEDULES)]


def layer_faults(line: Pipeline) -> list[Fault]:
    """Everything that keeps the layers from being dealt."""
    return [rule.fault(line) for rule in broken_by(line, LAYERS)]
