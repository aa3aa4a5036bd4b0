"""Prompts and answers on engines of their own: conservation, times by hand, bytes by hand, and where pools lie."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import PlanError
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Chunk, InferencePlan, Request, Uniform, Workload, check, serve
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.engine import Engine, Lane
from simulator.studies.serving.limits import Limits
from simulator.studies.serving.pools import Pool, Pools
from simulator.studies.serving.transfer import Transfers, placing
from simulator.studies.serving.workload import Users
from tests.examples import examples


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return Cluster.load("hgx-h100-8").with_nodes(2)


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model.load("llama3-8b")


def deployed(model: Model, plan: InferencePlan, cluster: Cluster) -> Deployment:
    calibration = Calibration.for_device(cluster.device)
    curves = calibration.links or default_curves()
    return Deployment.of(model, plan, cluster, Stack.load(plan.stack), calibration, curves)


def test_a_lone_request_is_its_prompt_its_transfer_and_its_steps(llama: Model, h100: Cluster) -> None:
    setting = deployed(llama, InferencePlan(tp=2, prefill_tp=4, prefill_dp=1), h100)
    assert setting.prefill is not None
    assert setting.transfers is not None
    prompt, answer = 700, 5
    request = Request(arrival_s=1.0, prompt_tokens=prompt, output_tokens=answer)
    played = setting.play([request], (0.0, math.inf))
    costs, before = setting.costs, setting.prefill.costs
    batch = Batch(decodes=0, keys=(0,), chunks=(Chunk(new=prompt, cached=0),))
    first_s = before.outside_s(request) + before.idle_s(0.0, 1) + sum(before.stages_s(batch))
    steps_s = sum(
        costs.idle_s(0.0, 1) + sum(costs.stages_s(Batch(decodes=1, keys=(prompt + n,)))) for n in range(1, answer)
    )
    (job,) = played.jobs
    assert job.first_s == pytest.approx(1.0 + first_s, rel=1e-12)
    assert job.end_s == pytest.approx(1.0 + first_s + setting.transfers.seconds(prompt) + steps_s, rel=1e-12)


def test_bytes_of_a_transfer_are_keys_and_values_of_the_prompt(llama: Model, h100: Cluster) -> None:
    """2 (K and V) × 32 layers × 8 heads × 128 × 2 bytes = 131,072 a token; 8 heads on 16 GPUs are held twice."""
    stack, whole = Stack.load("vllm-2025"), 131_072
    for tp, prefill_tp, sent, port in ((1, 4, whole, whole), (4, 1, whole, whole), (2, 8, whole, whole // 2)):
        plan = InferencePlan(tp=tp, prefill_tp=prefill_tp, prefill_dp=1)
        found = Transfers(llama, plan, h100, stack, LinkCurves.ideal(), near=True)
        assert (found.bytes_per_token, found.port_bytes_per_token) == (sent, port)
        link = h100.intra
        assert found.seconds(1000) == pytest.approx(1000 * port / link.bytes_per_s, rel=0.05)
    twice = Transfers(
        llama, InferencePlan(tp=16, prefill_tp=8, prefill_dp=1), h100, stack, LinkCurves.ideal(), near=False
    )
    assert (twice.bytes_per_token, twice.port_bytes_per_token) == (2 * whole, whole // 4)


@pytest.mark.parametrize(
    ("tp", "dp", "prefill_tp", "prefill_dp", "cells", "near"),
    [
        (4, 1, 4, 1, 1, True),  # one node
        (2, 3, 2, 1, 1, True),  # one node, nothing to divide
        (4, 2, 4, 2, 2, True),  # a cell a node
        (2, 4, 2, 4, 4, True),  # two cells a node
        (8, 1, 8, 1, 1, False),  # a node each
        (4, 3, 4, 1, 1, False),  # the smallest cell is larger than a node
    ],
)
def test_where_pools_lie(
    h100: Cluster, tp: int, dp: int, prefill_tp: int, prefill_dp: int, cells: int, *, near: bool
) -> None:
    found = placing(InferencePlan(tp=tp, dp=dp, prefill_tp=prefill_tp, prefill_dp=prefill_dp), h100)
    assert (found.cells, found.near) == (cells, near)


asked = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 64), st.integers(1, 32)), min_size=1, max_size=30)


@examples(60)
@given(asked=asked, blocks=st.integers(0, 30), sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_nothing_is_lost_between_the_pools(
    asked: list[tuple[float, int, int]], blocks: int, sizes: tuple[int, int]
) -> None:
    """Whatever the caches hold: all answers end, in order of their parts, and every block comes back."""
    cluster = Cluster.load("hgx-h100-8")
    plan = InferencePlan(dp=sizes[0] * 2, prefill_dp=sizes[1] * 2, max_sequences=6, max_batched_tokens=40)
    setting = deployed(Model.load("llama3.2-1b"), plan, cluster)
    assert setting.prefill is not None
    requests = [Request(arrival_s=a, prompt_tokens=p, output_tokens=o) for a, p, o in sorted(asked)]
    limits = replace(setting.limits, num_blocks=96 // plan.block_size + 1 + blocks)
    pools = Pools(
        Pool(costs=setting.prefill.costs, limits=limits),
        Pool(costs=setting.costs, limits=limits),
        requests,
        (0.0, math.inf),
        cells=2,
        transfer_s=lambda tokens: 1e-4 * tokens,
    )
    played = pools.run()
    assert played.leftover_blocks == 0
    for job in played.jobs:
        assert job.first_s is not None
        assert job.end_s is not None
        moved_s = 1e-4 * job.request.prompt_tokens if job.request.output_tokens > 1 else 0.0
        assert job.request.arrival_s < job.first_s <= job.end_s - moved_s + 1e-12
    longer = [request for request in requests if request.output_tokens > 1]
    assert played.passed is not None
    assert (played.passed.requests, played.passed.tokens) == (len(longer), sum(r.prompt_tokens for r in longer))
    computed = sum(r.prompt_tokens + r.output_tokens - 1 for r in requests)
    assert played.prefilled + played.decoded == computed + played.recomputed


@pytest.mark.parametrize("answer", [1, 20])
def test_users_of_two_pools_send_when_they_are_answered(llama: Model, h100: Cluster, answer: int) -> None:
    """Of four users the first requests come at once, and every other one when an answer ends: at its very moment."""
    setting = deployed(llama, InferencePlan(dp=1, prefill_dp=1), h100)
    requests = [Request(arrival_s=0.0, prompt_tokens=100 + 50 * i, output_tokens=answer) for i in range(20)]
    jobs = setting.play(requests, (0.0, math.inf), users=Users(count=4)).jobs
    arrivals = sorted(job.request.arrival_s for job in jobs)
    ends = sorted(job.end_s or math.nan for job in jobs)
    assert arrivals == [0.0] * 4 + ends[:16]


@pytest.mark.parametrize(("answers", "blocks"), [(70, 2000), (900, 60)])  # with room for all; where most wait for room
def test_engines_of_a_closed_loop_pass_over_steps_as_if_each_was_played(
    llama: Model, h100: Cluster, monkeypatch: pytest.MonkeyPatch, answers: int, blocks: int
) -> None:
    """Of three engines, whose answers bring requests to one another: the times are those of every step by itself, and it takes fewer events."""
    setting = deployed(llama, InferencePlan(dp=3), h100)
    requests = [
        Request(arrival_s=0.0, prompt_tokens=90 + 7 * i, output_tokens=1 + (answers + 131 * i) % 290) for i in range(40)
    ]
    limits = replace(setting.limits, num_blocks=blocks)

    def ends(*, passes: bool) -> tuple[list[float], int]:
        with monkeypatch.context() as patch:
            if not passes:
                patch.setattr(Lane, "_pass_over", lambda *_: 0.0)
            engine, prices = (
                Engine(setting.costs, limits, requests, (0.0, math.inf), users=Users(count=11)),
                Counter[str](),
            )
            original = setting.costs.idle_s
            patch.setattr(type(setting.costs), "idle_s", lambda _, *of: prices.update("i") or original(*of))
            return [job.end_s or math.nan for job in engine.run().jobs], prices["i"]

    (found, few), (each, many) = ends(passes=True), ends(passes=False)
    assert found == pytest.approx(each, rel=1e-9)
    assert few < many / 2


@pytest.mark.parametrize("pools", [0, 1])
def test_chats_of_users_go_on_behind_their_answers(llama: Model, h100: Cluster, pools: int) -> None:
    """Two users, conversations of three turns: each request is its user's next, so long behind the answer before it."""
    load = Workload(concurrency=2, turns=3, turn_gap_s=5.0, num_requests=11, prompt_tokens=10, output_tokens=4)
    users = load.users()
    setting = deployed(llama, InferencePlan(dp=1, prefill_dp=pools), h100)
    jobs = setting.play(load.requests(), (0.0, math.inf), users=users).jobs
    assert [job.request.prompt_tokens for job in jobs] == [10, 10, 24, 24, 38, 38, 10, 10, 24, 24, 38]
    assert [job.request.cached_tokens for job in jobs] == [0, 0, 14, 14, 28, 28, 0, 0, 14, 14, 28]
    for i, job in enumerate(jobs):
        assert job.end_s is not None
        behind_s = (jobs[i - 2].end_s or math.nan) + users.gaps_s[i] if i > 1 else 0.0
        assert job.request.arrival_s == behind_s


