"""Search over serving plans: the same as trying everything, bounds that hold, and what folding says beside theory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Cluster, InferencePlan, Model, Slo, Stack, Workload
from simulator.studies.serving import Batch, Chunk, StepCosts, Uniform, serve
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.plan import Weights
from simulator.studies.serving_search import ServingSearch, search_serving
from simulator.studies.serving_search.floors import Floors, floors_of
from simulator.studies.serving_search.plays import Player
from simulator.studies.serving_search.pools import pair_answer, single_answer
from simulator.studies.serving_search.tasks import fewest
from tests.examples import examples


def study(**changes: Any) -> ServingSearch:
    """A small model on four GPUs."""
    usual = ServingSearch(
        model=Model.load("llama3.2-1b"),
        cluster=Cluster.load("hgx-h100-8"),
        plan=InferencePlan(),
        workload=Workload(rate=40, num_requests=40, output_tokens=40),
        slo=Slo(ttft_s={95: 0.05}, tpot_s={95: 0.005}),
        stack=Stack.load("vllm-2025"),
        max_gpus=4,
        fixed={"pp": (1, 2), "prefill_pp": (1,), "max_sequences": (32,)},
    )
    return replace(usual, **changes)


SPACES = {
    "several engines": study(
        workload=Workload(rate=400, num_requests=60, prompt_tokens=400, output_tokens=40),
        slo=Slo(ttft_s={95: 0.03}, tpot_s={95: 0.006}),
    ),
    "a whole request": study(slo=Slo(tpot_s={99: 0.004}, latency_s={50: 0.11, 95: 0.13})),
    "two pools": study(
        workload=Workload(
            rate=25,
            num_requests=40,
            prompt_tokens=Uniform(distribution="uniform", low=2000, high=6000),
            output_tokens=Uniform(distribution="uniform", low=1, high=40),
        ),
        slo=Slo(ttft_s={90: 0.2}, tpot_s={95: 0.004}),
    ),
    "experts": study(
        model=Model.load("mixtral-8x7b"),
        max_gpus=8,
        plan=InferencePlan(max_model_len=4096),
        fixed={"pp": (1,), "prefill_tp": (4,), "max_sequences": (32,)},
        slo=Slo(ttft_s={95: 0.1}, tpot_s={95: 0.02}),
    ),
    "nothing": study(slo=Slo(tpot_s=1e-4), fixed={"pp": (1,), "max_sequences": (32,)}),
}


@pytest.fixture
def shared_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of one study, which differ in what they ask for, play an engine once among them."""
    kept: dict[str, Any] = {}

    class Sharing(Player):
        def __init__(self, study: ServingSearch) -> None:
            super().__init__(study)
            vars(self).update(kept or {name: kept.setdefault(name, one) for name, one in vars(self).items()})
            self.study = study

    monkeypatch.setattr("simulator.studies.serving_search.workers.Player", Sharing)


@pytest.mark.usefixtures("shared_plays")
@pytest.mark.parametrize("name", SPACES)
def test_the_table_is_that_of_trying_everything(name: str) -> None:
    """No bound, no limit of the table, no halving: the same rows, whatever the number of rows."""
    asked = SPACES[name]
    whole = [row.answer for row in search_serving(replace(asked, top=50, exhaustive=True)).rows]
    for top in (1, 50):
        found = search_serving(replace(asked, top=top))
        assert [row.answer for row in found.rows] == whole[:top]
    assert bool(whole) == (name != "nothing")


@pytest.mark.usefixtures("shared_plays")
def test_all_rows_are_those_of_trying_everything() -> None:
    asked = replace(SPACES["several engines"], every=True)
    found, whole = search_serving(asked), search_serving(replace(asked, exhaustive=True))
    assert [row.answer for row in found.rows] == [row.answer for row in whole.rows]
    assert len(found.rows) > 2


def test_one_engine_is_what_serve_says() -> None:
    """One replica takes all requests, so nothing is folded: every figure is that of `serve`."""
    asked = study()
    found = single_answer(Player(asked), InferencePlan(tp=2), 1)
    served = serve(asked.model, InferencePlan(tp=2), asked.cluster, asked.workload.requests(), slo=asked.slo)
    assert served.attainments == found.attainments
    assert served.load is not None
    assert served.load.capacity_per_s == found.capacity_per_s


