"""The line on stderr that says that work goes on: rewritten on a terminal, now and then a new one in a log."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest

from simulator.base.progress import MEMORY, PLAY, WRITING, listened_by, report
from simulator.cli import progress
from simulator.cli.place import _progress
from simulator.cli.progress import StatusLine
from simulator.cli.search import _ProgressLine
from simulator.cli.serve_search import _progress_line
from simulator.formats.writers.snapshot import write_snapshot
from simulator.memory import device_history
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.search import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_after_ten_seconds_and_every_half_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = StatusLine()
    for done in range(1, 101):
        clock[0] += 1.0
        line.show(f"{done} of 100", last=done == 100)
    assert capsys.readouterr().err == "10 of 100\n40 of 100\n70 of 100\n100 of 100\n"


def test_a_search_of_servers_says_how_long_each_of_its_steps_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = _progress_line()
    told = [
        (6, Progress("survey", 1, 4)),
        (6, Progress("survey", 2, 4)),  # 12 s for a half
        (30, Progress("plays", 1, 3, best=16)),  # 30 s for a third
    ]
    for seconds, one in told:
        clock[0] += seconds
        line(one)
    assert capsys.readouterr().err.splitlines() == [
        "survey: 2 of 4 for engines of this size, 12.0 s, some 12.0 s left",
        "plays: 1 of 3 for engines of this size, fewest so far 16 GPUs, 42.0 s, some 60.0 s left",
    ]


def test_a_search_says_how_long_survey_and_budget_take(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    line = _ProgressLine()
    told = [
        (0, Progress("listing", 128, None, spent=0.5)),
        (0, Progress("listing", 256, None, spent=1.0)),
        (2, Progress("scouting", 3, 3)),
        (8, Progress("survey", 10, 40)),  # 8 s for a quarter: 24 s
        (6, Progress("simulation", 1, None, spent=0.0)),
        (24, Progress("survey", 40, 40)),
        (6, Progress("simulation", 5, None, best=1.5, spent=0.1)),  # 12 s for a tenth: 108 s
        (40, Progress("scouting", 1, 3, stack="fast (2 of 4)")),  # the next search: of it nothing is known yet
    ]
    for seconds, one in told:
        clock[0] += seconds
        line(one)
    assert capsys.readouterr().err.splitlines() == [
        "survey of 10 of 40 branches, 10.0 s, some 24 s left",
        "survey of 40 of 40 branches, 40.0 s, some 0 s left",
        "fast (2 of 4): scouting of 1 of 3 branches, 86.0 s",
    ]
    clock[0] += 40
    line(Progress("simulation", 5, None, best=1.5, spent=0.1))
    assert capsys.readouterr().err == "simulation of 5 plans, best 1.5, 126 s, some 360 s left\n"
    for share in (0.1, 0.4):
        clock[0] += 30
        line(Progress("listing", 2560, None, spent=share))  # of the next search: 60 s for four tenths
    assert capsys.readouterr().err.splitlines()[-1] == "listing of 2,560 branches, 186 s, some 90 s of it left"
    clock[0] += 30
    line(Progress("scouting", 1, 3))
    assert capsys.readouterr().err == "scouting of 1 of 3 branches, 216 s\n"


def test_quick_work_leaves_no_line_in_a_log(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine()
    clock[0] += 5
    line.show("1 of 1", last=True)
    assert capsys.readouterr().err == ""


def test_a_terminal_s_line_is_rewritten_and_its_last_stays(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = StatusLine()
    for done in range(1, 11):
        clock[0] += 0.1
        line.show(f"{done} of 10", last=done == 10)
    assert capsys.readouterr().err.count("\r\x1b[2K") < 8
    line.show("10 of 10", last=True)
    assert capsys.readouterr().err == "\r\x1b[2K10 of 10\n"


def test_a_terminal_s_line_goes_where_work_breaks_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with suppress(KeyboardInterrupt), _progress():
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("\r\x1b[2K")


def test_a_step_that_is_played_is_told_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = Model.load("gpt2"), Cluster.load("hgx-h100-8", 2)
    plan = Plan(pp=4, dp_shard=4, zero=1, num_micro_batches=20, seq_len=128)
    alone = predict(model, plan, cluster, advise=True)
    told: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda _, line, **__: told.append(line))
    with progress.playing(plan, cluster):
        assert predict(model, plan, cluster, advise=True) == alone
    memory = [line for line in told if "memory of 4 stages" in line]
    assert memory == told[: len(memory)]
    assert memory[0].startswith("shardwise: memory of 4 stages: 40%, some ")  # its two ends are written
    assert memory[0].endswith(" s of it left")
    assert memory[-1] == "shardwise: memory of 4 stages: 100%, some 0 s of it left"
    played = told[len(memory) :]
    assert played[0].startswith("shardwise: playing 4 stages: 2%")  # of six plays, the program of the first stage
    assert played[-1] == "shardwise: playing 4 stages: 100%, some 0 s left"
    assert len(played) >= 6 * 4


@pytest.mark.parametrize("policy", ["caching", "defrag"])
def test_what_is_said_to_be_left_is_of_what_is_being_done(
    policy: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour was said to be left of seconds, as the time that memory had taken counted as that of the first play."""
    told: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda _, line, **__: told.append(line))
    with progress.told("it", {MEMORY: 1, PLAY: 2}):
        clock[0] += 100
        report(1.0, MEMORY)
        for _ in range(4):
            clock[0] += 1
            report(0.1, PLAY)
    assert told[-1] == "shardwise: playing it: 20%, some 16 s left"
    plan = {"pp": 2, "schedule": "gpipe", "zero": 1, "num_micro_batches": 8, "seq_len": 128, "dp_shard": 4}
    asked = Plan(**plan, memory_policy=policy)  # type: ignore[arg-type]
    parts: list[float] = []
    with listened_by(lambda work, part: parts.append(part) if work == MEMORY else None):
        predict(Model.load("gpt2"), asked, Cluster.load("hgx-h100-8", 1))
    assert sum(parts) == pytest.approx(1.0)


