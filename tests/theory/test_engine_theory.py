"""The engine against closed forms, exactly. Each expected value is derived where it stands."""

from __future__ import annotations

from fractions import Fraction

import pytest

from simulator.play.engine import run
from simulator.play.links import fair_rates
from simulator.work.program import Number, Program, ProgramOp
from tests.strategies import compute, gather, program


def ends(*programs: Program) -> list[Number]:
    return [span.end_s for span in run(programs).spans]


# -- links -------------------------------------------------------------------------------------------------------


def test_two_flows_on_a_link_share_it_until_the_smaller_has_gone() -> None:
    # Both get c/2. The smaller (a bytes) ends at 2a/c; by then the larger has a bytes behind it and b - a ahead, alone:
    # 2a/c + (b - a)/c = (a + b)/c.
    a, b, c = 3, 8, Fraction(5)
    flows = (gather(0, {"l": a}, stream="first"), gather(1, {"l": b}, stream="second"))
    assert ends(program(*flows, l=c)) == [2 * a / c, (a + b) / c]


def test_a_flow_that_starts_later_takes_half_from_then_on() -> None:
    # The first is alone for d seconds and has a - d c bytes left, which take 2 (a - d c)/c; the second (b large) then
    # has moved a - d c, and the link is never idle: it ends at (a + b)/c.
    a, b, c, d = 10, 20, Fraction(4), Fraction(1, 2)
    flows = (gather(0, {"l": a}, stream="first"), gather(1, {"l": b}, stream="second", latency_s=d))
    assert ends(program(*flows, l=c)) == [d + 2 * (a - d * c) / c, (a + b) / c]


def test_parking_lot() -> None:
    # Bertsekas and Gallager, Data Networks (1992), section 6.5.2: a long flow over links of 1 and 2 bytes/s and a short
    # one on each. The first link fills at 1/2 each; the second short flow takes what the long one leaves: 2 - 1/2.
    rates = fair_rates([{"x": 1, "y": 1}, {"x": 1}, {"y": 1}], {"x": 1, "y": 2})
    assert rates == [Fraction(1, 2), Fraction(1, 2), Fraction(3, 2)]


def test_all_links_of_a_bill_drain_together() -> None:
    # 6 bytes over 2 bytes/s need 3 s, 4 bytes over 8 bytes/s half a second: the slowest decides.
    assert ends(program(gather(0, {"slow": 6, "fast": 4}), slow=2, fast=8)) == [3]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_a_ring_all_reduce_played_chunk_by_chunk_takes_what_its_bill_says(n: int) -> None:
    # Patarasu and Yuan, J. Parallel Distrib. Comput. 69 (2009): 2 (n - 1) steps, in each of which every rank sends S/n
    # to its neighbour, over a port of B bytes/s: 2 (n - 1)/n S/B, and a latency a step. Here each step is a send that
    # meets the neighbour's receive, and a step's send waits for the receive of the step before.
    size, b, alpha = Fraction(12), Fraction(7), Fraction(1, 5)
    steps = 2 * (n - 1)
    ranks = [_ring_rank(rank, n, steps, size / n, alpha, b) for rank in range(n)]
    cost = gather(0, {"port": Fraction(steps, n) * size}, latency_s=steps * alpha)
    expected = Fraction(2 * (n - 1), n) * size / b + steps * alpha
    assert run(ranks).step_s == run([program(cost, port=b)]).step_s == expected


def _ring_rank(rank: int, n: int, steps: int, chunk: Fraction, alpha: Fraction, b: Fraction) -> Program:
    ops: list[ProgramOp] = []
    for step in range(steps):
        received = (2 * step - 1,) if step else ()
        sent = {f"port_{rank}": chunk}
        mine, theirs = f"{step}:{rank}", f"{step}:{(rank - 1) % n}"
        ops.append(gather(2 * step, sent, *received, stream="send", key=mine, members=2, latency_s=alpha))
        ops.append(gather(2 * step + 1, {}, stream="receive", key=theirs, members=2))
    return program(*ops, name=f"rank {rank}", **{f"port_{rank}": b})


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "m"), [(3, 2), (2, 3), (2, 2), (5, 0)])
@pytest.mark.parametrize("num_layers", [1, 2, 6])
def test_prefetch_of_one_overlaps_all_but_the_edges(c: int, m: int, num_layers: int) -> None:
    # Gather i + 1 starts with compute i at the earliest, and compute i + 1 needs both: a layer costs max(c, m) in the
    # middle. Before the first compute stands one gather, after the last gather one compute: m + (L - 1) max(c, m) + c.
    ops: list[ProgramOp] = []
    for layer in range(num_layers):
        before = (2 * layer - 3,) if layer > 1 else (0,) if layer == 1 else ()
        ops += [gather(2 * layer, {"l": m}, *before), compute(2 * layer + 1, Fraction(c), 2 * layer)]
    timeline = run([program(*ops, l=1)])
    assert timeline.step_s == m + (num_layers - 1) * max(c, m) + c
    assert timeline.exposed("all_gather") == m + (num_layers - 1) * max(m - c, 0)
    assert timeline.hidden("all_gather") == (num_layers - 1) * min(c, m)


def test_fork_and_join() -> None:
    # a, then b and c at once on two streams, then d: a + max(b, c) + d.
    a, b, c, d = Fraction(1), Fraction(5, 2), Fraction(4), Fraction(3)
    fork = (compute(0, a), compute(1, b), gather(2, {"l": c}, 0), compute(3, d, 1, 2))
    assert run([program(*fork, l=1)]).step_s == a + max(b, c) + d


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 4), (5, 2)])
def test_a_pipeline_fills_and_drains(p: int, m: int) -> None:
    # Huang et al., GPipe (arXiv 1811.06965), section 2.3: m micro-batches through p stages of t each take (m + p - 1) t.
    t = Fraction(3)
    assert run([_stage(stage, p, m, t) for stage in range(p)]).step_s == (m + p - 1) * t


