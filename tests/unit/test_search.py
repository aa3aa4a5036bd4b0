"""The search finds what an exhaustive one finds, remembers what it has finished, and says why nothing is legal."""

import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from simulator.base.errors import InputError
from simulator.cli import main
from simulator.parallel.legal import case_of, legal
from simulator.parallel.legality import faults, software_of
from simulator.parallel.pipeline import SCHEDULES
from simulator.predict.difference import Timed, difference, timed
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.plan import Plan
from simulator.spec.plan.compression import CommHook
from simulator.spec.software.stack import Stack
from simulator.studies.search import Journal, PlanOutcome, Processes, SearchStudy, Serial, Space, search
from simulator.studies.search.evaluate import evaluate as evaluate_anew
from simulator.studies.search.outcome import key_of, parsed
from simulator.studies.search.report import SearchReport, ranked
from simulator.studies.search.space import Pruned
from simulator.studies.search.survey import Survey, Surveyor
from simulator.studies.search.text import render
from tests.once import evaluate

MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=8192)
CLUSTER = Cluster.load("hgx-h100-8", 1)
FIXED = {
    "recompute": ("none", "full"),
    "cp": (1,),
    "schedule": (None, "1f1b", "interleaved"),
    "micro_batch_size": (1, 2),
    "tp": (1, 2),
    "sequence_parallel": (False,),
}


