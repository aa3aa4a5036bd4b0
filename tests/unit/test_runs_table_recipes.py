"""Published recipes beside rows that point to them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_table import recipes
from runs_table.meaning import resolve
from runs_table.recipes import published_recipe

from simulator.parallel.legality import check
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.backtest.rows import RunRow

QWEN = RunRow(
    line=2, id="a", framework="Megatron-Bridge 26.02 NeMo Container", model_name="Qwen3_30B_a3B", n_layers=48,
    d_model=2048, n_heads=32, n_kv_heads=4, d_ff=768, mlp_kind="swiglu", vocab=151_936, seq_len=4096, n_experts=128,
    top_k=8, gpu="H100-80GB-SXM", n_gpus=16, tp=1, pp=2, vpp=12, cp=1, ep=8, micro_batch=1, global_batch=512,
    precision="bf16", notes="act_ckpt/overlap/cuda-graph not in table (see recipe)", metric="step_time_s", value=1.0,
)  # fmt: skip
GPT_OSS = replace(
    QWEN, framework="Megatron-Bridge 26.04 NeMo Container", model_name="GPT OSS 120B", n_layers=36, d_model=2880,
    n_heads=64, n_kv_heads=8, d_ff=2880, gpu="GB200", n_gpus=64, pp=1, vpp=None, ep=64, micro_batch=4,
    global_batch=1280, top_k=4, vocab=201_088,
)  # fmt: skip


def _records() -> list[dict[str, str]]:
    text = Path(recipes.__file__).with_name("megatron_bridge_recipes.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize(
    ("release", "dispatcher"),
    [
        ("25.11", "all_to_all"),  # its own
        ("26.02", "deep_ep"),
        ("26.01", "deep_ep"),  # between two: the later
        ("26.06", "deep_ep"),  # gone since: the last that had it
        ("25.08", None),  # before the first
    ],
)
def test_the_recipe_of_the_release_then_the_next_then_the_last(release: str, dispatcher: str | None) -> None:
    found = published_recipe(replace(QWEN, framework=f"Megatron-Bridge {release} NeMo Container"))
    assert (found and found.dispatcher) == dispatcher


@pytest.mark.parametrize("batch", [512, 1280])
def test_of_two_recipes_in_a_release_the_one_of_the_global_batch(batch: int) -> None:
    found = published_recipe(replace(GPT_OSS, global_batch=batch))
    assert found is not None
    assert (found.global_batch, found.overlap) == (batch, batch == 1280)


@pytest.mark.parametrize(
    "fields",
    [
        {"notes": ""},
        {"act_ckpt": "full"},
        {"framework": "NeMo 25.11"},
        {"n_gpus": 16, "gpu": "A100-80GB-SXM"},
        {"model_name": "Qwen3-someone's"},
        {"n_experts": None, "top_k": None},
    ],
)
def test_a_row_that_points_nowhere_or_states_it_itself_has_none(fields: dict[str, Any]) -> None:
    assert published_recipe(replace(QWEN, **fields)) is None


def test_a_layout_of_no_recipe_takes_what_the_release_sets_for_another() -> None:
    found = published_recipe(replace(QWEN, ep=16))
    assert found is not None
    assert (found.dispatcher, found.overlap, found.cuda_graphs) == ("deep_ep", False, ("moe_router", "moe_preprocess"))
    assert published_recipe(replace(QWEN, ep=16, framework="Megatron-Bridge 26.01 NeMo Container")) is None


def test_recipes_of_the_package_recompute_deepseeks_layers_unless_exchanges_overlap() -> None:
    mixture = {
        "framework": "Megatron-Bridge 0.4.2 / Core 0.17.1 (NeMo 26.04.01)", "model_name": "deepseek-v3", "n_layers": 61,
        "d_model": 7168, "n_heads": 128, "d_ff": 2048, "vocab": 129_280, "n_experts": 256, "top_k": 8, "gpu": "B300-SXM",
        "n_gpus": 256, "tp": 8, "pp": 8, "ep": 32, "n_kv_heads": None, "vpp": None, "global_batch": 256,
    }  # fmt: skip
    row = replace(QWEN, **mixture)  # type: ignore[arg-type]
    assert resolve(row).plan.recompute.mode == "full"
    assert resolve(replace(row, act_ckpt="none")).plan.recompute.mode == "none"
    assert resolve(replace(row, n_gpus=1024, global_batch=1024)).plan.recompute.mode == "none"
    plain = replace(row, framework="Megatron-Bridge 26.04 NeMo Container", notes=f"{QWEN.notes}; variant: w/o MTP")
    assert resolve(plain).model.mtp_layers == 0 < resolve(row).model.mtp_layers


def test_a_plan_is_what_its_recipe_states() -> None:
    plan = resolve(GPT_OSS).plan
    assert (plan.experts.dispatcher, plan.experts.overlap) == ("deep_ep", True)
    assert (plan.recompute.mode, plan.recompute.modules) == ("selective", ("layernorm", "moe_act"))
    assert resolve(QWEN).plan.cuda_graphs == ("moe_router", "moe_preprocess")
    plan = resolve(replace(GPT_OSS, notes="")).plan
    assert (plan.experts.dispatcher, plan.experts.overlap, plan.recompute.mode) == ("all_to_all", False, "none")


def test_every_recipe_names_what_ships_and_none_contradicts_another() -> None:
    seen = set()
    for record in _records():
        assert Model.load(record["model"]).experts is not None
        assert Device.load(record["gpu"])
        assert record["precision"] in ("bf16", "fp8", "fp8_mx", "nvfp4")
        modules = tuple(record["recompute_modules"].split())
        graphs = tuple(record["cuda_graphs"].split())
        fields = {"dispatcher": record["dispatcher"], "cuda_graphs": graphs}
        check(Plan.model_validate({**fields, **({"recompute_modules": modules} if modules else {})}))
        facts = ("dispatcher", "overlap", "recompute_modules", "cuda_graphs", "releases")
        for release in record["releases"].split():
            key = (*(value for column, value in record.items() if column not in facts), release)
            assert key not in seen
            seen.add(key)
