"""Families of config.json: parameters as published, class defaults, --like, unknown families, presets by shape."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import Fault, ModelError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.model import Model, preset_with_shape
from simulator.spec.model.hf_config import config_fields
from simulator.spec.model.hf_config.families import family, family_names
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops.build import build_blocks
from tests.configured import configured

CONFIGS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "configs" / "families.toml").read_text()
)["config"]
TOWERS: list[dict[str, Any]] = [
    {"model": one["model"], "keys": one["config"]}
    for one in json.loads((Path(__file__).parents[1] / "data" / "configs" / "towers.json").read_text(encoding="utf-8"))
]
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """The file's keys; TOML has no null."""
    return {key: None if value == "null" else value for key, value in config["keys"].items()}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model"])
def test_a_family_has_its_published_parameters(config: dict[str, Any]) -> None:
    assert configured(keys_of(config), "config.json", "m").num_parameters == config["parameters"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model"])
def test_ops_of_a_family_hold_all_its_parameters(config: dict[str, Any]) -> None:
    """Each op says what gradients of parameters it makes: together those of its layer. Sinks are in no op, and a module of
    multi-token prediction makes the gradients of the ends once more."""
    model = configured(keys_of(config), "config.json", "m")
    blocks = build_blocks(model, Stack.load("torch-2.6-eager"), Plan(seq_len=512))
    held = {block.name: sum(op.parameter_numel for op in block.ops) for block in blocks.body}
    assert set(held) == set(model.body)
    sinks = model.num_heads if model.attention_sinks else 0
    for kind in set(model.body) - {"mtp"}:
        assert held[kind] + sinks == model.num_parameters_of(kind)


NEEDS_A_PATTERN = {"nemotron_h", "nemotron-nas", "mimo_v2_flash"}  # their classes have no default that says the layers


@pytest.mark.parametrize("name", sorted(set(family_names()) - NEEDS_A_PATTERN))
def test_a_section_that_says_only_its_model_type_is_its_class_with_all_defaults(name: str) -> None:
    fields = config_fields({"model_type": name}, "config.json: text_config", "m", nested=True)
    model = Model.parse(fields, "config.json", ModelError)
    assert "the file does not say them" in model.sources["defaults"]
    assert family(name).config_class in model.sources["defaults"]


def test_llava_says_what_its_text_config_leaves_to_the_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llava-hf/llava-1.5-7b-hf: vocabulary and length differ from LlamaConfig's, so nothing else is written."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llava", "text_config": text, "tie_word_embeddings": False}))
    # Llama 2 7B with 64 more rows at each end
    assert Model.load(file).num_parameters == 6_738_415_616 + 2 * 64 * 4096
    assert main(["predict", "--model", str(file), "--recompute", "full"]) == ExitCode.OK
    told = [
        line for line in capsys.readouterr().err.splitlines() if "LlamaConfig's" in line and "hidden_size 4096" in line
    ]
    assert len(told) == 1


def test_a_file_without_its_sizes_is_refused_with_the_defaults_of_its_class() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "hidden_size"} | {"model_type": "llama"}
    with pytest.raises(ModelError, match=r"hidden_size: is missing \(a positive integer; LlamaConfig's own is 4096\)"):
        configured(bare, "config.json", "m")