@pytest.mark.parametrize("store", ["host", "network"])
def test_beginnings_come_from_a_store_over_the_link_of_each_gpu(llama: Model, h100: Cluster, store: str) -> None:
    """8,192 tokens of 131,072 B, but the first 1,024, which all share; a second request's wait for the first one's."""
    assert h100.host_tier is not None
    bytes_per_s = h100.host_tier.h2d_bytes_per_s if store == "host" else 400e9 / 8  # eight NICs of eight GPUs
    plan = InferencePlan.parse({"prefix_store": store}, "plan", PlanError)
    asked = {"prompt_tokens": 8192, "output_tokens": 1, "cached_tokens": 8192, "shared_tokens": 1024}
    requests = [Request(arrival_s=0.0, **asked), Request(arrival_s=0.0, **asked)]
    waits = []
    for one in (plan, InferencePlan()):
        jobs = deployed(llama, one, h100).play(requests, (0.0, math.inf)).jobs
        waits.append([(job.first_s or math.nan) - job.request.arrival_s for job in jobs])
    read_s = (8192 - 1024) * 131_072 / bytes_per_s
    assert waits[0][0] - min(waits[1]) == pytest.approx(read_s, rel=0.03)
    assert waits[0][1] - waits[0][0] == pytest.approx(read_s, rel=0.03)
    with pytest.raises(PlanError, match="nothing is reused"):
        check(plan.model_copy(update={"prefix_caching": False}), llama, h100)
    with pytest.raises(PlanError, match="states no network"):
        check(InferencePlan(prefix_store="network"), llama, Cluster.load("gh200-1").model_copy(update={"inter": None}))


