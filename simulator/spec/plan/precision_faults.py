"""What contradicts a plan's fp8 and the layers it keeps in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.base.errors import Fault

if TYPE_CHECKING:
    from simulator.spec.plan.plan import Plan


def precision_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """Fields of narrow products beside a precision, an implementation or a recipe that has none of them."""
    yield from _ends_faults(plan, place)
    yield from _fp8_faults(plan, place)


def _ends_faults(plan: Plan, place: str) -> Iterator[Fault]:
    if plan.first_layers_bf16 + plan.last_layers_bf16 and not plan.narrow:
        problem = f"layers stay in bf16 where the others' products are narrower, and the precision is {plan.precision}"
        yield Fault(place=f"{place}: first_layers_bf16", problem=problem, remedy='precision = "fp8" or "nvfp4", or 0')


def _fp8_faults(plan: Plan, place: str) -> Iterator[Fault]:
    if plan.precision != "fp8":
        for name, given in (("fp8_recipe", plan.fp8_recipe is not None), ("fp8_all_gather", plan.fp8_all_gather)):
            if given:
                problem = f"it is of fp8 products, and the precision is {plan.precision}"
                yield Fault(place=f"{place}: {name}", problem=problem, remedy=f'precision = "fp8", or no {name}')
        return
    if plan.fp8_recipe == "rowwise" and plan.implementation == "megatron":
        remedy = 'fp8_recipe = "delayed", "tensorwise", "blockwise" or "mxfp8"'
        yield Fault(place=f"{place}: fp8_recipe", problem="Transformer Engine scales no rows", remedy=remedy)
    if not plan.fp8_all_gather:
        return
    if plan.first_layers_bf16 + plan.last_layers_bf16:
        problem = "layers of another precision among those gathered in fp8 are not modelled"
        yield Fault(
            place=f"{place}: fp8_all_gather", problem=problem, remedy="fp8_all_gather = false, or no such layers"
        )
    where = f"{place}: fp8_all_gather"
    if (plan.implementation, plan.zero) not in (("fsdp2", 2), ("fsdp2", 3), ("megatron", 1)):
        problem = f"{plan.implementation} with zero = {plan.zero} gathers no fp8"
        yield Fault(place=where, problem=problem, remedy='data_parallel = "fsdp2", or "megatron" with zero = 1')
    if plan.implementation == "fsdp2" and plan.fp8_recipe not in (None, "tensorwise"):
        problem = f"FSDP2 gathers fp8 that is scaled by tensor, not {plan.fp8_recipe}"
        yield Fault(place=where, problem=problem, remedy='fp8_recipe = "tensorwise"')
    elif plan.fp8_recipe in ("mxfp8", "blockwise"):
        problem = f"{plan.fp8_recipe} needs copies along rows and columns, so Megatron gathers 16 bits and casts them on arrival"
        yield Fault(place=where, problem=problem, remedy="fp8_all_gather = false")
