"""Layouts: what one engine may look like. Replicas and pools are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

from simulator.base.errors import Fault, InputError, PlanError
from simulator.studies.serving import InferencePlan, check
from simulator.studies.serving.legal import legal_tp
from simulator.studies.serving_search.study import DEGREES, ServingSearch

Role = Literal["both", "prefill", "decode"]  # what an engine computes of a request
_SHOWN: Final = 10
_MOST_STAGES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Plans of one engine. engines: that may do both, or only decode; prompts: that may only compute prompts.

    counts: how many of each role may run (None: any number). num_refused: layouts that no plan may have.
    """

    engines: tuple[InferencePlan, ...]
    prompts: tuple[InferencePlan, ...]
    counts: Mapping[Role, tuple[int, ...] | None]
    num_refused: int


def layouts(study: ServingSearch) -> Layouts:
    """Those of the study, smaller engines first. Raises PlanError where none is legal, with the faults of the first."""
    faults: list[Fault] = []
    engines, refused = _legal(study, "", faults)
    pooled, fixed = study.disaggregated != "no" and study.hands_over, study.fixed
    prompts, refused_too = _legal(study, "prefill_", faults) if pooled else ((), 0)
    if not engines or (study.disaggregated == "yes" and not prompts):
        problem = f"an engine of the degrees that are given takes more than {study.largest_engine} GPUs"
        none = Fault(place="inference: degrees", problem=problem, remedy="smaller degrees, or more nodes")
        raise PlanError(list(dict.fromkeys(faults))[:_SHOWN] or none)
    return Layouts(
        engines=engines,
        prompts=prompts,
        counts={"both": fixed.get("dp"), "decode": fixed.get("dp"), "prefill": fixed.get("prefill_dp")},
        num_refused=refused + refused_too,
    )


def key_of(layout: InferencePlan) -> str:
    """Equal for equal layouts."""
    return layout.model_dump_json(exclude_defaults=True)


def of_key(key: str) -> InferencePlan:
    """The layout of a key."""
    return InferencePlan.model_validate_json(key)


def _legal(study: ServingSearch, prefix: str, faults: list[Fault]) -> tuple[tuple[InferencePlan, ...], int]:
    """Legal layouts of a pool, and how many were refused; why is added to the faults."""
    found: dict[str, InferencePlan] = {}
    refused = 0
    for plan in _candidates(study, prefix):
        try:
            check(plan, study.model, study.seen)
        except InputError as exc:
            faults += exc.faults
            refused += 1
            continue
        found[key_of(plan)] = plan
    return tuple(sorted(found.values(), key=lambda one: (one.engine_devices, one.pp, key_of(one)))), refused


def _candidates(study: ServingSearch, prefix: str) -> Iterator[InferencePlan]:
    """Every engine that is small enough. Fixed degrees hold for both pools, unless that of prompts has its own."""
    fixed, most = study.fixed, study.largest_engine
    others = {name: values for name, values in fixed.items() if name not in DEGREES}
    others |= {"pcp": fixed["prefill_pcp"]} if prefix and "prefill_pcp" in fixed else {}
    splits: tuple[Any, ...] = fixed.get("experts") or (("split", "dealt") if study.model.experts else ("split",))
    for values in product(*others.values()):
        base = study.plan.model_copy(update=dict(zip(others, values, strict=True)) | _ALONE)
        for split in splits:
            for tp in fixed.get(f"{prefix}tp") or fixed.get("tp") or legal_tp(study.model, dealt=split == "dealt"):
                for pp in fixed.get(f"{prefix}pp") or fixed.get("pp") or _stages(study, most // tp):
                    if tp * pp * base.pcp <= most and (split == "split" or tp > 1 or "experts" in fixed):
                        yield study.resolved(_engine(base, tp=tp, pp=pp, experts=split))


_ALONE: Final = {"dp": 1, "prefill_tp": 1, "prefill_pp": 1, "prefill_pcp": 1, "prefill_dp": 0}


def _engine(base: InferencePlan, **degrees: Any) -> InferencePlan:  # noqa: ANN401  of each field's own type
    """Without what one GPU, or slices of experts, have no use for."""
    idle: dict[str, Any] = {"replicate": ()} if degrees["tp"] == 1 else {}
    idle |= {"expert_imbalance": 1.0} if degrees["experts"] == "split" else {}
    return base.model_copy(update=degrees | idle)


def _stages(study: ServingSearch, most: int) -> list[int]:
    """1, 2, 4, 8, and what divides up to 16 nodes, as far as GPUs and layers go."""
    nodes = study.cluster.num_nodes
    divisors = {n for n in range(1, min(nodes, _MOST_STAGES) + 1) if nodes % n == 0} if nodes <= _MOST_STAGES else set()
    return sorted(pp for pp in {1, 2, 4, 8} | divisors if pp <= min(most, study.model.num_layers))
