"""Which plans are legal: one list of rules as data, and who asks it.

`faults` says what is wrong with a plan, its model, cluster and software as far as these are known; `unused` which fields
do nothing; `runnable` what a framework cannot run. Adding a rule is adding a `Rule` to the list of its subject: faults, the search's pruning and the judgement
of half-read studies follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

from simulator.base.errors import Fault, PlanError
from simulator.parallel.legality import blocks, degrees, experts, heads, memory, offload, precision, traffic, tuning
from simulator.parallel.legality.pipeline import PIPELINE, broken_by
from simulator.parallel.legality.rule import Case, Reads, Rule
from simulator.parallel.legality.software import SOFTWARE, Software, software_of
from simulator.parallel.legality.unused import idle_details, unused
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan

RULES: Final[tuple[Rule[Any], ...]] = (
    # the plan alone
    *degrees.PLAN,
    *experts.PLAN,
    *offload.PLAN,
    *traffic.PLAN,
    *precision.PLAN,
    *tuning.PLAN,
    *memory.PLAN,
    *blocks.PLAN,
    # with the cluster
    *degrees.CLUSTER,
    *precision.CLUSTER,
    # with the model
    *heads.MODEL,
    *precision.MODEL,
    *tuning.MODEL,
    *experts.MODEL,
    *PIPELINE,
    # with all that meets in a run
    *blocks.MODULES,
    *offload.MODELLED,
    *memory.MODELLED,
    blocks.WHOLE_BACKWARDS,
    *offload.HOSTS,
    *precision.RUN,
    *experts.RUN,
    blocks.NEAR_PEERS,
    offload.EVEN_NODES,
    # with the framework that should run it
    *SOFTWARE,
)


__all__ = [
    "RULES", "Case", "Rule", "Software", "broken", "check", "check_split", "faults", "first_fault",
    "idle_details", "runnable", "software_of", "unused",
]  # fmt: skip

Rules = tuple[Rule[Any], ...]
_SOFTWARE: Rules = tuple(rule for rule in RULES if rule.reads == "software")


def broken(case: Case, rules: Rules = RULES) -> Iterator[tuple[Rule[Any], Any]]:
    """The rules that do not hold, in order, each with what it was asked about. What is not known breaks no rule."""
    subjects = case.subjects
    for reads, group in _by_subject(rules):  # a search comes here a million times
        subject: Any = subjects.get(reads)
        if subject is None:
            continue
        if reads == "pipeline":  # remembered: many plans have the same one
            for one in broken_by(subject, group):
                yield one, subject
            continue
        for rule in group:
            applies = rule.applies
            if (applies is None or applies(subject)) and not rule.holds(subject):
                yield rule, subject


@lru_cache(maxsize=64)
def _by_subject(rules: Rules) -> tuple[tuple[Reads, Rules], ...]:
    """The rules in their order, those together that follow one another and ask about the same."""
    return tuple((reads, tuple(group)) for reads, group in groupby(rules, key=lambda rule: rule.reads))


def faults(case: Case, place: str = "plan") -> list[Fault]:
    """Everything that is wrong, each once."""
    return list(dict.fromkeys(rule.fault(subject, place) for rule, subject in broken(case)))


def first_fault(case: Case, rules: Rules) -> Fault | None:
    """The fault of the first rule that does not hold."""
    for rule, subject in broken(case, rules):
        return rule.fault(subject)
    return None


def runnable(plan: Plan, software: Software, place: str = "plan") -> list[Fault]:
    """What a framework cannot run of a plan, each with what it would run instead. Empty: it runs it."""
    return [rule.fault(subject, place) for rule, subject in broken(Case(plan=plan, software=software), _SOFTWARE)]


def check(plan: Plan, place: str = "plan") -> None:
    """Raise PlanError with every contradiction inside the plan itself."""
    if found := faults(Case(plan=plan), place):
        raise PlanError(found)


def check_split(plan: Plan, model: Model, cluster: Cluster) -> None:
    """Raise PlanError with every way in which plan, model and cluster do not fit together.

    Ring attention splits the sequence (which the plan alone decides), never the heads; an all-to-all splits both.
    """
    found = [
        rule.fault(subject)
        for rule, subject in broken(Case(plan=plan, model=model, cluster=cluster))
        if rule.reads != "plan"
    ]
    PlanError.raise_for(found)
