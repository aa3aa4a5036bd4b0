"""A plan from another framework's file, before the number of GPUs is known; and the completed plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Final, Literal

from simulator.base.errors import Fault, PlanError
from simulator.formats.readers.plans.reading import Setting
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model

Degree = Literal["dp_shard", "dp_replicate"]
GPUS: Final = "GPUs"  # among a fault's flags: a number of GPUs, which becomes nodes where the cluster is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What one file states.

    fields: Plan's fields. places: where they stand. model: a shape, or a preset's name; None: the file states none, or names one that is no preset (model_unknown: which). cluster: likewise.
    num_devices: of the whole job; None: not stated. devices_fault: why its statement cannot be read. leftover: the data-parallel degree that takes what the others leave.
    global_batch_size: sequences a step, from which the number of micro-batches follows where that is not stated.
    num_data_parallel: ranks that read different sequences, where the file implies them.
    num_nodes: of the whole job; None: not stated. assumed: Plan's fields that this format leaves to the training script: what is
    taken where nobody gives them, and why. by_model: fields that the model and the others decide; or a Fault. half_by_gpu: a GPU
    without bf16 computes in fp16.
    stack: the software preset taken, and why; stack_changes: its fields that the file states otherwise.
    reference_forwards: of a reference model, in each micro-batch (DPO, KTO). notes: keys of our own file that have moved,
    and what trainers of preferences do.
    """

    format: str
    software: str
    file: str
    fields: dict[str, Any]
    places: dict[str, str]
    stack: str
    stack_why: str
    leftover: Degree | None
    model: Model | str | None = None
    model_unknown: str = ""
    cluster: str | None = None
    num_devices: int | None = None
    devices_fault: Fault | None = None
    global_batch_size: int | None = None
    num_data_parallel: int | None = None
    num_nodes: int | None = None
    assumed: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    by_model: Mapping[str, Callable[[Model, Mapping[str, Any]], object]] = field(default_factory=dict)
    half_by_gpu: bool = False
    stack_changes: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    faults: tuple[Fault, ...] = ()
    reference_forwards: int = 0
    notes: tuple[str, ...] = ()

    def settled(self, given: Collection[str], model: Model | None, device: Device | None = None) -> Draft:
        """With what has to be assumed, where the caller states other fields and has this model and device."""
        longest = model.max_positions if model is not None and model.positions == "learned" else None
        found = {name: entry for name, entry in self.assumed.items() if name not in given}
        if "seq_len" in found and longest is not None:
            found["seq_len"] = (min(int(str(found["seq_len"][0])), longest), found["seq_len"][1])
        if self.half_by_gpu and device is not None and not device.peak("bf16") and "precision" not in given:
            found["precision"] = ("fp16", f"{device.name} has no bf16")
        remaining = {name: value for name, value in self.fields.items() if name not in found}
        return replace(self, assumed=found, fields=remaining)

    def named(self, *uses: str) -> tuple[Setting, ...]:
        """The settings of these uses, in the file's order."""
        return tuple(setting for setting in self.settings if setting.use in uses)

    def stated_devices(self, given: Mapping[str, Any]) -> int | None:
        """GPUs of the job: stated, or implied by the batch and the other degrees."""
        if self.num_devices is not None:
            return self.num_devices
        if self.num_data_parallel is not None:
            return self.num_data_parallel * _inner({**self.fields, **given})
        degrees = {**self.fields, **given}
        both = "dp_shard" in degrees and "dp_replicate" in degrees
        if both and self.leftover is None:
            return _count(degrees, "dp_shard") * _count(degrees, "dp_replicate") * _inner(degrees)
        return None

    def most_devices(self, given: Mapping[str, Any]) -> int | None:
        """GPUs that the batch keeps busy: no rank is without a sequence. None: the file states no batch."""
        if self.global_batch_size is None or {"micro_batch_size", "num_micro_batches"} & set(given):
            return None
        fields = {**self.fields, **given}
        each = _count(fields, "micro_batch_size") * _count(fields, "num_micro_batches")
        return max(1, self.global_batch_size // each) * _inner(fields)

    def report(self) -> dict[str, Any]:
        """The settings that were read and that were not, as plain data."""
        return {
            "format": self.format,
            "software": self.software,
            "file": self.file,
            "stack": self.stack,
            "stack_reason": self.stack_why,
            "stack_changes": {name: value for name, (value, _) in self.stack_changes.items()},
            "num_devices": self.num_devices,
            **({"assumed": {name: value for name, (value, _) in self.assumed.items()}} if self.assumed else {}),
            "settings": [
                {"name": s.name, "value": s.value, "place": s.place, "use": s.use, "note": s.note}
                for s in self.settings
            ],
        }


def plan_fields(draft: Draft, num_devices: int, given: Mapping[str, Any], model: Model | None = None) -> dict[str, Any]:
    """Plan's fields for that many GPUs; `given` are those that the caller states over the file's.

    Raises PlanError with every fault: the file's own, degrees that do not divide, batches that do not add up.
    """
    fields, faults = drafted_fields(draft, num_devices, given, model)
    PlanError.raise_for(faults)
    return fields


def drafted_fields(
    draft: Draft, num_devices: int, given: Mapping[str, Any], model: Model | None = None
) -> tuple[dict[str, Any], tuple[Fault, ...]]:
    """As `plan_fields`; where there are faults, the fields that are settled all the same beside them."""
    faults = list(draft.faults)
    fields = {**draft.fields, **given}
    for name, make in draft.by_model.items():
        if model is not None and name not in fields:
            value = make(model, fields)
            if isinstance(value, Fault):
                faults.append(value)
            else:
                fields[name] = value
    fields = {"stack": draft.stack, **fields}
    fields |= {name: value for name, (value, _) in draft.assumed.items() if name not in fields}
    faults += _degrees(draft, fields, num_devices, given) or _batch(draft, fields, given)
    return fields, tuple(dict.fromkeys(faults))


def _inner(fields: Mapping[str, Any]) -> int:
    """Ranks that work on the same sequences: tp × cp × pp."""
    return _count(fields, "tp") * _count(fields, "cp") * _count(fields, "pp")


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name, 1)
    return value if isinstance(value, int) and value >= 1 else 1  # what is no count, Plan refuses


