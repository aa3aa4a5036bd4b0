"""A tower for images: what it goes with, and whether its tokens fit into a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulator.parallel.legality.rule import ModelRule, OfModel
from simulator.spec.plan import Plan

_WITHOUT: Final = "--images 0 trains the language model alone"


def _alone(where: str, holds: Callable[[Plan], bool], what: str, remedy: str) -> ModelRule:
    """What is not modelled beside a tower."""
    return ModelRule(
        where=where,
        applies=lambda of: of.model.sees is not None,
        holds=lambda of: holds(of.plan),
        equation=f"a tower for images with {what} is not modelled",
        remedy=f"{remedy}, or {_WITHOUT}",
    )


def _taken(of: OfModel) -> int:
    tower = of.model.sees
    return 0 if tower is None else tower.images * tower.image_tokens


MODEL: Final = (
    ModelRule(
        where="seq_len",
        holds=lambda of: _taken(of) <= of.plan.seq_len,
        equation=lambda of: f"the images of a sequence take {_taken(of)} tokens, and seq_len is {of.plan.seq_len}",
        remedy=lambda of: f"seq_len = {_taken(of)} at least, fewer --images, a smaller --image-size",
    ),
    _alone("tp", lambda plan: plan.tp == 1, "tensor parallelism", "tp = 1"),
    _alone("cp", lambda plan: plan.cp == 1, "context parallelism", "cp = 1"),
    _alone(
        "recompute",
        lambda plan: plan.recompute.mode != "every_k",
        "each k-th layer recomputed",
        'recompute = "full"',
    ),
    _alone(
        "offload_activations",
        lambda plan: plan.offload.activations == "none",
        "activations off the GPU",
        'offload_activations = "none"',
    ),
    _alone(
        "mixed_units",
        lambda plan: not plan.mixes_units,
        "adapters in FSDP1's flat vectors",
        "no mixed_units",
    ),
    _alone(
        "data_parallel",
        lambda plan: not plan.traits.own_model_code or plan.traits.core_layers or plan.traits.zero_engine,
        "this implementation",
        "data_parallel = fsdp2, ddp or megatron",
    ),
)
