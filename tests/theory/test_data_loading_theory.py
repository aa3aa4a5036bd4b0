"""Data loading against queues: D/D/1, M/D/1, and the closed form of a buffer of one batch."""

from __future__ import annotations

import json
from math import exp

import numpy as np
import pytest

from simulator import Cluster, Plan
from simulator.cli import main
from simulator.predict.data_loading import DataLoading, Loads, played, stall_of

H100, GH200 = Cluster.load("hgx-h100-8"), Cluster.load("gh200-1")
PLAN = Plan(dp_shard=8)


def queue(period_s: float, slots: int, **seconds: float) -> Loads:
    return Loads(period_s=period_s, workers=1, slots=slots, **{"decode_s": 0.0, "read_s": 0.0, "copy_s": 0.0} | seconds)


def test_workers_that_keep_up_stall_nothing() -> None:
    """D/D/w: 8 workers make a batch every second, which is when the step takes one."""
    found = stall_of(DataLoading(decode_s=8.0, workers=8), 1.0, PLAN, H100)
    assert (found.stall_s, found.workers_needed) == (0.0, 8)
    assert stall_of(DataLoading(decode_s=0.5, workers=1), 1.0, PLAN, H100).ready_s > 0


@pytest.mark.parametrize(
    ("asked", "step_s"),
    [
        (DataLoading(decode_s=12.0, workers=8), 12 / 8),
        (DataLoading(decode_s=12.0, workers=8, cores=32), 12 * (64 / 32) / 8),  # 8 ranks' workers on 32 cores
        (DataLoading(sample_bytes=10**9, storage_bytes_per_s=4e9), 8 / 4),  # 8 ranks of a node read a GB each
        (DataLoading(decode_s=0.5, workers=0), 1.0 + 0.5),  # one after the other
        (DataLoading(decode_s=1.0, sample_bytes=10**9, storage_bytes_per_s=4e9, workers=1), 2.0 + 1.0),  # read, decode
    ],
)
def test_where_nothing_varies_the_slowest_stage_is_the_step(asked: DataLoading, step_s: float) -> None:
    """D/D/1: a step takes the longest of itself and each stage's time a batch; without workers, their sum."""
    found = stall_of(asked, 1.0, PLAN, H100)
    assert found.step_s == pytest.approx(step_s, rel=1e-9)
    assert found.stall_s == pytest.approx(step_s - 1)


def test_accumulated_micro_batches_are_a_batch_each() -> None:
    found = stall_of(DataLoading(decode_s=0.75, workers=1), 1.0, Plan(dp_shard=8, num_micro_batches=2), H100)
    assert found.loads.period_s == 0.5
    assert found.step_s == pytest.approx(2 * 0.75)


def test_batches_wait_ready_as_customers_of_m_d_1() -> None:
    """Poisson arrivals from the one worker, the step as the server: Pollaczek and Khinchine, rho T / (2 (1 - rho))."""
    rho, count = 0.8, 60_000
    draws = np.random.default_rng(7).exponential(1 / rho, (count, 1))
    stalls, ready_s = played(queue(1.0, slots=count, decode_s=1 / rho), iter(draws))
    assert ready_s == pytest.approx(rho / (2 * (1 - rho)), rel=0.1)
    assert 1 + float(stalls.mean()) == pytest.approx(1 / rho, rel=0.02)  # it is busy for rho of the time


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_buffer_of_one_batch_waits_for_the_longer_of_step_and_worker(ranks: int) -> None:
    """E max(T, the latest of n exponential S) = T + the integral over t > T of 1 - (1 - exp(-t / S))^n."""
    mean_s, count = 0.6, 40_000
    draws = np.random.default_rng(3).exponential(mean_s, (count, ranks))
    stalls, _ = played(queue(1.0, slots=1, decode_s=mean_s), iter(draws))
    t = np.linspace(1.0, 40.0, 400_001)
    beyond = float(np.trapezoid(1 - (1 - np.exp(-t / mean_s)) ** ranks, t))
    assert float(stalls.mean()) == pytest.approx(beyond, rel=0.05)
    if ranks == 1:
        assert beyond == pytest.approx(mean_s * exp(-1 / mean_s), rel=1e-6)


