"""The named parts of intervals: which kind each is of, and what runs say of the kinds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import intervals as fits
import numpy as np
import pytest

from simulator.base.errors import CalibrationError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.predict.confidence import (
    SHEET,
    UNCOUNTED,
    UNTIMED,
    WAITING,
    Z90,
    kind_of,
    own_part,
    reaches,
    seen,
    upward,
)
from simulator.spec.calibration import intervals as module
from simulator.spec.calibration.intervals import PARTS, intervals
from simulator.spec.software.stack import Stack


def test_every_part_is_of_one_kind() -> None:
    kinds = {
        "gemm": "kernels", "elementwise": "kernels", "node links": "links", "PCIe": "pcie", "network": "network",
        "slower network": "network", "exchanges between nodes": "exchanges", "host": "host", "slower host": "host", UNCOUNTED: "uncounted",
        "release of megatron-core-2025": "experts", "eager experts": "eager experts", UNTIMED: "untimed", "h2d": "transfers",
        "slower h2d": "transfers", "cpu_adam": "transfers", "stack": "stack", "model code": "model code", "slower software: experts": "software",
        SHEET: None, "imbalance": None,
    }  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds
    assert [name for name in kinds if upward(name)] == [
        "slower network",
        "slower host",
        UNCOUNTED,
        "slower h2d",
        "slower software: experts",
        SHEET,
    ]
    assert seen(SHEET, 0.7) == 0.7
    assert seen("host", 0.2) == pytest.approx(0.2 * intervals().factors["host"])


def test_who_brings_the_layers_tells_what_a_stack_leaves_unexplained() -> None:
    stacks = ("nemo-24", "nanotron-2025", "transformers-2024", "torch-2.11-compiled")
    parts = [own_part(Stack.load(name)) for name in stacks]
    assert parts == ["stack", "stack", "model code", "model code"]
    assert [kind_of(part) for part in parts] == parts


def test_what_may_only_be_slower_moves_the_upper_end_alone() -> None:
    down, up = reaches(0.03, {"gemm": 0.04, "slower host": 0.12})
    assert down == pytest.approx(Z90 * 0.05)
    assert up == pytest.approx(Z90 * 0.13)


NONE = (0.0,) * len(PARTS)


def judged(
    source: str, group: str, squares: tuple[float, ...], error: float, late: tuple[float, ...] = NONE, kind: str = ""
) -> fits.Judged:
    return fits.Judged(source, kind, group, squares, late, (0.0, 0.0), error, 0.0)


def runs(source: str, count: int, scale: float, seed: int) -> list[fits.Judged]:
    """Runs of half kernels and half host, whose host is `scale` times as unknown as it was thought."""
    random = np.random.default_rng(seed)
    found = []
    for at in range(count):
        kernels, host = (0.05, 0.01) if at % 2 else (0.01, 0.1)
        squares = tuple({"kernels": kernels**2, "host": host**2}.get(part, 0.0) for part in PARTS)
        error = random.standard_normal() * math.hypot(kernels, scale * host)
        found.append(judged(source, f"{source} {at % 4}", squares, float(error)))
    return found


def test_what_may_only_be_slower_is_judged_by_runs_that_were() -> None:
    """Errors of three sigmas above the middle and of one below it: the part of the upper end makes the difference."""
    kernels, slower = (tuple(0.04**2 * (part == name) for part in PARTS) for name in ("kernels", "uncounted"))
    drawn = np.random.default_rng(5).standard_normal(2000) * 0.04
    errors = np.where(drawn > 0, 3 * drawn, drawn)
    sample = [judged(str(at % 80), str(at % 80), kernels, float(e), slower) for at, e in enumerate(errors)]
    factors = fits.fitted(sample)
    below, above = fits.sigmas(sample, factors)
    assert above[0] / below[0] == pytest.approx(3.0, rel=0.15)
    assert factors[PARTS.index("uncounted")] > 2 * factors[PARTS.index("kernels")]


def test_the_part_that_is_off_gets_the_factor() -> None:
    sample = [one for at in range(12) for one in runs(f"source {at}", 40 + 20 * (at % 3), 3.0, at)]
    factors = dict(zip(PARTS, fits.fitted(sample), strict=True))
    assert factors["host"] / factors["kernels"] == pytest.approx(3.0, rel=0.35)
    told = fits.held(sample, fits.fitted(sample))
    assert told["holds"] == pytest.approx(0.9, abs=0.02)


def test_a_source_counts_once_whatever_its_runs() -> None:
    few, many = runs("few", 10, 1.0, 1), runs("many", 400, 1.0, 2)
    weight = fits.weights([*few, *many])
    assert sum(weight[:10]) == pytest.approx(1.0)
    assert sum(weight[10:]) == pytest.approx(1.0)
    assert fits.quantile(np.array([1.0, *[2.0] * 9]), np.ones(10)) == 2.0
    assert fits.quantile(np.arange(10.0), np.ones(10)) == 8.0


def test_a_stack_of_few_runs_weighs_as_much_as_its_source_s_largest() -> None:
    sample = [judged("one", "", NONE, 0.0, kind=kind) for kind in ("rare", *["common"] * 9)]
    assert fits.weights(sample)[0] == pytest.approx(sum(fits.weights(sample)[1:])) == 0.5
    rows = [row for row in read_runs(fits.TABLES[0]) if isinstance(row, RunRow) and row.source == "VIA-Research/vTrain"]
    taken = fits.drawn(rows, 5)
    assert [fits.kind_of_run(row) for row in taken].count("megatron-deepspeed-2022 nodes") == 5
    assert len(taken) == 10
    assert fits.drawn(reversed(rows), 5)[0] in taken


def test_undescribed_software_is_as_wide_as_its_runs_need() -> None:
    squares = tuple(0.04 if part == "software" else 0.0 for part in PARTS)
    sample = [judged(str(at), "", squares, 0.1 * at) for at in range(10)]
    assert fits.software(sample, np.ones(len(PARTS))) == pytest.approx(
        0.9 / (0.2 * Z90)
    )  # 90 % of ten sources and one more


def test_the_factor_of_undescribed_software_alone_leaves_all_others() -> None:
    squares = tuple(0.04 if part == "software" else 0.0 for part in PARTS)
    found = fits.of_undescribed([judged(str(at), "", squares, 0.1 * at) for at in range(10)])
    factors = intervals().factors
    assert {part for part in PARTS if found["factors"][part] != factors[part]} == {"software"}
    assert found["factors"]["software"] == pytest.approx(0.9 / (0.2 * Z90), abs=1e-3)
    described = {source: one["holds"] for source, one in intervals().sample.items()}
    assert {source: one["holds"] for source, one in found["sample"].items()} == described


def test_the_shipped_factors_are_of_every_part_and_of_many_sources() -> None:
    assert set(intervals().factors) == set(PARTS)
    assert len(intervals().sample) > 15
    assert all(0.3 < factor < 10 for factor in intervals().factors.values())


def test_a_file_of_other_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "intervals.json"
    file.write_text(json.dumps({"source": "", "factors": {"luck": 1.0}}))
    monkeypatch.setattr(module, "FILE", file)
    with pytest.raises(CalibrationError, match="luck"):
        intervals.__wrapped__()


def test_ends_hold_whether_hosts_wait_or_not() -> None:
    """The lower end is that of hosts that do not; the upper one lies as far above a step whose hosts do."""
    parts = {"gemm": 0.04, "slower host": 0.12}
    down, up = reaches(0.03, parts)
    found = reaches(0.03, parts | {WAITING: 0.5})
    assert found == pytest.approx((down, up + Z90 * 0.5))
