"""What Megatron-Bridge's published recipes say about rows that point to them ("see recipe") instead of saying it.

megatron_bridge_recipes.csv holds, by layout and releases, the facts of scripts/performance/configs/*/*workload_base_configs.py
of github.com/NVIDIA-NeMo/Megatron-Bridge that a plan has a word for: who carries tokens to experts, whether that runs beside
another micro-batch, what is recomputed, and what CUDA graphs hold (of gpt-oss-20b its *_llm_pretrain.py). It holds no time and no memory: a recipe is read, nothing in it was measured.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from runs_table.rules import overlaps_experts, published_mixture
from simulator.studies.backtest.rows import RunRow

_Release = tuple[int, ...]
_Layout = tuple[str, ...]

_FRAMEWORK = re.compile(r"Megatron-Bridge (\d+(?:\.\d+)+)", re.IGNORECASE)
_POINTS_THERE = re.compile(r"\bsee recipe\b")
_LAYOUT = ("model", "gpu", "precision", "n_gpus", "tp", "pp", "vpp", "ep", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One published setting of a layout; `releases` are the containers that ship it."""

    layout: _Layout
    global_batch: int
    dispatcher: str
    overlap: bool
    recompute_modules: tuple[str, ...]
    cuda_graphs: tuple[str, ...]
    releases: tuple[_Release, ...]

    def plan_fields(self) -> dict[str, object]:
        """The plan's fields that the recipe states."""
        fields = {"dispatcher": self.dispatcher, "expert_overlap": self.overlap, "cuda_graphs": self.cuda_graphs}
        if not self.recompute_modules:
            return {**fields, "recompute": "none"}
        return {**fields, "recompute": "selective", "recompute_modules": self.recompute_modules}


def published_recipe(row: RunRow) -> Recipe | None:
    """The recipe of a row's model and layout; None where the row points to none, or none is published.

    It is the one of the row's own release, else of the next later (tables appear before the release that ships their
    recipe), else of the last before; among several in a release the one of the row's global batch. Releases before the
    first one listed had recipes of another form. Where no release has the layout, another of the row's own release says what it can.
    """
    named = _FRAMEWORK.search(row.framework)
    model = published_mixture(row)
    if row.act_ckpt or model is None or not named or not _POINTS_THERE.search(row.notes):
        return None
    release, degrees = _release(named[1]), (row.tp, row.pp, row.vpp, row.ep)
    sizes = (row.n_gpus, *((degree or 1) for degree in degrees), row.micro_batch)
    layout = (model.name, row.gpu.upper().split("-")[0], row.precision, *map(str, sizes))
    known = _releases()
    if release < known[0]:
        return None
    position = bisect_left(known, release)

    def rank(recipe: Recipe) -> tuple[bool, int, bool]:
        nearest = min((known.index(at) < position, abs(known.index(at) - position)) for at in recipe.releases)
        return *nearest, recipe.global_batch != row.global_batch

    return min(_recipes().get(layout, ()), key=rank, default=None) or _of_another_layout(layout, release)


def _of_another_layout(layout: _Layout, release: _Release) -> Recipe | None:
    """What the row's own release sets for another layout of the model on these GPUs in this precision.

    The one that shares most with the row's; overlap asks for a layout, and is left out.
    """
    machine = _LAYOUT.index("n_gpus") + 1
    same = [r for all_of in _recipes().values() for r in all_of if r.layout[:machine] == layout[:machine]]
    own = [recipe for recipe in same if release in recipe.releases]

    def shared(recipe: Recipe) -> int:
        return sum(mine == its for mine, its in zip(layout, recipe.layout, strict=True))

    nearest = max(own, key=shared, default=None)
    return nearest and replace(nearest, overlap=False)


# Recipes that come with the package itself, and the models of which they recompute every layer: v0.4.2,
# src/megatron/bridge/recipes/deepseek/deepseek_v3.py, deepseek_v3_pretrain_config_32nodes; Kimi K2 on the same in
# awsome-distributed-ai (kimi-k2/benchmarks/bench_kimi_k2_pretrain.py). Experts' exchanges beside a micro-batch forbid it.
_PACKAGE = re.compile(r"Megatron-Bridge 0\.\d", re.IGNORECASE)
_RECOMPUTED = ("deepseek-v3", "kimi-k2")
_PACKAGE_GPUS = 256
# awsome-distributed-ai's qwen3-235b/benchmarks/bench_qwen3_pretrain.py sets no recomputation where RECOMPUTE is empty,
# which its page calls "recompute off"; what runs is the recipe's own: v0.4.2, src/megatron/bridge/recipes/qwen/
# qwen3_moe.py, qwen3_30b_a3b_pretrain_config recomputes every layer, that of the 235B none.
_CALLED_OFF = ("qwen3-30b-a3b",)


# Models whose bridge to the package turns no fusion on, so that Megatron-Core's own defaults hold: v0.4.2,
# src/megatron/bridge/models/qwen/qwen3_moe_bridge.py and gpt_provider.py; core_v0.17.0, transformer_config.py:
# bias_activation_fusion and apply_rope_fusion are False. Llama's, DeepSeek's and Kimi's bridges set the former.
_UNFUSED = ("qwen3-30b-a3b", "qwen3-235b-a22b")


def package_stack(row: RunRow) -> dict[str, object]:
    """What of a stack the package's bridge of the row's model has otherwise."""
    model = published_mixture(row) if _PACKAGE.search(row.framework) else None
    unfused = model is not None and model.name in _UNFUSED
    return {"gated_activation": "operators", "rope": "unfused"} if unfused else {}


def package_fields(row: RunRow) -> dict[str, object]:
    """What a recipe of Megatron-Bridge's package says of the recomputation of a row that states none."""
    model = published_mixture(row)
    if model is None or overlaps_experts(row) or not _PACKAGE.search(row.framework):
        return {}
    left = row.act_ckpt == "none" and model.name in _CALLED_OFF
    unsaid = not row.act_ckpt and model.name in _RECOMPUTED and (row.n_gpus or 0) <= _PACKAGE_GPUS
    return {"recompute": "full"} if left or unsaid else {}


@cache
def _recipes() -> dict[_Layout, tuple[Recipe, ...]]:
    text = Path(__file__).with_name("megatron_bridge_recipes.csv").read_text()
    recipes = sorted(map(_recipe, csv.DictReader(text.splitlines())), key=lambda recipe: recipe.layout)
    return {layout: tuple(same) for layout, same in groupby(recipes, lambda recipe: recipe.layout)}


@cache
def _releases() -> list[_Release]:
    return sorted({at for same in _recipes().values() for recipe in same for at in recipe.releases})


def _recipe(record: dict[str, str]) -> Recipe:
    return Recipe(
        layout=tuple(record[column] for column in _LAYOUT),
        global_batch=int(record["global_batch"]),
        dispatcher=record["dispatcher"],
        overlap=record["overlap"] == "y",
        recompute_modules=tuple(record["recompute_modules"].split()),
        cuda_graphs=tuple(record["cuda_graphs"].split()),
        releases=tuple(map(_release, record["releases"].split())),
    )


def _release(text: str) -> _Release:
    return tuple(int(part) for part in text.split("."))
