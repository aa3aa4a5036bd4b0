"""Layers dealt to stages by what they compute, the head with them."""

from __future__ import annotations

from dataclasses import replace

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.schedules import EQUAL, Split


def dealt(model: Model, plan: Plan) -> Split:
    """How a model's layers are dealt to the plan's stages: as the plan says, else by cost where its implementation does so."""
    if plan.split != EQUAL or plan.pp == 1 or not plan.traits.balances_stages or plan.pipeline.virtual_stages > 1:
        return plan.split
    attention = 4 * model.num_heads * model.head_dim * model.d_model
    layer = attention + 3 * model.d_ff * model.d_model
    return replace(EQUAL, explicit=by_cost(model.num_layers, layer, model.vocab_size * model.d_model, plan.pp))


def by_cost(num_layers: int, layer: int, head: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: a stage takes layers until it and those before it have their share of the cost or more.

    The layer that passes it stays (nanotron, src/nanotron/models/base.py, build_model; what exactly fills it ends it too, by the
    pace of the stack's calibration runs). Where the layers pass all shares
    but the head's own the stages behind hold none.
    """
    counts, total, passed, stage = [0] * num_stages, num_layers * layer + head, 0, 0
    for _ in range(num_layers):
        counts[stage] += 1
        passed += layer
        if passed * num_stages >= total * (stage + 1):
            stage += 1
    return tuple(counts)
