"""`shardwise explore`: every combination, legal or not; numbers as predict's; resumable; plans of a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import simulator.cli.explore_points as points
from simulator.cli import main
from simulator.cli.explore_points import DIGITS, Axis, Exploration, PointJournal, explored
from simulator.formats.study import read_study
from simulator.predict import predict
from tests.pages import SMALL

BASE = ("explore", *SMALL, "--jobs", "1")
VARY = ("--vary", "tp=1,3", "--vary", "nodes=1,2")


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_combination_is_predicted_and_what_is_not_legal_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _json(capsys, *BASE, *VARY)
    assert code == 0
    assert found["axes"] == [{"key": "plan.tp", "values": ["1", "3"]}, {"key": "nodes", "values": ["1", "2"]}]
    assert (found["at"]["plan.tp"], found["at"]["nodes"]) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert found["counts"] == {"fits": 2, "illegal": 2}
    assert found["columns"]["step_s"][2:] == [None, None]
    assert "3" in found["reasons"][found["columns"]["why"][2]]
    asked = read_study(None, {"model": "llama3.2-1b", "cluster": "hgx-h100-8", "nodes": "2"}, {}, ("plan.seq_len=512",))
    step_s = predict(asked.model, asked.plan, asked.cluster, asked.calibration, asked.stack).step_s
    assert found["columns"]["step_s"][1] == float(f"{step_s:.{DIGITS}g}")
    assert found["columns"]["num_devices"][:2] == [8, 16]


def test_the_text_shows_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *VARY, "--plain"]) == 0
    out = capsys.readouterr().out
    assert "4 combinations: 2 fits, 2 illegal" in out
    assert "GPU time a million tokens" in out  # what they are ordered by


def test_the_command_of_a_page_has_options_that_predict_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "qwen2.5-vl-7b", "--image-size", "672", "--cluster", "hgx-h100-8", "--set", "plan.seq_len=2048")
    code, found = _json(capsys, "explore", *words, "--vary", "nodes=1", "--jobs", "1")
    assert code == 0
    assert main([*found["command"][1:], "--json"]) in (0, 4)


def test_faults_of_axes_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--vary", "tq=1", "--vary", "plan.zero", "--vary", "nodes=1", "--vary", "nodes=2"]) == 3
    told = capsys.readouterr().err
    assert "3 faults" in told
    assert "there is no 'tq'" in told
    assert "varies twice" in told
    assert main([*BASE, "--vary", "plan.tp=1,foo", "--vary", "plan.sequence_parallel=7"]) == 3
    told = capsys.readouterr().err
    assert "--vary plan.tp=foo" in told
    assert "--vary plan.sequence_parallel=7" in told
    assert main([*BASE, "--vary", f"plan.tp={','.join(map(str, range(1, 202)))}", "--vary", f"nodes={','.join(map(str, range(1, 102)))}"]) == 3  # fmt: skip
    assert "20,301 combinations" in capsys.readouterr().err


def test_what_a_journal_knows_is_not_predicted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"model": "llama3.2-1b", "cluster": "hgx-h100-8"}
    asked = Exploration(file=None, flags=flags, settings=("plan.seq_len=512",), axes=(Axis.parse("tp=1,2"),))
    count = 0

    def once(_: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"verdict": "fits", **dict.fromkeys(points.FIGURES[:-1], float(count))}

    monkeypatch.setattr(points, "_evaluated", once)
    with PointJournal(tmp_path / "x.journal", asked.identity) as kept:
        first = explored(asked, kept, 1, lambda *_: None)
    wider = Exploration(file=None, flags=flags, settings=asked.settings, axes=(Axis.parse("tp=1,2,4"),))
    with PointJournal(tmp_path / "x.journal", wider.identity) as kept:
        again = explored(wider, kept, 1, lambda *_: None)
    assert count == 3
    assert again[:2] == first


def test_a_journal_of_another_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = str(tmp_path / "x.journal")
    assert main([*BASE, "--vary", "tp=1,2", "--journal", journal]) == 0
    assert main([*BASE, "--set", "plan.micro_batch_size=2", "--vary", "tp=1,2", "--journal", journal]) == 3
    assert "belongs to another study" in capsys.readouterr().err


def test_prices_give_costs(capsys: pytest.CaptureFixture[str]) -> None:
    prices = Path(__file__).resolve().parents[2] / "docs" / "examples" / "prices.toml"
    _, found = _json(capsys, *BASE, "--vary", "tp=1,2", "--prices", str(prices))
    columns = found["columns"]
    hourly = columns["billion_tokens"][0] / (columns["device_s_per_token"][0] * 1e9 / 3600)
    assert columns["billion_tokens"][1] == pytest.approx(
        hourly * columns["device_s_per_token"][1] * 1e9 / 3600, rel=1e-5
    )


def test_plans_of_a_search_are_explored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "plans.json", tmp_path / "x.html"
    search = ("--global-batch", "8", "--seq-len", "512", "--stack", "torch-2.6-eager", "--jobs", "1", "--fix", "tp=1,2")
    assert (
        main(
            [
                "search",
                *SMALL[:4],
                *search,
                "--fix",
                "pp=1",
                "--fix",
                "cp=1",
                "--fix",
                "zero=3",
                "--fix",
                "recompute=none",
                "--export",
                str(file),
            ]
        )
        == 0
    )
    capsys.readouterr()
    code, found = _json(capsys, "explore", str(file), "--html", str(page))
    plans = json.loads(file.read_text())["plans"]
    assert code == 0
    assert found["columns"]["step_s"] == [plan["step_s"] for plan in plans]
    assert page.is_file()
    for text in ("[]", "{}", '{"plans": [1], "inputs": {}}', '{"plans": 3, "inputs": 4}'):
        file.write_text(text)
        assert main(["explore", str(file)]) == 3
        assert "is no export of a search" in capsys.readouterr().err
    assert main(["explore", str(file), "--vary", "tp=1"]) == 2
    (tmp_path / "plans.csv").write_text("rank\n1\n")
    assert main(["explore", str(tmp_path / "plans.csv")]) == 3
    assert "search --export plans.json" in capsys.readouterr().err