def _stage(stage: int, p: int, m: int, t: Fraction) -> Program:
    ops: list[ProgramOp] = []
    for batch in range(m):
        received: tuple[int, ...] = ()
        if stage > 0:
            received = (len(ops),)
            ops.append(gather(len(ops), {}, stream="receive", key=f"{batch} to {stage}", members=2))
        ops.append(compute(len(ops), t, *received))
        if stage < p - 1:
            ops.append(gather(len(ops), {}, len(ops) - 1, stream="send", key=f"{batch} to {stage + 1}", members=2))
    return program(*ops, name=f"stage {stage}")


def test_a_collective_starts_with_its_last_member() -> None:
    # Compute of 2 and 5 s, then one all-reduce of 6 bytes at 3 bytes/s each on its own port: both end at 5 + 2.
    ranks = [
        program(
            compute(0, Fraction(duration)),
            gather(1, {f"port_{rank}": 6}, 0, key="sum", members=2, kind="all_reduce"),
            name=f"rank {rank}",
            **{f"port_{rank}": 3},
        )
        for rank, duration in enumerate((2, 5))
    ]
    timeline = run(ranks)
    assert timeline.step_s == 7
    assert timeline.breakdown("rank 0") == {"gemm": 2, "wait:all_reduce": 3, "exposed:all_reduce": 2}
    assert timeline.breakdown("rank 1") == {"gemm": 5, "exposed:all_reduce": 2}


# -- the host ----------------------------------------------------------------------------------------------------


def _kernels(n: int, d: Number, h: Number, *, blocking: bool = False) -> Program:
    return program(*(compute(i, d, host_s=h, blocking=blocking) for i in range(n)))


def test_a_host_bound_program_takes_its_launches_and_the_last_kernel() -> None:
    # Kernels shorter than their launch (d < h): each has ended when the next is launched. n h + d.
    n, d, h = 7, Fraction(1, 3), Fraction(1, 2)
    timeline = run([_kernels(n, d, h)])
    assert timeline.step_s == n * h + d
    assert timeline.breakdown() == {"gemm": n * d, "host": n * h - (n - 1) * d}


def test_a_device_bound_program_waits_for_the_first_launch_only() -> None:
    # d > h: the host is ahead from the second kernel on. h + n d.
    n, d, h = 7, Fraction(1, 2), Fraction(1, 3)
    assert run([_kernels(n, d, h)]).step_s == h + n * d


def test_a_blocking_host_adds_its_launches_to_the_kernels() -> None:
    # As CUDA_LAUNCH_BLOCKING=1: launch, run, launch, run. n (h + d).
    n, d, h = 7, Fraction(1, 2), Fraction(1, 3)
    assert run([_kernels(n, d, h, blocking=True)]).step_s == n * (h + d)


# -- interference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0, Fraction(1, 2)])
def test_compute_loses_a_share_of_the_time_in_which_bytes_move(latency: Number) -> None:
    # Compute c beside a collective that moves bytes for m seconds after a latency a. If compute outlasts it, it does
    # m (1 - k) of its work meanwhile and the rest at full speed: c + k m, whatever the latency.
    c, m, k = Fraction(6), Fraction(3), Fraction(1, 4)
    both = (compute(0, c), gather(1, {"l": m}, latency_s=latency, interference=k))
    timeline = run([program(*both, l=1)])
    assert timeline.step_s == c + k * m
    assert timeline.breakdown() == {"gemm": c, "interference": k * m}


def test_compute_that_ends_under_the_collective_is_slowed_throughout() -> None:
    # c / (1 - k) while it is shorter than m.
    c, m, k = Fraction(2), Fraction(9), Fraction(1, 3)
    assert ends(program(compute(0, c), gather(1, {"l": m}, interference=k), l=1)) == [c / (1 - k), m]


def test_interferences_add_up_to_nine_tenths() -> None:
    # Two collectives of m and 2m seconds on links of their own, 3/5 each. Together they would take 6/5, so 9/10: compute
    # does m/10, then 2/5 m beside the second alone. What remains of c runs at full speed after 2m.
    c, m, k = Fraction(8), Fraction(5), Fraction(3, 5)
    flows = (
        gather(1, {"x": m}, stream="x", interference=k),
        gather(2, {"y": 2 * m}, stream="y", interference=k),
    )
    done = m * Fraction(1, 10) + m * (1 - k)
    assert ends(program(compute(0, c), *flows, x=1, y=1))[0] == 2 * m + (c - done)


def test_interference_reaches_only_the_rank_whose_collective_it_is() -> None:
    c, m, k = Fraction(6), Fraction(3), Fraction(1, 2)
    loud = program(compute(0, c), gather(1, {"l": m}, interference=k), name="loud", l=1)
    quiet = program(compute(0, c), name="quiet")
    assert [span.end_s for span in run([loud, quiet]).spans if not span.is_collective] == [c + k * m, c]


def test_exact_numbers_stay_exact() -> None:
    third = Fraction(1, 3)
    ops: list[ProgramOp] = [gather(0, {"l": 1}, interference=third), compute(1, third, 0), compute(2, third)]
    timeline = run([program(*ops, l=3)])
    assert all(isinstance(span.end_s, Fraction) for span in timeline.spans)
    assert timeline.step_s == 1
