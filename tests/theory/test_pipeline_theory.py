"""Pipeline schedules against their papers' closed forms, exactly, by a small player and by the engine.

p stages, m micro-batches, v chunks a stage; f, b, w: forward, gradients of the inputs, of the weights, of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from simulator.parallel.pipeline import Schedule, peak_in_flight
from simulator.play.engine import run
from tests.pipelines import Shape, play, programs
from tests.program_check import check

TIMES = [(Fraction(1), Fraction(1), Fraction(1)), (Fraction(2), Fraction(3), Fraction(5, 3)), (Fraction(5), 2, 2)]
SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (4, 3), (4, 4), (4, 8), (5, 9)]


def shape(schedule: Schedule, p: int, m: int, times: Sequence[Fraction], v: int = 1) -> Shape:
    f, b, w = map(Fraction, times)
    return Shape(schedule=schedule, p=p, m=m, v=v, f=f, b=b, w=w)


def step_s(shape: Shape) -> Fraction:
    """Both players' answer."""
    played = play(shape)
    stages = programs(shape)
    check(stages)
    assert run(stages).step_s == played
    return played


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b(schedule: Schedule, p: int, m: int, times: Sequence[Fraction]) -> None:
    # Narayanan et al., arXiv 2104.04473, section 2.2: work m (tf + tb), bubble (p - 1) (tf + tb). The last stage begins
    # after p - 1 forwards and is then never idle until its last backward, which p - 1 stages repeat.
    f, b, w = times
    assert step_s(shape(schedule, p, m, times)) == (m + p - 1) * (f + b + w)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (3, 6, 2), (4, 4, 2), (4, 8, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, m: int, v: int, times: Sequence[Fraction]) -> None:
    # Section 2.2: a chunk takes tf/v and tb/v, so the bubble is (p - 1)(tf + tb)/v, and the work the same.
    whole = [time * v for time in times]
    bubble = (p - 1) * sum(whole)
    assert step_s(shape("1f1b", p, m, whole)) == m * sum(whole) + bubble
    assert step_s(shape("interleaved", p, m, times, v)) == m * sum(whole) + bubble / v


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (3, 4, 3), (4, 8, 2)])
def test_breadth_first_loops_have_the_bubble_of_interleaving(p: int, m: int, v: int, times: Sequence[Fraction]) -> None:
    # Lamy-Poirier, arXiv 2211.05953: all micro-batches through one chunk, then through the next; with m ≥ p
    # a stage waits for its first micro-batch only. The price is memory: all m v are held.
    assert step_s(shape("gpipe", p, m, times, v)) == (m * v + p - 1) * sum(times)
    assert peak_in_flight("gpipe", p, m, 0, v) == m * v


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 8), (5, 11)])
def test_zb_h1(p: int, m: int, times: Sequence[Fraction]) -> None:
    # Qi et al., arXiv 2401.10241, table 2: bubble (p - 1)(T_F + T_B - T_W), held p micro-batches on every stage. Stated
    # for m ≥ p and equal times; it holds while a W fills no more than the gap it is put in (w ≤ f, w ≤ b).
    f, b, w = times
    assert step_s(shape("zb_h1", p, m, times)) == m * (f + b + w) + (p - 1) * (f + b - w)
    assert {peak_in_flight("zb_h1", p, m, stage) for stage in range(p)} == {p}


@pytest.mark.parametrize("stage", range(4))
def test_zb_h1_holds_fewer_inputs_and_more_gradients_towards_the_end(stage: int) -> None:
    # Section 2.3, stages from 1: worker i holds (p - i + 1) M_B + (i - 1) M_W: here p - s before their B, s before their W
    p, done, before = 4, {"F": 0, "B": 0, "W": 0}, set()
    for action in Shape(schedule="zb_h1", p=p, m=12).order(stage):
        done[action.kind] += 1
        if action.kind == "F" and done["B"] >= stage:
            before.add((done["F"] - done["B"], done["B"] - done["W"]))
    assert max(before) == (p - stage, stage)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 3), (8, 2), (8, 7), (8, 8)])
def test_zb_h1_with_fewer_micro_batches_than_stages(p: int, m: int) -> None:
    """As the authors' own test of 2 micro-batches on 8 stages runs it. No W stands between two backwards of the last stage.

    The last backward reaches stage 0 after p - 1 forwards down, m pairs on the last stage and p - 1 backwards up. Only its
    own W is left there: the others took the f between two backwards. Below, s more are left, and the backward came s b sooner.
    """
    f, b, w = Fraction(5), Fraction(7), Fraction(3)
    assert step_s(shape("zb_h1", p, m, (f, b, w))) == (m + p - 1) * (f + b) + w
    assert max(peak_in_flight("zb_h1", p, m, stage) for stage in range(p)) == m


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_where_f_b_and_w_are_equal() -> None:
    # Qi et al., section 2.1
    p, m, times = 4, 12, TIMES[0]
    work = m * sum(times)
    assert step_s(shape("1f1b", p, m, times)) - work == 3 * (step_s(shape("zb_h1", p, m, times)) - work)


@pytest.mark.parametrize("saved", [Fraction(0), Fraction(5, 2)])
@pytest.mark.parametrize("w", [Fraction(3), Fraction(2)])
@pytest.mark.parametrize(("positions", "more"), [(2, 0), (4, 2), (6, 0), (8, 2)])
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
def test_dualpipe(schedule: Schedule, positions: int, more: int, w: Fraction, saved: Fraction) -> None:
    # DeepSeek-V3, arXiv 2412.19437, table 2 (deepseek-ai/DualPipe, README): bubble (PP/2 - 1)(F&B + B - 3W), B the whole
    # backward; drawn for F = B - W. It is that of the middle stages: nearer the ends fewer forwards have a backward
    # beside them, more of the step is work, and its bubble is smaller by what those pairs would have saved.
    f = Fraction(3)
    whole = f + w
    p = positions if schedule == "dualpipe" else positions // 2
    played = Shape(schedule=schedule, p=p, m=2 * p + more, v=2, f=f, b=f, w=w, pair=f + whole - saved)
    bubbles = [step_s(played) - played.work_s(stage) for stage in range(p)]
    assert max(bubbles) == (Fraction(positions, 2) - 1) * (f + whole - saved + whole - 3 * w)
    assert max(bubbles) == bubbles[p // 2 if schedule == "dualpipe" else p - 1]


@pytest.mark.parametrize(("schedule", "p", "positions"), [("dualpipe", 8, 8), ("dualpipe_v", 4, 8)])
def test_dualpipe_holds_one_micro_batch_more_than_its_stages(schedule: Schedule, p: int, positions: int) -> None:
    # The same table: activations PP + 1
    assert {peak_in_flight(schedule, p, 20, stage, 2) for stage in range(p)} == {positions + 1}


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (8, 3), (16, 8)])
def test_interleaving_holds_more_by_its_published_factor(p: int, v: int) -> None:
    # Korthikanti et al., arXiv 2205.05198, section 4.2.3: the first stage holds L (1 + (p - 1)/(p m)) layers' activations,
    # m their chunks: in chunks of L/(p v) layers, p v + p - 1.
    assert peak_in_flight("interleaved", p, 4 * p, 0, v) == p * v * (1 + Fraction(p - 1, p * v))
    assert peak_in_flight("1f1b", p, 4 * p, 0) == p
