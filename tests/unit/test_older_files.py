"""Files that version 0.1 wrote are still read, and what has moved since is said with what to write instead."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.studies.search import journal
from simulator.studies.search.journal import Journal

OLD = Path(__file__).parents[1] / "fixtures" / "0.1"


def _answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str]:
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    return json.loads(told.out), told.err


def _keys(tree: object, above: str = "") -> set[str]:
    """Paths of the tables' keys; those of a table of names (`breakdown`, a plan's own) stand for themselves."""
    if not isinstance(tree, dict):
        return set()
    return {f"{above}/{key}" for key in tree} | {
        one for key in ("memory", "inputs") for one in _keys(tree.get(key), f"{above}/{key}")
    }


def test_a_study_is_read_and_says_where_its_keys_stand_now(capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((OLD / "prediction.json").read_text(encoding="utf-8"))
    now, notes = _answer(capsys, "predict", str(OLD / "study.toml"))
    assert _keys(before) <= _keys(now)  # a program that reads the answer finds what it found
    assert now["inputs"]["plan"]["recompute_every"] == 2
    assert "recompute_every is now plan.recompute.every" in notes


def test_plans_of_a_search_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads((OLD / "search.json").read_text(encoding="utf-8"))["plans"]
    plan, _ = _answer(capsys, "predict", "--plan", str(OLD / "search.json"), "--plan-format", "search")
    assert plan["inputs"]["plan"]["dp_shard"] == rows[0]["plan"]["dp_shard"] == 8
    explored, _ = _answer(capsys, "explore", str(OLD / "search.json"))
    assert explored["columns"]["step_s"] == [pytest.approx(row["step_s"], rel=1e-5) for row in rows]


def _search(journal: Path) -> list[str]:
    """The command that wrote the journal."""
    fixed = ("tp=1", "pp=1", "zero=3", "cp=1", "recompute=none", "stack=torch-2.6-eager")
    command = "search --model gpt2 --cluster hgx-h100-8 --nodes 1 --global-batch 8 --seq-len 256 --jobs 1 --json"
    return [*command.split(), *(word for one in fixed for word in ("--fix", one)), "--journal", str(journal)]


def test_a_journal_is_another_version_s_and_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "software_version", lambda: "0.2.0")  # a checkout may be installed as any
    file = tmp_path / "search.journal"
    file.write_bytes(data := gzip.decompress((OLD / "search.journal.gz").read_bytes()))
    assert main(_search(file)) == ExitCode.BAD_INPUT
    assert "was written by another version of shardwise: 0.1.0, this is 0.2.0" in capsys.readouterr().err
    assert file.read_bytes() == data


def test_a_journal_s_rows_have_the_format_that_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "search.journal"
    path.write_bytes(gzip.decompress((OLD / "search.journal.gz").read_bytes()))
    with sqlite3.connect(path) as database:
        facts = dict(database.execute("SELECT name, value FROM facts"))
    database.close()
    monkeypatch.setattr(journal, "software_version", lambda: facts["version"])
    (plan,) = json.loads((OLD / "search.json").read_text(encoding="utf-8"))["plans"]
    with Journal(path, facts["study"]) as found:
        (row,) = found.outcomes().values()
    assert (row.step_s, row.used_bytes) == (plan["step_s"], plan["used_bytes"])


def test_a_capture_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((OLD / "program.json").read_text(encoding="utf-8"))
    now, _ = _answer(capsys, "predict", "--program", str(OLD / "step.capture.gz"), "--cluster", "hgx-h100-8")
    assert now["verdict"] == before["verdict"] == "fits"
    assert _keys(before) <= _keys(now)


def test_a_calibration_samples_and_runs_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.calibration.json"
    file.write_bytes(gzip.decompress((OLD / "mine.calibration.json.gz").read_bytes()))
    now, _ = _answer(capsys, "predict", "--model", "gpt2", "--cluster", "hgx-h100-8", "--calibration", str(file))
    assert any("mine" in one["detail"] for one in now["sources"] if one["what"] in ("calibration", "links"))
    compared, _ = _answer(capsys, "calibrate", "diff", str(OLD / "samples.jsonl"), str(OLD / "samples.jsonl"))
    assert compared
    runs, _ = _answer(capsys, "validate", "compare", str(OLD / "runs.jsonl"))
    assert runs
