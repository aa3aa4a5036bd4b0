"""A burn-in says which rank computed what wrong, whatever it was that broke; sound ranks are not accused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from validate import faults
from validate.burn_in import checks, run
from validate.burn_in.run import LOST, WRONG, Burnt
from validate.supervise import Verdict

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def session(**changes: Any) -> Any:
    setting = SimpleNamespace(**{"device": "cpu", "tiny": True, "rank": 0, **changes})
    return SimpleNamespace(torch=torch, setting=setting, gpu=False, free_bytes=2**30, num_ranks=1)


@pytest.mark.usefixtures("warm_ranks")
def test_the_rank_that_breaks_is_named_with_every_check_that_saw_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.NAME, "1,round 2,corrupt")
    asked = ["calibrate", "burn-in", "--tiny", "--minutes", "0.02", "--ranks", "2", "--threads", "1", "--device", "cpu"]
    assert main([*asked, "--json"]) == WRONG
    told = json.loads(capsys.readouterr().out)
    assert not told["sound"]
    assert told["trouble"] is None
    assert {(row["rank"], row["round"]) for row in told["wrong"]} == {(1, 2)}
    assert {row["check"].split(" of ")[0] for row in told["wrong"]} == {
        "product fp32",
        "product bf16",
        "memory",
        *KINDS,
    }
    assert [row["check"] for row in told["wrong"]] == told["ranks"][0]["checks"]
    rounds = {row["rounds"] for row in told["ranks"]}
    assert len(rounds) == 1
    assert all(0 < row["rounds"] < rounds.copy().pop() for row in told["wrong"])


def test_every_rank_of_a_launcher_ends_with_what_came_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"rank": 0, "host": "", "check": "memory", "round": 1, "rounds": 1, "detail": "a bit"}
    found = {"sound": Burnt(verdict=Verdict(kind="ok")), "broken": Burnt(verdict=Verdict(kind="ok"), wrong=[broken])}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        for name, status in (("sound", 0), ("broken", WRONG)):
            monkeypatch.setattr(run, "burn_in", lambda *_, name=name: found[name])
            assert main(["calibrate", "burn-in", "--device", "cpu", "--threads", "1"]) == status
            assert bool(capsys.readouterr().out) == told


def test_a_burn_in_says_once_a_minute_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    clock = iter((0.0, 2.0, 59.0, 61.0, 130.0))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    show = run._progress(120.0, lines.append)
    for index, phase in ((0, "first results"), (1, "round 1"), (0, "round 1"), (0, "round 2"), (0, "round 9")):
        show(index, phase)
    assert lines == ["first results, 2 minutes left", "round 2, 0.983 minutes left", "round 9, 0 minutes left"]


def test_a_first_result_that_is_wrong_is_no_product_of_its_factors() -> None:
    """As wrong as a bit of the exponent; the right one is not accused, in any dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(96, 96).to(dtype) for _ in "ab")
        c = a @ b.t()
        assert not checks._freivalds(torch, a, b, c, 2.0**-23)
        c[5, 7] += 4 * c.abs().max()
        assert checks._freivalds(torch, a, b, c, 2.0**-23) == "1 of 96 rows are not the product of their factors"
        c[9, 0] = float("nan")
        assert "2 of 96" in checks._freivalds(torch, a, b, c, 2.0**-23)


def test_memory_that_keeps_one_bit_is_seen_in_one_of_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.memory(session())
    assert [check.play(number) for number in (1, 2)] == ["", ""]

    def stuck(chunk: Any) -> Any:
        chunk[3] |= 1 << 17
        return chunk

    monkeypatch.setattr(faults, "corrupted", stuck)
    seen = [check.play(number) for number in (1, 2)]
    assert sum(map(bool, seen)) == 1
    assert "1 of 16384 words" in "".join(seen)


def test_a_digest_knows_bits_and_places() -> None:
    c = torch.randn(8, 8)
    other = c.clone()
    other[0, 0], other[0, 1] = c[0, 1], c[0, 0]
    assert checks.digest(torch, c) == checks.digest(torch, c.clone()) != checks.digest(torch, other)


def test_the_rank_that_most_others_outvote() -> None:
    assert checks.outvoted([7, 7, 5, 7]) == [2]
    assert checks.outvoted([7, None, 5, 7]) == [2]  # one has another device
    assert checks.outvoted([7, 5]) == []  # nobody can say who is right
    assert checks.outvoted([None, None]) == []


@pytest.mark.parametrize(
    ("kind", "wrong", "status"),
    [("ok", 0, 0), ("ok", 1, WRONG), ("hung", 0, LOST), ("hung", 1, WRONG), ("interrupted", 0, ExitCode.INTERRUPTED)],
)
def test_exit_codes(kind: Any, wrong: int, status: int) -> None:
    row = {"rank": 3, "host": "n7", "check": "memory", "round": 2, "rounds": 4, "detail": "1 of 9 words"}
    found = Burnt(
        verdict=Verdict(kind=kind, rank=1), ranks={3: {"rounds": 5, "checks": ["memory"]}}, wrong=[row] * wrong
    )
    assert found.status == status
    assert found.as_json()["sound"] == (status == 0)
    assert (found.lines()[-1] == "sound") == (status == 0)
    if wrong:
        assert found.lines()[0] == "WRONG: rank 3 on n7: memory: 1 of 9 words (4 rounds, the first 2)"
