"""Narrow products: beside which precision, implementation, recipe, device and software they stand."""

from __future__ import annotations

from typing import Final

from simulator.parallel.legality.rule import ClusterRule, ModelRule, OnCluster, PlanRule, Run, RunRule
from simulator.spec.plan import Plan


def _gathers_fp8(plan: Plan) -> bool:
    return plan.precision.compute == "fp8" and plan.precision.fp8_all_gather


def _of_fp8(where: str) -> PlanRule:
    """A field that says something of fp8 products only."""
    return PlanRule(
        where=where,
        holds=lambda plan: plan.precision.compute == "fp8" or plan.value(where) in (None, False),
        equation=lambda plan: f"it only applies to fp8 products, and the precision is {plan.precision.compute}",
        remedy=f'precision = "fp8", or leave {where} out',
    )


PLAN: Final = (
    PlanRule(
        where="first_layers_bf16",
        holds=lambda plan: plan.narrow or plan.precision.first_layers_bf16 + plan.precision.last_layers_bf16 == 0,
        equation=lambda plan: (
            f"layers stay in bf16 where the others' products are narrower, and the precision is {plan.precision.compute}"
        ),
        remedy='precision = "fp8" or "nvfp4", or first_layers_bf16 = 0 and last_layers_bf16 = 0',
    ),
    _of_fp8("fp8_recipe"),
    _of_fp8("fp8_all_gather"),
    PlanRule(
        where="fp8_recipe",
        applies=lambda plan: plan.precision.compute == "fp8",
        holds=lambda plan: plan.precision.fp8_recipe != "rowwise" or not plan.traits.core_layers,
        equation="Transformer Engine has no scaling by rows",
        remedy='fp8_recipe = "delayed", "tensorwise", "blockwise" or "mxfp8"',
    ),
    PlanRule(
        where="fp8_all_gather",
        applies=_gathers_fp8,
        holds=lambda plan: plan.precision.first_layers_bf16 + plan.precision.last_layers_bf16 == 0,
        equation="layers of another precision among those gathered in fp8 are not modelled",
        remedy="fp8_all_gather = false, or first_layers_bf16 = 0 and last_layers_bf16 = 0",
    ),
    PlanRule(
        where="fp8_all_gather",
        applies=_gathers_fp8,
        holds=lambda plan: plan.zero in plan.traits.gathers_fp8,
        equation=lambda plan: f"{plan.implementation} with zero = {plan.zero} cannot gather fp8",
        remedy='data_parallel = "fsdp2", or "megatron" with zero = 1',
    ),
    PlanRule(
        where="fp8_all_gather",
        applies=lambda plan: _gathers_fp8(plan) and plan.traits.shards_rows,
        holds=lambda plan: plan.precision.fp8_recipe in (None, "tensorwise"),
        equation=lambda plan: f"FSDP2 gathers fp8 that is scaled by tensor, not {plan.precision.fp8_recipe}",
        remedy='fp8_recipe = "tensorwise"',
    ),
    PlanRule(
        where="fp8_all_gather",
        applies=lambda plan: _gathers_fp8(plan) and not plan.traits.shards_rows,
        holds=lambda plan: plan.precision.fp8_recipe not in ("mxfp8", "blockwise"),
        equation=lambda plan: (
            f"{plan.precision.fp8_recipe} needs copies along rows and columns, so Megatron gathers 16 bits "
            "and casts them on arrival"
        ),
        remedy="fp8_all_gather = false",
    ),
)

MODEL: Final = (
    ModelRule(
        where="first_layers_bf16",
        holds=lambda of: (
            of.plan.precision.first_layers_bf16 + of.plan.precision.last_layers_bf16 <= of.model.num_layers
        ),
        equation=lambda of: (
            f"{of.plan.precision.first_layers_bf16} + {of.plan.precision.last_layers_bf16} layers in bf16, "
            f"and the model has {of.model.num_layers}"
        ),
        remedy=lambda of: f"first_layers_bf16 + last_layers_bf16 = {of.model.num_layers} at most",
    ),
)


def _trains_fp4(run: Run) -> bool:
    """NVFP4 is trained by Transformer Engine, on GPUs that have the units."""
    return run.plan.precision.compute != "nvfp4" or (
        bool(run.cluster.device.peak("fp4")) and run.stack.traits.narrow_by_blocks
    )


def _multiplies_blocks(run: Run) -> bool:
    """The device multiplies operands that are scaled by blocks of 128."""
    return run.cluster.device.architecture in ("hopper", "blackwell")


def _without_units(on: OnCluster) -> list[str]:
    """Dtypes in which this plan multiplies and whose products the device does not do."""
    dtypes = dict.fromkeys((on.plan.product_dtype, on.plan.compute_dtype))
    return [dtype for dtype in dtypes if not on.cluster.device.peak(dtype)]


def _other_precisions(on: OnCluster) -> str:
    """Every precision that the device has units for."""
    device = on.cluster.device
    has = [f'"{dtype}"' for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8") if device.peak(dtype)]
    return f"precision = {' or '.join(has)}, or another GPU"


CLUSTER: Final = (
    ClusterRule(
        where="precision",
        holds=lambda on: not _without_units(on),
        equation=lambda on: f"{on.cluster.device.name} has no {' or '.join(_without_units(on))} matrix units",
        remedy=_other_precisions,
    ),
)

RUN: Final = (  # products of block-scaled operands need tensor cores that read the scales, and kernels that write them
    RunRule(
        where="precision",
        applies=lambda run: run.plan.precision.compute == "nvfp4",
        holds=lambda run: run.stack.traits.narrow_by_blocks,
        equation=lambda run: f"nvfp4 products are Transformer Engine's, and {run.stack.name} has torch's own",
        remedy='stack = "megatron-core-2025", or precision = "fp8"',
    ),
    RunRule(
        where="fp8_recipe",
        applies=lambda run: run.plan.precision.fp8_recipe == "blockwise" and _trains_fp4(run),
        holds=_multiplies_blocks,
        equation=lambda run: f"Transformer Engine has no products of fp8 by blocks of 128 on {run.cluster.device.name}",
        remedy='a Hopper or Blackwell GPU, or fp8_recipe = "delayed" or "tensorwise"',
    ),
    RunRule(
        where="fp8_recipe",
        applies=lambda run: (
            run.plan.precision.fp8_recipe == "blockwise" and _trains_fp4(run) and _multiplies_blocks(run)
        ),
        holds=lambda run: run.stack.traits.narrow_by_blocks,
        equation=lambda run: f"blocks of 128 are Transformer Engine's, and {run.stack.name} has torch's own products",
        remedy='stack = "megatron-core-2025", or fp8_recipe = "tensorwise" or "rowwise"',
    ),
    RunRule(
        where="fp8_recipe",
        applies=lambda run: run.plan.precision.fp8_recipe == "mxfp8" and _trains_fp4(run),
        holds=lambda run: run.cluster.device.architecture == "blackwell",
        equation=lambda run: f"{run.cluster.device.name} has no tensor cores for block-scaled fp8",
        remedy='a Blackwell GPU, or fp8_recipe = "delayed" or "tensorwise"',
    ),
)
