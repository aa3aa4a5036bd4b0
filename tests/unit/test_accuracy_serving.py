"""What figures of measured servers say of the requests behind them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from experiments.accuracy_serving import REQUESTS_A_USER, TABLE, _rates, _undescribed, as_run, counted, undescribed
from simulator.formats.readers.measured_table import read_serving
from simulator.studies.backtest.rows import ServingRow

FRACTIONS = 0.02  # of a nanosecond: 16 digits of a mean, times its requests


def _whole(row: ServingRow, requests: int) -> bool:
    nanoseconds = Decimal(repr(row.value)) * 10**6 * requests
    return abs(nanoseconds - round(nanoseconds)) < FRACTIONS


@pytest.mark.parametrize("engine", sorted(REQUESTS_A_USER))
def test_means_are_of_so_many_whole_nanoseconds(engine: str) -> None:
    """All are whole numbers times their requests, but for one or two that were left out; with a half or a fifth of them many are not."""
    read = (counted(as_run(row)) for row in read_serving(TABLE) if isinstance(row, ServingRow))
    rows = [row for row in read if row.engine == engine and row.num_requests and row.value < 500]
    assert len(rows) > 10
    for row in rows:
        assert any(_whole(row, row.num_requests - empty) for empty in range(3)), row.id
    for part in (2, 5):
        assert sum(not _whole(row, row.num_requests // part) for row in rows) > len(rows) / 4


def test_a_rate_is_of_both_times(tmp_path: Path) -> None:
    """Nine tokens of 2 s behind one of 2 s: 20 s a request, predicted 25 s: the rate is a fifth too low."""
    table = tmp_path / "table.csv"
    head = "id,engine,model,gpu,input_tokens,output_tokens,concurrency_or_rate,metric,value,unit\n"
    cells = ",vllm,llama3-8b,h100,8,10,4,"
    table.write_text(head + f"one-ttft{cells}ttft,2,s\none-tpot{cells}tpot,2,s\n", encoding="utf-8")
    rows = [
        {"id": "one-ttft", "scored": True, "engine": "vllm", "gpu": "h100", "predicted": 7.0, "measured": 2.0},
        {"id": "one-tpot", "scored": True, "engine": "vllm", "gpu": "h100", "predicted": 2.0, "measured": 2.0},
    ]
    assert "| vllm | h100 | 1 | 20.0 % | 20.0 % | -20.0 % |" in _rates(rows, table)


def test_a_row_without_its_engine_s_description_is_held_or_not() -> None:
    """Of two rows of one engine, twice as slow as predicted, one lies in an interval that ends at 2.5 times, one beyond 1.5 times."""
    two = [
        {"id": name, "scored": True, "predicted": 1.0, "measured": 2.0, "error": -0.5, "low": 0.5, "high": high}
        for name, high in (("one", 2.5), ("other", 1.5))
    ]
    assert "| Orca | 2 | 50.0 % | 50.0 % | -50.0 % | 50.0 % | 100.0 % |" in _undescribed(
        two, dict.fromkeys(("one", "other"), "Orca")
    )
    row = next(one for one in read_serving(TABLE) if isinstance(one, ServingRow) and one.engine == "sglang")
    assert (undescribed(row).engine, undescribed(row).stack) == ("", "")
    assert undescribed(row).client.startswith("sglang")
