"""Published files as they are: each is predicted, or refused with a command that works.

The files lie beside the checkout (shared/data/real_inputs); where they do not, these tests are skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulator.base.errors import InputError
from simulator.formats.study import PlanFile, Study, read_study
from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.spec.software.stack import Stack
from simulator.work.ops.build import build_blocks

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "real_inputs"
MODELS = sorted([*REAL.glob("hf/*.json"), *REAL.glob("mlc/*.json")])
JOBS = sorted(REAL.glob("titan/*.toml"))
NO_DECODER = {"rwkv5_3b.json", "snowflake-arctic-embed-m.json", "models_flux_train_configs_debug_model.toml"}

needs_files = pytest.mark.skipif(not MODELS, reason=f"no published files in {REAL}")


def study(file: Path, flags: dict[str, str]) -> Study:
    """What `predict` would read of a file on eight nodes, with flags."""
    plan = None if file in MODELS else PlanFile(path=file)
    asked = {"model": str(file)} if file in MODELS else {}
    return read_study(None, {"cluster": "hgx-h100-8", "nodes": "8", **asked, **flags}, {}, (), plan)


def commands(error: InputError) -> list[dict[str, str]]:
    """The flags that an error names to go on with."""
    found = re.findall(r"--(like|model) ([\w.-]+)", str(error))
    return [{flag: value} for flag, value in found if flag == "like" or value in preset_names()]


@needs_files
@pytest.mark.parametrize("file", [*MODELS, *JOBS], ids=lambda file: file.name)
def test_a_published_file_is_read_or_refused_with_a_command_that_works(file: Path) -> None:
    try:
        asked = study(file, {})
    except InputError as error:
        assert file.name in NO_DECODER
        first = next(iter(commands(error)))
        asked = study(file, first)
    stack = asked.stack or Stack.load(asked.plan.stack)
    assert build_blocks(asked.model, stack, asked.plan).body


@needs_files
def test_nine_in_ten_are_read_without_a_flag() -> None:
    assert len(NO_DECODER) <= 0.1 * len([*MODELS, *JOBS])


# Parameters of published files whose owners print them: config.json of the folder hf, and billions with the digits printed.
PRINTED = {
    "Qwen--Qwen3-235B-A22B_config.json": "235",
    "Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json": "480",
    "Qwen--Qwen3-VL-30B-A3B-Instruct_config.json": "31",
    "MiniMaxAI--MiniMax-M2.5_config.json": "229",
    "deepseek-ai--DeepSeek-V4-Flash_config.json": "290",  # 284B and a module of multi-token prediction of 6.5B
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json": "401",
    "meta-llama--Meta-Llama-3.1-405B_config.json": "406",
    "mistralai--Mixtral-8x22B-v0.1_config.json": "141",
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1_config.json": "49.9",
    "zai-org--GLM-5_config.json": "754",
}


@needs_files
@pytest.mark.parametrize("name", PRINTED)
def test_a_published_file_has_the_parameters_that_its_owners_print(name: str) -> None:
    digits = len(PRINTED[name].partition(".")[2])
    assert f"{Model.load(REAL / 'hf' / name).num_parameters / 1e9:.{digits}f}" == PRINTED[name]


@needs_files
def test_without_its_tower_a_model_has_the_parameters_of_its_language_model() -> None:
    """Qwen3-VL-30B-A3B's is Qwen3-30B-A3B, whose owners print 30.5."""
    model = Model.load(REAL / "hf" / "Qwen--Qwen3-VL-30B-A3B-Instruct_config.json")
    assert model.tower is not None
    assert f"{model.model_copy(update={'tower': None}).num_parameters / 1e9:.1f}" == "30.5"
