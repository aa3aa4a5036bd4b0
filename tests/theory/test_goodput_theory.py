"""Long runs against Young's and Daly's closed forms, and against the published interruptions of Llama 3."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log, sqrt

import numpy as np
import pytest

from simulator.studies.goodput import Cause, Conditions, Failures, daly_s, expected_s, play, young_s
from simulator.studies.goodput.failures import DAY_S, JobSize
from simulator.studies.goodput.spreads import Exponential, Lognormal, Uniform, slowest
from simulator.studies.goodput.timeline import expected_interruptions

RUNS = 400


def crash(mtbf_s: float, **fields: object) -> tuple[tuple[Cause, float], ...]:
    cause = Cause.model_validate({"name": "crash", "per": "job", "mtbf_s": mtbf_s, "replaces": False, **fields})
    return ((cause, 1 / mtbf_s),)


BASE = Conditions(
    work_s=100_000.0,
    interval_s=600.0,
    blocking_s=30.0,
    written_s=30.0,
    restart_s=300.0,
    causes=crash(5_000.0),
)


def totals(conditions: Conditions, runs: int = RUNS) -> np.ndarray:
    return np.array([play(conditions, (7, i)).total_s for i in range(runs)])


@pytest.mark.parametrize("interval_s", [300.0, 600.0, 2000.0])
def test_played_runs_take_what_daly_expects(interval_s: float) -> None:
    """Within three standard errors of the mean; the last interval needs no checkpoint, which is part of one in hundreds."""
    found = totals(replace(BASE, interval_s=interval_s))
    expected = expected_s(BASE.work_s, 5_000.0, BASE.blocking_s, interval_s, BASE.restart_s)
    error = found.std(ddof=1) / sqrt(RUNS)
    assert abs(found.mean() - expected) < 3 * error + 2 * BASE.blocking_s


@pytest.mark.parametrize("mtbf_s", [200.0, 1_000.0, 5_000.0])
@pytest.mark.parametrize("notice_s", [0.0, 60.0])
def test_interruptions_are_as_many_as_expected(mtbf_s: float, notice_s: float) -> None:
    """Within a tenth, down to failures that strike one and a half times in a restart and before the next checkpoint."""
    conditions = replace(BASE, causes=crash(mtbf_s, notice_s=notice_s), interval_s=100.0)
    counts = np.array([sum(play(conditions, (7, i)).interruptions.values()) for i in range(100)])
    error = counts.std(ddof=1) / sqrt(100)
    assert counts.mean() == pytest.approx(expected_interruptions(conditions), rel=0.1, abs=3 * error)


def test_without_failures_a_run_is_its_work_and_the_checkpoints_between() -> None:
    played = play(replace(BASE, causes=()), (0,))
    between = -(-BASE.work_s // BASE.interval_s) - 1
    assert played.total_s == pytest.approx(BASE.work_s + between * BASE.blocking_s)
    assert played.interruptions == {}
    assert expected_s(BASE.work_s, inf, BASE.blocking_s, BASE.interval_s, 60.0) == pytest.approx(played.total_s)
    whole = 500 * BASE.interval_s
    never_s, rarely_s = (expected_s(whole, mtbf_s, BASE.blocking_s, BASE.interval_s, 60.0) for mtbf_s in (inf, 1e12))
    assert rarely_s == pytest.approx(never_s + BASE.blocking_s, rel=1e-6)  # that formula has one at the end, too


@pytest.mark.parametrize("checkpoint_s", [1.0, 60.0, 600.0])
def test_dalys_interval_is_where_the_expected_time_is_least(checkpoint_s: float) -> None:
    """The estimate is a series in √(δ/2M): the exact minimum lies within a per cent of it for δ up to a tenth of M."""
    mtbf_s, restart_s = 10_000.0, 120.0
    best = daly_s(mtbf_s, checkpoint_s)
    at_best = expected_s(1e6, mtbf_s, checkpoint_s, best, restart_s)
    for factor in (0.8, 1.25):
        assert expected_s(1e6, mtbf_s, checkpoint_s, best * factor, restart_s) > at_best


def test_young_is_the_limit_of_rare_failures() -> None:
    assert daly_s(1e12, 1.0) == pytest.approx(young_s(1e12, 1.0), rel=1e-5)
    assert daly_s(100.0, 250.0) == 100.0  # a checkpoint longer than twice the time between failures


def test_rates_of_llama_3_give_its_published_counts() -> None:
    """arXiv 2407.21783, section 3.3.4: 466 interruptions in 54 days on 16,384 GPUs, 419 of them unexpected, 47 planned."""
    causes = Failures().all
    seen = {c.name: c.rate_per_s(JobSize(gpus=16_384, nics=16_384, hosts=2_048)) * 54 * DAY_S for c in causes}
    assert sum(seen.values()) == pytest.approx(466)
    unexpected = {name: count for name, count in seen.items() if name != "planned maintenance"}
    assert sum(unexpected.values()) == pytest.approx(419)


def test_announced_interruptions_lose_nothing() -> None:
    played = play(replace(BASE, causes=crash(5_000.0, notice_s=60.0)), (3,))
    assert played.interruptions["crash"] > 5
    assert played.seconds["lost work"] == 0
    unannounced = play(replace(BASE, causes=crash(5_000.0, notice_s=20.0)), (3,))  # too short for a checkpoint of 30 s
    assert unannounced.seconds["lost work"] > 0


def test_what_is_written_beside_training_is_lost_until_it_is_there() -> None:
    beside = replace(BASE, blocking_s=1.0, written_s=500.0)
    at_once = replace(BASE, blocking_s=1.0, written_s=1.0)
    lost = [sum(play(c, (1, i)).seconds["lost work"] for i in range(50)) for c in (beside, at_once)]
    assert lost[0] > lost[1]


def test_spares_spare_the_wait() -> None:
    broken = replace(BASE, causes=crash(5_000.0, replaces=True), repair_s=4_000.0)
    none, many = (play(replace(broken, spare_hosts=count), (5,)) for count in (0, 100))
    assert none.seconds["waiting for hosts"] == pytest.approx(4_000.0 * none.interruptions["crash"], rel=0.2)
    assert many.seconds["waiting for hosts"] == 0


def test_a_slow_host_costs_its_share_until_it_is_seen() -> None:
    """One appears every 10,000 s and is seen 1,000 s later; meanwhile the job runs at 1 / 1.25 of its speed."""
    slow = replace(
        BASE, causes=(), straggler_rate=1e-4, straggler_slowdown=0.25, straggler_detect_s=1_000.0, restart_s=0.0
    )
    played = [play(slow, (9, i)) for i in range(100)]
    lost = sum(p.seconds["slow hosts"] for p in played)
    seen = sum(p.interruptions.get("slow host", 0) for p in played)
    assert lost / seen == pytest.approx(1_000.0 * (1 - 1 / 1.25), rel=0.05)


def test_slow_hosts_of_many_kinds_cost_their_means() -> None:
    """Slowdown and detection drawn apart: a stay of mean D at 1 / (1 + s) of the speed costs D E[s / (1 + s)].

    s even over 0..0.5: E[s / (1 + s)] = 1 - 2 ln 1.5. Detection exponential with mean 500 s, of a host every 20,000 s.
    """
    slow = replace(
        BASE,
        causes=(),
        straggler_rate=1 / 20_000,
        straggler_slowdown=Uniform[float](distribution="uniform", low=0.0, high=0.5),
        straggler_detect_s=Exponential[float](distribution="exponential", mean=500.0),
        restart_s=0.0,
    )
    played = [play(slow, (13, i)) for i in range(RUNS)]
    lost = sum(p.seconds["slow hosts"] for p in played)
    seen = sum(p.interruptions.get("slow host", 0) for p in played)
    assert lost / seen == pytest.approx(500.0 * (1 - 2 * log(1.5)), rel=0.08)


def test_all_wait_for_the_slowest_host() -> None:
    """The largest of n exponentials has mean H_n and variance Σ 1/k²; of n even draws over 0..1 mean n / (n + 1)."""
    n = 256
    mean, sigma = slowest(Exponential[float](distribution="exponential", mean=0.01), n)
    assert mean == pytest.approx(0.01 * sum(1 / k for k in range(1, n + 1)), rel=1e-3)
    assert sigma == pytest.approx(0.01 * sqrt(sum(1 / k**2 for k in range(1, n + 1))), rel=1e-2)
    assert slowest(Uniform[float](distribution="uniform", low=0.0, high=1.0), n)[0] == pytest.approx(n / (n + 1))
    # of one lognormal draw: median e^(σ²/2)
    assert slowest(Lognormal[float](distribution="lognormal", median=0.02, sigma=0.5), 1)[0] == pytest.approx(
        0.02 * exp(0.125), rel=1e-3
    )
    assert slowest(0.03, n) == (pytest.approx(0.03), 0.0)


def test_parts_add_up_to_the_work_and_the_rest() -> None:
    played = play(BASE, (11,))
    assert played.seconds["training"] == pytest.approx(BASE.work_s)
    assert sum(played.seconds.values()) == pytest.approx(played.total_s)
    assert played.total_s < inf
