"""How layers are dealt to stages and chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from simulator.parallel.legality.rule import Pipeline, PipelineRule
from simulator.parallel.schedule_traits import num_positions


def _one_or_more(where: str, count: Callable[[Pipeline], int]) -> PipelineRule:
    return PipelineRule(
        where=where,
        holds=lambda line: count(line) >= 1,
        equation=lambda line: f"{where} = {count(line)}",
        remedy=f"{where} = 1 or more",
    )


NUM_STAGES: Final = _one_or_more("pp", lambda line: line.num_stages)
MICRO_BATCHES: Final = _one_or_more("num_micro_batches", lambda line: line.num_micro_batches)
NUM_CHUNKS: Final = _one_or_more("virtual_stages", lambda line: line.num_chunks)
_NUM_LAYERS: Final = _one_or_more("layers", lambda line: line.num_layers)


def _positions(line: Pipeline) -> int:
    return num_positions(line.schedule, line.num_stages, line.num_chunks)


def _chunks_of(line: Pipeline) -> int:
    """Chunks of a stage that one micro-batch passes."""
    return _positions(line) // line.num_stages


# --- layers of every position are given


def _explicit(line: Pipeline) -> bool:
    return line.split.explicit is not None and line.has_layers


def _given(line: Pipeline) -> tuple[int, ...]:
    return line.split.explicit or ()


def _sum(line: Pipeline) -> str:
    counts = _given(line)
    summed = " + ".join(map(str, counts)) if len(counts) <= 16 else "the numbers sum to"
    return f"{summed} = {sum(counts)}, the model has {line.num_layers} layers"


_stage_layers_rule = partial(PipelineRule, where="stage_layers", applies=_explicit)
_OF_EACH: Final = (
    _stage_layers_rule(
        holds=lambda line: line.split.first is None and line.split.last is None and not line.split.ends_as_layers,
        equation="the layers of each stage are given; settings of the first stage, the last stage, embedding or head contradict them",
        remedy="leave stage_layers out, or those settings",
    ),
    _stage_layers_rule(
        holds=lambda line: len(_given(line)) == _positions(line),
        equation=lambda line: f"{len(_given(line))} numbers for {_positions(line)} virtual stages",
        remedy=lambda line: f"give {_positions(line)} numbers: pp × virtual_stages",
    ),
    _stage_layers_rule(
        holds=lambda line: all(count >= 0 for count in _given(line)),
        equation=lambda line: f"{min(_given(line))} layers in a stage",
        remedy="give each stage 0 layers or more",
    ),
    _stage_layers_rule(
        holds=lambda line: sum(_given(line)) == line.num_layers,
        equation=_sum,
        remedy=lambda line: f"give numbers whose sum is {line.num_layers}",
    ),
)


# --- layers of the first or the last stage are given


def _ends(line: Pipeline) -> bool:
    split = line.split
    return split.explicit is None and (split.first is not None or split.last is not None) and line.has_layers


def _sizes(line: Pipeline) -> list[int]:
    return [count for count in (line.split.first, line.split.last) if count is not None]


def _middle(line: Pipeline) -> int:
    """Stages whose layers are not given."""
    return line.num_stages - len(_sizes(line))


def _left(line: Pipeline) -> int:
    return line.num_layers - sum(_sizes(line))


def _left_text(line: Pipeline) -> str:
    return f"{line.num_layers} layers - {' - '.join(map(str, _sizes(line)))} = {_left(line)}"


def _end_rules(where: str, count: Callable[[Pipeline], int | None]) -> tuple[PipelineRule, ...]:
    """What one end may hold."""

    def layers(line: Pipeline) -> int:
        return count(line) or 0

    return (
        PipelineRule(
            where=where,
            applies=lambda line: _ends(line) and count(line) is not None,
            holds=lambda line: layers(line) >= 1,
            equation=lambda line: f"{layers(line)} layers",
            remedy=f"{where} = 1 or more",
        ),
        PipelineRule(
            where=where,
            applies=lambda line: _ends(line) and layers(line) >= 1,
            holds=lambda line: layers(line) % _chunks_of(line) == 0,
            equation=lambda line: f"{layers(line)} layers are not a multiple of virtual_stages = {_chunks_of(line)}",
            remedy=lambda line: f"{where} = {_nearest(layers(line), _chunks_of(line))}",
        ),
    )


_OF_ENDS: Final = (
    PipelineRule(
        where="first_stage_layers",
        applies=_ends,
        holds=lambda line: not line.split.ends_as_layers,
        equation="the layers of the first or last stage are given, so embedding and head cannot count as layers too",
        remedy="leave first_stage_layers and last_stage_layers out, or do not count embedding and head as layers",
    ),
    *_end_rules("first_stage_layers", lambda line: line.split.first),
    *_end_rules("last_stage_layers", lambda line: line.split.last),
    PipelineRule(
        where="pp",
        applies=_ends,
        holds=lambda line: _middle(line) >= 0,
        equation=lambda line: f"first and last of pp = {line.num_stages} stages",
        remedy="pp = 2 or more",
    ),
    PipelineRule(
        where="pp",
        applies=lambda line: _ends(line) and _middle(line) == 0,
        holds=lambda line: _left(line) == 0,
        equation=lambda line: f"{_left_text(line)} left over, and no stage takes them",
        remedy=lambda line: f"first_stage_layers + last_stage_layers = {line.num_layers}",
    ),
    PipelineRule(
        where="pp",
        applies=lambda line: _ends(line) and _middle(line) > 0,
        holds=lambda line: (
            _left(line) >= _middle(line) * _chunks_of(line) and _left(line) % (_middle(line) * _chunks_of(line)) == 0
        ),
        equation=lambda line: f"{_left_text(line)} left for {_middle(line)} stages of {_chunks_of(line)} chunks",
        remedy=lambda line: (
            f"choose first_stage_layers and last_stage_layers so that {_nearest(_left(line), _middle(line) * _chunks_of(line))} are left"
        ),
    ),
)


# --- layers are dealt evenly


def _evenly(line: Pipeline) -> bool:
    split = line.split
    return split.explicit is None and split.first is None and split.last is None and line.has_layers


def _total(line: Pipeline) -> int:
    return line.num_layers + line.split.ends_as_layers


def _layers_text(line: Pipeline) -> str:
    ends = line.split.ends_as_layers
    return f"{line.num_layers} layers" + (f" + {ends} (embedding, head)" if ends else "")


def _chunks_text(line: Pipeline) -> str:
    chunks = _chunks_of(line)
    return f"pp = {line.num_stages}" + (f" × {chunks} virtual stages = {_positions(line)}" if chunks > 1 else "")


def _uneven(line: Pipeline) -> str:
    if line.split.ends_as_layers:
        return f"{_layers_text(line)} = {_total(line)} is not a multiple of {_chunks_text(line)}"
    return f"{_layers_text(line)} do not divide by {_chunks_text(line)}"


_OF_ALL: Final = (
    PipelineRule(
        where="pp",
        applies=_evenly,
        holds=lambda line: _total(line) >= _positions(line),
        equation=lambda line: f"{_chunks_text(line)} for {_layers_text(line)}",
        remedy=lambda line: f"pp × virtual_stages ≤ {_total(line)}",
    ),
    PipelineRule(
        where="pp",
        applies=lambda line: _evenly(line) and line.split.even and _total(line) >= _positions(line),
        holds=lambda line: _total(line) % _positions(line) == 0,
        equation=_uneven,
        remedy=lambda line: f"pp × virtual_stages = {_nearest_divisors(_total(line), _positions(line))}",
    ),
)

LAYERS: Final = (_NUM_LAYERS, NUM_STAGES, NUM_CHUNKS, *_OF_EACH, *_OF_ENDS, *_OF_ALL)


def _nearest(count: int, unit: int) -> str:
    """The multiples of `unit` around `count`, as the reader would write them."""
    below = count // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _nearest_divisors(total: int, near: int) -> str:
    below = next(size for size in range(min(near, total), 0, -1) if total % size == 0)
    above = next((size for size in range(near + 1, total + 1) if total % size == 0), None)
    return f"{below} or {above}" if above else f"{below}"
