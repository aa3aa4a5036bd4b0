"""What a search spends its work on, what it says of what it left out, and the Pareto front of its table."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from simulator.base.fit import Fit
from simulator.play.lower import lower
from simulator.predict.play import num_played, play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.search import (
    Interrupted,
    PlanOutcome,
    Progress,
    SearchReport,
    SearchStudy,
    Serial,
    Space,
    render,
    search,
    search_stacks,
)
from simulator.studies.search.engines import Task, _Batches, _Here, _surveyed
from simulator.studies.search.outcome import bound_group_of, key_of, layout_of
from simulator.studies.search.report import Row, compared
from simulator.studies.search.space import Branch, Pruned
from simulator.studies.search.survey import Prospect, Survey, work_of
from simulator.studies.search.table import WINDOW, EveryPlan, Layouts
from tests.once import evaluate

MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=8192)
CLUSTER = Cluster.load("hgx-h100-8", 1)
_FEW = {"micro_batch_size": (1, 2), "sequence_parallel": (False,), "tp": (1, 2), "cp": (1,), "recompute": ("none",)}
_MEGATRON = "megatron-core-2025"


@pytest.fixture(autouse=True)
def _simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of this process share what comes of a plan."""
    monkeypatch.setattr("simulator.studies.search.engines.evaluate", evaluate)


def _study(*stacks: str, budget: int = SearchStudy.budget) -> SearchStudy:
    fixed = {"stack": stacks or (_MEGATRON,), **_FEW}
    space = Space(model=MODEL, clusters=(CLUSTER,), global_batch=16, seq_len=512, fixed=fixed)
    return SearchStudy(space=space, layouts=True, top=5, budget=budget)


def _found(study: SearchStudy) -> SearchReport:
    with Serial(study) as engine:
        return search_stacks(study, engine)


def _text(report: SearchReport, width: int = 400) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as told:
        console.print(render(report))
    return told.get()


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"pp": 1, "num_micro_batches": 2, "zero": 3, "dp_shard": 8}, 2 * 4),  # all are played
        ({"pp": 1, "num_micro_batches": 64, "zero": 3, "dp_shard": 8}, (4 + 3) * 4),  # four, and once more three
        (
            {"pp": 2, "num_micro_batches": 64, "zero": 1, "dp_shard": 4, "schedule": "1f1b"},
            (10 + 9) * 2,
        ),  # stages whole
    ],
)
def test_work_counts_what_is_played(fields: dict[str, object], layers: int) -> None:
    plan = Plan(seq_len=512, data_parallel="megatron", stack=_MEGATRON, **fields)  # type: ignore[arg-type]
    work, memory_work = work_of(plan, MODEL.num_layers)
    assert memory_work == 2 * MODEL.num_layers
    assert work - 2 * memory_work == layers
    stack = Stack.load(_MEGATRON)
    lowering = lower(MODEL, plan, CLUSTER, stack, Calibration.for_device(CLUSTER.device), default_curves())
    longer = play(lowering).num_played
    assert num_played(plan) in (longer, 2 * longer - 1)


def test_longer_pipelines_and_sharded_layers_are_more_work() -> None:
    plans = [
        Plan(
            seq_len=512,
            data_parallel="megatron",
            stack=_MEGATRON,
            zero=zero,
            pp=pp,
            dp_shard=8 // pp,
            num_micro_batches=64,
        )
        for zero, pp in ((1, 2), (1, 4), (3, 4), (3, 8))
    ]
    works = [work_of(plan, 32)[0] for plan in plans]
    assert works == sorted(works)
    assert works[-1] > 4 * works[0]


def test_the_budget_ends_a_search_and_the_rest_is_said() -> None:
    """Proven without a budget; with a small one the gap is stated, and nothing at all is better by more than that."""
    whole, short = _found(_study()), _found(_study(budget=200))
    assert whole.gain == 0
    assert "bounds prove it" in _text(whole)
    assert short.work <= 200 < whole.work
    assert short.gain
    assert short.counts.open
    told = _text(short)
    assert f"NOT PROVEN to be the best plan that surely fits. Gap {short.gain:.1%}" in told
    assert short.as_json()["at_most_better"] == short.gain
    best, found = whole.rows[0].outcome.step_s, short.rows[0].outcome.step_s
    assert best is not None
    assert found is not None
    assert found * (1 - short.gain) <= best <= found


