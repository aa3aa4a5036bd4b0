"""A serving study: what `shardwise serve` needs, from a TOML file, from flags, or from the embedded default."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo

from simulator.base.errors import Fault, InputError, StackError
from simulator.base.schema import Strict, faults_of, nested, read_toml
from simulator.base.units import FROM_FILE, UnitError
from simulator.base.value_errors import Expected
from simulator.formats.study.loading import calibration_named, loaded_cluster, model_of
from simulator.formats.study.overrides import Override, literal, parse_overrides, patched
from simulator.formats.study.provenance import named_sources, of_model, set_by_hand
from simulator.formats.study.tables import DEFAULT_NAME, Faults, at_its_key, counts_read, flags_above, located, of_root
from simulator.predict import Source
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.hosts import counted
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.model import Model
from simulator.spec.model.families import weights_of
from simulator.spec.model.hf_config import stored_weights
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan, Request, Slo, Workload, check, stack_named, stack_of, with_defaults
from simulator.studies.serving.slo import USUAL_PERCENTILE, read_times
from simulator.studies.serving.workload import Requests

DEFAULT: Final[Mapping[str, Any]] = {
    "model": "llama3-8b",
    "cluster": "hgx-h100-8",
    "inference": {},
    "workload": {"rate": 4.0},
}
ROOTS: Final = ("inference", "workload", "slo", "model", "cluster", "device", "stack")  # what --set reaches into
TABLES: Final = ("inference", "workload", "slo")
_NO_RATE: Final = ("workload.trace", "workload.concurrency")  # instead of the default's rate
_FILES: Final = (("inference", "stack"), ("workload", "trace"))  # keys that may name one


def _times(value: object, info: ValidationInfo) -> object:
    """A bare "500ms" limits the 99th percentile; "p50=200ms,p95=1s", or a table of these, name theirs."""
    if isinstance(value, Mapping):
        value = ",".join(f"{name}={time}" for name, time in value.items())
    if isinstance(value, str):
        return read_times(value)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if (info.context or {}).get("from_file"):
        raise UnitError(f"must be a time with its unit; it is {value}", f"write '{value}s', or for example '500ms'")
    return {USUAL_PERCENTILE: value}


_Times = Annotated[
    dict[float, float] | None, BeforeValidator(_times), Expected("a time as 500ms, or percentiles as p95=500ms")
]


class SloTable(Strict):
    """Limits as they are written: "500ms", "p95=500ms"."""

    ttft: _Times = None
    tpot: _Times = None
    latency: _Times = None

    def limits(self) -> Slo:
        """In seconds."""
        return Slo(ttft_s=self.ttft, tpot_s=self.tpot, latency_s=self.latency)


class ServingFile(Strict):
    """A serving study as it is written. nodes: how many of the cluster's nodes; None: as many as its file says."""

    model: str
    cluster: str
    nodes: int | None = Field(ge=1, le=MAX_NODES, default=None)
    like: str | None = None
    images: int | None = Field(ge=0, default=None)
    image_size: int | None = Field(ge=1, default=None)
    calibration: str | None = None
    inference: InferencePlan = InferencePlan()
    workload: Workload = Workload()
    slo: SloTable = SloTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStudy:
    """Everything serve() takes, and where it came from. checkpoint: what the weights of the model's are stored in, if that is known."""

    model: Model
    plan: InferencePlan
    cluster: Cluster
    calibration: Calibration | None
    stack: Stack
    workload: Workload
    requests: Sequence[Request]
    slo: Slo
    sources: tuple[Source, ...]
    checkpoint: str | None = None

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data for the JSON report."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "nodes": self.cluster.num_nodes,
            "calibration": self.calibration.name if self.calibration else None,
            "inference": self.plan.model_dump(mode="json"),
            "workload": self.workload.model_dump(mode="json"),
        }