@pytest.fixture(autouse=True)
def _simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of this process share what comes of a plan."""
    monkeypatch.setattr("simulator.studies.search.engines.evaluate", evaluate)


def _space(**fixed: tuple[object, ...]) -> Space:
    return Space(model=MODEL, clusters=(CLUSTER,), global_batch=16, seq_len=512, fixed={**FIXED, **fixed})


def _keys(space: Space) -> list[str]:
    pruned = Pruned()
    return [key_of(plan, 1) for branch in space.branches(pruned) for plan in space.plans(branch, pruned)]


def test_the_space_is_what_the_plan_model_and_cluster_allow() -> None:
    space = _space(data_parallel=("megatron",))
    found = _keys(space)
    expected = set()
    for tp, cp, pp, zero in product((1, 2), (1,), (1, 2, 4, 8), range(4)):
        ranks, rest = divmod(8, tp * cp * pp)
        if rest:
            continue
        for size, schedule, chunks, recompute in product(
            (1, 2), (None, "1f1b", "interleaved"), (1, 2, 4), FIXED["recompute"]
        ):
            count, rest = divmod(16, ranks * size)
            replicas = {ranks} if zero == 0 else {1, ranks * tp * cp // 8 if ranks * tp * cp > 8 else 1}
            for replica in () if rest else replicas:
                plan = Plan(
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    zero=zero,
                    data_parallel="megatron",
                    seq_len=512,
                    micro_batch_size=size,
                    num_micro_batches=count,
                    recompute=recompute,
                    schedule=schedule,
                    virtual_stages=chunks,
                    dp_replicate=replica,
                    dp_shard=ranks // replica,
                )
                try:
                    legal(MODEL, plan, CLUSTER, Stack.load(plan.stack))
                except InputError:
                    continue
                # the search asks for chunks only where a schedule that has them is named
                if chunks == 1 or schedule == "interleaved":
                    expected.add(key_of(plan, 1))
    assert set(found) == expected
    assert len(found) == len(set(found))
    assert found == _keys(space)


EXPERTS = MODEL.model_copy(update={"experts": Experts(num_experts=8, top_k=2, d_ff=512)})


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (MODEL, {"offload": ("none", "activations", "optimizer", "states")}),
        (
            MODEL,
            {"stack": ("megatron-core-2025", "megatron-deepspeed-2022"), "recompute": ("none", "selective", "full")},
        ),
        (MODEL, {"sync_every_steps": (2,), "dp_replicate": (1, 2, 4, 8)}),
        (MODEL, {"comm_hook": (CommHook(kind="fp16_compress"), CommHook(kind="powersgd", start_step=2))}),
        (MODEL, {"data_parallel": ("deepspeed",), "hierarchical_gather": (False, True), "dp_replicate": (1, 2, 4)}),
        (EXPERTS, {"expert_overlap": (False, True), "ep": (1, 2), "data_parallel": ("megatron", "fsdp2")}),
    ],
)
def test_flows_and_leaves_are_legal_apart(model: Model, fixed: dict[str, tuple[object, ...]]) -> None:
    """What the space says is what every single plan is asked: a rule that reads both would tell them apart."""
    asked = {**FIXED, "schedule": (*SCHEDULES, None), "recompute": ("none", "full", "every_k"), **fixed}
    asked = asked | {"pp": (1, 2), "tp": (1,), "micro_batch_size": (1,), "virtual_stages": (1, 2)}
    space = Space(model=model, clusters=(CLUSTER,), global_batch=32, seq_len=512, fixed=asked)
    expected = []
    for branch in space.branches(Pruned()):
        ranks = 8 // branch.fields["tp"] // branch.fields["pp"]
        for (size, schedule, chunks), leaf in product(space.flows(branch), space.leaves(branch, ranks)):
            flow = {"micro_batch_size": size, "num_micro_batches": 32 // ranks // size}
            plan = Plan(**branch.fields, **flow, schedule=schedule, virtual_stages=chunks, **leaf)
            stack = Stack.load(plan.stack)
            software = software_of(stack.framework, plan.implementation)
            if not faults(case_of(model, plan, CLUSTER, stack, software)):
                expected.append(key_of(plan, 1))
    assert expected
    assert _keys(space) == expected


@pytest.mark.parametrize("objective", ["step", "memory"])
def test_the_table_is_that_of_the_exhaustive_search(objective: str) -> None:
    study = SearchStudy(space=_space(zero=(3,), recompute=("none",)), objective=objective, top=4)  # type: ignore[arg-type]
    keys = _keys(study.space)
    everything = [evaluate(study, key) for key in keys]
    with Serial(study) as engine:
        report = search(study, engine)
    assert [row.outcome for row in report.rows] == [row.outcome for row in ranked(study, everything)]
    c = report.counts
    assert c.legal + c.unchecked == len(keys)
    assert c.too_large + c.too_slow + sum(c.simulated.values()) == c.legal + c.scouts
    said = next(line for line in _shown(report).splitlines() if line.startswith("Of the legal: "))
    by_memory, by_bound, ran = (int(n) for n in re.findall(r"(\d+) (?:pruned by memory|by the bound|simulated)", said))
    twice = re.search(r"of which (\d+) found the bound that prunes them, too", said)
    assert by_memory + by_bound + ran - (int(twice[1]) if twice else 0) == c.legal
    if objective == "step":
        assert c.too_slow + c.unchecked > 0


def _shown(report: SearchReport) -> str:
    console = Console(width=300, color_system=None)
    with console.capture() as told:
        console.print(render(report))
    return told.get()


def _everything(study: SearchStudy) -> Survey:
    """The whole space without any limit."""
    found, surveyor = Survey(), Surveyor(study)
    for branch in study.space.branches(found.pruned):
        found.merge(surveyor.survey(branch))
    return found


def test_floors_know_how_the_software_cuts_experts() -> None:
    """9 columns an expert over 8 shards: rows are padded to 16, whole experts (64 a rank) are not."""
    model = MODEL.model_copy(update={"experts": Experts(num_experts=512, top_k=1, d_ff=9)})
    fixed = {**FIXED, "zero": (3,), "tp": (1,), "pp": (1,), "ep": (1,), "recompute": ("none",)}
    space = Space(model=model, clusters=(CLUSTER,), global_batch=16, seq_len=512, fixed=fixed)
    floors = {}
    for cut_by in ("experts", "rows"):
        stack = Stack.load("torch-2.11-eager").copy_with(expert_shards=cut_by)
        study = SearchStudy(space=space, stack=stack, objective="memory")
        for prospect in _everything(study).prospects:
            floors[cut_by, prospect.key] = prospect.floor
            least = study.value_of(evaluate(study, prospect.key))
            assert least is not None
            assert prospect.floor <= least
    keys = {key for _, key in floors}
    assert keys
    assert all(floors["experts", key] < floors["rows", key] for key in keys)


def test_what_scouts_rule_out_is_not_in_the_exhaustive_table() -> None:
    """A short table is full after the plans that split the model least; the rest is surveyed against its worst."""
    fixed = {
        "zero": (3,),
        "recompute": ("none", "full"),
        "tp": (1, 2, 4),
        "pp": (1, 2),
        "schedule": (None, "interleaved"),
    }
    study = SearchStudy(space=_space(**fixed), top=1)
    pruned, surveyor, keys = Pruned(), Surveyor(study), _keys(study.space)
    with Serial(study) as engine:
        report = search(study, engine)
    best = report.rows[0].outcome
    assert best == ranked(study, [evaluate(study, key) for key in keys])[0].outcome
    assert best.step_s is not None
    assert report.counts.legal < len(keys)  # too slow ones are not even asked whether they are legal
    assert report.counts.unchecked + report.counts.legal + sum(report.counts.refused.values()) == sum(
        survey.num_legal + sum(survey.pruned.counts.values()) for survey in [_everything(study)]
    )
    found = [surveyor.survey(branch, best.step_s) for branch in study.space.branches(pruned)]
    assert sum(each.num_too_slow + each.num_unchecked for each in found) > 0
    assert best.key in {prospect.key for each in found for prospect in each.prospects}


def test_what_no_bound_knows_is_simulated() -> None:
    space = _space(
        zero=(0,),
        data_parallel=("ddp",),
        pp=(1,),
        tp=(1,),
        recompute=("none",),
        comm_hook=(CommHook(kind="bf16_compress"),),
    )
    study = SearchStudy(space=space, top=1)
    with Serial(study) as engine:
        counts = search(study, engine).counts
    assert (counts.legal, counts.too_large, counts.too_slow) == (sum(counts.simulated.values()), 0, 0)


def test_processes_find_the_same_as_one() -> None:
    study = SearchStudy(space=_space(pp=(1,)), top=3)
    with Serial(study) as engine:
        alone = search(study, engine).as_json()
    with Processes(study, 2) as engine:
        assert search(study, engine).as_json() == alone


@pytest.mark.parametrize(
    "fixed", [{"data_parallel": ("ddp",), "zero": (0,)}, {"data_parallel": ("fsdp2",), "zero": (3,)}]
)
def test_what_neighbours_share_changes_no_outcome(fixed: dict[str, tuple[object, ...]]) -> None:
    """Prices of blocks and the play of the allocator are taken over from the plan before, where they are the same."""
    around = {"bucket_bytes": (2**20, 2**24, 2**25), "memory_fraction": (0.002, 0.018, 1.0)}
    space = _space(**fixed, **around, tp=(1,), pp=(1,), schedule=(None,), micro_batch_size=(2,), recompute=("none",))
    keys, study = _keys(space), SearchStudy(space=space)
    together = [evaluate_anew(study, key) for key in keys]
    assert together[::-1] == [evaluate_anew(SearchStudy(space=space), key) for key in keys[::-1]]
    assert len(keys) == 9
    assert len({one.status for one in together}) > 1
    assert len({one.step_s for one in together}) >= (2 if "ddp" in fixed["data_parallel"] else 1)


def test_an_empty_space_names_the_tightest_rule() -> None:
    study = SearchStudy(space=_space(tp=(3,)))
    with Serial(study) as engine, pytest.raises(InputError, match=r"degrees refuses [\d,]+ .*do not divide 8 devices"):
        search(study, engine)


def test_an_empty_space_names_what_was_asked_before_what_is_in_every_space() -> None:
    study = SearchStudy(space=replace(_space(precision=("fp8",)), clusters=(Cluster.load("dgx-a100-80-8"),)))
    wanted = (
        r"precision refuses [\d,]+ .*no fp8 matrix units .*\"bf16\" or \"fp16\".*degrees [\d,]+ \(loosen precision\)"
    )
    with Serial(study) as engine, pytest.raises(InputError, match=wanted):
        search(study, engine)


def test_a_gpu_without_bf16_is_searched_in_fp16() -> None:
    space = replace(_space(), clusters=(Cluster.load("dgx1-v100-8"),))
    with Serial(SearchStudy(space=space, top=3)) as engine:
        rows = search(SearchStudy(space=space, top=3), engine).rows
    assert {row.plan.precision.compute for row in rows} == {"fp16"}


def test_what_a_key_says_is_the_plan() -> None:
    plan = Plan(tp=2, dp_shard=4, seq_len=512, recompute="full", stage_layers=(3, 1), pp=2)
    assert parsed(key_of(plan, 3)) == (plan, 3)


def test_differences_leave_out_what_both_steps_share() -> None:
    a = Timed(step_s=1.1, spread={"gemm": 0.04, "exposed": 0.03}, stack_sigma=0.0)
    same = difference(a, a)
    assert (same.low, same.ratio, same.high) == (1.0, 1.0, 1.0)
    b = Timed(step_s=1.0, spread={"gemm": 0.04}, stack_sigma=0.0)
    assert difference(a, b).low == pytest.approx(1.1 * 2.718281828 ** (-1.6449 * 0.03))
    wide = Timed(step_s=1.0, spread={"gemm": 0.04}, stack_sigma=0.05)
    near = Timed(step_s=1.06, spread={"gemm": 0.04}, stack_sigma=0.05)
    assert difference(a, b).distinguishable
    assert not difference(wide, near).distinguishable


def test_curves_err_alike_only_on_the_same_shapes() -> None:
    spread = {"gemm": 0.03, "communication": 0.04, "imbalance": 0.1}
    plan = Plan(tp=2, dp_shard=4, seq_len=512)
    one = timed(1.0, spread, 0.0, plan)

    def reach(**changed: object) -> float:
        other = timed(1.0, spread, 0.0, plan.copy_with(**changed))
        return math.log(difference(one, other).high) / 1.6449

    assert reach(num_micro_batches=4) == 0.0
    assert reach(zero=2) == pytest.approx(0.04 * math.sqrt(2))  # other messages, the same kernels
    assert reach(micro_batch_size=2) == pytest.approx(0.05 * math.sqrt(2))  # other shapes of all


def _outcome(key: str = "a") -> PlanOutcome:
    return PlanOutcome(
        key=key,
        status="fits",
        num_devices=8,
        step_s=0.1 + 0.2,
        tokens_per_step=64,
        used_bytes=7,
        breakdown={"gemm": 1 / 3, "attention": 0.1},
    )


def test_a_journal_gives_back_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    with Journal(path, "study") as journal:
        journal.add(_outcome())
    with Journal(path, "study") as journal:
        (back,) = journal.outcomes().values()
    assert back == _outcome()
    assert list(back.breakdown) == ["gemm", "attention"]  # a report prints them in this order


def test_a_journal_whose_numbers_were_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with Journal(path, "study") as journal:
        journal.add(_outcome())
    with sqlite3.connect(path) as database:
        database.execute("UPDATE outcomes SET outcome = replace(outcome, '\"step_s\":', '\"step_s\": -')")
    with Journal(path, "study") as journal, pytest.raises(InputError, match="1 of 1 outcomes are not what was written"):
        journal.outcomes()


def test_a_journal_whose_plan_fits_without_figures_is_refused(tmp_path: Path) -> None:
    """One that a search would rank: its row is whole, and nothing that a search writes."""
    with Journal(tmp_path / "journal.db", "study") as journal:
        journal.add(_outcome())
        assert journal.outcomes()
        with pytest.raises(InputError, match="no outcome that a prediction could have"):
            journal.outcomes(ranked=True)


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    with Journal(path, "study"):
        pass
    with pytest.raises(InputError, match="another study"):
        Journal(path, "other")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE facts SET value = '0.0.0' WHERE name = 'version'")
    with pytest.raises(InputError, match=r"another version of shardwise: 0\.0\.0"):
        Journal(path, "study")
    text = tmp_path / "notes.txt"
    text.write_text("no database, but long enough to be looked at" * 99)
    with pytest.raises(InputError, match="not a journal"):
        Journal(text, "study")
    strange = tmp_path / "strange.db"
    with sqlite3.connect(strange) as database:
        database.execute("CREATE TABLE mine (x)")
    with pytest.raises(InputError, match="another program"):
        Journal(strange, "study")


def test_a_journal_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        Journal(tmp_path / "nowhere" / "search.db", "study")
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("whoever runs this may write anywhere")
    with pytest.raises(InputError, match="cannot be written"):
        Journal(folder / "search.db", "study")


_COMMAND = (
    *("search", "--model", "gpt2", "--cluster", "hgx-h100-8", "--nodes", "1", "--global-batch", "16"),
    *("--seq-len", "512", "--fix", "recompute=none", "--fix", "pp=1", "--fix", "cp=1", "--json", "--jobs", "1"),
)
_TWO = ("--stack", "torch-2.6-eager,megatron-core-2025")


def test_the_command_prints_the_table_and_exports_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plans.csv"
    assert main([*_COMMAND, *_TWO, "--export", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [plan["rank"] for plan in report["plans"]] == list(range(1, 11))
    header, first, *_ = out.read_text(encoding="utf-8").splitlines()
    assert header.startswith("rank,nodes,num_devices,verdict,step_s")
    assert first.startswith("1,1,8,fits,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fix", "dp_shard=8"], "follows from the others"),
        (["--fix", "tpp=8"], "is not a field of a plan"),
        (["--fix", "tp=many"], 'must be a whole number; it is the text "many"'),
        (["--fix", "tp"], "has no value"),
        (["--fix", "offload=moon"], "moon"),
        (["--fix", "ep=1", "--fix", "ep=2"], "--fix ep: is given twice"),
        (["--stack", ","], "--stack: names none"),
        (["--stack", ""], "--stack: names none"),
        (["--stack", "deepspeed-0.14", "--fix", "stack=megatron-core-2025"], "--stack: contradicts --fix stack"),
        (["--fix", "stack=nobody"], "no preset is called 'nobody'"),
        (["--front", "--run-tokens", "0"], "--run-tokens: a run has at least one token"),
        (["--nodes", "two"], "numbers of nodes"),
        (["--set", "cluster.inter.nics=4"], "--set cluster.inter.nics"),
        (["--nodes", "99999999999999999999"], "numbers of nodes up to 65536"),
        (["--export", "table.xls"], "no format"),
        (["--export", "/nowhere/table.csv"], "there is no folder /nowhere"),
        (["--front", "--plot", "/nowhere/front.svg"], "there is no folder /nowhere"),
        (["--engine", "dask"], "--scheduler: is missing"),
    ],
)
def test_bad_input_is_told_at_its_place(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_COMMAND, *arguments]) == 3
    assert message in capsys.readouterr().err


def test_parquet_without_pyarrow_is_told_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simulator.studies.search.export.find_spec", lambda _: None)
    monkeypatch.setattr("simulator.cli.search.search_stacks", lambda *_: pytest.fail("it has begun"))
    assert main([*_COMMAND, "--export", "plans.parquet"]) == 3
    assert "shardwise[parquet]" in capsys.readouterr().err


def test_a_killed_search_goes_on_to_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_COMMAND, *_TWO]) == 0
    whole = capsys.readouterr().out
    path, random = tmp_path / "search.db", Random(7)  # noqa: S311  moments, no secrets
    command = [sys.executable, "-m", "simulator.cli", *_COMMAND, *_TWO, "--journal", str(path)]
    acknowledged: dict[str, PlanOutcome] = {}
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            process.wait(timeout=random.uniform(0.7, 2.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if path.exists():
            with sqlite3.connect(path) as database:
                if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    rows = dict(database.execute("SELECT key, outcome FROM outcomes"))
                    now = {key: PlanOutcome.of(json.loads(text)) for key, text in rows.items()}
                    assert acknowledged.items() <= now.items()
                    acknowledged = now
    for _ in range(2):  # the second takes every candidate from the journal
        assert main([*_COMMAND, *_TWO, "--journal", str(path)]) == 0
        assert capsys.readouterr().out == whole


_FRONT = (
    *(
        "search",
        "--model",
        "gpt2",
        "--cluster",
        "hgx-h100-8",
        "--global-batch",
        "16",
        "--seq-len",
        "512",
        "--jobs",
        "1",
    ),
    *(
        *_TWO,
        "--fix",
        "recompute=none",
        "--fix",
        "pp=1",
        "--fix",
        "cp=1",
        "--fix",
        "tp=1",
        "--front",
        "--nodes",
        "1,2,3",
    ),
)


def test_the_front_is_the_best_of_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 sequences on 24 GPUs have no legal plan; each other size has its own search's quickest."""
    journal, picture = str(tmp_path / "front.db"), tmp_path / "front.svg"
    assert main([*_FRONT, "--json", "--journal", journal, "--run-tokens", "1B"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {one["nodes"]: one for one in found["sizes"]}
    assert found["currency"] == "device-hours"
    assert sizes[3]["step_s"] is None
    assert sizes[3]["reason"]
    alone = [word for word in _FRONT if word != "--front"]
    for nodes in (1, 2):
        alone[-1] = str(nodes)
        assert main([*alone, "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert (sizes[nodes]["plan"], sizes[nodes]["step_s"]) == (best["plan"], best["step_s"])
        hours = nodes * 8 * best["step_s"] / 3600
        assert sizes[nodes]["billion_tokens"] == pytest.approx(hours / (16 * 512) * 1e9)
        assert sizes[nodes]["run"] == pytest.approx(sizes[nodes]["billion_tokens"])
    cheapest = min((1, 2), key=lambda nodes: float(sizes[nodes]["billion_tokens"]))
    assert sizes[cheapest]["over_cheapest"] is None
    over = sizes[3 - cheapest]["over_cheapest"]
    assert over["ratio"] == sizes[3 - cheapest]["billion_tokens"] / sizes[cheapest]["billion_tokens"]
    days = {nodes: sizes[nodes]["run_days"] for nodes in (1, 2)}
    small, large = sorted(days, key=lambda nodes: -days[nodes])
    between = (days[small] + days[large]) / 2  # only the quicker size ends in time
    asked = [*_FRONT, "--journal", journal, "--run-tokens", "1B", "--days"]
    assert main([*asked, str(between), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["enough_nodes"] == large
    surely = max(days.values()) * 10
    assert main([*asked, str(surely), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["enough_nodes"] == found["surely_nodes"] == 1
    assert main([*asked, str(min(days.values()) / 2), "--plain"]) == 0
    assert "No size that was searched ends the run" in capsys.readouterr().out
    assert main([*_FRONT, "--days", "3"]) == 3
    assert "--run-tokens 15T" in capsys.readouterr().err
    assert main([*_FRONT, "--plain", "--journal", journal, "--plot", str(picture)]) == 0
    assert "time against cost" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"<?xml")


def test_what_belongs_to_the_front_is_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    alone = [word for word in _FRONT if word != "--front"]
    assert main([*alone, "--run-tokens", "1T"]) == 3
    assert "belongs to --front" in capsys.readouterr().err
    assert main([*_FRONT, "--run-tokens", "1Q", "--plot", "a.gif", "--prices", "nowhere.toml"]) == 3
    told = capsys.readouterr().err
    for words in ("not a count", "is not a picture format", "nowhere.toml"):
        assert words in told


def test_a_search_whose_workers_are_gone_has_no_answer_of_the_other_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that cannot be searched is listed; one that could not be, as nobody was there, must not be."""
    from simulator.base.errors import Fault
    from simulator.studies.search import Serial, software
    from simulator.studies.search.study import SearchBrokenError

    study = SearchStudy(space=_space(stack=("torch-2.6-eager", "deepspeed-0.14")), layouts=True)
    begun: list[object] = []

    def lost(one: SearchStudy, *_: object) -> object:
        begun.append(one)
        raise SearchBrokenError(Fault(place="--scheduler", problem="is gone"))

    monkeypatch.setattr(software, "search", lost)
    with Serial(study) as engine, pytest.raises(SearchBrokenError, match="is gone"):
        software.search_stacks(study, engine)
    assert len(begun) == 1


def test_a_survey_does_not_depend_on_what_its_process_surveyed_before() -> None:
    """Of plans with more stages than layers too: 16 devices, 12 layers."""
    fixed = {"tp": (1,), "cp": (1,), "zero": (1,), "recompute": ("none",), "data_parallel": ("megatron",)}
    space = Space(model=Model.load("gpt2"), clusters=(Cluster.load("hgx-h100-8", 2),), global_batch=32, seq_len=256, fixed=fixed)  # fmt: skip
    study, pruned = SearchStudy(space=space), Pruned()
    branches, one = list(space.branches(pruned)), Surveyor(study)

    def counts(of: Callable[[], Surveyor]) -> list[tuple[int, int, int, int]]:
        found = [of().survey(branch, 0.003) for branch in branches]
        return [(each.num_unchecked, each.num_legal, each.num_too_slow, len(each.prospects)) for each in found]

    alone = counts(lambda: Surveyor(study))
    assert counts(lambda: one) == alone
    assert max(branch.fields["pp"] for branch in branches) == 16
    assert sum(unchecked for unchecked, *_ in alone) > 0
