"""Laws of serving, on drawn workloads."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Choice, InferencePlan, StepCosts, Workload
from simulator.studies.serving.engine import Engine, Lane
from simulator.studies.serving.limits import Limits, RequestState
from simulator.studies.serving.scheduler import Scheduler
from simulator.studies.serving.workload import Request
from tests.examples import examples

MOST_TOKENS = 96  # of one request: as many as the smallest cache below holds

requests = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 32)).map(
        lambda pair: Request(arrival_s=0.0, prompt_tokens=pair[0], output_tokens=pair[1])
    ),
    min_size=1,
    max_size=30,
)
windows = st.sampled_from([(None,), (8,), (None, 5)])


@st.composite
def schedulers(draw: st.DrawFn) -> Limits:
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunked = draw(st.booleans())
    return Limits(
        num_blocks=-(-MOST_TOKENS // block_size) + draw(st.integers(0, 40)),
        block_size=block_size,
        max_sequences=draw(st.integers(1, 12)),
        max_tokens=draw(st.integers(12, 40)) if chunked else draw(st.integers(MOST_TOKENS, 200)),
        chunked=chunked,
        windows=draw(windows),
    )


def played(limits: Limits, asked: list[Request]) -> tuple[Scheduler, list[RequestState], list[Batch]]:
    """Every step judged beside a scheduler that counts by hand: blocks, keys, tokens."""
    scheduler = Scheduler(limits)
    jobs = [RequestState(request=request, index=i) for i, request in enumerate(asked)]
    scheduler.waiting.extend(jobs)
    batches: list[Batch] = []
    cached = dict.fromkeys(range(len(jobs)), 0)  # by hand
    done = dict.fromkeys(range(len(jobs)), 0)
    lost = dict.fromkeys(range(len(jobs)), 0)
    finished: list[RequestState] = []
    while (batch := scheduler.next_batch()) is not None:
        for job in jobs:
            if job.preemptions > lost[job.index]:
                lost[job.index], cached[job.index] = job.preemptions, 0
        pieces = {job.index: chunk for job, chunk in scheduler._pieces}
        known = {i: job.request.prompt_tokens + done[i] for i, job in enumerate(jobs)}
        decoding = [i for i in scheduler.running if i not in pieces and done[i] and cached[i] == known[i] - 1]
        if batch.decodes:
            assert batch.decodes == len(decoding)
            for window, keys in zip(limits.windows, batch.keys, strict=True):
                assert keys == sum(min(cached[i] + 1, window or math.inf) for i in decoding)
        else:
            decoding = []
        for i, chunk in pieces.items():
            assert chunk.cached == cached[i]
            cached[i] += chunk.new
            done[i] += chunk.last
        for i in decoding:
            cached[i] += 1
            done[i] += 1
        held = {i: cached[i] if i not in pieces else known[i] for i in scheduler.running}
        assert scheduler.used_blocks == sum(-(-tokens // limits.block_size) for tokens in held.values())
        assert scheduler.free >= 0
        assert len(scheduler.running) <= limits.max_sequences
        assert batch.tokens <= max(limits.max_tokens, limits.max_sequences)
        batches.append(batch)
        ends = scheduler.complete(float(len(batches)))
        assert {job.index for job in ends} == {i for i in (*pieces, *decoding) if done[i] == asked[i].output_tokens}
        finished += ends
    return scheduler, finished, batches


@examples(150)
@given(limits=schedulers(), asked=requests)
def test_every_request_gets_its_answer_and_gives_back_its_blocks(limits: Limits, asked: list[Request]) -> None:
    scheduler, finished, batches = played(limits, asked)
    assert sorted(job.index for job in finished) == list(range(len(asked)))
    assert scheduler.free == limits.num_blocks
    assert all(job.done == job.request.output_tokens for job in finished)
    assert sum(batch.rows for batch in batches) == sum(request.output_tokens for request in asked)
    computed = sum(request.prompt_tokens + request.output_tokens - 1 for request in asked)
    assert scheduler.prefilled + scheduler.decoded == computed + scheduler.recomputed


@examples(300)
@given(
    limits=schedulers(),
    asked=requests,
    prefix=st.integers(1, 60),
    found=st.lists(st.booleans(), min_size=30, max_size=30),
    host=st.integers(0, 20),
    pace=st.integers(1, 3),
)
def test_shared_beginnings_and_a_host_lose_no_token(
    limits: Limits, asked: list[Request], prefix: int, found: list[bool], host: int, pace: int
) -> None:
    """Whatever is preempted, kept in the host's memory or given way; who decodes has cached all but the last token."""
    hits = [one and prefix < r.prompt_tokens for one, r in zip(found, asked, strict=False)]
    sharing = [
        replace(r, cached_tokens=hit * prefix, shared_tokens=hit * prefix) for hit, r in zip(hits, asked, strict=True)
    ]
    scheduler = Scheduler(replace(limits, host_blocks=host))
    jobs = [RequestState(request=request, index=i) for i, request in enumerate(sharing)]
    coming, answered = deque(jobs), 0
    while answered < len(jobs):
        scheduler.waiting.extend(coming.popleft() for _ in range(min(pace, len(coming))))
        batch = scheduler.next_batch()
        assert batch is not None  # none waits for ever
        assert not (batch.out and batch.back)  # nor comes back for nothing
        for job in (job for each in scheduler._finish.values() for job in each.values()):
            assert job.cached == job.known - 1
        assert scheduler.free >= 0
        assert 0 <= scheduler.hosted_blocks <= host
        answered += len(scheduler.complete(0.0))
    assert all(job.done == job.request.output_tokens for job in jobs)
    assert scheduler.used_blocks == scheduler._shared
    assert not scheduler.hosted_blocks