def test_replicas_at_random_are_m_d_1_queues_at_their_share() -> None:
    """One request at a time, one token: an engine of n waits as Pollaczek and Khinchine say at 1/n of the rate."""
    plan, engines = InferencePlan(max_sequences=1), 4
    asked = study(plan=plan, workload=Workload(rate=1.0, num_requests=10_000, output_tokens=1, warmup=0.0))
    costs = Player(asked).deployed(plan, 1).costs
    service_s = costs.idle_s(0.0, 1) + sum(
        costs.stages_s(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=512, cached=0),)))
    )
    load = 0.6
    workload = asked.workload.model_copy(update={"rate": engines * load / service_s})
    play = Player(replace(asked, workload=workload)).play("both", plan, engines)
    waited_s = sum(play.first_s) / len(play.first_s) - service_s - costs.outside_s(workload.requests()[0])
    assert waited_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize("engines", [2, 4])
def test_a_router_does_no_worse_than_folding_assumes(engines: int) -> None:
    """Sent to the engine with the fewest, requests wait no longer than dealt at random, and nothing is lost."""
    prompts = Uniform(distribution="uniform", low=500, high=4000)
    asked = study(workload=Workload(rate=30.0 * engines, num_requests=300, prompt_tokens=prompts, output_tokens=40))
    folded = single_answer(Player(asked), InferencePlan(), engines)
    requests = asked.workload.model_copy(update={"num_requests": 300 * engines}).requests()
    whole = serve(asked.model, InferencePlan(dp=engines), asked.cluster, requests, slo=asked.slo)
    for alone, together in zip(folded.attainments, whole.attainments, strict=True):
        assert alone.measured_s is not None
        assert together.measured_s is not None
        assert together.measured_s <= 1.05 * alone.measured_s
    assert whole.load is not None
    assert folded.capacity_per_s == pytest.approx(whole.load.capacity_per_s, rel=0.03)


def test_a_pair_of_pools_is_near_its_whole_play() -> None:
    """Prompts and answers played apart, at their shares, beside all engines on one clock."""
    asked = replace(
        SPACES["two pools"], workload=Workload(rate=40, num_requests=400, prompt_tokens=1500, output_tokens=40)
    )
    folded = pair_answer(Player(asked), InferencePlan(), InferencePlan(), (2, 2))
    assert folded is not None
    plan = InferencePlan(dp=2, prefill_dp=2)
    whole = serve(asked.model, plan, asked.cluster, asked.workload.requests(), slo=asked.slo)
    (first, rest), (whole_first, whole_rest) = folded.attainments, whole.attainments
    assert first.measured_s is not None
    assert whole_first.measured_s is not None
    assert whole_first.measured_s <= 1.02 * first.measured_s  # dealt at random, prompts queue more
    assert rest.measured_s == pytest.approx(whole_rest.measured_s, rel=0.1)
    assert whole.load is not None
    assert folded.capacity_per_s == pytest.approx(whole.load.capacity_per_s, rel=0.05)


CLUSTERS = ("hgx-h100-8", "hgx-a100-40-8", "pcie-rtx4090-4")
MODELS = ("llama3.2-1b", "llama3-8b", "mixtral-8x7b", "deepseek-v3")


