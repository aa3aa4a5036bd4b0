"""What is not known of an engine that nobody described: how its sigmas follow from engines that were described."""

from __future__ import annotations

import math

import pytest
from unnamed_engines import Judged, Kind, conformal, document, drawn, fitted, held, needed

from simulator.studies.serving.decoding import Z90


def rows(engine: str, errors: list[float], kind: Kind = "step", known: float = 0.0) -> list[Judged]:
    """In sigmas."""
    return [Judged(engine, kind, Z90 * error, 0.0, known) for error in errors]


def test_the_sigma_of_an_engine_holds_nine_of_ten_rows_beside_what_is_known() -> None:
    errors = [*[0.1] * 8, -0.5, 3.0]
    assert needed(rows("a", errors)) == pytest.approx(0.5)
    assert needed(rows("a", errors, known=0.3)) == pytest.approx(0.4)  # in quadrature
    assert needed(rows("a", errors, known=0.6)) == 0.0
    assert held(rows("a", errors), {"step": 0.5 + 1e-9, "wait": 9.0})["holds"] == 0.9


@pytest.mark.parametrize(("count", "largest"), [(3, 1), (8, 1), (9, 1), (10, 1), (19, 2), (29, 3)])
def test_an_unknown_engine_is_one_more_than_there_are(count: int, largest: int) -> None:
    """Of n the k-th smallest with k the least that is 0.9 (n + 1) or more; the largest where no k is."""
    assert conformal(range(count)) == count - largest


def test_waits_have_what_steps_have_and_an_engine_is_judged_by_the_others() -> None:
    engines = {
        "a": [*rows("a", [0.3] * 10), *rows("a", [0.5] * 10, "wait")],
        "b": rows("b", [0.4] * 10),
        "c": rows("c", [0.1] * 10),
    }
    assert fitted(engines) == pytest.approx({"step": 0.4, "wait": 0.3})
    found = document(engines, 10)
    assert (found["step"], found["wait"]) == pytest.approx((0.4, 0.3), abs=1.1e-3)
    assert found["step"] >= 0.4  # rounded up
    assert {name: one["holds"] for name, one in found["sample"].items()} == {"a": 0.5, "b": 0.0, "c": 1.0}
    assert found["sample"]["c"]["upper"] == pytest.approx(math.exp(Z90 * 0.4) - 1, abs=1e-3)


def test_the_sample_has_the_engines_alike_and_none_that_is_the_usual_one() -> None:
    few = drawn(2)
    assert {row.id for row in few} <= {row.id for row in drawn(4)}
    assert len(few) == 2 * 5 + 2 * 3  # five engines, of which three were measured in closed loops
    assert not any("vllm" in row.engine.casefold() for row in few)