def test_several_stacks_share_one_budget_and_a_proven_one_leaves_its_part() -> None:
    study = _study("deepspeed-0.14", _MEGATRON, budget=400)
    report = _found(study)
    assert report.work <= 1.5 * study.budget
    alone = _found(_study(_MEGATRON, budget=300))
    of_it = [row for row in report.rows if row.plan.stack == _MEGATRON]
    assert of_it[0].outcome.step_s == alone.rows[0].outcome.step_s


def test_a_stack_or_value_that_is_given_twice_is_one() -> None:
    once, twice = _study("deepspeed-0.14"), _study("deepspeed-0.14", "deepspeed-0.14")
    assert twice.space.fixed == once.space.fixed
    space = replace(once.space, fixed={**once.space.fixed, "tp": (1, 2, 1), "vocab_parallel": (True, 1)})
    assert (space.fixed["tp"], space.fixed["vocab_parallel"]) == ((1, 2), (True, 1))


def test_what_was_left_out_of_a_large_space_is_no_proof() -> None:
    told = _text(replace(_found(_study()), num_left_out=7))
    assert "1 is the best plan that surely fits that was looked at" in told
    assert "7 branches were not looked at" in told


def test_an_interrupted_search_claims_no_gap() -> None:
    study = _study()

    def tell(progress: Progress) -> None:
        if progress.phase == "simulation" and progress.done == 2:
            raise KeyboardInterrupt

    with Serial(study) as engine, pytest.raises(Interrupted) as stop:
        search(study, engine, None, tell)
    report = stop.value.report
    assert report is not None
    assert report.gain is None
    assert report.as_json()["at_most_better"] is None
    assert "Nothing is proven yet" in _text(report)


def test_a_search_says_where_it_stands_from_its_first_branches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    study, seen, asked = _study(budget=5), list[tuple[str, int]](), list[int]()

    def surveyed(*given: Any, scouts: bool) -> Survey:
        asked.append(len(seen))
        return _surveyed(*given, scouts=scouts)

    monkeypatch.setattr("simulator.studies.search.engines._surveyed", surveyed)
    listed: list[float | None] = []

    def told(progress: Progress) -> None:
        seen.append((progress.phase, progress.done))
        listed.extend([progress.spent] * (progress.phase == "listing"))

    with Serial(study) as engine:
        search(study, engine, None, told)
    assert listed == sorted(one for one in listed if one is not None)
    assert listed[-1] == 1
    assert list(dict.fromkeys(phase for phase, _ in seen))[:3] == ["listing", "scouting", "survey"]
    assert len(asked) > 1
    assert asked == sorted(set(asked))  # something was said before each task


# -- what is tried next ------------------------------------------------------------------------------------------------


def _prospect(floor: float, key: str, layout: str = "one", **others: object) -> Prospect:
    return Prospect(floor, key, layout, **{"share": 0.5, "bound_group": "", **others})  # type: ignore[arg-type]


def _outcome(status: Fit, step_s: float | None, used_bytes: int) -> PlanOutcome:
    return PlanOutcome(
        key="",
        status=status,
        step_s=step_s,
        used_bytes=used_bytes,
        capacity_bytes=100,
        num_devices=8,
        tokens_per_step=1,
    )


def test_what_does_not_fit_costs_its_memory_alone() -> None:
    table = Layouts(_study(budget=1000))
    one = _prospect(1.0, "a", work=600, memory_work=100)
    assert table.choose([one]) is one
    assert table.work == 600
    table.add(one, _outcome(Fit.DOES_NOT_FIT, None, 150))
    assert table.work == 100


def test_what_is_expected_not_to_fit_comes_last() -> None:
    """One plan needed three times its floor: another of its group would not fit either, though its floor does."""
    table = Layouts(_study())
    table.add(_prospect(1.0, "seen", bound_group="x"), _outcome(Fit.DOES_NOT_FIT, None, 150))
    quick, slow = (
        _prospect(1.0, "quick", "two", bound_group="x", share=0.6),
        _prospect(1.5, "slow", "three", bound_group="x", share=0.2),
    )
    assert table.choose([slow, quick], 0.5) is slow


