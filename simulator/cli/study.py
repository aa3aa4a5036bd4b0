"""A study: what one prediction needs, from a TOML file, from flags, or from the embedded default.

Every value remembers who gave it, so that a fault is reported at the flag or the key that caused it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError

from simulator.calibration import Calibration
from simulator.checkpoint import Checkpoint
from simulator.cli.imported import PlanFile, num_nodes, read_draft, stack_overrides
from simulator.cli.imported import sources as imported_sources
from simulator.cli.overrides import Override, literal, parse_overrides, patched
from simulator.errors import ClusterError, Fault, InputError, ModelError, StackError
from simulator.mesh import check
from simulator.model import Model
from simulator.plan import Plan, idle_fields
from simulator.predict import Source
from simulator.readers.plans import Draft, drafted_fields
from simulator.schema import Strict, faults_of, read_toml
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.topology.hosts import other_intra
from simulator.units import FROM_FILE

T = TypeVar("T")

# One node of 8 H100 and the length Llama 3 was trained with; everything else is what PyTorch's FSDP2 does by itself.
DEFAULT: Final[Mapping[str, Any]] = {
    "model": "llama3-8b",
    "cluster": "hgx-h100-8",
    "plan": {"zero": 3, "seq_len": 8192},
}
DEFAULT_NAME: Final = "the embedded default"
EMPTY: Final[Mapping[str, Any]] = {}
ROOTS: Final = ("plan", "model", "cluster", "device", "stack", "checkpoint", "kernels")  # what --set reaches into


class StudyFile(Strict):
    """A study as it is written.

    nodes: how many of the cluster's nodes; None: as many as its file says. placement: a table of the GPU of each rank.
    checkpoint: None: none is saved.
    run: the long run that `shardwise goodput` plays; that verb judges it.
    """

    model: str = Field(description="a preset's name as llama3-8b, a model's TOML file, or a config.json")
    cluster: str = Field(description="a preset's name as hgx-h100-8, or a cluster's TOML file")
    nodes: int | None = Field(ge=1, default=None)
    placement: str | None = Field(description="a table's file", default=None)
    calibration: str | None = Field(description="a preset's name, or a calibration's file", default=None)
    plan: Plan = Plan()
    checkpoint: Checkpoint | None = None
    run: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything predict() takes, and where it came from."""

    model: Model
    plan: Plan
    cluster: Cluster
    calibration: Calibration | None
    stack: Stack | None
    sources: tuple[Source, ...]
    checkpoint: Checkpoint | None = None
    draft: Draft | None = None  # where the plan came from another framework's file

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data for the JSON report."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "nodes": self.cluster.num_nodes,
            **({"seats": list(self.cluster.seats)} if self.cluster.seats else {}),
            "calibration": self.calibration.name if self.calibration else None,
            "plan": self.plan.model_dump(mode="json"),
            "imported": self.draft.report() if self.draft else None,
        }


