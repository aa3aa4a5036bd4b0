"""A study: what one prediction needs, from a TOML file, from flags, or from the embedded default.

Every value remembers who gave it, so that a fault is reported at the flag or the key that caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError

from simulator.calibration import Calibration
from simulator.checkpoint import Checkpoint
from simulator.cli.overrides import Override, literal, parse_overrides, patched
from simulator.errors import ClusterError, Fault, InputError, ModelError, StackError
from simulator.model import Model
from simulator.plan import Plan
from simulator.predict import Source
from simulator.schema import Strict, faults_of, read_toml
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.units import FROM_FILE

T = TypeVar("T")

# One node of 8 H100 and the length Llama 3 was trained with; everything else is what PyTorch's FSDP2 does by itself.
DEFAULT: Final[Mapping[str, Any]] = {
    "model": "llama3-8b",
    "cluster": "hgx-h100-8",
    "plan": {"zero": 3, "seq_len": 8192},
}
DEFAULT_NAME: Final = "the embedded default"
ROOTS: Final = ("plan", "model", "cluster", "device", "stack", "checkpoint")  # what --set reaches into


class StudyFile(Strict):
    """A study as it is written.

    nodes: how many of the cluster's nodes; None: as many as its file says. checkpoint: None: none is saved.
    """

    model: str
    cluster: str
    nodes: int | None = Field(ge=1, default=None)
    calibration: str | None = None
    plan: Plan = Plan()
    checkpoint: Checkpoint | None = None


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

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data for the JSON report."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "nodes": self.cluster.num_nodes,
            "calibration": self.calibration.name if self.calibration else None,
            "plan": self.plan.model_dump(mode="json"),
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
    file: Path | None, flags: Mapping[str, str], plan_flags: Mapping[str, str], settings: Sequence[str]
) -> Study:
    """The study of `file` (None: the embedded default) under flags and `--set`s.

    flags: model, cluster, nodes, calibration as given. plan_flags: Plan's fields as given.
    Raises InputError with every fault of every input.
    """
    faults = _Faults()
    base = dict(DEFAULT) if file is None else faults.attempt(lambda: _located(read_toml(file, InputError), file.parent))
    if base is None:
        raise InputError(faults)
    overrides, wrong = parse_overrides(settings, ROOTS)
    faults += wrong
    raw, origins = _merged(base, flags, plan_flags, overrides, keep_plan=file is not None or "model" not in flags)
    study = faults.attempt(lambda: _checked(raw, origins, str(file or DEFAULT_NAME)))

    model = faults.attempt(lambda: _model(raw, _of(overrides, "model")))
    cluster = faults.attempt(lambda: _cluster(raw, overrides))
    calibration = faults.attempt(lambda: _calibration(raw, cluster))
    plan = _with_degrees(study.plan, cluster) if study is not None else None
    stack = None
    if plan is not None:
        name = plan.stack
        stack = faults.attempt(lambda: patched(Stack.load(name), _of(overrides, "stack"), StackError))
        faults.attempt(plan.check)
    saved = _of(overrides, "checkpoint")
    asked = study.checkpoint if study is not None else None
    checkpoint = faults.attempt(lambda: patched(asked or Checkpoint(), saved, InputError)) if asked or saved else None
    if faults or study is None or model is None or cluster is None or plan is None:
        raise InputError(faults)
    sources = _sources(str(file or DEFAULT_NAME), raw, origins, study.plan, plan)
    sources += tuple(
        Source(what=o.flag.removeprefix("--set "), kind="given", detail=f"{o.text} (--set)")
        for o in overrides
        if o.root != "plan"
    )
    return Study(
        model=model,
        plan=plan,
        cluster=cluster,
        calibration=calibration,
        stack=stack,
        sources=sources,
        checkpoint=checkpoint,
    )


def _located(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths in a file are relative to that file."""
    plan = data.get("plan")
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
            plan = _nested(plan, name.split("."), value)
        origins |= {f"plan.{name}": flag for name, flag, _ in given}
    return {**raw, "plan": plan}, origins


def _nested(table: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """`table` with the value put at the path; what is no table on the way gives way to one."""
    name, *rest = path
    if not rest:
        return {**table, name: value}
    below = table.get(name)
    return {**table, name: _nested(below if isinstance(below, Mapping) else {}, rest, value)}


def _checked(raw: Mapping[str, Any], origins: Mapping[str, str], name: str) -> StudyFile:
    try:
        return StudyFile.model_validate(dict(raw), context=FROM_FILE)
    except ValidationError as exc:
        raise InputError(_relabelled(fault, origins, name) for fault in faults_of(exc, "", StudyFile)) from None


def _relabelled(fault: Fault, origins: Mapping[str, str], name: str) -> Fault:
    path = fault.place.removeprefix(": ")
    flag = next((flag for key, flag in origins.items() if path == key or path.startswith(f"{key}.")), None)
    return replace(fault, place=flag or f"{name}: {path}")


def _of(overrides: Sequence[Override], root: str) -> list[Override]:
    return [override for override in overrides if override.root == root]


def _model(raw: Mapping[str, Any], overrides: Sequence[Override]) -> Model | None:
    name = raw.get("model")
    return patched(Model.load(name), overrides, ModelError) if isinstance(name, str) else None


def _cluster(raw: Mapping[str, Any], overrides: Sequence[Override]) -> Cluster | None:
    name, nodes = raw.get("cluster"), raw.get("nodes")
    if not isinstance(name, str):
        return None
    counted = isinstance(nodes, int) and not isinstance(nodes, bool) and nodes >= 1
    cluster = Cluster.load(name, nodes if counted else None)
    below = [replace(o, path=("device", *o.path)) for o in _of(overrides, "device")]
    if any(o.path == ("device", "memory_bytes") for o in below):  # CUDA's total was that of the device as it was
        device = cluster.device.model_copy(update={"cuda_memory_bytes": None})
        cluster = cluster.model_copy(update={"device": device})
    return patched(cluster, [*_of(overrides, "cluster"), *below], ClusterError)


def _calibration(raw: Mapping[str, Any], cluster: Cluster | None) -> Calibration | None:
    name = raw.get("calibration")
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
    name: str, raw: Mapping[str, Any], origins: Mapping[str, str], asked: Plan, plan: Plan
) -> tuple[Source, ...]:
    """Who said what: the file, a flag, or nobody (then it is assumed)."""
    assumed = "assumed" if name == DEFAULT_NAME else "given"
    found = [
        Source(what=key, kind="given" if key in origins else assumed, detail=f"{raw[key]} ({origins.get(key, name)})")
        for key in ("model", "cluster", "nodes", "calibration")
        if raw.get(key) is not None
    ]
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
