"""Workloads: lengths as histograms, prefixes that prompts share, conversations; and what an engine computes of them."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from simulator.base.errors import InputError
from simulator.cli import main
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.serving import InferencePlan, StepCosts, Workload, engine_of
from simulator.studies.serving.engine import Engine, ServedRun
from simulator.studies.serving.limits import Limits, RequestState
from simulator.studies.serving.scheduler import Scheduler
from simulator.studies.serving.served import ServedRequests
from simulator.studies.serving.workload import Request, Requests

LIMITS = Limits(num_blocks=400, block_size=16, max_sequences=8, max_tokens=512, chunked=True)


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    cluster = Cluster.load("hgx-h100-8")
    calibration = Calibration.for_device(cluster.device)
    return StepCosts(
        Model.load("llama3.2-1b"), InferencePlan(), cluster, engine_of("vLLM 0.12"), calibration, default_curves()
    )


def workload(**given: object) -> Workload:
    return Workload.parse(given, "workload", InputError)


def test_a_histogram_draws_from_its_bins_as_often_as_they_weigh() -> None:
    lengths = {"distribution": "histogram", "edges": [10, 20, 21, 30], "weights": [3, 0, 1]}
    found = Counter(request.prompt_tokens for request in workload(prompt_tokens=lengths, num_requests=4000).requests())
    assert set(found) == {*range(10, 20), *range(21, 31)}  # the last edge is included
    assert sum(found[n] for n in range(10, 20)) / 4000 == pytest.approx(3 / 4, abs=0.03)


@pytest.mark.parametrize(
    ("edges", "weights", "said"),
    [([1, 5], [1, 1], "make 1 bins, with 2 weights"), ([5, 5], [1], "do not grow"), ([1, 5], [0], "all weights are 0")],
)
def test_a_histogram_that_is_none_is_an_error(edges: list[int], weights: list[float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        workload(prompt_tokens={"distribution": "histogram", "edges": edges, "weights": weights})


def played(costs: StepCosts, load: Workload, **limits: object) -> ServedRun:
    return Engine(costs, replace(LIMITS, **limits), load.requests(), (0.0, float("inf"))).run()  # type: ignore[arg-type]


def test_a_shared_prefix_is_computed_by_nobody_and_held_once(costs: StepCosts) -> None:
    """100 tokens are six whole blocks of 16: 96 are not computed, and all others have blocks of their own."""
    load = workload(rate=0, num_requests=4, prefix_tokens=100, prompt_tokens=28, output_tokens=1)
    run = played(costs, load)
    assert run.prefilled == 4 * (128 - 96)
    assert run.meter.peak_blocks == 6 + 4 * 2  # 32 more tokens each
    without = played(costs, load, reuses=False)
    assert (without.prefilled, without.meter.peak_blocks) == (4 * 128, 4 * 8)


def test_of_what_hits_nothing_everything_is_computed(costs: StepCosts) -> None:
    load = workload(rate=0, num_requests=4, prefix_tokens=100, prompt_tokens=28, output_tokens=1, cache_hits=0)
    assert played(costs, load).prefilled == 4 * 128


def test_what_was_preempted_finds_its_prefix_again(costs: StepCosts) -> None:
    """Few blocks: sequences are thrown out, and each computes what it had, without the prefix, once more."""
    load = workload(rate=0, num_requests=4, prefix_tokens=64, prompt_tokens=32, output_tokens=120)
    run = played(costs, load, num_blocks=26)
    assert run.preemptions
    assert run.prefilled + run.decoded == 4 * (32 + 119) + run.recomputed - 64 * run.preemptions
    assert run.leftover_blocks == 4  # the prefix stays


def test_turns_stand_behind_all_that_was_said_and_come_at_the_rate() -> None:
    load = workload(rate=10, num_requests=3000, turns=3, prompt_tokens=10, output_tokens=5, prefix_tokens=7)
    requests = load.requests()
    kinds = Counter((request.prompt_tokens, request.cached_tokens, request.shared_tokens) for request in requests)
    assert kinds == {(17, 7, 7): 1000, (32, 22, 7): 1000, (47, 37, 7): 1000}
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    halves = [sum(low <= time < low + 150 for time in times) for low in (0, 150)]
    assert halves == pytest.approx([1500, 1500], rel=0.1)  # as many at the beginning as later


def test_keys_without_a_meaning_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--turn-gap-s", "3s"], "there is one: turns = 2 or more, or concurrency"),
        (["--cache-hits", "0.5"], "give prefix_tokens or turns"),
        (["--rate", "0", "--turns", "2"], "give a rate above 0, or concurrency"),
    ):
        assert main(["serve", *words]) == 3
        assert said in capsys.readouterr().err


def test_requests_in_columns_are_the_same_requests() -> None:
    load = workload(rate=10, num_requests=50, turns=2, prompt_tokens=10, output_tokens=5, prefix_tokens=7)
    drawn = load.requests()
    copied = Requests.of(iter(drawn))
    assert list(copied) == list(drawn) == [drawn[i] for i in range(50)]
    assert list(drawn[10:20]) == list(drawn)[10:20]
    assert drawn[-1] == list(drawn)[-1]
    assert not list(Requests.of(()))


def test_a_million_requests_take_bytes_not_objects() -> None:
    requests = workload(rate=10, num_requests=100_000).requests()
    tracemalloc.start()
    served = ServedRequests(requests[:50_000], moved=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50_000 * 60  # three columns of requests, three of what became of them, 8 bytes each, and little else
    assert (len(served), served[0].end_s, isnan(served[5:7][1].request.arrival_s)) == (50_000, None, True)


def _waiting(limits: Limits, count: int, answer: int = 100) -> Scheduler:
    """So many requests of 100 tokens stand in its queue."""
    found = Scheduler(limits)
    _add(found, 0, count, answer)
    return found


def _add(scheduler: Scheduler, first: int, count: int, answer: int = 100) -> None:
    request = Request(arrival_s=0.0, prompt_tokens=100, output_tokens=answer)
    scheduler.waiting.extend(RequestState(request=request, index=i) for i in range(first, first + count))


def _steps(scheduler: Scheduler, count: int) -> list[tuple[int, int]]:
    """(sequences that decode, prompts) of the next steps."""
    found = []
    for _ in range(count):
        batch = scheduler.next_batch()
        assert batch is not None
        found.append((batch.decodes, len(batch.chunks)))
        scheduler.complete(0.0)
    return found


def test_an_engine_that_alternates_decodes_behind_each_step_of_prompts() -> None:
    """Five prompts of 100, three a step: whole ones stop decoding, and pieces go along with it."""
    whole = replace(LIMITS, max_tokens=300, chunked=False, alternates=True)
    assert _steps(_waiting(whole, 5), 4) == [(0, 3), (3, 0), (0, 2), (5, 0)]
    pieces = replace(LIMITS, max_tokens=250, alternates=True)
    assert _steps(_waiting(pieces, 5), 4) == [
        (0, 3),
        (2, 1),
        (3, 2),
        (5, 0),
    ]  # the third ends alone: nobody is admitted


def test_prompts_apart_are_computed_but_for_the_token_that_decodes_in_the_same_step() -> None:
    """TurboMind 0.1.0a1: whatever waits joins at once, and a prompt of one token is not computed at all."""
    scheduler = _waiting(replace(LIMITS, max_tokens=150, chunked=False, apart=True), 3, answer=3)
    first = scheduler.next_batch()
    assert first is not None
    assert (first.decodes, [chunk.new for chunk in first.chunks], first.rows) == (3, [99] * 3, 3)
    assert first.keys == (300,)
    began = list(scheduler.running.values())
    scheduler.complete(1.0)
    one = RequestState(request=Request(arrival_s=0.0, prompt_tokens=1, output_tokens=1), index=9)
    scheduler.waiting.append(one)
    assert _steps(scheduler, 1) == [(4, 0)]
    assert [job.first_s for job in began] == [1.0] * 3
    assert (one.first_s, one.end_s, one.done) == (0.0, 0.0, 1)
    assert _steps(scheduler, 1) == [(3, 0)]
    assert (scheduler.unfinished, scheduler.used_blocks, scheduler.prefilled, scheduler.decoded) == (0, 0, 297, 10)


def test_a_prompt_computed_apart_for_another_engine_keeps_its_blocks_until_they_are_read() -> None:
    scheduler = _waiting(replace(LIMITS, chunked=False, apart=True, hands_over=True), 1, answer=1)
    assert scheduler.next_batch() is not None
    (job,) = scheduler.complete(1.0)
    assert scheduler.used_blocks == -(-100 // LIMITS.block_size)
    scheduler.release(job)
    assert scheduler.used_blocks == 0


def test_requests_wait_until_they_are_a_part_of_those_that_run_or_long_enough() -> None:
    limits = replace(
        LIMITS, max_tokens=1000, chunked=False, alternates=True, waiting_ratio=0.3, waiting_steps=4, max_sequences=64
    )
    many = _waiting(limits, 10)
    assert _steps(many, 1) == [(0, 10)]
    _add(many, 10, 2)
    assert _steps(many, 6) == [(10, 0)] * 4 + [(0, 2), (12, 0)]  # two are no three tenths of ten, and wait four steps
    _add(many, 12, 3)
    assert _steps(many, 2) == [(0, 3), (15, 0)]  # three of twelve are more than 3.6 rounded down
    few = _waiting(replace(limits, max_tokens=300, waiting_ratio=0.0, alternates=False), 20)
    assert _steps(few, 4)[-1] == (0, 3)
    few.limits = replace(limits, max_tokens=200)
    assert _steps(few, 5) == [(12, 0)] * 4 + [(0, 2)]  # a step has room for two, and three are wanted


@pytest.mark.parametrize(
    ("times", "prompts", "answers", "kept"),
    [((0, 1), (5, 5), (1, 1), True), ((1, 0), (5, 5), (1, 1), False), ((0, 1), (5, 0), (1, 1), False), ((0, 1), (5, 5), (1, 6), False),
     ((-1, 0), (5, 5), (1, 1), False), ((0, float("inf")), (5, 5), (1, 1), False)],
)  # fmt: skip
def test_requests_that_keep_to_a_length_are_known_at_once(
    times: tuple[float, ...], prompts: tuple[int, ...], answers: tuple[int, ...], *, kept: bool
) -> None:
    requests = Requests(times, prompts, answers)
    assert requests.keep_to(10) is kept
    assert requests.tokens == sum(prompts) + sum(answers)


@pytest.mark.parametrize("shape", [0.25, 1.0, 16.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(shape: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    times = [r.arrival_s for r in Workload(rate=4.0, num_requests=20_000, burstiness=shape).requests()]
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


def test_bursts_are_a_streams() -> None:
    with pytest.raises(InputError, match="burstiness is a stream's"):
        Workload(concurrency=4, burstiness=0.5)