def _degrees(draft: Draft, fields: dict[str, Any], num_devices: int, given: Mapping[str, Any]) -> list[Fault]:
    """Fill in the data-parallel degrees. What the caller gives beside the file is Plan's and the mesh's to judge."""
    place = draft.places.get("num_devices") or draft.file
    inner = _inner(fields)
    if num_devices % inner:
        equation = " × ".join(f"{name} {_count(fields, name)}" for name in ("tp", "cp", "pp"))
        below = num_devices // inner * inner
        near = " or ".join(str(n) for n in (below, below + inner) if n)
        stated = [n for n in ("tp", "cp", "pp") if n in draft.places and n not in given and _count(fields, n) > 1]
        places = ", ".join(dict.fromkeys(draft.places[n] for n in stated))
        problem = f"{equation} = {inner} does not divide {num_devices} GPUs" + (f" ({places})" if places else "")
        remedy, more = f"{near} GPUs, or other degrees", ((GPUS, f"{below + inner}"),)
        return [Fault(place=place, problem=problem, remedy=remedy, flags=more)]
    ranks = num_devices // inner
    degrees = [name for name in ("dp_shard", "dp_replicate") if name in given]
    if len(degrees) == 2:
        return []
    if draft.leftover is None and not degrees:
        return _stated(draft, fields, ranks, num_devices)
    leftover = draft.leftover or "dp_shard"
    if degrees:
        leftover = "dp_replicate" if degrees == ["dp_shard"] else "dp_shard"
    other = "dp_replicate" if leftover == "dp_shard" else "dp_shard"
    fixed = _count(fields, other)
    if ranks % fixed:
        problem = f"{other} = {fixed} does not divide the {ranks} ranks of data parallelism"
        return [Fault(place=draft.places.get(other, place), problem=problem, remedy=f"{other} = {gcd(ranks, fixed)}")]
    fields[leftover] = ranks // fixed
    fields.setdefault(other, fixed)  # as it was given: what is no count, Plan refuses
    return []


def _stated(draft: Draft, fields: Mapping[str, Any], ranks: int, num_devices: int) -> list[Fault]:
    """Both data-parallel degrees are stated in the file."""
    shard, replicate = _count(fields, "dp_shard"), _count(fields, "dp_replicate")
    if shard * replicate == ranks:
        return []
    inner = _inner(fields)
    problem = f"dp_replicate {replicate} × dp_shard {shard} × tp·cp·pp {inner} = {shard * replicate * inner}, not {num_devices} GPUs"
    near = f"dp_shard = {ranks // replicate}" if ranks % replicate == 0 else f"{shard * replicate * inner} GPUs"
    return [Fault(place=draft.places.get("dp_shard", draft.file), problem=problem, remedy=near)]


def _batch(draft: Draft, fields: dict[str, Any], given: Mapping[str, Any]) -> list[Fault]:
    """Sequences a step = micro-batch × micro-batches × ranks of data parallelism: fill in the one that is missing."""
    ranks = _count(fields, "dp_shard") * _count(fields, "dp_replicate")
    total, place = draft.global_batch_size, draft.places.get("global_batch_size", draft.file)
    if total is None or "num_micro_batches" in given:
        return []
    if "micro_batch_size" not in fields:
        count = _count(fields, "num_micro_batches")
        return _filled(
            fields, "micro_batch_size", total, count * ranks, f"micro-batches {count} × ranks {ranks}", place
        )
    micro = _count(fields, "micro_batch_size")
    moved = given.keys() & {"tp", "pp", "cp", "dp_shard", "dp_replicate", "micro_batch_size"}
    if "num_micro_batches" not in fields or moved:
        return _filled(fields, "num_micro_batches", total, micro * ranks, f"micro-batch {micro} × ranks {ranks}", place)
    count = _count(fields, "num_micro_batches")
    if total != micro * count * ranks:
        equation = (
            f"micro-batch {micro} × accumulation {count} × ranks of data parallelism {ranks} = {micro * count * ranks}"
        )
        problem = f"{total} sequences a step, but {equation}"
        remedy = f"{micro * count * ranks}"
        if total % (micro * ranks) == 0:
            remedy += f", or accumulation = {total // (micro * ranks)}"
        fewer = (("--num-micro-batches", f"{count}"),)
        return [Fault(place=place, problem=problem, remedy=remedy, flags=fewer)]
    return []


def _filled(fields: dict[str, Any], name: str, total: int, parts: int, equation: str, place: str) -> list[Fault]:
    if total % parts:
        near = " or ".join(str(n) for n in (total // parts * parts, total // parts * parts + parts) if n)
        problem = f"{total} sequences a step are not a multiple of {equation} = {parts}"
        fits = gcd(total, parts) if name == "micro_batch_size" else 0
        cure = (GPUS, f"{fits}") if fits else ("--num-micro-batches", f"{max(1, round(total / parts))}")
        return [Fault(place=place, problem=problem, remedy=near, flags=(cure,))]
    fields[name] = total // parts
    return []
