"""The default table of a search: the winner of an exhaustive one, a row a layout, nothing twice, every framework named."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from simulator.base.fit import Fit
from simulator.cli import main
from simulator.parallel.legality import unused
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.studies.search import USUAL, PlanOutcome, SearchReport, SearchStudy, Serial, Space, search, search_stacks
from simulator.studies.search.outcome import key_of, layout_of, parsed, tidied
from simulator.studies.search.space import Pruned
from simulator.studies.search.survey import Prospect
from simulator.studies.search.table import Layouts
from tests.once import evaluate

MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=8192)
EXPERTS = MODEL.model_copy(update={"experts": Experts(num_experts=8, top_k=2, d_ff=512)})
WIDE = MODEL.model_copy(update={"d_model": 8192, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672, "num_layers": 12})
CLUSTER = Cluster.load("hgx-h100-8", 1)
_FEW = {"micro_batch_size": (1, 2), "sequence_parallel": (False,), "tp": (1, 2), "cp": (1,)}


@pytest.fixture(autouse=True)
def _simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of this process share what comes of a plan."""
    monkeypatch.setattr("simulator.studies.search.engines.evaluate", evaluate)


def _study(model: Model, stack: str, seq_len: int = 512, **fixed: tuple[object, ...]) -> SearchStudy:
    asked = {"stack": (stack,), **_FEW, **fixed}
    space = Space(model=model, clusters=(CLUSTER,), global_batch=16, seq_len=seq_len, fixed=asked)
    return SearchStudy(space=space, layouts=True, top=5)


def _found(study: SearchStudy) -> SearchReport:
    with Serial(study) as engine:
        return search(study, engine)


def _all(study: SearchStudy) -> list[PlanOutcome]:
    """Every legal plan, simulated."""
    branches = study.space.branches(Pruned())
    plans = [plan for branch in branches for plan in study.space.plans(branch, Pruned())]
    return [evaluate(study, key_of(plan, 1)) for plan in plans]


@pytest.mark.parametrize(
    "study",
    [
        _study(MODEL, "megatron-core-2025", recompute=("none", "selective")),
        _study(EXPERTS, "torch-2.11-compiled", pp=(1,), recompute=("none",), zero=(2, 3)),
        _study(WIDE, "torch-2.11-eager", 4096, pp=(1,), zero=(3,)),  # most do not fit, or are tight
    ],
    ids=["dense", "experts", "large"],
)
def test_the_winner_is_that_of_the_exhaustive_search(study: SearchStudy) -> None:
    """What surely fits comes first; of it, no legal plan is quicker."""
    everything, report = _all(study), _found(study)
    sure = [o.step_s for o in everything if o.status is Fit.FITS and o.step_s is not None]
    assert sure
    best = report.rows[0].outcome
    assert (best.status, best.step_s, report.gain) == (Fit.FITS, min(sure), 0.0)
    assert sum(report.counts.simulated.values()) <= len(everything)
    steps = {row.outcome.key: row.outcome.step_s for row in report.rows}
    assert steps.items() <= {o.key: o.step_s for o in everything}.items()


def test_a_layout_has_one_row() -> None:
    rows = _found(_study(MODEL, "megatron-core-2025")).rows
    assert len({layout_of(*parsed(row.outcome.key)) for row in rows}) == len(rows) > 2


def test_plans_that_run_the_same_are_one() -> None:
    """Megatron's selective recomputation recomputes the core of attention, of which a tiled kernel keeps nothing."""
    study = _study(MODEL, "megatron-core-2025", recompute=("none", "selective"), pp=(1,), tp=(1,))
    report = _found(study)
    assert report.counts.equal * 2 == report.counts.legal
    every = SearchStudy(space=study.space, top=5)
    rows = _found(every).rows
    assert len({row.outcome.signature for row in rows}) == len(rows)
    assert all(row.plan.recompute.mode == "none" for row in rows)


def test_what_makes_no_difference_is_named() -> None:
    """One rank has nothing to shard: its stages of ZeRO are one row."""
    space = Space(
        model=MODEL,
        clusters=(CLUSTER,),
        global_batch=16,
        seq_len=512,
        fixed={
            **_FEW,
            "stack": ("megatron-core-2025",),
            "tp": (8,),
            "recompute": ("none",),
            "expert_imbalance": (1.0, 2.0),
        },
    )
    rows = _found(SearchStudy(space=space, layouts=True)).rows
    assert any("expert_imbalance 2.0" in words for row in rows for words in row.same)
    assert all("expert_imbalance" not in row.plan.changed_fields() for row in rows)