def test_hope_and_proof_share_the_work() -> None:
    """The best is 3. "likely" may be better, as plans of its group come close to their floors; the gap depends on "low"."""
    table = Layouts(_study(budget=1000))
    table.add(_prospect(1.0, "a", bound_group="loose"), _outcome(Fit.FITS, 4.0, 50))
    table.add(_prospect(3.0, "b", "two", bound_group="close"), _outcome(Fit.FITS, 3.0, 50))
    low = [_prospect(1.2 + 0.1 * i, f"low {i}", "three", bound_group="loose", work=100) for i in range(3)]
    likely = [_prospect(2.9, f"likely {i}", "four", bound_group="close", work=200) for i in range(3)]
    left = sorted([*low, *likely], key=lambda each: -each.floor)
    chosen = [table.choose(left) for _ in range(5)]
    assert [each.key for each in chosen if each] == ["likely 0", "low 0", "low 1", "likely 1", "low 2"]


def test_a_layout_that_nobody_tried_is_judged_by_its_bound_group() -> None:
    table = Layouts(_study())
    table.add(_prospect(1.0, "a", "one", bound_group="loose"), _outcome(Fit.FITS, 4.0, 50))
    table.add(_prospect(3.0, "b", "two", bound_group="tight"), _outcome(Fit.FITS, 3.3, 50))
    loose, tight = _prospect(1.2, "c", "three", bound_group="loose"), _prospect(2.9, "d", "four", bound_group="tight")
    assert table.choose([tight, loose]) is tight


def test_before_all_is_known_no_plan_takes_more_than_its_part() -> None:
    table = Layouts(_study(budget=WINDOW * 100))
    heavy, light = _prospect(1.0, "a", work=60), _prospect(1.5, "b", work=50)
    assert table.choose([light, heavy], 0.5) is light  # a half of the budget is for WINDOW plans of 50 each
    assert table.choose([heavy]) is heavy
    table.work = WINDOW * 100 - 59
    assert table.choose([_prospect(1.0, "c", work=60)]) is None


def test_a_layout_within_the_best_plans_interval_is_kept() -> None:
    table = Layouts(_study())
    best = replace(_outcome(Fit.FITS, 2.0, 50), low_s=1.6, high_s=2.5)
    table.add(_prospect(1.9, "a"), best)
    assert table.limit == 2.5
    table.add(_prospect(1.9, "b"), replace(_outcome(Fit.TIGHT, 1.0, 50), high_s=9.0))
    assert table.limit == 2.5  # a tight plan is not the best