def read_serving_study(
    file: Path | None,
    flags: Mapping[str, str],
    table_flags: Mapping[str, str],
    settings: Sequence[str],
    *,
    searched: bool = False,
) -> ServingStudy:
    """The study of `file` (None: the embedded default) under flags and `--set`s.

    flags: model, cluster, nodes, calibration. table_flags: "inference.tp" and its like -> text. searched: the plan is what
    a search starts from, as stated: it need not fit the cluster, and the engine's defaults may differ from layout to layout.
    Raises InputError with every fault of every input.
    """
    faults = Faults()
    base = faults.attempt(lambda: _written(file))
    if base is None:
        raise InputError(faults)
    overrides, wrong = parse_overrides(settings, ROOTS)
    faults += wrong
    name = str(file or DEFAULT_NAME)
    merged, origins = _merged(base, flags, table_flags, overrides)
    raw = _with_stack(merged)
    study = faults.attempt(lambda: _checked(raw, origins, name))
    model = faults.attempt(lambda: model_of(raw, of_root(overrides, "model")))
    cluster = faults.attempt(lambda: loaded_cluster(raw, overrides))
    if cluster is not None:
        faults.attempt(lambda: cluster.must_be_in_order("serving"))
    calibration = faults.attempt(lambda: calibration_named(raw.get("calibration"), cluster))
    plan = stack = requests = stored = None
    named: tuple[Source, ...] = ()
    if study is not None:
        stored, workload = _stored(raw.get("model") if model else None), study.workload
        stated, named = _as_published(study, stored)
        stack = faults.attempt(lambda: patched(stack_of(stated), of_root(overrides, "stack"), StackError))
        plan = stated
        if stack is not None and cluster is not None and not searched:
            plan = _completed(stated, stack, cluster, model, faults)
        requests = faults.attempt(lambda: requests_of(workload, model.image_tokens if model else 0))
    if faults or study is None or plan is None or model is None or cluster is None or stack is None or requests is None:
        raise InputError(dict.fromkeys(at_its_key(fault, origins, name, "inference") for fault in faults))
    return ServingStudy(
        model=model,
        plan=plan,
        cluster=cluster,
        calibration=calibration,
        stack=stack,
        workload=study.workload,
        requests=requests,
        slo=study.slo.limits(),
        checkpoint=stored,
        sources=(
            *_sources(name, raw, origins, study.workload),
            *named,
            *(() if searched else _idle(raw, plan)),
            *of_model(model, raw.get("model")),
            *set_by_hand(overrides, TABLES),
        ),
    )


def _completed(
    stated: InferencePlan, stack: Stack, cluster: Cluster, model: Model | None, faults: Faults
) -> InferencePlan:
    """The plan with the engine's defaults; what does not fit model and cluster is a fault."""
    plan = with_defaults(stated, stack, cluster.device, model)
    if model is not None:
        faults.attempt(partial(check, plan, model, cluster))
    return plan


def _written(file: Path | None) -> Mapping[str, Any]:
    """The study as it is written, or the embedded default. Raises InputError where the file cannot be read."""
    return DEFAULT if file is None else located(read_toml(file, InputError), file.parent, _FILES)


def _idle(raw: Mapping[str, Any], plan: InferencePlan) -> Iterator[Source]:
    """GPUs that were asked for by number and do not serve."""
    asked, _ = counted(str(raw.get("cluster"))) or (0, "")
    if plan.num_devices < asked:
        detail = f"{plan.num_devices} of the {asked} GPUs serve: tp, pp and dp take no more (--tp, --dp)"
        yield Source(what="plan", kind="assumed", detail=detail)


def _with_stack(raw: dict[str, Any]) -> dict[str, Any]:
    """The study with its stack's own name where it has another one of it."""
    plan = raw.get("inference")
    stack = plan.get("stack") if isinstance(plan, Mapping) else None
    return nested(raw, ("inference", "stack"), stack_named(stack)) if isinstance(stack, str) else raw


def _stored(model: object) -> str | None:
    """What the weights of the model's checkpoint are in, by its config.json or its name."""
    return stored_weights(model) or weights_of(model) if isinstance(model, str) else None


def _as_published(study: ServingFile, weights: str | None) -> tuple[InferencePlan, tuple[Source, ...]]:
    """The plan with the weights that the model's checkpoint has, where nothing states others."""
    plan = study.inference
    if weights is None or weights == plan.weights or "weights" in plan.model_fields_set:
        return plan, ()
    source = Source(
        what="inference", kind="assumed", detail=f"weights = {weights}, as the checkpoint of {study.model} has"
    )
    return plan.model_copy(update={"weights": weights}), (source,)