def test_users_think_where_a_gap_is_given(llama: Model, h100: Cluster) -> None:
    """Two users, one request each every thinking and answering time: Little's law of the interactive system."""
    load = Workload(concurrency=2, turn_gap_s=1.0, num_requests=400, prompt_tokens=10, output_tokens=4)
    run = deployed(llama, InferencePlan(), h100).play(load.requests(), (0.0, math.inf), users=load.users())
    answered_s = sum((job.end_s or 0.0) - job.request.arrival_s for job in run.jobs) / 400
    assert run.end_s == pytest.approx(400 / 2 * (1.0 + answered_s), rel=0.1)
    assert Workload(concurrency=2).users().gaps_s == ()
    served = serve(llama, InferencePlan(), h100, load.requests(), users=load.users())
    assert served.load is not None
    assert served.load.measured_s < run.end_s  # until the first of them has nothing more to send
    for found in (served.load.requests_per_s, served.load.arriving_per_s):
        assert found == pytest.approx(2 / (1.0 + answered_s), rel=0.1)


def test_decoding_waits_for_no_prompt(llama: Model, h100: Cluster) -> None:
    """What disaggregation is for: long prompts stretch no step of those that decode."""
    prompts = Uniform(distribution="uniform", low=4000, high=8000)
    workload = Workload(rate=2.0, num_requests=200, prompt_tokens=prompts, output_tokens=64)
    both = serve(llama, InferencePlan(dp=2), h100, workload.requests())
    apart = serve(llama, InferencePlan(dp=1, prefill_dp=1), h100, workload.requests())
    assert both.latencies is not None
    assert both.latencies.tpot is not None
    assert apart.latencies is not None
    assert apart.latencies.tpot is not None
    assert apart.num_devices == both.num_devices == 2
    assert apart.latencies.tpot.p99_s < 0.7 * both.latencies.tpot.p99_s
    assert apart.handed_over is not None
    assert apart.handed_over.near


def test_faults_of_both_pools_are_told_together(h100: Cluster) -> None:
    plan = InferencePlan(tp=3, prefill_tp=5, prefill_dp=9)
    with pytest.raises(PlanError) as caught:
        check(plan, Model.load("llama3-8b"), h100)
    assert {fault.place for fault in caught.value.faults} == {
        "inference: tp", "inference: prefill_tp", "inference: degrees",
    }  # fmt: skip
    with pytest.raises(PlanError, match="no engines for prompts alone"):
        check(InferencePlan(prefill_tp=2), Model.load("llama3-8b"), h100)


def test_a_pool_that_does_not_fit_is_named(h100: Cluster) -> None:
    found = serve(
        Model.load("llama3-70b"), InferencePlan(tp=8, prefill_dp=2), h100, Workload(num_requests=3).requests()
    )
    assert not found.fits
    assert found.cause.startswith("of a GPU that computes prompts")
    assert all(set(remedy.plan) & {"prefill_tp", "prefill_pp", "weights"} for remedy in found.remedies)


def test_requests_taken_over_wait_for_their_blocks(llama: Model, h100: Cluster) -> None:
    """A cache for one request at a time: they decode one after another, and none is computed again."""
    setting = deployed(llama, InferencePlan(), h100)
    limits = Limits(num_blocks=3, block_size=16, max_sequences=8, max_tokens=64, chunked=True)
    requests = [Request(arrival_s=0.0, prompt_tokens=30, output_tokens=4) for _ in range(3)]
    played = Engine(setting.costs, limits, requests, (0.0, math.inf), engines=1, prefilled=True).run()
    ends = sorted(job.end_s or 0.0 for job in played.jobs)
    assert played.prefilled == played.recomputed == 0
    assert played.decoded == 9
    assert ends[1] == pytest.approx(2 * ends[0], rel=1e-3)
    assert ends[2] == pytest.approx(3 * ends[0], rel=1e-3)
