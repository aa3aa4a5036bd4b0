from __future__ import annotations

from fractions import Fraction

from simulator.work.program import Number
from simulator.work.trace import MemorySample, MemoryTrace, Span, Timeline


def _kernel(number: int, start: Number, end: Number, nominal: Number, *, cause: int | None, stream: str) -> Span:
    return Span(
        program="rank",
        stream=stream,
        id=number,
        label=f"kernel {number}",
        category="gemm",
        start_s=start,
        end_s=end,
        nominal_s=nominal,
        parts=(("gemm", nominal),),
        cause=cause,
    )


def _collective(number: int, start: Number, end: Number, *, cause: int | None, kind: str, joined: Number) -> Span:
    return Span(
        program="rank",
        stream=kind,
        id=number,
        label=f"{kind} {number}",
        category=kind,
        start_s=start,
        end_s=end,
        nominal_s=end - joined,
        joined_s=joined,
        cause=cause,
    )


GATHER, REDUCE = "all_gather", "reduce_scatter"

# launch until 1; gather 1..4 (its peers arrive at 2); kernel 4..9 that takes 4 alone; a copy 3..10; kernel 10..12;
# reduce 12..15. Another rank ends at 16.
SPANS = (
    _collective(0, 1, 4, cause=None, kind=GATHER, joined=2),
    _kernel(1, 4, 9, 4, cause=0, stream="compute"),
    _kernel(2, 3, 10, 7, cause=None, stream="copy"),
    _kernel(3, 10, 12, 2, cause=2, stream="compute"),
    _collective(4, 12, 15, cause=3, kind=REDUCE, joined=12),
)
TIMELINE = Timeline(spans=SPANS, step_s=16)


def test_every_gap_goes_to_what_the_next_kernel_waited_for() -> None:
    assert TIMELINE.breakdown() == {
        "host": 1,
        "wait:all_gather": 1,
        "exposed:all_gather": 2,
        "gemm": 6,
        "interference": 1,
        "exposed:gemm": 1,
        "exposed:reduce_scatter": 3,
        "idle": 1,
    }


def test_a_gap_is_shared_along_the_chain_of_causes() -> None:
    # The kernel waits for a reduce 3..5, which waited for a gather 0..3: nothing else stood in the way.
    spans = (
        _collective(0, 0, 3, cause=None, kind=GATHER, joined=0),
        _collective(1, 3, 5, cause=0, kind=REDUCE, joined=3),
        _kernel(2, 5, 6, 1, cause=1, stream="compute"),
    )
    assert Timeline(spans=spans, step_s=6).breakdown() == {
        "exposed:reduce_scatter": 2,
        "exposed:all_gather": 3,
        "gemm": 1,
    }


def test_a_late_launch_is_the_hosts_whatever_ran_meanwhile() -> None:
    spans = (
        _collective(0, 0, 3, cause=None, kind=GATHER, joined=0),
        _kernel(1, 4, 5, 1, cause=None, stream="compute"),
    )
    assert Timeline(spans=spans, step_s=5).breakdown() == {"host": 4, "gemm": 1}


def test_exposed_and_hidden_count_overlapping_collectives_once() -> None:
    spans = (
        _collective(0, 0, 4, cause=None, kind=GATHER, joined=0),
        _collective(1, 2, 6, cause=None, kind=GATHER, joined=2),
        _kernel(2, 1, 5, 4, cause=None, stream="compute"),
        _kernel(3, 5, 6, 1, cause=None, stream="copy"),
    )
    timeline = Timeline(spans=spans, step_s=6)
    assert (timeline.exposed(GATHER), timeline.hidden(GATHER)) == (2, 4)
    assert (timeline.exposed(REDUCE), timeline.hidden(REDUCE)) == (0, 0)


def test_busy_is_by_stream() -> None:
    assert TIMELINE.busy("rank", "compute") == 7
    assert TIMELINE.busy("rank", "copy") == 7
    assert TIMELINE.busy("rank", "nothing") == 0


def test_programs_are_asked_by_name() -> None:
    assert TIMELINE.programs == ("rank",)
    assert TIMELINE.of("rank") == TIMELINE.of() == SPANS
    assert TIMELINE.of("nobody") == ()


def test_an_empty_timeline_has_no_time() -> None:
    timeline = Timeline(spans=(), step_s=0)
    assert timeline.breakdown() == {}
    assert timeline.exposed(GATHER) == 0


def test_what_rounding_leaves_is_no_part_of_a_step() -> None:
    # 0.1 + 0.2 is not 0.3: a kernel of 0.2 s from 0.1 s on ends 4e-17 s later than it should, and lost nothing to anybody
    spans = (
        _kernel(0, 0.0, 0.1, 0.1, cause=None, stream="compute"),
        _kernel(1, 0.1, 0.1 + 0.2, 0.2, cause=None, stream="compute"),
    )
    assert 0.1 + 0.2 - 0.1 != 0.2
    assert set(Timeline(spans=spans, step_s=0.1 + 0.2).breakdown()) == {"gemm"}


def test_the_largest_part_does_not_change_the_breakdown() -> None:
    third = Fraction(1, 3)
    span = Span(
        program="rank",
        stream="compute",
        id=0,
        label="layer",
        category="gemm",
        start_s=0,
        end_s=1,
        nominal_s=1,
        parts=(("gemm", 2 * third), ("norm", third)),
    )
    assert Timeline(spans=(span,), step_s=1).breakdown() == {"gemm": 2 * third, "norm": third}


def test_a_memory_trace_knows_its_peak() -> None:
    samples = tuple(
        MemorySample(label=label, allocated_bytes=a, reserved_bytes=r) for label, a, r in (("a", 3, 4), ("b", 7, 8))
    )
    assert MemoryTrace(samples=samples, peak_index=1, by_category={"parameters": 7}).peak.label == "b"
