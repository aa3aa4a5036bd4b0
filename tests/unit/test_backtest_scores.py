"""Scores against numbers worked out by hand; baselines recover the truth that made their data."""

from __future__ import annotations

import random

import pytest

from simulator.studies.backtest.baselines import MIN_ROWS, baselines
from simulator.studies.backtest.outcome import RowOutcome, Work
from simulator.studies.backtest.report import make_report
from simulator.studies.backtest.scores import memory_scores, quantile, spearman, step_score


def outcome(name: str, predicted: float, measured: float, **changes: object) -> RowOutcome:
    fields: dict[str, object] = {
        "id": name,
        "line": 2,
        "status": "ok",
        "source": "s",
        "gpu": "g",
        "precision": "bf16",
        "predicted_step_s": predicted,
        "low_step_s": 0.9 * predicted,
        "high_step_s": 1.1 * predicted,
        "measured_step_s": measured,
        "work": Work(gemm_flop=1, attention_flop=1, stream_bytes=1, communication_bytes=1, ideal_s=1.0),
        **changes,
    }
    return RowOutcome(**fields)  # type: ignore[arg-type]


def test_quantiles_interpolate() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.9) == 3.0
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100], 0.9) == 90
    assert quantile([1, 2], 0.9) == pytest.approx(1.9)


def test_spearman() -> None:
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 2, 3], [5, 5, 5]) is None
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # ranks 1 3 2 5 4 lie 0 1 1 1 1 off: 1 - 6 Σd² / (n (n² - 1))
    assert spearman([1, 2, 3, 4, 5], [1, 3, 2, 6, 3.5]) == pytest.approx(1 - 6 * 4 / 120)
    # ties share their mean rank: 1.5, 1.5, 3 against 1, 2, 3
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)


def test_step_score_by_hand() -> None:
    rows = [outcome("a", 1.1, 1.0), outcome("b", 0.8, 1.0), outcome("c", 2.1, 2.0), outcome("d", 1.0, 4.0)]
    score = step_score(rows)  # errors +.10, -.20, +.05, -.75
    assert score.n == 4
    assert score.median_abs_error == pytest.approx(0.15)
    assert score.p90_abs_error == pytest.approx(0.20 + 0.7 * 0.55)
    assert score.bias == pytest.approx(-0.075)
    assert score.coverage_90 == 0.5  # a lies in .99 to 1.21, c in 1.89 to 2.31
    # MFU ranks 2 4 1 3 against 3.5 3.5 2 1: deviations from 2.5 multiply to 1.0, their squares sum to 5 and 4.5
    assert score.spearman_mfu == pytest.approx(1 / (5 * 4.5) ** 0.5)


def test_rows_without_a_measurement_or_not_ok_do_not_count() -> None:
    report = make_report(
        "t",
        [
            outcome("a", 1.0, 1.0),
            outcome("calibrates", 5.0, 1.0, status="calibration"),
            outcome("again", 5.0, 1.0, duplicate_of="a"),
            outcome("no", 1.0, 1.0, status="refused", kind="tensor parallelism"),
            outcome("unmeasured", 1.0, 1.0, measured_step_s=None),
            RowOutcome(id="", line=9, status="bad", reason="line 9: …"),
        ],
    )
    (group,) = report.groups
    assert (group.step.n, group.step.median_abs_error) == (1, 0.0)
    assert group.rows == {"calibration": 1, "ok": 3, "refused": 1}
    assert group.refused == {"tensor parallelism": 1}
    assert group.duplicates == 1
    assert [row["id"] for row in report.as_json()["rows"]] == ["a", "calibrates", "again", "no", "unmeasured", ""]