class _Faults(list[Fault]):
    """Collects faults, so that all of them can be told together."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except InputError as exc:
            self.extend(exc.faults)
        except OSError as exc:
            self.append(Fault(place=str(exc.filename), problem=f"cannot be read: {exc.strerror}"))
        return None


def read_study(
    file: Path | None,
    flags: Mapping[str, str],
    plan_flags: Mapping[str, str],
    settings: Sequence[str],
    plan_file: PlanFile | None = None,
) -> Study:
    """The study of `file` (None: the embedded default) under flags and `--set`s.

    flags: model, cluster, nodes, calibration as given. plan_flags: Plan's fields as given.
    plan_file: holds the plan, and perhaps the model, in place of the study's.
    Raises InputError with every fault of every input.
    """
    faults = _Faults()
    base = dict(DEFAULT) if file is None else faults.attempt(lambda: _located(read_toml(file, InputError), file.parent))
    if base is None:
        raise InputError(faults)
    overrides, wrong = parse_overrides(settings, ROOTS)
    faults += wrong
    raw, origins = _merged(base, flags, plan_flags, overrides, keep_plan=file is not None or "model" not in flags)
    given = {name: literal(text) for name, text in plan_flags.items()}
    draft = faults.attempt(lambda: read_draft(plan_file, {*given, *flags})) if plan_file is not None else None
    if plan_file is not None:
        if draft is None:
            raise InputError(faults)
        raw = {**raw, **_model_of(draft, flags, keep=file is not None)}
    model = faults.attempt(lambda: _model(raw, _of(overrides, "model"), draft))
    cluster = faults.attempt(lambda: _cluster(raw, overrides, draft, given))
    if draft is not None:
        raw, origins = _with_draft(raw, origins, draft, faults, cluster, model, given, overrides)
    asked = _Asked(
        name=str(file or DEFAULT_NAME), raw=raw, origins=origins, overrides=overrides, draft=draft, given=given
    )
    return _completed(asked, model, cluster, faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A study as plain data, and who said what: the file's name, the flags' origins, `--set`s, another framework's file."""

    name: str
    raw: Mapping[str, Any]
    origins: Mapping[str, str]
    overrides: Sequence[Override]
    draft: Draft | None
    given: Mapping[str, Any]


def _completed(asked: _Asked, model: Model | None, cluster: Cluster | None, faults: _Faults) -> Study:
    """The plan, its software and its checkpoint, judged. Raises InputError with every fault, those so far among them."""
    raw, overrides, draft = asked.raw, asked.overrides, asked.draft
    settled = draft is None or not faults
    study = faults.attempt(lambda: _checked(raw, asked.origins, draft.file if draft else asked.name))
    calibration = faults.attempt(lambda: _calibration(raw, cluster, _of(overrides, "kernels")))
    plan = _with_degrees(study.plan, cluster) if study is not None else None
    stack = None
    if plan is not None:
        preset = plan.stack
        stated = draft is not None and preset == draft.stack  # else the file could not be read, and this is a default
        changes = [
            *(stack_overrides(draft, overrides, asked.given) if draft and stated else ()),
            *_of(overrides, "stack"),
        ]
        stack = faults.attempt(lambda: patched(Stack.load(preset), changes, StackError))
        found = _plan_faults(plan, model, cluster, others=bool(faults))
        faults += found if settled else _standing(found, raw)
    saved, kept = _of(overrides, "checkpoint"), study.checkpoint if study is not None else None
    checkpoint = faults.attempt(lambda: patched(kept or Checkpoint(), saved, InputError)) if kept or saved else None
    if faults or study is None or model is None or cluster is None or plan is None:
        raise InputError(dict.fromkeys(faults))
    sources = _sources(asked.name, raw, asked.origins, study.plan, plan, draft)
    sources += tuple(
        Source(what=o.flag.removeprefix("--set "), kind="given", detail=f"{o.text} (--set)")
        for o in overrides
        if o.root != "plan"
    )
    if draft is None:  # whose reader tells of its own
        sources += _without_effect(study.plan, plan, model)
    return Study(
        model=model,
        plan=plan,
        cluster=cluster,
        calibration=calibration,
        stack=stack,
        sources=sources,
        checkpoint=checkpoint,
        draft=draft,
    )


_NOTHING = (False, None, 0, 1, "none")


def _without_effect(asked: Plan, plan: Plan, model: Model) -> tuple[Source, ...]:
    """What was asked of the plan and does nothing beside the rest of it."""
    idle = idle_fields(plan, experts=model.experts is not None)
    given = {name: getattr(plan, name) for name in idle if name in asked.model_fields_set}
    named = [name for name, value in given.items() if value is True or value not in _NOTHING]  # True equals 1
    return tuple(
        Source(what=f"plan.{name}", kind="given", detail=f"without effect: needs {idle[name]}") for name in named
    )