def test_kin_share_what_is_sharded_and_not_how_far() -> None:
    plans = [Plan(seq_len=512, zero=3, dp_shard=8 // tp, tp=tp) for tp in (1, 2)]
    assert bound_group_of(plans[0]) == bound_group_of(plans[1])
    assert layout_of(plans[0], 1) != layout_of(plans[1], 1)
    assert bound_group_of(plans[0]) != bound_group_of(Plan(seq_len=512, zero=2, dp_shard=8))


class _Watched(Serial):
    """Keeps the limits that surveys got."""

    def __init__(self, study: SearchStudy) -> None:
        super().__init__(study)
        self.limits: list[float] = []

    def survey(self, branches: list[Branch], limit: float, *, scouts: bool = False) -> Task:
        self.limits += [] if scouts else [limit]
        return super().survey(branches, limit, scouts=scouts)


def test_an_exact_search_has_a_limit_after_its_first_round() -> None:
    """Its table is full before the rest is surveyed, so what is too slow is dropped unchecked."""
    study = replace(_study(), layouts=False)
    with _Watched(study) as engine:
        report = search(study, engine)
    first = engine.limits.count(float("inf"))
    assert 0 < first < len(engine.limits)
    assert report.counts.too_slow + report.counts.unchecked
    branches = study.space.branches(Pruned())
    plans = [plan for branch in branches for plan in study.space.plans(branch, Pruned())]
    steps = {outcome.signature: outcome.step_s for outcome in (evaluate(study, key_of(plan, 1)) for plan in plans)}
    assert [row.outcome.step_s for row in report.rows] == sorted(s for s in steps.values() if s is not None)[:5]


def test_more_plans_are_on_the_way_where_none_is_in_vain() -> None:
    table = EveryPlan(replace(_study(), top=40))
    assert table.window == 40  # the table is empty: whatever they are, forty more are wanted
    for step in range(640):
        table.add(_prospect(1.0, str(step)), _outcome(Fit.FITS, 1.0 + step, 50))
    assert table.window == 640 // 16
    assert Layouts(_study()).window == WINDOW


def test_a_task_has_as_many_plans_as_it_may_and_starts_when_one_is_asked_for() -> None:
    started = list[list[str]]()

    def start(keys: list[str]) -> _Here:
        started.append(list(keys))
        return _Here(lambda: [key.upper() for key in keys])

    batches = _Batches(start)
    tasks = [batches.add(key, 3) for key in "abcdefg"]
    assert started == [["a", "b", "c"], ["d", "e", "f"]]
    assert [task.result() for task in tasks] == list("ABCDEFG")
    assert started[2:] == [["g"]]
    batches.add("h", 3)
    batches.add("i", 2)  # heavier than the one before
    assert started[3:] == [["h", "i"]]


# -- the Pareto front --------------------------------------------------------------------------------------------------


def test_the_front_has_every_row_that_none_beats() -> None:
    """(step, memory): 1 is the quickest, 3 smaller, 5 the smallest; 2 is larger than 1, 4 as large as 3 and slower."""
    figures = [(1.0, 50), (1.1, 60), (1.2, 40), (1.3, 40), (9.0, 10), (1.2, 40)]
    plan = Plan(seq_len=512, dp_shard=8)
    key = key_of(plan, 1)
    rows = [
        Row(rank=0, nodes=1, plan=plan, outcome=replace(_outcome(Fit.FITS, *one), key=key), same=(), against_best=None)
        for one in figures
    ]
    assert [row.on_front for row in compared(rows)] == [True, False, True, False, True, True]


def test_the_front_is_marked_over_all_stacks() -> None:
    report = _found(_study(_MEGATRON, "deepspeed-0.14", "torch-2.11-compiled"))
    figures = [(row.outcome.step_s, row.outcome.used_bytes) for row in report.rows]
    assert len({row.plan.stack for row in report.rows}) == 3
    for row, (step_s, used) in zip(report.rows, figures, strict=True):
        beaten = any(s <= step_s and b <= used and (s, b) != (step_s, used) for s, b in figures)  # type: ignore[operator]
        assert row.on_front is not beaten
    assert 1 <= sum(row.on_front for row in report.rows) < len(report.rows)
    marks = re.findall(r"^ *(\d+)≈?(\*?)  ", _text(report), re.MULTILINE)
    assert [(int(rank), bool(star)) for rank, star in marks] == [(row.rank, row.on_front) for row in report.rows]
    first_screen = _text(report, width=80).splitlines()[:24]
    assert max(map(len, first_screen)) <= 80
    last = report.rows[-1]
    assert any(line.strip().startswith(f"{last.rank}  {last.plan.stack}: ") for line in first_screen), "a line each"
    assert [plan["on_front"] for plan in report.as_json()["plans"]] == [row.on_front for row in report.rows]


def test_a_long_survey_leaves_less_for_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of all plans are still made, so what is said of the gap stays proven."""
    whole = _found(_study())
    branches = list(_study().space.branches(Pruned()))
    sizes = sum(_study().space.num_sizes(branch) for branch in branches)
    assert sizes == sum(len({size for size, *_ in _study().space.flows(branch)}) for branch in branches)
    monkeypatch.setattr("simulator.studies.search.driver._TOGETHER", sizes + 200)
    short = _found(_study(budget=400))
    assert short.work <= 200 < whole.work
    assert short.counts.legal + short.counts.unchecked == whole.counts.legal + whole.counts.unchecked
    best, found = whole.rows[0].outcome.step_s, short.rows[0].outcome.step_s
    assert best is not None
    assert found is not None
    assert found * (1 - (short.gain or 0.0)) <= best <= found
