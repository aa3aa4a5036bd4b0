"""Elastic training on spot offers: constant offers are the plain run, and changes cost what arithmetic says."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from simulator.cli import main
from simulator.studies.goodput.elastic import Elastic, Offer, Size, follow

FOUR = Size(
    nodes=4, num_devices=32, tokens_per_s=4e5, restart_s=600.0, blocking_s=20.0, written_s=60.0, interval_s=1800.0
)
TWO = Size(
    nodes=2, num_devices=16, tokens_per_s=2e5, restart_s=500.0, blocking_s=30.0, written_s=90.0, interval_s=3600.0
)
SIZES = {4: FOUR, 2: TWO}
HOUR = 3600.0


def offers(*lines: tuple[float, float, int]) -> tuple[Offer, ...]:
    return tuple(Offer(hour=hour, price_per_gpu_hour=price, nodes=nodes) for hour, price, nodes in lines)


def run(tokens: float, *lines: tuple[float, float, int], **fields: Any) -> Elastic:
    return follow(offers(*lines), SIZES, tokens, **fields)


def test_a_constant_offer_is_rate_times_time() -> None:
    """However many lines say the same."""
    for lines in ([(0, 2.0, 4)], [(hour, 2.0, 5) for hour in range(0, 24, 5)]):
        found = run(4e5 * 10 * HOUR, *lines)
        assert (found.changes, found.lost_tokens) == (0, 0.0)
        assert found.days == pytest.approx(10 / 24)
        assert found.dollars == pytest.approx(32 * 2.0 * 10)


def test_shrinking_loses_half_an_interval_and_a_restart() -> None:
    found = run(4e5 * 20 * HOUR, (0, 2.0, 4), (10, 1.0, 2))
    lost = 4e5 * 1800 / 2
    left = 4e5 * 20 * HOUR - (4e5 * 10 * HOUR - lost)
    assert found.lost_tokens == pytest.approx(lost)
    assert found.days == pytest.approx((10 * HOUR + 500 + left / 2e5) / (24 * HOUR))
    assert found.dollars == pytest.approx(32 * 2.0 * 10 + 16 * 1.0 * (500 + left / 2e5) / HOUR)
    assert sum(found.seconds.values()) == pytest.approx(found.days * 24 * HOUR)  # type: ignore[operator]


def test_with_notice_and_when_growing_a_checkpoint_is_written_instead() -> None:
    warned = run(4e5 * 20 * HOUR, (0, 2.0, 4), (10, 1.0, 2), notice_s=120.0)
    assert warned.lost_tokens == 0
    assert warned.seconds["changing"] == pytest.approx(20 + 500)
    grown = run(4e5 * 20 * HOUR, (0, 2.0, 2), (10, 1.0, 4))
    assert grown.lost_tokens == 0
    assert grown.seconds["changing"] == pytest.approx(30 + 600)


def test_above_the_highest_price_the_job_pauses_and_pays_nothing() -> None:
    found = run(4e5 * 20 * HOUR, (0, 2.0, 4), (10, 9.0, 4), (15, 2.0, 4), most_price=3.0)
    assert found.seconds["paused"] == 5 * HOUR
    changing_s = 20 + 600  # a checkpoint before the pause, a restart behind it
    assert found.days == pytest.approx((25 * HOUR + changing_s) / (24 * HOUR))
    assert found.dollars == pytest.approx(32 * 2.0 * (20 + changing_s / HOUR))
    never = run(1e12, (0, 2.0, 4), (10, 9.0, 4), most_price=3.0)
    assert never.days is None
    assert never.tokens == pytest.approx(4e5 * 10 * HOUR)


def test_a_size_that_cannot_run_leaves_its_machines_to_the_next_smaller() -> None:
    found = run(2e5 * 10 * HOUR, (0, 1.0, 3))
    assert found.by_nodes == {2: pytest.approx(10 / 24)}
    assert run(1e9, (0, 1.0, 1)).days is None


def test_no_change_loses_more_than_was_trained_behind_the_last_one() -> None:
    """That one restarted from a checkpoint: behind its restart of 600 s, 120 s are trained until machines are taken again."""
    found = run(4e5 * 20 * HOUR, (0, 1.0, 2), (10, 1.0, 4), (10.2, 1.0, 2))
    assert found.seconds["changing"] == pytest.approx(30 + 600 + 500)
    assert found.lost_tokens == pytest.approx(4e5 * (0.2 * HOUR - 30 - 600))


def test_changes_faster_than_restarts_train_nothing() -> None:
    found = run(1e15, (0, 1.0, 4), *((hour / 10, 1.0, 2 + 2 * (hour % 2)) for hour in range(1, 200)), (20, inf, 0))
    assert found.tokens < 4e5 * 0.1 * HOUR + 1


MODEL = [
    "goodput",
    "--model",
    "gpt2",
    "--nodes",
    "2",
    "--set",
    "plan.seq_len=512",
    "--tokens",
    "2T",
    "--replicas",
    "40",
    "--json",
]


def asked(capsys: pytest.CaptureFixture[str], file: Path, *lines: str) -> dict[str, Any]:
    file.write_text("\n".join(["hour,price_per_gpu_hour,nodes", *lines]) + "\n")
    assert main([*MODEL, "--spot", str(file), "--price-per-gpu-hour", "2.5"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_constant_offers_are_the_plain_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, tmp_path / "offers.csv", "0,2.5,2", "1000,2.5,2")
    assert found["spot"]["days"] == pytest.approx(found["days"]["mean"])
    assert found["spot"]["dollars"] == pytest.approx(found["dollars"]["mean"])


def test_fewer_nodes_run_fewer_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the ranks, and steps without the network between them: at least half as fast, at most as fast a rank alone."""
    found = asked(capsys, tmp_path / "offers.csv", "0,2.5,1")
    assert list(found["spot"]["by_nodes"]) == ["1"]
    assert 1.2 * found["days"]["mean"] < found["spot"]["days"] < 2.1 * found["days"]["mean"]


def test_every_fault_of_the_offers_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "offers.csv"
    file.write_text("hour,price_per_gpu_hour,nodes\n0,2.5,2\n0,cheap,2\n5,1,many\n4,1,2\n")
    assert main([*MODEL, "--spot", str(file)]) == 3
    told = capsys.readouterr().err
    assert all(part in told for part in ("line 3", "cheap", "line 4", "many"))
    assert main([*MODEL, "--max-price", "3"]) == 2
    assert "--max-price needs --spot" in capsys.readouterr().err
    file.write_text("hour,price_per_gpu_hour,nodes\n")
    assert main([*MODEL, "--spot", str(file)]) == 3
    assert "there is no offer" in capsys.readouterr().err
