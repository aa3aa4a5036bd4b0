from __future__ import annotations

import doctest
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from simulator.base.errors import EngineError
from simulator.play.engine import run
from simulator.work.program import Number, Program
from tests.program_check import check
from tests.strategies import compute, gather, program


def test_nothing_takes_no_time() -> None:
    assert run([]).step_s == 0
    assert run([program()]).step_s == 0


def test_spans_come_in_launch_order_and_name_what_they_waited_for() -> None:
    timeline = run([program(gather(0, {"l": 2}), compute(1, 3, 0), compute(2, 1), gather(3, {"l": 1}, 1), l=1)])
    assert [(s.id, s.start_s, s.end_s, s.cause) for s in timeline.spans] == [
        (0, 0, 2, None),
        (1, 2, 5, 0),
        (2, 5, 6, 1),
        (3, 5, 6, 1),
    ]


def test_a_span_says_what_it_would_take_alone() -> None:
    flows = [gather(i, {"l": 6}, stream=f"stream {i}", latency_s=Fraction(1, 2)) for i in range(2)]
    timeline = run([program(*flows, l=3)])
    assert [(s.nominal_s, s.end_s) for s in timeline.spans] == [(Fraction(5, 2), Fraction(9, 2))] * 2


def test_the_category_of_compute_is_its_largest_part() -> None:
    work = replace(compute(0, 5), parts=(("norm", 2), ("gemm", 3)))
    plain = replace(compute(1, 5), parts=())
    spans = run([program(work, plain)]).spans
    assert [span.category for span in spans] == ["gemm", "compute"]
    assert spans[1].parts == (("compute", 5),)


def test_an_op_may_wait_for_one_that_is_launched_later() -> None:
    assert run([program(compute(0, 2, 1), gather(1, {"l": 3}), l=1)]).step_s == 5


def test_a_stream_waits_while_the_host_is_blocked() -> None:
    # The gather is launched half a second after the blocking kernel has ended at 3.
    ops = (compute(0, 3, blocking=True), replace(gather(1, {"l": 1}), host_s=Fraction(1, 2)))
    timeline = run([program(*ops, l=1)])
    assert timeline.spans[1].start_s == Fraction(7, 2)
    assert timeline.spans[1].cause is None


def test_links_of_one_name_are_one_link() -> None:
    ranks = [program(gather(0, {"nic": 4}), name=f"rank {r}", nic=4) for r in range(3)]
    assert run(ranks).step_s == 3


def test_members_add_up_on_a_shared_link() -> None:
    ranks = [program(gather(0, {"nic": 4}, key="all", members=3), name=f"rank {r}", nic=4) for r in range(3)]
    assert run(ranks).step_s == 3


def test_the_longest_latency_of_the_members_counts() -> None:
    ranks = [program(gather(0, {}, key="all", members=2, latency_s=r + 1), name=f"rank {r}") for r in range(2)]
    assert run(ranks).step_s == 2


def _mixed(third: Number, two: Number, quarter: Number, capacity: Number) -> Program:
    ops = (compute(0, third), gather(1, {"l": two}, interference=quarter), compute(2, third, 1))
    return program(*ops, l=capacity)


def test_floats_give_what_fractions_give() -> None:
    exact = run([_mixed(Fraction(1, 3), 2, Fraction(1, 4), Fraction(3))]).step_s
    rounded = run([_mixed(1 / 3, 2.0, 0.25, 3.0)]).step_s
    assert isinstance(rounded, float)
    assert rounded == pytest.approx(float(exact), rel=1e-15)


def test_a_cycle_is_an_error_that_names_its_ops() -> None:
    cycle = program(compute(0, 1, 1), gather(1, {"l": 1}, 0), l=1)
    for play in (run, check):
        with pytest.raises(EngineError, match=r"(?s)op 0 'kernel 0' on compute.*op 1 'all_gather 1' on gather"):
            play([cycle])


def test_a_collective_that_nobody_joins_is_an_error() -> None:
    lonely = program(gather(0, {"l": 1}, key="all", members=3), l=1)
    with pytest.raises(EngineError, match="collective 'all' has 1 of 3 members"):
        run([lonely])
    with pytest.raises(EngineError, match="1 ops arrive, 3 are its members"):
        check([lonely])


def test_an_unknown_op_is_an_error() -> None:
    broken = program(compute(0, 1, 7))
    for play in (run, check):
        with pytest.raises(EngineError, match="waits for op 7, which the program does not have"):
            play([broken])


def test_collectives_in_opposite_orders_wait_for_each_other() -> None:
    first = program(gather(0, {}, key="a", members=2), gather(1, {}, key="b", members=2))
    second = program(gather(0, {}, key="b", members=2), gather(1, {}, key="a", members=2), name="rank 1")
    with pytest.raises(EngineError, match="collective 'a' has 1 of 2 members"):
        run([first, second])
    with pytest.raises(EngineError, match="a cycle"):
        check([first, second])


def test_a_host_that_waits_for_what_it_has_yet_to_launch_is_an_error() -> None:
    stuck = program(compute(0, 1, 1, blocking=True), gather(1, {}))
    with pytest.raises(EngineError, match="waits for the host"):
        run([stuck])
    with pytest.raises(EngineError, match="a cycle"):
        check([stuck])


FAULTS: dict[str, tuple[Program, str]] = {
    "an id twice": (program(compute(0, 1), compute(0, 1)), "2 ops have this id"),
    "a negative time": (program(compute(0, -1)), "duration_s is -1"),
    "a time that is not a number": (program(compute(0, float("nan"))), "duration_s is nan"),
    "parts that do not sum": (program(replace(compute(0, 3), parts=(("gemm", 2),))), "its parts sum to 2 s"),
    "a link without capacity": (program(gather(0, {"l": 1})), "link l has no capacity"),
    "a capacity of zero": (program(l=0), "capacity is 0 bytes/s"),
}


@pytest.mark.parametrize(("faulty", "message"), FAULTS.values(), ids=FAULTS)
def test_check_names_the_fault(faulty: Program, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check([faulty])


def test_check_lists_every_fault() -> None:
    two_capacities = program(compute(0, -1), name="rank 1", l=2)
    with pytest.raises(EngineError) as caught:
        check([program(gather(0, {"m": 1}), l=1), two_capacities])
    assert "duration_s is -1" in str(caught.value)
    assert "capacity is 2 bytes/s here and 1 elsewhere" in str(caught.value)
    assert "link m has no capacity" in str(caught.value)


def test_programs_need_names_of_their_own() -> None:
    with pytest.raises(EngineError, match="2 programs have this name"):
        check([program(), program()])


def test_a_legal_program_passes_the_check() -> None:
    check([program(gather(0, {"l": 1}), compute(1, 2, 0), l=1)])


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "background" / "engine.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0