@pytest.mark.parametrize("stack", USUAL)
def test_a_printed_plan_has_no_field_that_changes_nothing(stack: str) -> None:
    study = _study(EXPERTS, stack, recompute=("none",), zero=(0, 1, 3), expert_capacity_factor=(None,))
    for row in _found(study).rows[:2]:
        assert not row.plan.changed_fields().keys() & unused(row.plan, experts=True).keys()
        assert tidied(row.plan, experts=True) == row.plan
        assert evaluate(study, key_of(row.plan, 1)).signature == row.outcome.signature


def test_a_tight_plan_comes_behind_what_surely_fits_and_does_not_end_the_search() -> None:
    table = Layouts(_study(MODEL, "megatron-core-2025"))
    tight, sure = Prospect(1.0, "a", "one", share=0.99), Prospect(1.5, "b", "two", share=0.5)
    found = {
        status: PlanOutcome(key="", status=status, step_s=step_s, used_bytes=1, num_devices=8, tokens_per_step=1)
        for status, step_s in ((Fit.TIGHT, 1.1), (Fit.FITS, 1.6))
    }
    table.add(tight, found[Fit.TIGHT])
    assert table.may_win(sure)  # slower than the tight one, and still the answer
    assert table.limit > sure.floor
    table.add(sure, found[Fit.FITS])
    assert table.best == found[Fit.FITS].step_s
    assert not table.may_win(tight)


def test_every_framework_that_can_run_it_has_a_row() -> None:
    stacks = (*USUAL, "megatron-deepspeed-2022")
    space = Space(
        model=MODEL,
        clusters=(CLUSTER,),
        global_batch=16,
        seq_len=512,
        fixed={**_FEW, "stack": stacks, "cp": (2,), "pp": (1,)},
    )
    study = SearchStudy(space=space, layouts=True, top=6)
    with Serial(study) as engine:
        report = search_stacks(study, engine)
    assert {row.plan.stack for row in report.rows} == set(USUAL)
    assert [stack for stack, _ in report.without] == ["megatron-deepspeed-2022"]  # it has no context parallelism
    assert [row.rank for row in report.rows] == [1, 2, 3, 4, 5, 6]
    steps = [row.outcome.step_s for row in report.rows if row.outcome.status is Fit.FITS]
    assert steps == sorted(steps, key=float)
    for stack in USUAL:
        alone = SearchStudy(space=_with(space, stack), layouts=True, top=6)
        best = next(row for row in report.rows if row.plan.stack == stack)
        assert _found(alone).rows[0].outcome == best.outcome


def _with(space: Space, stack: str) -> Space:
    fixed = {**space.fixed, "stack": (stack,)}
    return Space(model=space.model, clusters=space.clusters, global_batch=16, seq_len=512, fixed=fixed)


_COMMAND = (
    *(
        "search",
        "--model",
        "gpt2",
        "--cluster",
        "hgx-h100-8",
        "--nodes",
        "1",
        "--global-batch",
        "16",
        "--seq-len",
        "512",
    ),
    *("--fix", "pp=1", "--fix", "cp=1", "--fix", "recompute=none", "--jobs", "1"),
)


def test_the_command_chooses_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_COMMAND, "--stack", "megatron-core-2025,deepspeed-0.14", "--plain"]) == 0
    told = capsys.readouterr().out
    assert "software" in told
    assert "megatron-core-2025" in told
    assert "deepspeed-0.14" in told
    assert main([*_COMMAND, "--stack", "megatron-core-2025,nobody"]) == 3
    assert "nobody" in capsys.readouterr().err
    assert main([*_COMMAND, "--fix", "data_parallel=fsdp2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"]["fixed"]["stack"] == list(USUAL[:2])


def test_a_search_that_is_ended_prints_what_it_knows() -> None:
    arguments = ["search", "--model", "llama3-8b", "--cluster", "hgx-h100-8", "--nodes", "4"]
    arguments += ["--global-batch", "256", "--seq-len", "8192", "--jobs", "1", "--all", "--top", "500", "--plain"]
    arguments += ["--stack", "torch-2.6-eager", "--fix", "pp=1"]
    code = "import sys; from simulator.studies.search import driver; old = driver._Run._take\n"
    code += "def take(*a):\n    old(*a); print('taken', file=sys.stderr, flush=True)\n"
    code += "driver._Run._take = take\nfrom simulator.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    while "taken" not in process.stderr.readline():
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "INTERRUPTED, best so far" in out