def test_a_snapshot_is_told_as_it_is_written(tmp_path: Path) -> None:
    model, cluster = Model.load("llama3-8b"), Cluster.load("hgx-h100-8", 1)
    history = device_history(model, Plan(dp_shard=8, seq_len=128), Stack.of(Plan()), cluster.device)
    parts: list[float] = []
    with listened_by(lambda work, part: parts.append(part) if work == WRITING else None):
        write_snapshot(tmp_path / "s.pickle", history)
    assert len(parts) > 1
    assert sum(parts) == pytest.approx(1.0)


@pytest.mark.parametrize("plan", [{"pp": 2, "num_micro_batches": 2}, {"dp_shard": 8}])
def test_a_step_of_any_size_is_told_where_it_takes_long(
    plan: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 stages of 64 micro-batches took half a minute without a word: fewer passes than were thought to be long."""
    asked = Plan(**{"zero": 1, "seq_len": 128, **plan})  # type: ignore[arg-type]
    model, cluster = Model.load("gpt2"), Cluster.load("hgx-h100-8", 1)
    asked = asked.copy_with(dp_shard=8 // asked.pp)
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.__setitem__(0, now[0] + 31) or now[0])
    with progress.playing(asked, cluster):
        predict(model, asked, cluster)
    words = "playing 2 stages: " if asked.pp > 1 else "playing the step: "
    assert f"shardwise: {words}" in capsys.readouterr().err


def test_quick_work_leaves_no_line_on_a_terminal_either(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = StatusLine(at_once=False)
    clock[0] += 0.9
    line.show("1 of 2")
    line.clear()
    assert capsys.readouterr().err == ""
    clock[0] += 0.9
    line.show("2 of 2")
    assert "2 of 2" in capsys.readouterr().err
