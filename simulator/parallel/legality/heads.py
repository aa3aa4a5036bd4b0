"""Whether tp and cp come out even in a model's heads, columns and mixers."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Final

from simulator.parallel.legality.degrees import divisors
from simulator.parallel.legality.rule import ModelRule, OfModel
from simulator.spec.model.hybrid import Mamba
from simulator.spec.plan import Plan

_NARROW_MULTIPLE: Final = 16  # columns that fp8 products come in (Megatron-LM, core/ssm/mamba_mixer.py)
_KV: Final = "key-value heads"

# What tp deals out, by the words of a fault, and how many a model has of it; None: nothing to deal
_COUNTS: Final[dict[str, Callable[[OfModel], int | None]]] = {
    "heads": lambda of: of.model.num_heads if _attends(of) else None,
    _KV: lambda of: of.model.num_kv_heads if _attends(of) else None,
    "columns of the MLP": lambda of: of.model.d_ff if _has_mlp(of) else None,
    "Mamba heads": lambda of: of.model.mamba.num_heads if of.model.mamba is not None else None,
    "Mamba groups": lambda of: of.model.mamba.num_groups if of.model.mamba is not None else None,
    "columns of the shared experts": lambda of: (of.model.experts.shared_d_ff or None) if of.model.experts else None,
}


def shares_kv_heads(plan: Plan) -> bool:
    """Several ranks of tp may attend to one key-value head.

    Megatron-Core deals the joint product of Q, K and V out evenly and gathers what it made (core/transformer/attention.py,
    num_query_groups < world_size). torch's and DeepSpeed's styles view whole heads of what a rank has.
    """
    return plan.traits.core_layers


def _attends(of: OfModel) -> bool:
    return any(kind != "mamba" for kind in of.model.layer_kinds)


def _has_mlp(of: OfModel) -> bool:
    kinds = set(of.model.layer_kinds)
    return bool(kinds & {"dense_layer", "mlp"}) or (of.model.experts is None and "layer" in kinds)


def _splits(name: str, count: int, degree: int, *, shared: bool) -> bool:
    return count % degree == 0 or (name == _KV and shared and degree % count == 0)


def _nearest_tp(of: OfModel) -> str:
    """The degree next to the plan's that splits all there is."""
    shared, tp = shares_kv_heads(of.plan), of.plan.tp
    counts = {name: count for name, count_of in _COUNTS.items() if (count := count_of(of)) is not None}
    legal = [
        degree
        for degree in divisors(next(iter(counts.values())))
        if all(_splits(name, count, degree, shared=shared) for name, count in counts.items())
    ]
    return f"tp = {min(legal, key=lambda degree: (abs(degree - tp), degree))}"


def _split_rule(name: str) -> ModelRule:
    """Tp divides what the model has of one thing."""
    count_of, shared = _COUNTS[name], name == _KV

    def holds(of: OfModel) -> bool:
        if of.plan.tp == 1:
            return True
        count = count_of(of)
        return count is None or _splits(name, count, of.plan.tp, shared=shared and shares_kv_heads(of.plan))

    def equation(of: OfModel) -> str:
        multiple = ", nor is it a multiple of them" if shared and shares_kv_heads(of.plan) else ""
        return f"tp = {of.plan.tp} does not divide the model's {count_of(of)} {name}{multiple}"

    return ModelRule(where="tp", holds=holds, equation=equation, remedy=_nearest_tp)


def _swap_rule(name: str, count_of: Callable[[OfModel], int]) -> ModelRule:
    """An all-to-all of cp deals out what tp leaves of the heads."""

    def equation(of: OfModel) -> str:
        plan = of.plan
        among = f"cp × tp = {plan.cp} × {plan.tp} ranks" if plan.tp > 1 else f"cp = {plan.cp} ranks"
        return f"an all-to-all deals the model's {count_of(of)} {name} out to {among}, which does not come out even"

    return ModelRule(
        where="cp_exchange",
        applies=lambda of: of.plan.cp > 1 and of.plan.cp_exchange == "all_to_all",
        holds=lambda of: count_of(of) % (of.plan.cp * of.plan.tp) == 0,
        equation=equation,
        remedy='cp_exchange = "ring", or lower cp',
    )


