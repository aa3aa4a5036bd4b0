"""The Python functions and methods; the page that describes them runs, and holds the code that mypy checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib import rc_context

from simulator import (
    Cluster,
    InferencePlan,
    InputError,
    Model,
    Plan,
    Prediction,
    Stack,
    Workload,
    predict,
    search,
    serve,
)
from simulator.base.errors import ArgumentError
from simulator.cli import main
from simulator.formats.writers.json_report import report
from simulator.studies.search import SearchStudy, Serial, Space
from simulator.studies.search import search as searched

PAGE = Path(__file__).parents[2] / "docs/reference/python-api.md"
MODEL = Model(name="tiny", num_layers=2, d_model=256, num_heads=4, d_ff=704, vocab_size=1024)
CLUSTER = Cluster.load("hgx-h100-8")
FIXED = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": [2, 3], "data_parallel": "fsdp2", "recompute": "none"}


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(MODEL, Plan(dp_shard=8, seq_len=256), CLUSTER)


def faults(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [str(fault) for fault in error.value.faults]


# --- the page


def test_the_page_holds_the_code_that_is_checked() -> None:
    blocks = re.findall(r"```python\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    checked = PAGE.with_name("python_api.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert "\n\n".join(blocks) + "\n" == checked


# --- a prediction


def test_data_and_json_are_the_command_lines(prediction: Prediction) -> None:
    assert prediction.to_dict() == report(prediction)
    assert json.loads(prediction.to_json()) == json.loads(json.dumps(prediction.to_dict()))


def test_json_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--json"])
    told = json.loads(capsys.readouterr().out)
    mine = predict(Model.load("llama3-8b"), Plan(dp_shard=8, seq_len=8192), CLUSTER, advise=True).to_dict()
    for key in mine.keys() - {"inputs", "sources"}:
        assert told[key] == json.loads(json.dumps(mine[key])), key


def test_repr_is_a_line_with_the_verdict(prediction: Prediction) -> None:
    assert repr(prediction).startswith("<Prediction of tiny on hgx-h100-8, 8 devices: fits, ")
    assert len(repr(prediction)) < 200


def test_notebooks_show_escaped_html(prediction: Prediction) -> None:
    named = predict(MODEL.model_copy(update={"name": "a<b>"}), Plan(dp_shard=8, seq_len=256), CLUSTER)
    assert "a&lt;b&gt;" in named._repr_html_()
    assert prediction._repr_html_().startswith("<p><b>FITS</b> tiny on hgx-h100-8: ")


@pytest.mark.parametrize("name", ["plot_memory", "plot_timeline"])
def test_pictures_are_shown_and_saved_alike_each_time(name: str, prediction: Prediction, tmp_path: Path) -> None:
    picture = getattr(prediction, name)()
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == picture._repr_svg_()
    with pytest.raises(InputError, match="not a picture format"):
        picture.save(str(tmp_path / "picture.gif"))


def test_the_memory_picture_names_the_verdict(prediction: Prediction) -> None:
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters
        text = prediction.plot_memory().svg()
    assert f"{prediction.verdict.upper()}: tiny on hgx-h100-8, {prediction.needs}" in text


# --- arguments


def test_every_unknown_argument_and_wrong_type_is_told_with_the_nearest_names() -> None:
    with pytest.raises(ArgumentError) as error:
        predict("llama3-8b", Plan(), cluster=3, advice=True)  # type: ignore[arg-type,call-arg]
    assert faults(error) == [
        "predict(advice=): unknown argument (did you mean advise?)",
        'predict(model=): is "llama3-8b" (Model.load(...))',
        "predict(cluster=): is 3 (Cluster.load(...))",
    ]
    assert isinstance(error.value, TypeError)
    assert isinstance(error.value, ValueError)


def test_a_missing_argument_beside_its_misspelt_name_is_not_told_twice() -> None:
    with pytest.raises(ArgumentError) as error:
        search(MODEL, CLUSTER, seqlen=8192)  # type: ignore[call-arg]
    assert faults(error) == [
        "search(seqlen=): unknown argument (did you mean seq_len?)",
        "search(global_batch=): is missing",
    ]


@pytest.mark.parametrize(
    ("noun", "fields", "near"),
    [
        (Plan, {"dp_shrad": 8, "pipeline": {"virtual_stage": 2}}, ["virtual_stages", "dp_shard"]),
        (InferencePlan, {"replicat": ["head"]}, ["replicate"]),
        (Workload, {"rates": 3}, ["rate"]),
        (Stack, {"nam": "s"}, ["name"]),
    ],
)
def test_an_inputs_misspelt_fields_have_the_nearest_names(
    noun: type[Plan], fields: dict[str, object], near: list[str]
) -> None:
    with pytest.raises(ArgumentError) as error:
        noun(**fields)  # type: ignore[arg-type]
    told = "\n".join(faults(error))
    assert all(f"did you mean {name}" in told for name in near)


# --- search and serve


def test_search_answers_as_the_study_does() -> None:
    own = Stack.load("torch-2.6-eager")
    mine = search(MODEL, CLUSTER, global_batch=16, seq_len=256, fix=FIXED, stack=own, every=True, top=2)
    fixed = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in FIXED.items()}
    space = Space(model=MODEL, clusters=(CLUSTER,), global_batch=16, seq_len=256, fixed=fixed)
    study = SearchStudy(space=space, stack=own, top=2)
    with Serial(study) as engine:
        assert mine.as_json() == searched(study, engine).as_json()
    assert {row.plan.zero for row in mine.rows} <= {2, 3}
    assert [row.outcome.status for row in mine.rows] == ["fits", "fits"]


def test_search_takes_the_command_lines_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--global-batch", "16", "--seq-len", "2048", "--json"]
    fix = {"tp": 1, "pp": 1, "cp": 1, "recompute": "none", "micro_batch_size": 2}
    main(["search", *asked, *(f"--fix={name}={value}" for name, value in fix.items()), "--jobs", "1", "--top", "4"])
    told = json.loads(capsys.readouterr().out)
    mine = search(Model.load("llama3.2-1b"), CLUSTER, global_batch=16, seq_len=2048, fix=fix, top=4)
    assert json.loads(json.dumps(mine.as_json()))["plans"] == told["plans"]


def test_search_tells_every_wrong_value_of_fix() -> None:
    wrong = {"tpp": 1, "zero": [7, 3], "dp_shard": 2, "offload": "all"}
    with pytest.raises(ArgumentError) as error:
        search(MODEL, CLUSTER, global_batch=16, seq_len=256, fix=wrong)
    assert faults(error) == [
        "search(fix=): tpp: is not a field of a plan (did you mean pp, tp or etp?)",
        "search(fix=): zero: must be at most 3; it is 7",
        (
            "search(fix=): dp_shard: follows from the others "
            "(fix dp_replicate or micro_batch_size; global_batch and seq_len give the rest)"
        ),
        "search(fix=): offload: all (one of none, activations, optimizer, states)",
    ]


def test_search_resumes_from_a_journal(tmp_path: Path) -> None:
    asked = {"global_batch": 16, "seq_len": 256, "fix": FIXED, "top": 1, "journal": tmp_path / "kept.jsonl"}
    first = search(MODEL, CLUSTER, **asked)  # type: ignore[arg-type]
    assert search(MODEL, CLUSTER, **asked).as_json() == first.as_json()  # type: ignore[arg-type]
    assert (tmp_path / "kept.jsonl").exists()


def test_serve_plays_the_workload(tmp_path: Path) -> None:
    arrivals = tmp_path / "day.csv"
    arrivals.write_text("arrival_s,prompt_tokens,output_tokens\n0,16,4\n1,16,4\n", encoding="utf-8")
    played = serve(MODEL, InferencePlan(), CLUSTER, Workload(trace=str(arrivals), warmup=0.0))
    assert (played.num_requests, played.verdict) == (2, "ok")
    drawn = serve(MODEL, InferencePlan(), CLUSTER, Workload(rate=5, num_requests=10, warmup=0.5))
    assert (drawn.num_requests, drawn.num_warmup) == (10, 5)
