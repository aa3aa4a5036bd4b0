"""Whatever stands in a plan's file, its reader answers with a plan or with faults; and every setting is accounted for."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simulator.base.errors import InputError
from simulator.formats.readers import PLAN_FORMATS
from simulator.formats.readers.plans import plan_fields, read_plan
from simulator.formats.readers.plans.options import megatron_arguments, options_of
from simulator.parallel.legality import check
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from tests.examples import examples

FILES = sorted((Path(__file__).resolve().parents[1] / "data" / "plans").iterdir())
LAUNCHERS = {"--jobid", "--master_addr", "--max_restarts", "--nnodes", "--node_rank", "--nproc_per_node", "--rdzv_backend",
             "--rdzv_endpoint", "--tee"}  # fmt: skip
MODEL = Model.load("llama2-7b")
GIVEN: dict[str, Any] = {"seq_len": 1024}

pieces = st.sampled_from(
    ("", "0", "-1", "1e9", "nan", "null", "true", '"auto"', "auto", "$X", "${X:-", "$((1/0))", "$(ls)", "(", ")", "'", '"',
     "\\", "\n", "#", "{", "}", "[", "]", "=", ":", "--", "--bf16", "--seq-length", "&a", "*a", "<<EOF", "\x00", "é", "9" * 40,
     "if", "then", "fi", "done", "-", ",", "|", ";", "!")
)  # fmt: skip
values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8),
    st.sampled_from(("auto", "cpu", "nvme", "AdamW", "full", "fp8", "1F1B", "op", "always", "none")),
    st.lists(st.integers(0, 5), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


def answered(text: str, form: str | None, given: dict[str, Any] = GIVEN, num_devices: int = 16) -> None:
    """Read, complete, validate: nothing but faults may come out where it is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan"
        file.write_text(text, encoding="utf-8", errors="replace")
        try:
            draft = read_plan(file, form, given=given)
            fields = plan_fields(draft, num_devices, given, draft.model if isinstance(draft.model, Model) else MODEL)
            check(Plan.model_validate(fields))
        except (InputError, ValidationError):
            return


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real file with pieces put in, taken out or doubled."""
    text = draw(st.sampled_from(FILES)).read_text()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from((0, 1, 5, 40))))
        text = text[:start] + draw(st.one_of(pieces, st.just(text[start:end] * 2))) + text[end:]
    return text


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        here = found
        for part in path:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                break
        else:
            here[last] = value
    return found


def tables(names: frozenset[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(names)), values, max_size=8)


@given(damaged(), st.sampled_from((None, *PLAN_FORMATS)))
@examples(200, ci=100)
def test_a_damaged_file_is_answered(text: str, form: str | None) -> None:
    answered(text, form)


@given(tables(options_of("deepspeed").known))
@examples(100, ci=50)
def test_any_deepspeed_configuration_is_answered(flat: dict[str, Any]) -> None:
    answered(json.dumps(nested(flat)), "deepspeed")


@given(tables(options_of("accelerate").known))
@examples(100, ci=50)
def test_any_accelerate_configuration_is_answered(flat: dict[str, Any]) -> None:
    answered(json.dumps(nested(flat)), "accelerate")  # JSON is YAML


@given(tables(options_of("torchtitan").known))
@examples(100)
def test_any_torchtitan_job_is_answered(flat: dict[str, Any]) -> None:
    answered(json.dumps(nested(flat)), "torchtitan")


@given(st.sampled_from(("transformers", "axolotl", "llama-factory", "torchtune")), st.data())
@examples(120, ci=80)
def test_any_fine_tuning_configuration_is_answered(form: str, data: st.DataObject) -> None:
    answered(json.dumps(nested(data.draw(tables(options_of(form).known)))), form)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(megatron_arguments().known)), st.sampled_from(("", "1", "2", "8", "adam", "0.5"))
        )
    )
)
@examples(150)
def test_any_megatron_arguments_are_answered(options: list[tuple[str, str]]) -> None:
    answered("--micro-batch-size 1 " + " ".join(f"{name} {value}" for name, value in options), "megatron")


@given(st.lists(st.sampled_from(sorted(megatron_arguments().known)), unique=True, max_size=12))
@examples(60)
def test_every_argument_is_accounted_for(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan"
        file.write_text("t.py --micro-batch-size 1 " + " ".join(f"{name} 1" for name in names))
        draft = read_plan(file)
    assert {setting.name for setting in draft.settings} >= {"--micro-batch-size", *names}


def test_every_setting_of_the_files_is_accounted_for() -> None:
    for file in FILES:
        told = {setting.name.rpartition(".")[2] for setting in read_plan(file).settings}
        text = file.read_text()
        if file.suffix in (".sh", ".args"):
            stated = set(re.findall(r"(?<=\s)--[a-z][\w-]*", re.sub(r"#.*?\n", "\n", text))) - LAUNCHERS
        elif file.suffix == ".toml":
            stated = {key for table in tomllib.loads(text).values() for key in table}
        else:
            continue
        assert stated <= told, (file.name, stated - told)