def _plan_faults(plan: Plan, model: Model | None, cluster: Cluster | None, *, others: bool) -> list[Fault]:
    """The plan's own faults; where it or another input has any, those with model and cluster that would be told next."""
    faults = _Faults()
    faults.attempt(plan.check)
    if (faults or others) and model is not None and cluster is not None:
        faults.attempt(lambda: check(plan, model, cluster))
    return faults


def _standing(faults: Sequence[Fault], raw: Mapping[str, Any]) -> list[Fault]:
    """Of a plan that another framework's file settles in part: the faults that stand whatever the rest becomes."""
    known = {name for name in ("tp", "cp", "pp", "ep", "etp", "seq_len") if name in raw["plan"]}
    unknown = re.compile("dp_shard|dp_replicate|micro_batch|devices")
    return [f for f in faults if f.place.removeprefix("plan: ") in known and not unknown.search(f.problem)]


def _model_of(draft: Draft, flags: Mapping[str, str], *, keep: bool) -> dict[str, Any]:
    """Model and cluster where the plan's file decides them: over the study's, under the flags'; no default model."""
    found: dict[str, Any] = {"cluster": draft.cluster} if draft.cluster and "cluster" not in flags else {}
    if "model" in flags or (draft.model is None and keep):
        return found
    return {**found, "model": draft.model.name if isinstance(draft.model, Model) else draft.model}