@examples(60)
@given(
    name=st.sampled_from(MODELS),
    cluster=st.sampled_from(CLUSTERS),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    weights=st.sampled_from(["bf16", "int4"]),
    decodes=st.lists(st.integers(1, 6000), max_size=40),
    chunks=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=4),
)
def test_no_step_beats_its_bound(
    name: str, cluster: str, tp: int, pp: int, weights: Weights, decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    """Any step takes at least the bound of each request in it: of a token behind its context, and its pieces' share."""
    model, machine = Model.load(name), Cluster.load(cluster)
    plan = InferencePlan(tp=tp, pp=pp, weights=weights)
    asked = study(model=model, cluster=machine, plan=plan)
    floors = Floors(asked, plan)
    calibration, curves = asked.numbers
    costs = StepCosts(model, plan, machine, asked.stack, calibration, curves)
    keys = tuple(sum(min(n, window or n) for n in decodes) for window in costs.windows)
    pieces = tuple(Chunk(new=new, cached=cached) for new, cached in chunks)
    batch = Batch(decodes=len(decodes), keys=keys, chunks=pieces)
    if not batch.tokens:
        return
    step_s = costs.overhead_s + sum(costs.stages_s(batch))
    assert step_s >= floors.step_s(batch)
    assert all(step_s >= floors.token_s(context) for context in decodes)
    assert all(step_s >= floors.first_s(piece.new) for piece in pieces)


@examples(6)
@given(
    rate=st.floats(5, 200),
    tp=st.sampled_from([1, 2]),
    engines=st.integers(1, 3),
    batched=st.sampled_from([256, 8192]),
    seed=st.integers(0, 100),
)
def test_no_percentile_beats_its_bound(rate: float, tp: int, engines: int, batched: int, seed: int) -> None:
    lengths = Uniform(distribution="uniform", low=1, high=500)
    workload = Workload(rate=rate, num_requests=40, prompt_tokens=lengths, output_tokens=lengths, seed=seed, warmup=0.0)
    plan = InferencePlan(tp=tp, max_batched_tokens=batched)
    asked = study(plan=plan, workload=workload)
    player, floors = Player(asked), Floors(asked, plan)
    play = player.play("both", plan, engines)
    bounds = floors_of(floors, floors, player.counted)
    for name, values in player.values(play, play).items():
        pairs = [(value, bound) for value, bound in zip(values, bounds[name], strict=True) if value is not None]
        assert all(bound is not None and value >= bound for value, bound in pairs)


@given(holds_from=st.integers(0, 40), first=st.integers(1, 5), size=st.integers(0, 30), some=st.integers(1, 6))
def test_the_fewest_is_found_by_halves(holds_from: int, first: int, size: int, some: int) -> None:
    counts = tuple(range(first, first + size))
    expected = next((n for n in counts if n >= holds_from), None)
    assert fewest(counts, lambda n: n >= holds_from, one_by_one=some) == expected


def test_a_rate_beyond_capacity_is_told_without_a_play() -> None:
    found = search_serving(study(workload=Workload(rate=1e5, num_requests=20, output_tokens=20)))
    assert found.rows == ()
    assert found.counts.plays == 0
    assert found.least_devices is not None
    assert found.least_devices > 4
    as_needed = search_serving(
        study(workload=Workload(rate=1e5, num_requests=20, output_tokens=20), any_nodes=True, max_gpus=None, top=1)
    )
    best = as_needed.best
    assert best is not None
    assert best.answer.num_devices >= found.least_devices
    assert best.answer.capacity_per_s > 1e5


def test_where_nothing_meets_a_limit_the_nearest_is_named() -> None:
    """The miss is that of `serve` under the plan that is named."""
    asked = study(slo=Slo(ttft_s=1.0, tpot_s={95: 0.0005}), disaggregated="no")
    found = search_serving(asked)
    assert found.best is None
    assert found.nearest is not None
    (missed,) = [one for one in found.nearest.attainments if not one.held]
    assert (missed.name, missed.percentile) == ("tpot", 95)
    if found.nearest.plan.dp == 1:
        served = serve(asked.model, found.nearest.plan, asked.cluster, asked.workload.requests(), slo=asked.slo)
        assert served.attainments == found.nearest.attainments


def test_replicas_and_pools_take_the_gpus_that_their_plans_say() -> None:
    """Conservation: GPUs, tokens a second and money of a row follow from its plan and the rate."""
    asked = SPACES["several engines"]
    for row in search_serving(asked).rows:
        plan = row.answer.plan
        devices = plan.tp * plan.pp * plan.dp + plan.prefill_tp * plan.prefill_pp * plan.prefill_dp
        assert row.answer.num_devices == devices <= 4
        assert row.tokens_per_s_gpu == pytest.approx(400 * 40 / devices)
        assert row.answer.capacity_per_s > 400
        assert all(each.held for each in row.answer.attainments)
        assert not math.isnan(row.answer.capacity_per_s)
        Deployment.of(asked.model, plan, asked.cluster, asked.stack, *asked.numbers)