@examples(60)
@given(limits=schedulers(), asked=requests)
def test_a_cache_for_everything_preempts_nobody(limits: Limits, asked: list[Request]) -> None:
    blocks = sum(-(-(r.prompt_tokens + r.output_tokens) // limits.block_size) for r in asked)
    roomy = Limits(
        num_blocks=2 * blocks + 100,
        block_size=limits.block_size,
        max_sequences=limits.max_sequences,
        max_tokens=limits.max_tokens,
        chunked=limits.chunked,
        windows=limits.windows,
    )
    assert played(roomy, asked)[0].preemptions == 0


@pytest.fixture(scope="module")
def one_at_a_time() -> StepCosts:
    cluster, plan = Cluster.load("hgx-h100-8"), InferencePlan(max_sequences=1)
    calibration = Calibration.for_device(cluster.device)
    return StepCosts(Model.load("llama3-8b"), plan, cluster, Stack.load(plan.stack), calibration, default_curves())


@examples(400)
@given(limits=schedulers(), asked=requests, host=st.integers(0, 20), gap_s=st.sampled_from([0.0, 0.01, 0.1]))
def test_steps_that_are_passed_over_at_once_end_when_they_would_one_by_one(
    one_at_a_time: StepCosts, limits: Limits, asked: list[Request], host: int, gap_s: float
) -> None:
    """However full the cache is."""
    coming = [replace(request, arrival_s=i * gap_s) for i, request in enumerate(asked)]
    given = one_at_a_time, replace(limits, host_blocks=host, windows=(None,)), coming, (0.0, math.inf)
    at_once = Engine(*given).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "_pass_over", lambda *_: 0.0)
        in_turn = Engine(*given).run()
    assert at_once.preemptions == in_turn.preemptions
    assert [job.end_s for job in at_once.jobs] == pytest.approx([job.end_s for job in in_turn.jobs])


@examples(30)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.5, 60), factor=st.floats(1, 5))
def test_one_at_a_time_nobody_waits_less_when_all_come_sooner(
    one_at_a_time: StepCosts, seed: int, rate: float, factor: float
) -> None:
    """Lindley: W' = max(0, W + S - gap), and every gap shrinks. (With batching it is no law: a crowd shares its steps.)"""

    def waits(at: float) -> list[float]:
        prompts = Choice(distribution="choice", values=(64, 512, 2048))
        workload = Workload(rate=at, num_requests=60, seed=seed, prompt_tokens=prompts, output_tokens=1)
        limits = Limits(num_blocks=600, block_size=16, max_sequences=1, max_tokens=8192, chunked=True)
        jobs = Engine(one_at_a_time, limits, workload.requests(), (0.0, math.inf)).run().jobs
        return [job.end_s - job.request.arrival_s for job in jobs]

    assert all(fast >= slow - 1e-9 for fast, slow in zip(waits(factor * rate), waits(rate), strict=True))