def _merged(
    base: Mapping[str, Any], flags: Mapping[str, str], table_flags: Mapping[str, str], overrides: Sequence[Override]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The study as plain data, and for each key that the command line gave, by which flag."""
    traced = any(table_flags.get(key, "0") != "0" for key in _NO_RATE) or any(
        f"{o.root}.{'.'.join(o.path)}" in _NO_RATE for o in overrides
    )
    raw = {**base, **({"workload": {}} if traced and base is DEFAULT else {}), **counts_read(flags)}
    origins = {key: f"--{key.replace('_', '-')}" for key in flags}
    given = [(key, flag_of(key), literal(text)) for key, text in table_flags.items()]
    given += [(f"{o.root}.{'.'.join(o.path)}", o.flag, o.value) for o in overrides if o.root in TABLES]
    for key, flag, value in given:
        raw = nested(raw, key.split("."), value)
        origins[key] = flag
    return raw, origins


def flag_of(key: str) -> str:
    """The flag of a table's key: --tp, --slo-ttft."""
    table, _, name = key.partition(".")
    short = {"prompt_tokens": "prompt", "output_tokens": "output", "num_requests": "requests"}.get(name, name)
    return f"--{'slo-' if table == 'slo' else ''}{short.replace('_', '-')}"


def _checked(raw: Mapping[str, Any], origins: Mapping[str, str], name: str) -> ServingFile:
    try:
        return ServingFile.model_validate(dict(raw), context=FROM_FILE)
    except ValidationError as exc:
        raise InputError(_relabelled(fault, origins, name) for fault in faults_of(exc, "", ServingFile)) from None


def _relabelled(fault: Fault, origins: Mapping[str, str], name: str) -> Fault:
    """The fault at the flag that gave the key; of keys of a table that contradict each other, at the flags that gave them."""
    path, words = fault.place.removeprefix(": "), set(re.findall(r"\w+", str(fault)))
    flags = flags_above(path, origins)[:1] or [
        flag for key, flag in origins.items() if key.startswith(f"{path}.") and key.split(".")[1] in words
    ]
    return replace(fault, place=" and ".join(dict.fromkeys(flags)) or f"{name}: {path}")


def requests_of(workload: Workload, image_tokens: int) -> Sequence[Request]:
    """Drawn, or of the trace. image_tokens: of each, beside its text. Raises InputError."""
    if workload.trace is None:
        return workload.requests(image_tokens)
    drawn = (set(Workload.model_fields) - {"trace", "warmup", "concurrency", "ramp_s"}) & workload.model_fields_set
    if drawn:
        problem = f"a trace says when requests arrive and how long they are, and {', '.join(sorted(drawn))} too"
        raise InputError.at("workload: trace", problem, "give one of them")
    from simulator.formats.readers.arrivals_table import read_arrivals

    found = read_arrivals(workload.trace)
    longer = (replace(one, prompt_tokens=one.prompt_tokens + image_tokens) for one in found)
    return Requests.of(longer) if image_tokens else found


def _sources(name: str, raw: Mapping[str, Any], origins: Mapping[str, str], workload: Workload) -> tuple[Source, ...]:
    """The origin of each value: the file, a flag, or a default (then it is assumed)."""
    assumed = "assumed" if name == DEFAULT_NAME else "given"
    found = named_sources(name, raw, origins)
    for table in TABLES:
        keys = raw.get(table) or {}
        flags = [f"{key} = {keys[key]}" for key in keys if any(o.startswith(f"{table}.{key}") for o in origins)]
        rest = [f"{key} = {keys[key]}" for key in keys if not any(o.startswith(f"{table}.{key}") for o in origins)]
        if flags:
            found.append(Source(what=table, kind="given", detail=f"{', '.join(flags)} (flags)"))
        if rest:
            found.append(Source(what=table, kind=assumed, detail=f"{', '.join(rest)} ({name})"))
    if workload.trace is None:
        unsaid = ("rate", "num_requests", "prompt_tokens", "output_tokens", "seed")
        stated = workload.model_fields_set | ({"rate"} if workload.concurrency else set())
        defaults = [f"{key} = {getattr(workload, key)}" for key in unsaid if key not in stated]
        if defaults:
            found.append(Source(what="workload", kind="assumed", detail=f"{', '.join(defaults)}, as none was given"))
    return tuple(found)
