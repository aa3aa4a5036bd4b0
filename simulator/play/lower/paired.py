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
from typing import Final

from simulator.play.lower.builder import Builder
from simulator.play.lower.work import NO_WORK, Phase, Segment, Work, levelled
from simulator.work.ops import Exchange

_NODES: Final = 4  # attention, dispatch, experts, combine: pipeline_parallel/utils.py, ScheduleNode, with streams, events and a backward


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhasePieces:
    """One direction of a layer with experts: compute, an exchange, compute, an exchange, compute."""

    before: Phase
    there: tuple[Exchange, ...]
    between: Phase
    back: tuple[Exchange, ...]
    after: Phase
    waits: bool  # the host does, before the first exchange


def paired(build: Builder, forwards: Sequence[Phase], backwards: Sequence[Phase]) -> Work:
    """A chunk's forward and another micro-batch's backward: layers with experts in pairs, all else one after another."""
    pieces = [_phase_pieces(phase) for phase in forwards], [_phase_pieces(phase) for phase in backwards]
    phases = (*forwards, *backwards)
    plain = [phase for phase, part in zip(phases, (*pieces[0], *pieces[1]), strict=True) if part is None]
    total = build.summed(*plain)
    for f, b in zip_longest(*([part for part in mine if part is not None] for mine in pieces)):
        pair = _pair(build, f, b)
        total += levelled(pair, max(pair.duration_s, pair.host_s)) if f is not None and f.waits else pair
    return total


def _pair(build: Builder, f: _PhasePieces | None, b: _PhasePieces | None) -> Work:
    """A layer each; one alone where the other chunk has fewer. Each piece is a node of a schedule in Python, like a module."""
    f_before, f_between, f_after = _folded(build, f)
    b_before, b_between, b_after = _folded(build, b)
    work = b_before
    for exchanges, beside in (
        (b and b.there, f_before),
        (f and f.there, b_between),
        (b and b.back, f_between),
        (f and f.back, b_after),
    ):
        work += build.alongside(exchanges, beside) if exchanges else beside
    pieces = _NODES * sum(layer is not None for layer in (f, b))
    return work + f_after + Work(parts=(), host_s=pieces * build.host.module_s)


def _folded(build: Builder, pieces: _PhasePieces | None) -> tuple[Work, Work, Work]:
    if pieces is None:
        return NO_WORK, NO_WORK, NO_WORK
    before, between, after = (build.summed(phase) for phase in (pieces.before, pieces.between, pieces.after))
    return before, between, after


def _phase_pieces(phase: Phase) -> _PhasePieces | None:
    """None where the phase has not the two exchanges of a layer with experts."""
    segments = phase.segments
    at = [
        i for i, segment in enumerate(segments) if ("ep", "all_to_all") in ((e.axis, e.kind) for e in segment.exchanges)
    ]
    if len(at) != 2:
        return None
    first, second = at
    there, back = segments[first], segments[second]
    return _PhasePieces(
        before=Phase(segments=(*segments[:first], Segment(work=there.work))),
        there=there.exchanges,
        between=Phase(segments=(Segment(work=there.beside), *segments[first + 1 : second], Segment(work=back.work))),
        back=back.exchanges,
        after=Phase(segments=(Segment(work=back.beside), *segments[second + 1 :])),
        waits=any(segment.waits for segment in segments),
    )
