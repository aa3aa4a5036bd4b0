"""The origin of each value of a study: a file, a flag, or a default; and the values that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from simulator.formats.study.overrides import Override
from simulator.formats.study.tables import DEFAULT_NAME
from simulator.parallel.legality import idle_details, unused
from simulator.predict import Source
from simulator.spec.calibration.stored import stored_file
from simulator.spec.model import Model, preset_with_shape
from simulator.spec.model.files import preset_names
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from simulator.formats.readers.plans import Draft

_NOTHING = (False, None, 0, 1, "none")


def without_effect(stated_plan: Plan, plan: Plan, model: Model) -> tuple[Source, ...]:
    """Fields of the plan that were given but have no effect with the others."""
    idle = unused(plan, experts=model.experts is not None)
    given = {name: plan.value(name) for name in idle if name in stated_plan.flat_fields_set}
    named = [name for name, value in given.items() if value is True or value not in _NOTHING]  # True equals 1
    changed = plan.offload.model_dump(exclude_defaults=True)
    found = {name: idle[name] for name in named}
    found |= {f"offload.{name}": needs for name, needs in idle_details(plan).items() if name in changed}
    detail = "without effect: needs {}".format
    return tuple(Source(what=f"plan.{name}", kind="given", detail=detail(found[name])) for name in found)


def sources_of(
    name: str,
    raw: Mapping[str, Any],
    origins: Mapping[str, str],
    stated_plan: Plan,
    plan: Plan,
    draft: Draft | None = None,
) -> tuple[Source, ...]:
    """The origin of each value: the file, a flag, or a default (then it is assumed)."""
    assumed = "assumed" if name == DEFAULT_NAME else "given"
    imported = draft and draft.model and "model" not in origins
    found = named_sources(name, {**raw, "model": None} if imported else raw, origins)
    if draft is not None:
        from simulator.formats.study.imported import sources

        if imported:
            found.append(Source(what="model", kind="given", detail=f"{raw['model']} ({draft.file})"))
        found += sources(draft, plan.stack)
        places = {f"plan.{field}": place for field, place in draft.places.items()}
        origins = {key: flag for key, flag in origins.items() if places.get(key) != flag}
        name, assumed = draft.file, "given"
    stated = {key: value for key, value in raw["plan"].items() if draft is None or key not in draft.assumed}
    return (*found, *_of_plan(name, assumed, stated, origins, stated_plan, plan))


def named_sources(name: str, raw: Mapping[str, Any], origins: Mapping[str, str]) -> list[Source]:
    """The origin of each noun that a study names: its file, a flag, or the embedded default."""
    assumed = "assumed" if name == DEFAULT_NAME else "given"
    return [
        Source(what=key, kind="given" if key in origins else assumed, detail=f"{raw[key]} ({origins.get(key, name)})")
        for key in ("model", "cluster", "nodes", "placement", "calibration")
        if raw.get(key) is not None
    ]


_KIND_OF: Final = {"defaults": "assumed", "read as": "given", "not modelled": "assumed"}


def left_open(model: Model) -> Iterator[Source]:
    """What the model's file does not say, or what of it is not modelled."""
    for topic, kind in _KIND_OF.items():
        if topic in model.sources:
            yield Source(what=f"model, {topic}", kind=kind, detail=model.sources[topic])


def model_notes(model: Model) -> tuple[str, ...]:
    """The same in a line each."""
    return tuple(f"{model.name}: {one.what.partition(', ')[2]}: {one.detail}" for one in left_open(model))


def of_model(model: Model, named: object) -> Iterator[Source]:
    """What the model's file leaves open, and the preset that it amounts to. named: what the study calls the model."""
    yield from left_open(model)
    if isinstance(named, str) and named not in preset_names() and (preset := preset_with_shape(model)):
        yield Source(what="model, preset", kind="given", detail=f"this is the preset {preset}")


def of_stored_calibration(raw: Mapping[str, Any], device: str) -> Iterator[Source]:
    """The calibration, not named by the study, taken from where this device's own is kept."""
    stored = stored_file(device) if raw.get("calibration") is None else None
    if stored is not None:
        yield Source(
            what="calibration", kind="calibrated", detail=f"{stored}, kept of this device (calibrate fit --keep)"
        )


def set_by_hand(overrides: Sequence[Override], tables: Sequence[str] = ("plan",)) -> tuple[Source, ...]:
    """Settings by `--set` outside the study's own tables. A link's latency is part of pictures alone: waits are measured."""
    idle = ", without effect: calls wait as measured, which cluster.fabric.wait scales"
    return tuple(
        Source(
            what=one.flag.removeprefix("--set "),
            kind="given",
            detail=f"{one.text} (--set){idle * (one.path[-1] == 'latency_s' and one.root in ('link', 'cluster'))}",
        )
        for one in overrides
        if one.root not in tables
    )


def _of_plan(
    name: str, kind: str, table: Mapping[str, Any], origins: Mapping[str, str], stated_plan: Plan, plan: Plan
) -> list[Source]:
    """The origin of the plan's fields: flags, the file, or defaults."""
    found: list[Source] = []
    paths = [key.removeprefix("plan.") for key in origins if key.startswith("plan.")]
    flags = [f"{path} = {_leaf(plan, *path.split('.'))}" for path in paths]
    if flags:
        found.append(Source(what="plan", kind="given", detail=f"{', '.join(flags)} (flags)"))
    rest = [f"{key} = {value}" for key, value in table.items() if f"plan.{key}" not in origins]
    if rest:
        found.append(Source(what="plan", kind=kind, detail=f"{', '.join(rest)} ({name})"))
    for degree in ("dp_shard", "dp_replicate"):
        if getattr(plan, degree) != getattr(stated_plan, degree):
            detail = f"{degree} = {getattr(plan, degree)}: all devices of the cluster, as no degree was given"
            found.append(Source(what="plan", kind="assumed", detail=detail))
    if plan.precision.compute != stated_plan.precision.compute:
        detail = f"precision = {plan.precision.compute}, as none was given and the GPU has no {stated_plan.precision.compute}"
        found.append(Source(what="plan", kind="assumed", detail=detail))
    if "seq_len" not in plan.flat_fields_set:
        found.append(Source(what="plan", kind="assumed", detail=f"seq_len = {plan.seq_len}, as none was given"))
    return found


def _leaf(plan: Plan, name: str, *below: str) -> object:
    """The field of a flat name, or what stands below it: zeropp, secondary_ranks."""
    found: object = plan.value(name)
    for part in below:
        found = found.get(part) if isinstance(found, dict) else getattr(found, part)
    return found