def test_memory_is_scored_by_metric_with_its_verdicts() -> None:
    def held(predicted: int, measured: int | None, metric: str, *, fits: bool, oom: bool = False) -> RowOutcome:
        return outcome(
            "m", 1.0, 1.0, mem_metric=metric, predicted_memory_bytes=predicted, measured_memory_bytes=measured,
            fits=fits, measured_oom=oom,
        )  # fmt: skip

    rows = [
        held(110, 100, "peak_reserved_gib", fits=True),
        held(90, 100, "peak_reserved_gib", fits=False),
        held(500, None, "oom", fits=False, oom=True),
        held(50, None, "oom", fits=True, oom=True),
    ]
    reserved, oom = memory_scores(rows)
    assert (reserved.mem_metric, reserved.n, reserved.predicted_oom) == ("peak_reserved_gib", 2, 1)
    assert reserved.median_abs_error == pytest.approx(0.1)
    assert reserved.bias == pytest.approx(0)
    assert (oom.n, oom.oom_rows, oom.oom_found, oom.median_abs_error) == (0, 2, 1, None)


def drawn(n: int, truth: tuple[float, float, float, float], seed: int = 0) -> list[RowOutcome]:
    """Rows whose time is exactly a line in the four terms, and whose ideal time is half of it."""
    draw = random.Random(seed)  # noqa: S311
    rows = []
    for i in range(n):
        terms = [draw.uniform(1, 100) * scale for scale in (1e12, 1e11, 1e9, 1e8)]
        time_s = sum(a * x for a, x in zip(truth, terms, strict=True))
        work = Work(
            gemm_flop=terms[0],
            attention_flop=terms[1],
            stream_bytes=terms[2],
            communication_bytes=terms[3],
            ideal_s=0.5 * time_s,
        )
        rows.append(outcome(f"r{i}", time_s, time_s, work=work))
    return rows


def test_baselines_recover_the_truth_that_made_the_rows() -> None:
    constant, line = baselines(drawn(40, (1e-14, 2e-14, 5e-13, 1e-11)), "seed")
    for baseline in (constant, line):
        assert baseline.n == 40
        assert baseline.reason is None
        assert baseline.p90_abs_error == pytest.approx(0, abs=1e-9)


def test_a_constant_mfu_misses_what_a_line_sees() -> None:
    rows = [
        outcome(f"r{i}", 1.0, 1.0 + i % 2, work=Work(
            gemm_flop=1e12, attention_flop=1e11 * (i % 2), stream_bytes=1, communication_bytes=1, ideal_s=0.5))
        for i in range(20)
    ]  # fmt: skip
    constant, line = baselines(rows, "seed")
    assert line.median_abs_error == pytest.approx(0, abs=1e-9)
    assert constant.median_abs_error is not None
    assert constant.median_abs_error > 0.2


def test_no_term_gets_a_negative_weight() -> None:
    """Attention that seems to speed a step up is noise: its weight stays at zero and the error stays."""
    rows = drawn(40, (1e-14, 0.0, 0.0, 0.0))
    faster = [
        outcome(o.id, 1.0, (o.measured_step_s or 0) - 1e-15 * (o.work.attention_flop if o.work else 0), work=o.work)
        for o in rows
    ]
    _, line = baselines(faster, "seed")
    assert line.median_abs_error is not None
    assert line.median_abs_error > 1e-4


def test_too_few_rows_have_no_baseline_and_a_reason() -> None:
    constant, line = baselines(drawn(MIN_ROWS["constant_mfu"] - 1, (1e-14, 0, 0, 0)), "seed")
    for baseline in (constant, line):
        assert baseline.median_abs_error is None
        assert "too few" in (baseline.reason or "")


def test_splits_depend_on_the_group_alone() -> None:
    rows = drawn(12, (1e-14, 2e-14, 5e-13, 1e-11), seed=3)
    noisy = [
        outcome(o.id, 1.0, (o.measured_step_s or 0) * (1 + 0.1 * (i % 3)), work=o.work) for i, o in enumerate(rows)
    ]
    assert baselines(noisy, "a") == baselines(noisy, "a")
    assert baselines(noisy, "a") != baselines(noisy, "b")
