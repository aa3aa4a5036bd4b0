"""--recipe: a fine-tuning run by its usual name, with the usual settings of such runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from simulator.base.errors import Fault, InputError
from simulator.base.schema import nearest
from simulator.spec.model.families import preset_of

_Command = TypeVar("_Command", bound=Callable[..., Any])

# What guides of transformers, TRL, axolotl and torchtune set where nothing speaks against it
_COMMON: Final = {"seq_len": "2048", "recompute": "full", "stack": "transformers-2024"}
RECIPES: Final = {name: {**_COMMON, "peft": name} for name in ("full", "lora", "qlora", "dora", "ia3", "prefix")}
_PAIRS, _ROLLOUT = "--recipe full or lora with --reference base", "--recipe full or lora with --rollout FILE"
_OTHERWISE: Final = {"dpo": _PAIRS, "kto": _PAIRS, "grpo": _ROLLOUT, "ppo": _ROLLOUT, "sft": "full, lora or qlora"}
_ALONE: Final = re.compile(r"1\s*[x×*]")


def recipe_option(function: _Command) -> _Command:
    """--recipe."""
    what = (
        "Fine-tune: all weights, or adapters beside frozen ones (peft's file says which); what such runs usually set."
    )
    return click.option("--recipe", metavar=f"{'|'.join(RECIPES)}|adapter_config.json", help=what)(function)


def with_recipe(flags: dict[str, Any], *, alone: bool) -> list[Fault]:
    """Fill a command's unset flags from --recipe; returns its faults. alone: no file states a model."""
    recipe, faults = flags.pop("recipe"), list[Fault]()
    if recipe is None:
        return faults
    if recipe.endswith(".json"):
        from simulator.formats.readers.adapter_config import read_adapter_config

        try:
            found = {**_COMMON, **read_adapter_config(Path(recipe))}
        except InputError as exc:
            return [*faults, *exc.faults]
        base = found.pop("model", "")
        if alone and base and flags["model"] is None:
            flags["model"], problem = preset_of(base), f"{base[:60]} is not a preset"
            if flags["model"] is None:
                where, remedy = f"{recipe}: base_model_name_or_path", "--model NAME, or its config.json"
                faults.append(Fault(place=where, problem=problem, remedy=remedy))
        return _filled(flags, found, faults)
    recipe = recipe.lower() if recipe.lower() in RECIPES else recipe
    if recipe not in RECIPES:
        remedy = _OTHERWISE.get(recipe.lower()) or nearest(recipe, RECIPES)
        return [*faults, Fault(place="--recipe", problem=f"no recipe is called {recipe!r}", remedy=remedy)]
    return _filled(flags, RECIPES[recipe], faults)


def _filled(flags: dict[str, Any], recipe: Mapping[str, str], faults: list[Fault]) -> list[Fault]:
    """Values of unset flags from the recipe; nothing is sharded on one GPU."""
    alone = {"zero": "0", "data_parallel": "ddp"} if _ALONE.match(flags["cluster"] or "") else {}
    for name, value in {**recipe, **alone}.items():
        if flags.get(name) is None:
            flags[name] = value
    return faults
