"""The recipes about purchases, each in a small version: it runs, and its answer and its picture are there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PRICES = """
currency = "USD"
[[price]]
cluster = "hgx-a100-80-8"
kind = "reserved"
per_gpu_hour = 2.0
date = "2026-11-01"
source = "made up"
[[price]]
cluster = "pcie-a100-40-8"
kind = "reserved"
per_gpu_hour = 0.8
date = "2026-11-01"
source = "made up"
[[price]]
cluster = "hgx-h100-8"
kind = "on-demand"
per_gpu_hour = 3.0
date = "2026-11-01"
source = "made up"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def recipe(name: str, *arguments: str, priced: bool = True) -> str:
        more = ["--prices", str(prices)] if priced else []
        words = [name, "--model", "gpt2", "--jobs", "1", "-o", str(tmp_path / "out"), *more, *arguments]
        monkeypatch.setattr(sys, "argv", words)
        try:
            runpy.run_path(str(EXPERIMENTS / f"{name}.py"), run_name="__main__")
        except SystemExit as stop:
            assert stop.code in (None, 0)  # noqa: PT017
        return capsys.readouterr().out

    return recipe


def test_nvlink_or_pcie(run, tmp_path: Path) -> None:  # noqa: ANN001
    out = run("a100_nvlink_or_pcie", "--global-batch", "16", "--seq-len", "256", "--samples", "8")
    for words in ("is worth", "90 %", "best in", "Sobol indices", "USD a billion tokens"):
        assert words in out
    assert (tmp_path / "out" / "front.svg").read_bytes().startswith(b"<?xml")


def test_hdr_or_ndr(run, tmp_path: Path) -> None:  # noqa: ANN001
    out = run("hdr_or_ndr", "--nodes", "2", "--sequences-a-node", "8", "--seq-len", "256", priced=False)
    assert out.count("NDR may cost") == 1
    assert (tmp_path / "out" / "premium.svg").read_bytes().startswith(b"<?xml")


def test_nodes_in_time(run, tmp_path: Path) -> None:  # noqa: ANN001
    asked = ("--nodes", "1,2", "--global-batch", "16", "--seq-len", "256", "--replicas", "20", "--tokens", "100B")
    out = run("nodes_for_70b", *asked, "--days", "1000")
    assert "1 node is enough" in out
    assert "million USD" in out
    assert (tmp_path / "out" / "days.svg").is_file()
