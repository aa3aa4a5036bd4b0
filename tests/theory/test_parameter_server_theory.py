"""Parameter servers against queues: exact cycles, the bottleneck's law, M/D/1, and the bounds of stale synchronous clocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simulator.cli import main
from simulator.predict.parameter_server import Cycle, Queued, Servers, played

FREE = Cycle(compute_s=1.0, push_s=0.0, pull_s=0.0, server_in_s=0.0, update_s=0.0, server_out_s=0.0)
LOADED = Cycle(compute_s=1.0, push_s=0.2, pull_s=0.1, server_in_s=0.03, update_s=0.04, server_out_s=0.02)
ALONE = Servers(bounded=False)


def run(cycle: Cycle, workers: int, **fields: object) -> Queued:
    return played(cycle, workers, Servers.model_validate(fields))


def test_one_worker_takes_its_parts_one_after_another() -> None:
    found = played(LOADED, 1, ALONE)
    assert 1 / found.updates_per_s == pytest.approx(1.0 + 0.2 + 0.04 + 0.1)
    assert (found.stale, found.wait_s) == (0.0, pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_equal_workers_reach_the_bound_of_a_closed_network(workers: int) -> None:
    """min(N / sum of a cycle's parts, 1 / the longest queue): operational analysis, Denning and Buzen 1978, exact for D/D."""
    found = played(LOADED, workers, ALONE)
    assert found.updates_per_s == pytest.approx(min(workers / 1.34, 1 / 0.04), rel=0.03)
    assert found.stale == pytest.approx(workers - 1, rel=0.01)  # between two of its own come all the others'
    assert found.busy["update"] == pytest.approx(0.04 * found.updates_per_s)


def test_synchronous_workers_wait_for_the_last_of_them() -> None:
    """Every server adds N shards that come at once and steps once, and all pull."""
    workers, add = 8, 0.04 * 12 / 30  # bytes that adding and Adam move: 12 and 30 a parameter
    found = run(replace(LOADED, push_s=0.0, server_in_s=0.0, server_out_s=0.0), workers, staleness=0)
    clock_s = 1.0 + workers * add + 0.04 + 0.1
    assert workers / found.updates_per_s == pytest.approx(clock_s, rel=1e-6)
    assert (found.stale, found.ahead) == (0.0, 0)


def test_updates_wait_as_customers_of_m_d_1() -> None:
    """Many workers with exponential compute are nearly Poisson: wait = rho S / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    workers, rho, service = 400, 0.7, 0.01
    compute_s = workers * service / rho
    found = run(replace(FREE, compute_s=compute_s, update_s=service), workers, bounded=False, variation=1.0, clocks=150)
    busy = found.updates_per_s * service
    assert busy == pytest.approx(rho, rel=0.02)
    assert found.wait_s == pytest.approx(busy * service / (2 * (1 - busy)), rel=0.1)


def test_more_staleness_never_slows_workers_that_vary_and_its_bound_holds() -> None:
    found = [run(LOADED, 8, staleness=s, variation=0.7, clocks=300) for s in (0, 1, 4, 16)]
    rates = [one.updates_per_s for one in found]
    assert rates == sorted(rates)
    assert rates[0] < 0.8 * rates[-1]
    for one, bound in zip(found, (0, 1, 4, 16), strict=True):
        assert one.ahead <= bound  # clocks ahead of the slowest (Ho et al. 2013, section 3)
        assert one.most_stale <= (2 * bound + 1) * 7  # 2 s + 1 clocks of each other worker (their lemma 1)


def test_overlap_hides_the_way_to_the_servers() -> None:
    """Bounded delay 1: the next clock computes meanwhile, so a clock is the longer of compute and of half its way."""
    assert run(LOADED, 4, staleness=1, overlap=True).updates_per_s == pytest.approx(4 / 1.0, rel=0.01)
    slow = replace(LOADED, push_s=3.0, pull_s=0.5)  # the worker's own link up is then never idle
    assert run(slow, 4, staleness=2, overlap=True).updates_per_s == pytest.approx(4 / 3.0, rel=0.02)


def test_seconds_scale_with_seconds() -> None:
    twice = Cycle(**{name: 2 * getattr(LOADED, name) for name in Cycle.__slots__})
    one, two = (run(cycle, 6, staleness=2, variation=0.5) for cycle in (LOADED, twice))
    assert two.updates_per_s == pytest.approx(one.updates_per_s / 2)
    assert (two.stale, two.wait_s) == (one.stale, pytest.approx(2 * one.wait_s))


MODEL = ["predict", "--model", "llama3.2-1b", "--nodes", "2", "--set", "plan.seq_len=1024"]


def test_the_answer_is_arithmetic_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "count=4",
        "bounded=false",
        "push=bf16",
        "server_bytes_per_s=10GB/s",
        "worker_bytes_per_s=5GB/s",
        "update_numel_per_s=1e9",
    ]
    words = [*MODEL, "--zero", "0", "--dp-replicate", "16", *(w for one in asked for w in ("--set", f"servers.{one}"))]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found, psi = answer["servers"], 1_235_814_400  # parameters of Llama 3.2 1B
    assert found["cycle"]["push_s"] == pytest.approx(2 * psi / 5e9)
    assert found["cycle"]["pull_s"] == pytest.approx(4 * psi / 5e9)
    assert found["cycle"]["server_in_s"] == pytest.approx(2 * psi / 4 / 10e9)
    assert found["cycle"]["update_s"] == pytest.approx(psi / 4 / 1e9)
    assert found["server_bytes"] == pytest.approx(
        psi / 4 * (4 + 2 + 8)
    )  # master, incoming gradient, Adam's two moments
    assert found["tokens_per_s"] == pytest.approx(found["found"]["updates_per_s"] * 1024)
    saved = answer["memory"]["used_bytes"] - found["worker_bytes"]
    assert 0 < saved <= 8 * psi  # the moments are the servers'; the peak is now at the loss
    assert {source["what"]: source["kind"] for source in found["sources"]}["staleness"] == "assumed"


def test_what_servers_cannot_do_is_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--tp", "2", "--set", "servers.overlap=true", "--set", "servers.bounded=false"]) == 3
    told = capsys.readouterr().err
    assert all(part in told for part in ("servers: tp", "servers: zero", "servers.overlap", "servers: dp_shard"))
    assert main([*MODEL, "--set", "servers.count=0", "--set", "servers.staleness=-1"]) == 3
    told = capsys.readouterr().err
    assert "servers.count" in told
    assert "servers.staleness" in told


def test_commands_count_servers_or_say_that_they_leave_them_out(capsys: pytest.CaptureFixture[str]) -> None:
    study = [
        "--model",
        "gpt2",
        "--set",
        "plan.seq_len=512",
        "--set",
        "servers.staleness=1",
        "--set",
        "energy.tokens=1B",
    ]
    study += ["--set", "plan.zero=0", "--set", "plan.data_parallel=ddp", "--set", "plan.dp_replicate=8"]
    assert main(["compare", *study, "--no-ablations", "--what-if", "servers.count=4", "--json"]) == 0
    told = capsys.readouterr()
    assert "[servers]" not in told.err
    assert "[energy] is left out here" in told.err
    one, four = json.loads(told.out)["subjects"]
    assert main(["predict", *study, "--json"]) == 0
    alone = capsys.readouterr()
    assert "left out" not in alone.err
    assert one["served_tokens_per_s"] == json.loads(alone.out)["servers"]["tokens_per_s"] < four["served_tokens_per_s"]
    assert one["step_s"] == four["step_s"]
    assert main(["goodput", *study, "--steps", "100", "--replicas", "2"]) == 0
    assert "[servers] is left out here" in capsys.readouterr().err
