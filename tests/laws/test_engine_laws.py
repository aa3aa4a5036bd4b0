"""Laws of the engine and of the links, on drawn programs, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from simulator.play.engine import MOST_INTERFERENCE, run
from simulator.play.links import fair_rates
from simulator.work.program import Chain, Collective, Compute, Kernels, Number, Ops, Program, ProgramOp
from simulator.work.trace import Timeline
from tests.folding import fold_programs
from tests.program_check import check
from tests.strategies import clusters, scaled, uncontended

LINKS = ("a", "b", "c")

flows = st.lists(
    st.dictionaries(st.sampled_from(LINKS), st.integers(1, 5), min_size=1).map(dict[str, Number]),
    min_size=1,
    max_size=5,
)
capacities = st.fixed_dictionaries({link: st.integers(1, 9).map(Fraction) for link in LINKS})


def _streams(programs: Sequence[Program]) -> set[tuple[str, str]]:
    return {(program.name, op.stream) for program in programs for op in program.ops}


def _without_interference(program: Program) -> Program:
    ops = (replace(op, interference=0) if isinstance(op, Collective) else op for op in program.ops)
    return replace(program, ops=tuple(ops))


@given(flows, capacities)
def test_fair_rates_fill_no_link_beyond_its_capacity(
    flows: list[dict[str, Number]], capacities: dict[str, Number]
) -> None:
    rates = fair_rates(flows, capacities)
    for link in LINKS:
        load = sum(rate * flow.get(link, 0) for rate, flow in zip(rates, flows, strict=True))
        assert load <= capacities[link]


@given(flows, capacities)
def test_every_flow_has_a_bottleneck_where_nobody_gets_more(
    flows: list[dict[str, Number]], capacities: dict[str, Number]
) -> None:
    # The definition of max-min fairness (Bertsekas and Gallager 1992, section 6.5.2): a full link on which no other
    # flow has a larger share. Shares are in bytes/s at the flow's heaviest link.
    rates = fair_rates(flows, capacities)
    shares = [rate * max(flow.values()) for rate, flow in zip(rates, flows, strict=True)]
    for share, flow in zip(shares, flows, strict=True):
        full = [
            link
            for link in flow
            if sum(r * f.get(link, 0) for r, f in zip(rates, flows, strict=True)) == capacities[link]
        ]
        assert any(share == max(s for s, f in zip(shares, flows, strict=True) if link in f) for link in full)


@given(clusters())
def test_drawn_programs_are_legal_and_finish(programs: list[Program]) -> None:
    check(programs)
    timeline = run(programs)
    assert len(timeline.spans) == sum(len(program.ops) for program in programs)


@given(clusters(), st.sampled_from((Fraction(1, 3), Fraction(7, 2))))
def test_scaling_every_duration_scales_every_time(programs: list[Program], factor: Fraction) -> None:
    before, after = run(programs), run([scaled(program, factor) for program in programs])
    assert after.step_s == factor * before.step_s
    assert [s.end_s for s in after.spans] == [factor * s.end_s for s in before.spans]
    for program in programs:
        expected = {name: factor * seconds for name, seconds in before.breakdown(program.name).items()}
        assert after.breakdown(program.name) == expected


@given(clusters())
def test_two_runs_give_the_same_spans(programs: list[Program]) -> None:
    assert run(programs).spans == run(programs).spans


def _chained(program: Program) -> Program:
    """The same with chains wherever ops may be one."""
    awaited = {
        op.id: {i for other in program.ops if other.stream != op.stream for i in other.after} for op in program.ops
    }
    rows: list[list[ProgramOp]] = []
    for op in program.ops:
        last = rows[-1][-1] if rows else None
        joins = isinstance(op, Compute) and isinstance(last, Compute) and op.stream == last.stream and not last.blocking
        if last is not None and joins and last.id not in awaited[last.id] and not set(op.after) - {last.id}:
            rows[-1].append(op)
        else:
            rows.append([op])
    return replace(program, ops=Ops([_chain(row) for row in rows]))


def _chain(row: list[ProgramOp]) -> Chain | ProgramOp:
    ops = [op for op in row if isinstance(op, Compute)]
    if not ops:
        return row[0]
    parts = tuple(op.parts or (("compute", op.duration_s),) for op in ops)
    kernels = Kernels(
        tuple(op.duration_s for op in ops),
        parts,
        tuple(op.host_s for op in ops),
        tuple(max(one, key=lambda part: part[1])[0] for one in parts),
    )
    return Chain(ops[0].id, ops[0].stream, ops[0].after, [op.label for op in ops], kernels, ops[-1].blocking)


@given(clusters(max_ops=16))
def test_a_chain_is_played_as_its_ops_are(programs: list[Program]) -> None:
    alone, together = run(programs), run(list(map(_chained, programs)))
    assert [span._replace(cause=None) for span in together.spans] == [span._replace(cause=None) for span in alone.spans]
    assert [together.breakdown(one.name) for one in programs] == [alone.breakdown(one.name) for one in programs]


@given(clusters())
def test_no_stream_is_busy_for_longer_than_the_step(programs: list[Program]) -> None:
    timeline = run(programs)
    assert all(timeline.busy(program, stream) <= timeline.step_s for program, stream in _streams(programs))


@given(clusters())
def test_no_link_moves_its_bytes_faster_than_its_capacity(programs: list[Program]) -> None:
    step_s = run(programs).step_s
    capacities = {link: capacity for program in programs for link, capacity in program.links.items()}
    moved = dict.fromkeys(capacities, Fraction(0))
    for cost in (op.cost for program in programs for op in program.ops if isinstance(op, Collective)):
        for link, num_bytes in cost.link_bytes.items():
            moved[link] += Fraction(num_bytes)
    assert all(moved[link] <= capacity * step_s for link, capacity in capacities.items())


@given(clusters())
def test_spans_of_one_stream_do_not_overlap_and_wait_for_their_causes(programs: list[Program]) -> None:
    timeline = run(programs)
    ends = {(span.program, span.id): span.end_s for span in timeline.spans}
    for program in programs:
        last: dict[str, Number] = {}
        for span, op in zip(timeline.of(program.name), program.ops, strict=True):
            assert span.start_s >= max([last.get(span.stream, 0), *(ends[program.name, before] for before in op.after)])
            assert span.cause is None or ends[program.name, span.cause] == span.start_s
            last[span.stream] = span.end_s


@given(clusters())
def test_the_breakdown_sums_to_the_step(programs: list[Program]) -> None:
    timeline = run(programs)
    for program in programs:
        breakdown = timeline.breakdown(program.name)
        assert sum(breakdown.values()) == timeline.step_s
        assert all(seconds > 0 for seconds in breakdown.values())


@given(clusters())
def test_exposed_and_hidden_sum_to_the_time_of_a_kind(programs: list[Program]) -> None:
    timeline = run(programs)
    name = programs[0].name
    for kind in {op.kind for op in programs[0].ops if isinstance(op, Collective)}:
        spans = [span for span in timeline.of(name) if span.category == kind]
        moments = sorted({moment for span in spans for moment in (span.start_s, span.end_s)})
        active = sum(
            (end - start)
            for start, end in pairwise(moments)
            if any(span.start_s <= start and end <= span.end_s for span in spans)
        )
        assert timeline.exposed(kind, name) + timeline.hidden(kind, name) == active


@given(clusters())
def test_compute_takes_its_time_and_at_most_ten_times_it(programs: list[Program]) -> None:
    for span in run(programs).spans:
        took = span.end_s - span.start_s
        assert took >= span.nominal_s
        assert span.is_collective or took * (1 - MOST_INTERFERENCE) <= span.nominal_s


@given(uncontended())
def test_removing_interference_never_slows_a_rank_without_contention(program: Program) -> None:
    # With contention it may: a flow that starts earlier can take bandwidth from one that matters more.
    assert run([_without_interference(program)]).step_s <= run([program]).step_s


@given(clusters())
def test_folded_is_unfolded(programs: list[Program]) -> None:
    folded = fold_programs(programs)
    check(folded)
    full, short = run(programs), run(folded)
    assert short.step_s == full.step_s
    assert sum(program.num_ranks for program in folded) == len(programs)
    for program in folded:  # a class is played by its first rank: moment for moment the same
        assert _moments(short, program.name) == _moments(full, program.name)
        assert short.breakdown(program.name) == full.breakdown(program.name)


def _moments(timeline: Timeline, program: str) -> list[tuple[int, Number, Number]]:
    return [(span.id, span.start_s, span.end_s) for span in timeline.of(program)]


@given(clusters(max_ops=4))
def test_folding_twice_changes_nothing(programs: list[Program]) -> None:
    folded = fold_programs(programs)
    assert run(fold_programs(folded)).step_s == run(folded).step_s
