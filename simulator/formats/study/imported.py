"""A plan from another framework's file as part of a study: its settings, overridden by the command line's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

from simulator.base.errors import ClusterError, Fault, PlanError
from simulator.base.schema import nearest, nested
from simulator.formats.readers import PLAN_FORMATS
from simulator.formats.readers.plans import GPUS, Draft, drafted_fields, read_plan
from simulator.formats.study.overrides import Override
from simulator.formats.study.tables import DEFAULT, PlanFile, of_root
from simulator.predict import Source
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model

PART: Final = ("gpus_per_node", "nvlink_domain_size")  # of a cluster that a job takes a part of


def read_draft(file: PlanFile, given: Collection[str]) -> Draft:
    """The file's plan as far as it goes. given: what the command line states: Plan's fields, the model. Raises PlanError."""
    if file.form is not None and file.form not in PLAN_FORMATS:
        remedy = nearest(file.form, PLAN_FORMATS) or f"one of {', '.join(PLAN_FORMATS)}"
        raise PlanError.at("--plan-format", f"{file.form!r} is not a format", remedy)
    variables, faults = {}, []
    for text in file.define:
        name, equals, value = text.partition("=")
        if not equals or not name:
            faults.append(Fault(f"--define {text}", "has no value", "--define NAME=VALUE"))
        variables[name] = value
    PlanError.raise_for(faults)
    return read_plan(file.path, file.form, given, variables)


def model_and_cluster(draft: Draft, flags: Mapping[str, str], *, keep: bool) -> dict[str, Any]:
    """Model and cluster where the plan's file decides them: over the study's, under the flags'; no default model."""
    found: dict[str, Any] = {"cluster": draft.cluster} if draft.cluster and "cluster" not in flags else {}
    if "model" in flags or (draft.model is None and keep):
        return found
    return {**found, "model": draft.model.name if isinstance(draft.model, Model) else draft.model}


def with_draft(
    raw: Mapping[str, Any],
    origins: Mapping[str, str],
    draft: Draft,
    cluster: Cluster | None,
    model: Model | None,
    given: Mapping[str, Any],
    overrides: Sequence[Override],
) -> tuple[dict[str, Any], dict[str, str], list[Fault]]:
    """The study with the file's plan under the command line's, for the cluster's number of GPUs; origins; faults."""
    faults: list[Fault] = []
    if raw.get("model") is None and not (draft.faults and draft.format == "megatron"):
        problem = draft.model_unknown or "does not state the model"
        place = draft.places.get("model", draft.file)
        # else what stands there cannot be read, and is reported
        if not any(fault.place == place for fault in draft.faults):
            # of a model that is named and not known, no other is proposed
            cure = () if draft.model_unknown else (("--model", str(DEFAULT["model"])),)
            faults.append(Fault(place, problem, "--model NAME or FILE", flags=cure))
    plan: dict[str, Any] = {}
    found = draft.faults
    if cluster is not None:
        plan, found = drafted_fields(draft, cluster.num_devices, given, model)
        found = tuple(_with_nodes(fault, cluster) for fault in found)
    faults.extend(found)
    for override in of_root(overrides, "plan"):
        plan = nested(plan, override.path, override.value)
    places = {f"plan.{name}": place for name, place in draft.places.items()}
    return {**raw, "model": raw.get("model") or "", "plan": plan}, {**places, **origins}, faults


def _with_nodes(fault: Fault, cluster: Cluster) -> Fault:
    """Numbers of GPUs among a fault's flags as nodes of the cluster, or as a part of one."""
    found: list[tuple[str, str]] = []
    for flag, value in fault.flags:
        count, each = (int(value) if flag == GPUS else 0), cluster.gpus_per_node
        if flag != GPUS:
            found.append((flag, value))
        elif count < each:
            found += [("--nodes", "1"), *(("--set", f"cluster.{key}={count}") for key in PART)]
        else:
            found.append(("--nodes", f"{lcm(count, each) // each}"))
    return replace(fault, flags=tuple(found))


def part_of(draft: Draft, cluster: Cluster, given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Nodes that hold the job's GPUs, and how many GPUs of each; None: as many as the cluster has. Raises ClusterError."""
    stated, each = draft.stated_devices(given), cluster.gpus_per_node
    if stated is None and draft.devices_fault is not None:
        raise ClusterError(draft.devices_fault)
    if stated is None:
        most = draft.most_devices(given)
        return draft.num_nodes, most if most is not None and most < each and not draft.num_nodes else None
    if stated % each == 0:
        return stated // each, None
    nodes = draft.num_nodes or 1
    if stated % nodes == 0 and stated // nodes < each:
        return nodes, stated // nodes
    place = draft.places.get("num_devices", draft.file)
    problem = f"the job's {stated} GPUs are not whole nodes of {cluster.name}, which has {each} each"
    nodes = -(-stated // each)
    raise ClusterError(Fault(place, problem, "--nodes N, or another --cluster", flags=(("--nodes", f"{nodes}"),)))


def stack_overrides(draft: Draft, overrides: Sequence[Override], given: Mapping[str, Any]) -> list[Override]:
    """The file's software settings that differ from the preset's; none if the caller names a stack."""
    if "stack" in given:
        return []
    set_already = {override.path for override in overrides if override.root == "stack"}
    return [
        Override(
            root="stack", path=path, text=str(value).lower() if isinstance(value, bool) else str(value), flag=place
        )
        for name, (value, place) in draft.stack_changes.items()
        if (path := tuple(name.split("."))) not in set_already
    ]


def sources(draft: Draft, used_stack: str) -> Iterator[Source]:
    """Where the plan and its software came from."""
    yield Source(what="plan", kind="given", detail=f"{draft.file}: {draft.software}'s settings, {_counted(draft)}")
    if used_stack == draft.stack:
        yield Source(what="stack", kind="assumed", detail=f"{draft.stack}: {draft.stack_why}")
        for name, (value, place) in draft.stack_changes.items():
            yield Source(what=f"stack.{name}", kind="given", detail=f"{value} ({place})")
    if "alloc_conf" in draft.places:
        detail = f"{draft.fields['alloc_conf']} ({draft.places['alloc_conf']})"
        yield Source(what="plan.memory.alloc_conf", kind="given", detail=detail)
    for name, (value, why) in draft.assumed.items():
        yield Source(what=f"plan.{name}", kind="assumed", detail=f"{value}: {why} (--{name.replace('_', '-')})")


def _counted(draft: Draft) -> str:
    counts = {use: len(draft.named(use)) for use in ("used", "no effect", "overruled", "not modelled", "unknown")}
    counted = (f"{count} {'without effect' if use == 'no effect' else use}" for use, count in counts.items() if count)
    return ", ".join(counted) or "none"


def warnings(draft: Draft) -> list[str]:
    """Warnings: contradictions that the framework resolves, settings that are not modelled, and unknown settings."""
    heads = {"overruled": "overruled", "not modelled": "not modelled", "unknown": "unknown, and ignored"}
    return [f"{head}: {setting}" for use, head in heads.items() for setting in draft.named(use)]
