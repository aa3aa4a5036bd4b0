"""Speculative decoding: tokens that are guessed cheaply, and verified together in one step of the model.

A step verifies k guesses of each sequence and adds a token of its own. Where each guess is accepted with probability a,
independently, a step yields 1 + a + … + a^k = (1 - a^(k+1)) / (1 - a) tokens of a sequence on average (Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192, equation 1). Everything here counts
that mean: the queue sees steps of one token each, which take a verifying step, and the guesses before it, divided by it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from simulator.base.errors import Fault
from simulator.spec.model import Model
from simulator.studies.serving.kernels import WEIGHT_BITS
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import StageShard, kv_bytes_per_token, stage_shards, weight_bytes


def tokens_a_step(guesses: int, acceptance: float) -> float:
    """What a step yields of a sequence, on average."""
    return sum(acceptance**n for n in range(guesses + 1))


def draft_plan(plan: InferencePlan) -> InferencePlan:
    """The draft model's own: as the plan's engines, without guesses of its own."""
    return plan.model_copy(update={"speculative": "none", "draft_model": None, "replicate": ()})


def held_besides(model: Model, plan: InferencePlan, shard: StageShard) -> tuple[int, int]:
    """(bytes of weights, bytes a cached token) on a GPU, of what makes the guesses."""
    if plan.speculative == "draft" and plan.draft_model is not None:
        (draft,) = stage_shards(Model.load(plan.draft_model), draft_plan(plan))
        return weight_bytes(draft, plan), kv_bytes_per_token(draft, plan)
    if plan.guesses_by_a_layer:
        # one layer as the last, and the product that joins the last state with the new token's embedding; tables are shared
        layer = shard.part.model_copy(update={"num_layers": 1, "chunks": (shard.layers[-1:],)})
        narrow = sum(prod(shape) for _, shape in layer.parameter_shapes(layer.layer_kinds[-1]))
        joined = 2 * model.d_model**2 // plan.tp
        each = kv_bytes_per_token(replace(shard, layers=shard.layers[-1:]), plan)
        return int((narrow + joined) * WEIGHT_BITS[plan.weights] / 8), each
    return 0, 0


def speculation_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Faults of a plan's speculative decoding."""
    given = {name for name in ("draft_tokens", "acceptance", "draft_model") if name in plan.model_fields_set}
    if plan.speculative == "none":
        given -= {name for name in given if getattr(plan, name) in (None, InferencePlan.model_fields[name].default)}
        remedy = 'speculative = "draft", "eagle", "mtp" or "ngram", or leave it out'
        return [
            Fault(f"inference: {name}", f"{getattr(plan, name)!r}, and nothing is guessed", remedy)
            for name in sorted(given)
        ]
    faults = []
    if plan.acceptance is None:
        problem = "decides what guesses are worth, and depends on model and texts"
        faults.append(Fault("inference: acceptance", problem, "the share of guesses accepted, as 0.7"))
    if plan.pp > 1:
        faults.append(Fault("inference: speculative", f"guesses over pp = {plan.pp} stages are not modelled", "pp = 1"))
    if plan.speculative == "mtp" and not model.mtp_layers:
        problem = f"{model.name} has no module of multi-token prediction"
        faults.append(Fault("inference: speculative", problem, '"draft", "eagle" or "ngram"'))
    return [*faults, *_draft_faults(plan, model)]


def _draft_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    place = "inference: draft_model"
    if plan.speculative != "draft":
        return [Fault(place, "guesses nothing", 'speculative = "draft", or leave it out')] if plan.draft_model else []
    if plan.draft_model is None:
        return [Fault(place, "is not given", "a small model with the same vocabulary")]
    draft = Model.load(plan.draft_model)
    faults = []
    if draft.vocab_size != model.vocab_size:
        problem = f"{draft.name} has {draft.vocab_size} tokens, {model.name} has {model.vocab_size}"
        faults.append(Fault(place, problem, "a model with the same vocabulary"))
    if draft.num_heads % plan.tp or draft.d_ff % plan.tp:
        problem = f"tp = {plan.tp} does not divide {draft.name}'s {draft.num_heads} heads and {draft.d_ff} columns"
        faults.append(Fault(place, problem, "another model, or tp"))
    return faults