def _with_draft(
    raw: Mapping[str, Any],
    origins: Mapping[str, str],
    draft: Draft,
    faults: list[Fault],
    cluster: Cluster | None,
    model: Model | None,
    given: Mapping[str, Any],
    overrides: Sequence[Override],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The study with the file's plan under the command line's, for the cluster's number of GPUs."""
    if raw.get("model") is None and not (draft.faults and draft.format == "megatron"):
        faults.append(Fault(place=draft.file, problem="does not state the model", remedy="--model NAME or FILE"))
    plan: dict[str, Any] = {}
    found = draft.faults
    if cluster is not None:
        plan, found = drafted_fields(draft, cluster.num_devices, given, model)
    faults.extend(found)
    for override in _of(overrides, "plan"):
        plan = nested(plan, override.path, override.value)
    places = {f"plan.{name}": place for name, place in draft.places.items()}
    return {**raw, "model": raw.get("model") or "", "plan": plan}, {**places, **origins}


def _located(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths in a file are relative to that file."""
    plan = data.get("plan")
    if isinstance(data.get("placement"), str):
        data["placement"] = str(folder / data["placement"])
    places = [(data, key) for key in ("model", "cluster", "calibration")]
    if isinstance(plan, dict):
        places.append((plan, "stack"))
    for table, key in places:
        value = table.get(key)
        if isinstance(value, str) and value.endswith((".toml", ".json")):
            table[key] = str(folder / value)
    return data


def _merged(
    base: Mapping[str, Any],
    flags: Mapping[str, str],
    plan_flags: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    keep_plan: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The study as plain data, and for each key that the command line gave, by which flag."""
    raw = {**base, **flags}
    if isinstance(raw.get("nodes"), str):
        raw["nodes"] = literal(raw["nodes"])
    origins = {key: f"--{key}" for key in flags}
    plan = raw.get("plan", {}) if keep_plan else {}
    if isinstance(plan, dict):
        given = [(name, f"--{name.replace('_', '-')}", literal(text)) for name, text in plan_flags.items()]
        given += [(".".join(o.path), o.flag, o.value) for o in overrides if o.root == "plan"]
        for name, _, value in given:
            plan = nested(plan, name.split("."), value)
        origins |= {f"plan.{name}": flag for name, flag, _ in given}
    return {**raw, "plan": plan}, origins


def nested(table: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """`table` with the value put at the path; what is no table on the way gives way to one."""
    name, *rest = path
    if not rest:
        return {**table, name: value}
    below = table.get(name)
    return {**table, name: nested(below if isinstance(below, Mapping) else {}, rest, value)}


def _checked(raw: Mapping[str, Any], origins: Mapping[str, str], name: str) -> StudyFile:
    try:
        return StudyFile.model_validate(dict(raw), context=FROM_FILE)
    except ValidationError as exc:
        found = [fault for fault in faults_of(exc, "", StudyFile) if raw.get("model") or "model" not in fault.place]
        raise InputError(_relabelled(fault, origins, name) for fault in found) from None


def _relabelled(fault: Fault, origins: Mapping[str, str], name: str) -> Fault:
    path = fault.place.removeprefix(": ")
    flag = next((flag for key, flag in origins.items() if path == key or path.startswith((f"{key}.", f"{key}["))), None)
    if fault.problem == "unknown key" and path in Plan.model_fields:
        fault = replace(fault, remedy="it belongs under [plan]")
    return replace(fault, place=flag or f"{name}: {path}")


def _of(overrides: Sequence[Override], root: str) -> list[Override]:
    return [override for override in overrides if override.root == root]


def _model(raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None = None) -> Model | None:
    name = raw.get("model")
    if draft is not None and isinstance(draft.model, Model) and name == draft.model.name:
        return patched(draft.model, overrides, ModelError)
    return patched(Model.load(name), overrides, ModelError) if isinstance(name, str) else None


def _cluster(
    raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None = None, given: Mapping[str, Any] = EMPTY
) -> Cluster | None:
    """The cluster with its ranks placed; of as many nodes as a plan's file implies, where nobody else says how many."""
    cluster, table = _counted_cluster(raw, overrides, draft, given), raw.get("placement")
    if cluster is None or not isinstance(table, str):
        return cluster
    from simulator.readers.placement import read_placement  # noqa: PLC0415  only what is asked for is loaded

    return cluster.seated(read_placement(Path(table), cluster))


def _counted_cluster(
    raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None, given: Mapping[str, Any]
) -> Cluster | None:
    cluster = loaded_cluster(raw, overrides)
    if cluster is None or draft is None or raw.get("nodes") is not None:
        return cluster
    nodes = num_nodes(draft, cluster, given)
    if nodes not in (None, cluster.num_nodes):
        cluster = loaded_cluster({**raw, "nodes": nodes}, overrides)
    return cluster


def loaded_cluster(raw: Mapping[str, Any], overrides: Sequence[Override]) -> Cluster | None:
    """The cluster that `cluster` and `nodes` name, under what was set of it and its device; None where none is named."""
    name, nodes = raw.get("cluster"), raw.get("nodes")
    if not isinstance(name, str):
        return None
    counted = isinstance(nodes, int) and not isinstance(nodes, bool) and nodes >= 1
    cluster = Cluster.load(name, nodes if counted else None)
    below = [replace(o, path=("device", *o.path)) for o in _of(overrides, "device")]
    if any(o.path == ("device", "memory_bytes") for o in below):  # CUDA's total was that of the device as it was
        device = cluster.device.model_copy(update={"cuda_memory_bytes": None})
        cluster = cluster.model_copy(update={"device": device})
    own = [each for one in _of(overrides, "cluster") for each in _rewired(cluster, one)]
    return patched(cluster, [*own, *below], ClusterError)


def _rewired(cluster: Cluster, one: Override) -> list[Override]:
    """link.intra=nvlink5 or =off in full; any other override as it is."""
    if one.path != ("intra",) or not isinstance(one.value, str):
        return [one]
    host = cluster.host_link
    kind = other_intra(cluster.intra.model_dump(), host.model_dump() if host else None, one.value)
    found = [replace(one, meant=kind)]
    if kind["shape"] == "pcie" and cluster.nvlink_domain_size != cluster.gpus_per_node:
        found.append(replace(one, path=("nvlink_domain_size",), meant=cluster.gpus_per_node))
    if (
        kind["shape"] != "pcie" and cluster.host is None and host is not None
    ):  # what joined the GPUs joins them to hosts
        found.append(replace(one, path=("host",), meant=host.model_dump()))
    return found


class KernelSpeeds(Strict):
    """`--set kernels.gemm=1.2`: so many times as fast as the calibration says."""

    gemm: float = Field(gt=0, le=1e6, default=1.0)
    attention: float = Field(gt=0, le=1e6, default=1.0)
    elementwise: float = Field(gt=0, le=1e6, default=1.0)
    scan: float = Field(gt=0, le=1e6, default=1.0)


def _calibration(
    raw: Mapping[str, Any], cluster: Cluster | None, overrides: Sequence[Override] = ()
) -> Calibration | None:
    speed = patched(KernelSpeeds(), overrides, InputError)
    named = calibration_named(raw.get("calibration"), cluster)
    if not overrides or cluster is None:
        return named
    return (named or Calibration.for_device(cluster.device)).with_speed(
        {"gemm": speed.gemm, "attention": speed.attention, "elementwise": speed.elementwise, "scan": speed.scan}
    )


def calibration_named(name: object, cluster: Cluster | None) -> Calibration | None:
    """A calibration by name or path, or made of the cluster's device; None: the device's own."""
    if not isinstance(name, str):
        return None
    if name == "ideal":
        return Calibration.ideal()
    if name == "datasheet":
        return Calibration.datasheet(cluster.device) if cluster is not None else None
    return Calibration.load(name)


def _with_degrees(plan: Plan, cluster: Cluster | None) -> Plan:
    """Where no data-parallel degree was given: all devices that the other degrees leave."""
    if cluster is None or plan.model_fields_set & {"dp_shard", "dp_replicate"}:
        return plan
    size, rest = divmod(cluster.num_devices, plan.cp * plan.tp * plan.pp)
    return plan if rest else plan.model_copy(update={"dp_replicate" if plan.zero == 0 else "dp_shard": size})


def _sources(
    name: str, raw: Mapping[str, Any], origins: Mapping[str, str], asked: Plan, plan: Plan, draft: Draft | None = None
) -> tuple[Source, ...]:
    """Who said what: the file, a flag, or nobody (then it is assumed)."""
    assumed = "assumed" if name == DEFAULT_NAME else "given"
    found = [
        Source(what=key, kind="given" if key in origins else assumed, detail=f"{raw[key]} ({origins.get(key, name)})")
        for key in ("model", "cluster", "nodes", "placement", "calibration")
        if raw.get(key) is not None and not (key == "model" and draft and draft.model and key not in origins)
    ]
    if draft is not None:
        if draft.model and "model" not in origins:
            found.append(Source(what="model", kind="given", detail=f"{raw['model']} ({draft.file})"))
        found += imported_sources(draft, plan.stack)
        places = {f"plan.{field}" for field in draft.places}
        origins = {key: flag for key, flag in origins.items() if key not in places or flag.startswith("--")}
        name, assumed = draft.file, "given"
    flags = [
        f"{key.removeprefix('plan.')} = {attrgetter(key.removeprefix('plan.'))(plan)}"
        for key in origins
        if key.startswith("plan.")
    ]
    if flags:
        found.append(Source(what="plan", kind="given", detail=f"{', '.join(flags)} (flags)"))
    rest = [f"{key} = {value}" for key, value in raw["plan"].items() if f"plan.{key}" not in origins]
    if rest:
        found.append(Source(what="plan", kind=assumed, detail=f"{', '.join(rest)} ({name})"))
    for degree in ("dp_shard", "dp_replicate"):
        if getattr(plan, degree) != getattr(asked, degree):
            detail = f"{degree} = {getattr(plan, degree)}: all devices of the cluster, as no degree was given"
            found.append(Source(what="plan", kind="assumed", detail=detail))
    if "seq_len" not in plan.model_fields_set:
        found.append(Source(what="plan", kind="assumed", detail=f"seq_len = {plan.seq_len}, as none was given"))
    return tuple(found)
