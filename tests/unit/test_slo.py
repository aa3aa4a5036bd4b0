"""Limits on percentiles: how they are written, what is refused, and what is judged by them."""

from __future__ import annotations

import json

import pytest

from simulator import Slo
from simulator.base.errors import ArgumentError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import UnitError
from simulator.cli import main
from simulator.studies.serving.report import judged
from simulator.studies.serving.slo import read_times


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("500ms", {99: 0.5}),
        ("p95=500ms", {95: 0.5}),
        ("p50=200ms, p99.9=1s", {50: 0.2, 99.9: 1.0}),
    ],
)
def test_limits_as_people_write_them(text: str, times: dict[float, float]) -> None:
    assert read_times(text) == pytest.approx(times)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("p95", "is not a time"),
        ("q95=1s", "'q95' is no percentile"),
        ("p0=1s,p100=2s", "p0 is no percentile: above 0 and below 100, as p95; p100 is no percentile"),
        ("-3ms", "must be above zero; it is -3ms"),
        ("0s", "must be a time above zero"),
        ("p95=1s,p95=2s", "p95 is given twice"),
        ("p95=500ms,p99=400ms", "p99 within 400 ms contradicts p95 within 500 ms"),
    ],
)
def test_what_is_no_limit(text: str, told: str) -> None:
    with pytest.raises(UnitError, match=told):
        read_times(text)


def test_from_python_every_fault_is_told() -> None:
    with pytest.raises(ArgumentError) as caught:
        Slo(ttft_s=-1, tpot_s={101: 0.1, 50: float("nan")}, latency_s={50: 2.0, 99: 1.0})
    assert [fault.place for fault in caught.value.faults] == ["Slo(ttft_s=)"] + ["Slo(tpot_s=)"] * 2 + [
        "Slo(latency_s=)"
    ]


def test_each_limit_is_judged_by_its_own_percentile() -> None:
    times: list[float | None] = [float(n) for n in range(1, 101)]
    slo = Slo(ttft_s={50: 50.0, 90: 89.5}, tpot_s={99: 1.0})
    rows, share = judged({"ttft": times, "tpot": [None] * 100, "latency": times}, slo)
    assert [(row.percentile, row.measured_s, row.held) for row in rows] == [
        (50, 50.0, True),
        (90, 90.0, False),
        (99, None, True),
    ]
    assert share == 0.5


def test_serve_takes_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--model", "llama3.2-1b", "--requests", "50"]
    assert main([*arguments, "--slo-ttft", "p50=1s,p95=2s", "--set", "slo.tpot=p90=1us", "--json"]) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["attainments"]
    assert [(row["name"], row["percentile"], row["held"]) for row in rows] == [
        ("ttft", 50, True),
        ("ttft", 95, True),
        ("tpot", 90, False),
    ]
    assert main([*arguments, "--slo-ttft", "p95=2s,p99=1s", "--slo-tpot", "fast"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "--slo-ttft: p99 within 1.00 s contradicts p95 within 2.00 s" in told
    assert "--slo-tpot: 'fast' is not a time" in told
