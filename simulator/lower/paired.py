"""A forward and a backward of different micro-batches at once, layer by layer, so that experts' exchanges run beside compute.

Megatron-LM (core/models/common/model_chunk_schedule_plan.py), DeepSeek-V3 (arXiv 2412.19437, figure 4); f forward, b backward:

    exchanges   combine b          dispatch f | dispatch b       combine f
    compute     attention f        experts b  | experts f        attention b

Attention stands for all of a layer up to its rows' departure, experts for all between the two exchanges. What comes after
the second exchange of a direction runs with neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from simulator.lower.builder import Builder
from simulator.lower.work import NO_WORK, Phase, Segment, Work
from simulator.ops import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One direction of a layer with experts: compute, an exchange, compute, an exchange, compute."""

    before: Phase
    there: Exchange
    between: Phase
    back: Exchange
    after: Phase


def paired(build: Builder, forwards: Sequence[Phase], backwards: Sequence[Phase]) -> Work:
    """A chunk's forward and another micro-batch's backward: layers with experts in pairs, all else one after another."""
    ways = [_way(phase) for phase in forwards], [_way(phase) for phase in backwards]
    phases = (*forwards, *backwards)
    plain = [phase for phase, way in zip(phases, (*ways[0], *ways[1]), strict=True) if way is None]
    total = build.folded(*plain, synchronous=False) if plain else NO_WORK
    for f, b in zip_longest(*([way for way in mine if way is not None] for mine in ways)):
        total += _pair(build, f, b)
    return total


def _pair(build: Builder, f: _Way | None, b: _Way | None) -> Work:
    """A layer each; one alone where the other chunk has fewer."""
    f_before, f_between, f_after = _folded(build, f)
    b_before, b_between, b_after = _folded(build, b)
    work = b_before
    for exchange, beside in (
        (b and b.there, f_before),
        (f and f.there, b_between),
        (b and b.back, f_between),
        (f and f.back, b_after),
    ):
        work += build.alongside(exchange, beside) if exchange else beside
    return work + f_after


def _folded(build: Builder, way: _Way | None) -> tuple[Work, Work, Work]:
    if way is None:
        return NO_WORK, NO_WORK, NO_WORK
    before, between, after = (build.folded(phase, synchronous=False) for phase in (way.before, way.between, way.after))
    return before, between, after


def _way(phase: Phase) -> _Way | None:
    """None where the phase has not the two exchanges of a layer with experts."""
    segments = phase.segments
    at = [i for i, segment in enumerate(segments) if any(exchange.axis == "ep" for exchange in segment.exchanges)]
    if len(at) != 2:
        return None
    first, second = at
    there, back = segments[first], segments[second]
    return _Way(
        before=Phase(segments=(*segments[:first], Segment(work=there.work))),
        there=there.exchanges[0],
        between=Phase(segments=(Segment(work=there.beside), *segments[first + 1 : second], Segment(work=back.work))),
        back=back.exchanges[0],
        after=Phase(segments=(Segment(work=back.beside), *segments[second + 1 :])),
    )
