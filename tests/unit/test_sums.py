"""Sums of floats are those of any Python."""

from __future__ import annotations

from fractions import Fraction

from simulator.base.sums import summed


def test_each_addition_is_rounded() -> None:
    """0.1 is a little more than a tenth; added ten times with rounding it ends below 1, with errors carried along at 1."""
    assert summed([0.1] * 10) == 0.9999999999999999
    assert summed([1e16, 1.0, -1e16]) == 0.0


def test_numbers_of_other_kinds_stay_what_they_are() -> None:
    assert summed([1, 2, 3]) == 6
    assert summed([Fraction(1, 3)] * 3) == 1
    assert summed([]) == 0
    assert summed((each for each in (2.0, 0.5)), 1.0) == 3.5
