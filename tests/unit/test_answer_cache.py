"""Answers about captures that are cached for a second look."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.cli import answer_cache, main
from simulator.predict import program as road
from tests.captures import data
from validate.capture.written import write_capture


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A capture of GPUs that its state fills, so that the answer has remedies, and a folder that keeps every answer."""
    one = data(2)
    one["ranks"][0]["events"][0:0] = [[2, 900_000, 90 << 30, 0]]
    one["ranks"][0]["categories"]["900000"] = "parameters"
    write_capture(tmp_path / "step.capture.gz", one)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "answers"))
    monkeypatch.setattr(answer_cache, "_WORTH_S", 0.0)
    return ["predict", "--program", str(tmp_path / "step.capture.gz")]


def answers(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "answers").glob("*"))


def test_a_second_look_is_the_first_one_and_predicts_nothing(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDWISE_CACHE")
    first = [(main([*asked, *how]), capsys.readouterr().out) for how in ([], ["--json"])]
    assert answers(tmp_path) == []
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "answers"))
    assert (main(asked), capsys.readouterr().out) == first[0]
    assert len(answers(tmp_path)) == 1
    with monkeypatch.context() as without:
        without.setattr(road, "predict_program", None)
        assert [(main([*asked, *how]), capsys.readouterr().out) for how in ([], ["--json"])] == first
    trace = tmp_path / "step.json"
    assert main([*asked, "--trace", str(trace)]) == first[0][0]  # made anew: it has a timeline
    assert trace.is_file()


def test_another_question_another_answer_and_a_damaged_one_is_none(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = main(asked), capsys.readouterr().out
    for further in (["--cluster", "hgx-h200-8"], ["--tokens-per-step", "64"], ["--set", "kernels.gemm=2"]):
        main([*asked, *further])
        assert capsys.readouterr().out != first[1]
    assert len(answers(tmp_path)) == 4
    for damage in (b"{", b"[]", b"{}", b"\xff"):
        for one in answers(tmp_path):
            one.write_bytes(damage)
        assert (main(asked), capsys.readouterr().out) == first


def test_the_oldest_answers_go(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "_MOST", 2)
    for tokens in ("1", "2", "3", "4"):
        main([*asked, "--tokens-per-step", tokens])
    assert len(answers(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_costs_no_answer(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = main(asked), capsys.readouterr().out
    (tmp_path / "taken").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(tmp_path / "taken" / "below"))
        assert (main(asked), capsys.readouterr().out) == first
