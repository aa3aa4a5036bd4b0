"""Sobol's indices against functions whose indices are known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.studies.sensitivity import Design, Ends, Error, Evaluated, Range, Sensitivity, analysed, together

NUM_POINTS = 1024


def _answer(inputs: tuple[Range | Error, ...], rows: list[list[float]], design: Design) -> Sensitivity:
    """Of figures at the points of a design; now: all in the middle."""
    values = np.array(rows)
    middle = tuple(float(np.median(row)) for row in values)
    ends = [Ends(low=middle, high=middle) for _ in inputs]
    found = Evaluated(figure="f", pays=(), values=values, now=middle, ends=ends, num_evaluated=0)
    return analysed([f"f{n}" for n in range(len(rows))], inputs, design, found, seed=3)


def test_the_ishigami_function() -> None:
    """f = sin x1 + a sin² x2 + b x3⁴ sin x1 on [-π, π]³ (Ishigami & Homma 1990).

    D = a²/8 + b π⁴/5 + b² π⁸/18 + 1/2; D1 = b π⁴/5 + b² π⁸/50 + 1/2; D2 = a²/8; D13 = 8 b² π⁸/225.
    """
    a, b, pi = 7.0, 0.1, math.pi
    first = b * pi**4 / 5 + b**2 * pi**8 / 50 + 0.5
    second, both = a**2 / 8, 8 * b**2 * pi**8 / 225
    whole = first + second + both
    inputs = tuple(Range(leaf=f"x{n}", low=-pi, high=pi) for n in (1, 2, 3))
    design = Design.of(3, NUM_POINTS, 0)
    x = -pi + 2 * pi * design.points
    f = np.sin(x[:, 0]) + a * np.sin(x[:, 1]) ** 2 + b * x[:, 2] ** 4 * np.sin(x[:, 0])
    indices = _answer(inputs, [f.tolist()], design).indices["f0"]
    exact = [(first, first + both), (second, second), (0.0, both)]
    for index, (alone, with_others) in zip(indices, exact, strict=True):
        assert index.first == pytest.approx(alone / whole, abs=0.06)
        assert index.total == pytest.approx(with_others / whole, abs=0.06)
        assert index.first_low - 0.03 <= alone / whole <= index.first_high + 0.03


def test_independent_errors_explain_their_squares() -> None:
    """log f = Σ σ z: the variance is additive, so first and total are σ² over the sum of squares, for small σ."""
    sigmas = (0.03, 0.02, 0.01)
    inputs = tuple(Error(key=str(one), sigmas=(one,)) for one in sigmas)
    design = Design.of(3, NUM_POINTS, 1)
    f = [math.exp(sum(e.log_factor(0, u) for e, u in zip(inputs, row, strict=True))) for row in design.points.tolist()]
    for index, sigma in zip(_answer(inputs, [f], design).indices["f0"], sigmas, strict=True):
        share = sigma**2 / sum(each**2 for each in sigmas)
        assert index.first == pytest.approx(share, abs=0.03)
        assert index.total == pytest.approx(share, abs=0.03)


def test_what_may_only_be_slower_moves_the_upper_half_alone() -> None:
    """As the interval of a prediction: σ below the middle, √(σ² + τ²) above it, and half of all points on either side."""
    both, late = Error(key="a", sigmas=(0.03,)), Error(key="b", sigmas=(0.04,), upward=True)
    points = Design.of(2, NUM_POINTS, 4).points.tolist()
    found = np.quantile([together(((both, a), (late, b)), 0) for a, b in points], [0.05, 0.5, 0.95])
    assert found == pytest.approx([-1.6449 * 0.03, 0.0, 1.6449 * 0.05], abs=0.002)
    assert together([(late, 0.05)], 0) == 0.0
    assert together([(late, 0.95)], 0) == pytest.approx(1.6449 * 0.04, rel=1e-4)


def test_a_decision_flips_as_often_as_its_input_says() -> None:
    """A costs p, even over 1..3, B 2.5: B wins where p > 2.5, a quarter of the points, and p alone decides it."""
    price = Range.parse("A:price.per_gpu_hour=1..3")
    idle = Range.parse("B:kernels.gemm=x0.5..x2")
    design = Design.of(2, NUM_POINTS, 2)
    a = [price.value(row[0]) for row in design.points.tolist()]
    answer = _answer((price, idle), [a, [2.5] * len(a)], design)
    assert answer.best == 0
    assert answer.flips == pytest.approx(0.25, abs=0.01)
    of_price, of_idle = answer.indices["decision"]
    assert of_price.first == pytest.approx(1, abs=0.05)
    assert of_idle.total == 0
    assert "f1" not in answer.indices  # it is the same everywhere


def test_multiples_are_even_by_their_ratio() -> None:
    """The middle of x0.5..x2 is 1, and one of its ends is as far as the other."""
    one = Range.parse("device.memory_bytes_per_s=x0.5..x2")
    assert one.value(0.5) == pytest.approx(1)
    assert one.text(0) == "x0.5"
    size = Range.parse("device.memory_bytes=1GB..80GB")
    assert (size.text(0), size.text(1 / 3), size.text(1)) == ("1GB", "27333333333B", "80GB")
    rate = Range.parse("link.inter.bytes_per_s=200Gb/s..400Gb/s")
    assert rate.text(0.5) == "300Gb/s"