def test_infinity_that_python_wrote_is_read(tmp_path: Path) -> None:
    """nvidia/NVIDIA-Nemotron-3-Super-120B-A12B's time_step_limit."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA, "time_step_limit": [0.0, float("inf")]}))
    assert Model.load(file).num_parameters == 8_030_261_248
    file.write_text(json.dumps({"model_type": "llama", **LLAMA, "hidden_size": float("inf")}))
    with pytest.raises(ModelError, match="hidden_size: inf is not a positive integer"):
        Model.load(file)


def test_an_unknown_family_names_one_that_reads_it_and_like_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    renamed = {"n_layers": 32, **{key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}}
    file.write_text(json.dumps({"model_type": "llamba", **renamed, "hyper_streams": 4, "bos_token_id": 1}))
    assert main(["predict", "--model", str(file)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "'llamba' is not known (nearest: llama" in told
    assert "--like llama reads it as that family" in told
    assert main(["predict", "--model", str(file), "--like", "llama"]) == ExitCode.OK
    told = capsys.readouterr().err
    assert "read as: llama, as --like says; n_layers is taken as num_hidden_layers; not read: hyper_streams" in told
    assert Model.load(file, like="llama").num_parameters == 8_030_261_248


def test_experts_are_read_like_a_family_with_experts_only(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "who", **LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}))
    with pytest.raises(ModelError, match="--like mixtral reads it"):
        Model.load(file)
    with pytest.raises(ModelError, match="experts of model_type 'llama' are not known"):
        Model.load(file, like="llama")
    assert Model.load(file, like="mixtral").experts is not None


def test_a_family_that_like_misspells_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "who", **LLAMA}))
    with pytest.raises(ModelError, match=r"--like lama: is not a family \(one of llama"):
        Model.load(file, like="lama")


def test_a_family_whose_keys_nobody_has_names_the_preset_nearest_in_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "rwkv5", "hidden_size": 4096, "num_hidden_layers": 32}))
    with pytest.raises(ModelError, match=r"no known family has its keys; --model (\S+) is the preset") as caught:
        Model.load(file)
    preset = str(caught.value).partition("--model ")[2].split()[0]
    assert (Model.load(preset).d_model, Model.load(preset).num_layers) == (4096, 32)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("Meta-Llama-3-8B", "llama3-8b"), ("Llama-3.1-8B", "llama3.1-8b"), ("my-own-run", "llama3")],
)
def test_a_shape_that_a_preset_has_is_named(name: str, preset: str) -> None:
    found = preset_with_shape(configured({"model_type": "llama", **LLAMA}, "config.json", name))
    assert found is not None
    assert found.startswith(preset)
    assert preset_with_shape(configured({"model_type": "llama", **LLAMA, "vocab_size": 7}, "c", name)) is None


def test_a_prediction_says_which_preset_its_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    main(["predict", "--model", str(file), "--json"])
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert any(one["what"] == "model, preset" and "this is the preset llama3" in one["detail"] for one in sources)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "qwen2_moe", "mlp_only_layers": [3]}, "mlp_only_layers: single layers without experts"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period: 0 is not a positive integer"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "layer_types: 1 entries for 32 layers"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mambo"]}, "is not a pattern of layers"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [1, 2]}, "moe_topk: .* is not the same count"),
        ({"model_type": "llama", "num_hidden_layers": 10**12}, "is more than 10000 layers"),
        ({"model_type": "mamba", "time_step_rank": "wide"}, "time_step_rank"),
        ({"model_type": "mpt", "expansion_ratio": "four"}, "expansion_ratio"),
        ({"model_type": "gpt_oss", "rope_scaling": {"factor": -1, "rope_type": "yarn", "attention_factor": 0}}, "factor"),
        ({"model_type": "minimax_m2", "scoring_func": "tanh"}, "scoring_func: 'tanh' is not known"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_taken_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        configured({**LLAMA, "moe_intermediate_size": 8, **change}, "config.json", "bad")


def faults_of(file: Path) -> tuple[Fault, ...]:
    """Why a file is refused; none where it is read."""
    try:
        Model.load(str(file))
    except ModelError as refused:
        return refused.faults
    return ()


WRONG: list[Any] = [{"a": {"b": 1}}, [[1], {"a": 1}], True, 1e308]


@pytest.mark.parametrize("config", [*CONFIGS, *TOWERS], ids=lambda config: config["model"])
def test_no_value_of_a_key_is_more_than_a_fault(config: dict[str, Any], tmp_path: Path) -> None:
    """Each key, and each of a section, with values of every type: the file is read or refused."""
    keys, file = keys_of(config), tmp_path / "config.json"
    sections: list[tuple[str, ...]] = [
        (key, inner) for key in keys if isinstance(keys[key], dict) for inner in keys[key]
    ]
    for path in [*((key,) for key in keys), *sections]:
        for wrong in WRONG:
            changed = copy.deepcopy(keys)
            section = changed[path[0]] if path[1:] else changed
            section[path[-1]] = wrong
            file.write_text(json.dumps(changed))
            assert all(fault.place.startswith(str(file)) for fault in faults_of(file)), (path, wrong)


def test_the_page_of_families_lists_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "model-families.md").read_text()
    assert [name for name in family_names() if f"`{name}`" not in page] == []
