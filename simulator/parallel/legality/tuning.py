"""Fine-tuning and towers for images: what is frozen, how it is stored, what goes with it, and what of it is modelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulator.parallel.legality.rule import ModelRule, OfModel, PlanRule
from simulator.spec.model import ModelPart
from simulator.spec.plan import Plan
from simulator.spec.plan.peft import KEYS


def _matches(of: OfModel) -> bool:
    """Some module of the model has adapters, or some parameter is trained."""
    peft, model = of.plan.peft, of.model
    layers = zip(model.layer_numbers, model.layer_kinds, strict=True)
    ends: tuple[ModelPart, ...] = ("embedding", "head", *model.body[len(model.tower_kinds) + model.num_layers :])
    parts = dict.fromkeys([(peft.at(number), kind) for number, kind in layers] + [(peft.at(None), end) for end in ends])
    each = [(own, name) for own, part in parts for name, _ in model.parameter_shapes(part)]
    if peft.pairs or peft.method == "ia3":
        return any(own.adapts(name.removesuffix(".weight")) for own, name in each)
    return peft.adds or any(own.trains(name) for own, name in each)


def _has_keys(of: OfModel) -> bool:
    """Some layer has keys and values of its own, which a prefix stands ahead of."""
    names = {name for part in of.model.body for name, _ in of.model.parameter_shapes(part)}
    return not names.isdisjoint(KEYS)


def _alone(where: str, what: str, remedy: str, holds: Callable[[Plan], bool]) -> ModelRule:
    """What is not modelled beside a tower."""
    remedy += ", or --images 0: the language model alone"
    equation = f"a tower for images with {what} is not modelled"
    return ModelRule(where=where, applies=lambda of: of.model.image_tokens > 0, holds=lambda of: holds(of.plan), equation=equation, remedy=remedy)  # fmt: skip


PLAN: Final = (
    PlanRule(
        where="adapter_master_dtype",
        applies=lambda plan: plan.peft.master is not None and plan.precision.master != plan.peft.master,
        holds=lambda plan: plan.traits.whole_modules and plan.zero == 0 and plan.tp * plan.pp == 1,
        equation="pairs that are stored wider than what else is trained are modelled where each GPU holds whole modules",
        remedy='data_parallel = "ddp", zero = 0, tp = pp = 1; or master_dtype = "fp32"',
    ),
    PlanRule(
        where="base_weights",
        holds=lambda plan: plan.peft.base in (None, "compute") or plan.peft.adds,
        equation=lambda plan: (
            f"weights that are trained are not stored as {plan.peft.base}, and peft is {plan.peft.method}"
        ),
        remedy='peft = "lora", or no base_weights',
    ),
    PlanRule(
        where="base_weights",
        holds=lambda plan: plan.peft.method != "qlora" or plan.peft.base not in ("compute", "fp32"),
        equation="qlora is LoRA beside quantised weights",
        remedy='peft = "lora", or base_weights = "nf4_double", "nf4", "gptq", "int8" or "fp8"',
    ),
    PlanRule(
        where="train_modules",
        holds=lambda plan: not plan.peft.trained or plan.peft.adds,
        equation=lambda plan: f"all modules are trained where peft is {plan.peft.method}",
        remedy='peft = "lora", or no train_modules',
    ),
    PlanRule(
        where="freeze_modules",
        holds=lambda plan: not plan.peft.frozen or not plan.peft.adds,
        equation=lambda plan: f"all modules are frozen where peft is {plan.peft.method}",
        remedy='no freeze_modules, or peft = "none"',
    ),
    PlanRule(
        where="base_weights",
        applies=lambda plan: plan.narrow,
        holds=lambda plan: not plan.peft.quantised,
        equation=lambda plan: f"{plan.peft.stored} weights in {plan.precision.compute} products are not modelled",
        remedy='precision = "bf16", or base_weights = "compute"',
    ),
    PlanRule(
        where="mixed_units",
        applies=lambda plan: plan.mixes_units,
        holds=lambda plan: not plan.peft.quantised,
        equation=lambda plan: (
            f"weights in {plan.peft.stored} share no flat vector with adapters, which have another dtype"
        ),
        remedy="no mixed_units: adapters are units of their own, or no base_weights",
    ),
    PlanRule(
        where="zeropp",
        applies=lambda plan: plan.peft.any,
        holds=lambda plan: not plan.deepspeed.zeropp.any,
        equation="ZeRO++ with frozen weights is not modelled",
        remedy="no zeropp",
    ),
    PlanRule(
        where="peft",
        applies=lambda plan: plan.peft.method == "prefix",
        holds=lambda plan: plan.cp == 1,
        equation="keys and values ahead of a sequence that ranks split are not modelled",
        remedy="cp = 1",
    ),
)

MODEL: Final = (
    ModelRule(
        where="peft",
        holds=lambda of: of.plan.peft.last_layer < of.model.num_layers,
        equation=lambda of: f"layer {of.plan.peft.last_layer} of a model of {of.model.num_layers}, numbered from 0",
        remedy=lambda of: f"layers.0-{of.model.num_layers - 1} at most",
    ),
    ModelRule(
        where="peft",
        applies=lambda of: of.plan.peft.any,
        holds=_matches,
        equation=lambda of: (
            f"the model has no {' or '.join(of.plan.peft.words)}" if of.plan.peft.adds else "nothing is left to train"
        ),
        remedy="lora_targets = all, attention or mlp; fewer freeze_modules",
    ),
    ModelRule(  # peft/tuners/prefix_tuning/model.py: a prefix's keys and values are equally wide, latent attention's are not
        where="peft",
        applies=lambda of: of.plan.peft.method == "prefix",
        holds=_has_keys,
        equation="no layer of the model projects keys and values that a prefix could stand ahead of",
        remedy='peft = "lora"; prefixes go with multi-head and grouped-query attention',
    ),
    ModelRule(
        where="seq_len",
        holds=lambda of: of.model.image_tokens <= of.plan.seq_len,
        equation=lambda of: (
            f"the images of a sequence take {of.model.image_tokens} tokens, and seq_len is {of.plan.seq_len}"
        ),
        remedy=lambda of: f"seq_len = {of.model.image_tokens} at least, fewer --images, a smaller --image-size",
    ),
    _alone("tp", "tensor parallelism", "tp = 1", lambda plan: plan.tp == 1),
    _alone("cp", "context parallelism", "cp = 1", lambda plan: plan.cp == 1),
    _alone("recompute", "each k-th layer recomputed", "recompute = full", lambda p: p.recompute.mode != "every_k"),
    _alone(
        "offload", "activations off the GPU", "offload.activations = none", lambda p: p.offload.activations == "none"
    ),
    _alone("mixed_units", "adapters in FSDP1's flat vectors", "no mixed_units", lambda plan: not plan.mixes_units),
    _alone(
        "data_parallel",
        "a framework's own model code",
        "fsdp2, ddp, deepspeed or megatron",
        lambda plan: not plan.traits.own_model_code or plan.traits.core_layers or plan.traits.zero_engine,
    ),
)