def test_more_prefetch_never_stalls_longer() -> None:
    asked = DataLoading(decode_s=0.9, decode_variation=1.0, workers=1, batches=2000)
    stalls = [stall_of(asked.model_copy(update={"prefetch": n}), 1.0, PLAN, H100).stall_s for n in (1, 2, 4, 16)]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] > 2 * stalls[-1] > 0


def test_seconds_scale_with_seconds() -> None:
    """Homogeneity: twice the times of every stage and of the step, twice the stall."""
    loads = [queue(k * 1.0, slots=4, decode_s=k * 0.9, read_s=k * 0.2, copy_s=k * 0.1) for k in (1, 2)]
    draws = np.random.default_rng(1).exponential(0.9, (500, 4))
    (one, first), (two, second) = (played(each, iter(k * draws)) for k, each in zip((1, 2), loads, strict=True))
    assert two == pytest.approx(2 * one)
    assert second == pytest.approx(2 * first)


def test_a_host_of_its_own_decodes_where_a_shared_one_stalls() -> None:
    """72 Grace cores, each 1.24 as slow, for one GPU; 112 of a DGX's for eight. The copy crosses C2C at 375 GB/s."""
    work = {"decode_s": 20.0, "workers": 72, "device_bytes": 3 * 10**9}
    grace = stall_of(DataLoading(**work, cores=72), 1.0, Plan(dp_shard=1, zero=0), GH200)
    shared = stall_of(DataLoading(**work, cores=112), 1.0, PLAN, H100)
    assert grace.loads.decode_s == pytest.approx(20 * 1.24)
    assert grace.stall_s == 0
    assert shared.loads.decode_s == pytest.approx(20 * 8 * 72 / 112)
    assert shared.step_s == pytest.approx(20 * 8 / 112)
    assert grace.loads.copy_s == pytest.approx(3e9 / 375e9 + 9e-6)


def test_the_stall_is_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--model", "llama3.2-1b", "--set", "plan.seq_len=1024", "--json", "--telemetry", "--energy"]
    assert main(words) == 0
    bare = json.loads(capsys.readouterr().out)
    assert main([*words, "--set", "data.decode_s=1s", "--set", "data.workers=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx(0.5)
    assert found["breakdown_s"]["exposed:data loading"] == pytest.approx(0.5 - bare["step_s"])
    assert sum(found["breakdown_s"].values()) == pytest.approx(0.5)
    assert found["data_loading"]["workers_needed"] == int(1 / bare["step_s"]) + 1
    assert found["energy"]["gpu_w"] < 0.5 * bare["energy"]["gpu_w"]  # it waits for most of the step
    busy = [one["telemetry"]["programs"][0]["utilisation"][0]["amount"] for one in (bare, found)]
    assert busy[0] == pytest.approx(busy[1])


def test_runs_wait_for_data_too_and_other_commands_say_that_they_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    study = [
        "--model",
        "gpt2",
        "--set",
        "plan.seq_len=512",
        "--set",
        "data.decode_s=1s",
        "--set",
        "data.workers=2",
        "--json",
    ]
    assert main(["goodput", *study, "--steps", "1000", "--replicas", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(0.5)
    assert main(["compare", *study, "--no-ablations", "--what-if", "plan.micro_batch_size=2"]) == 0
    assert "[data] is left out here" in capsys.readouterr().err


def test_what_is_wrong_is_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--set", "data.decode_s=-1s", "--set", "data.workers=-2", "--set", "data.prefetsh=3"]) == 3
    told = capsys.readouterr().err
    assert all(key in told for key in ("data.decode_s", "data.workers", "data.prefetsh", "prefetch"))