def _mamba(of: OfModel) -> Mamba:
    """The model's mixer; the rules that ask for it apply where there is one."""
    if of.model.mamba is None:
        raise LookupError
    return of.model.mamba


def _swaps_mixers(of: OfModel) -> bool:
    """Mixers swap heads for tokens, and tp alone comes out even, which is reported already."""
    plan, mamba = of.plan, of.model.mamba
    return plan.cp > 1 and mamba is not None and mamba.num_heads % plan.tp == 0 and mamba.num_groups % plan.tp == 0


def _groups(of: OfModel) -> int:
    """Of a rank of tp."""
    return _mamba(of).num_groups // of.plan.tp


_BY_MEGATRON: Final = ', or data_parallel = "megatron"'
_MIXERS: Final = (  # they swap heads for tokens under context parallelism (Megatron-LM, core/ssm/mamba_context_parallel.py)
    ModelRule(
        where="tp",
        applies=lambda of: of.model.mamba is not None,
        holds=lambda of: of.plan.tp * of.plan.cp == 1 or (of.plan.traits.core_layers and _mamba(of).kind == "mamba2"),
        equation=lambda of: (
            f"{of.plan.implementation} splits no {_mamba(of).called} mixers, and tp × cp = {of.plan.tp} × {of.plan.cp}"
        ),
        remedy=lambda of: f"tp = 1, cp = 1{_BY_MEGATRON if _mamba(of).kind == 'mamba2' else ''}",
    ),
    ModelRule(
        where="precision",
        applies=lambda of: of.model.mamba is not None,
        holds=lambda of: not of.plan.narrow or _mamba(of).projected % _NARROW_MULTIPLE == 0,
        equation=lambda of: (
            f"the {_mamba(of).projected} columns of a Mamba mixer's product are not a multiple of {_NARROW_MULTIPLE}"
        ),
        remedy='precision = "bf16", or change the heads, groups or states of the mixers in the model file',
    ),
    ModelRule(
        where="cp",
        applies=_swaps_mixers,
        holds=lambda of: _mamba(of).num_heads % (of.plan.cp * of.plan.tp) == 0,
        equation=lambda of: (
            f"cp × tp = {of.plan.cp} × {of.plan.tp} does not divide the model's {_mamba(of).num_heads} Mamba heads"
        ),
        remedy=lambda of: f"cp = {gcd(_mamba(of).num_heads // of.plan.tp, of.plan.cp)}",
    ),
    ModelRule(
        where="cp",
        applies=_swaps_mixers,
        holds=lambda of: _groups(of) % of.plan.cp == 0 or of.plan.cp % _groups(of) == 0,
        equation=lambda of: (
            f"cp = {of.plan.cp} is neither a divisor nor a multiple of a rank's {_groups(of)} Mamba groups"
        ),
        remedy=lambda of: f"cp = {gcd(_groups(of), of.plan.cp)} or {_groups(of)}",
    ),
)

_ENCODERS: Final = (  # models that attend both ways, or whose head reads one token
    ModelRule(
        where="cp",
        applies=lambda of: of.model.bidirectional or of.model.num_classes > 0,
        holds=lambda of: of.plan.cp == 1,
        equation="sequences that ranks split, of a model that attends both ways or reads one token, are not modelled",
        remedy="cp = 1",
    ),
    ModelRule(
        where="seq_len",
        applies=lambda of: of.model.bidirectional and of.model.positions == "learned",
        holds=lambda of: (
            of.plan.seq_len == of.model.max_positions
            or (of.plan.seq_len < of.model.max_positions and not of.model.patch_numel)
        ),
        equation=lambda of: f"the model has {of.model.max_positions} positions, and seq_len is {of.plan.seq_len}",
        remedy=lambda of: f"seq_len = {of.model.max_positions}{'' if of.model.patch_numel else ' at most'}",
    ),
)

MODEL: Final = (
    *_ENCODERS,
    *(_split_rule(name) for name in _COUNTS),
    _swap_rule("heads", lambda of: of.model.num_heads),
    _swap_rule(_KV, lambda of: of.model.num_kv_heads),
    *_MIXERS,
)
