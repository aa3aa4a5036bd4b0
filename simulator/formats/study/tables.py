"""A study as plain data: its file, overridden by flags and `--set`s, with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from simulator.base.errors import Fault, InputError
from simulator.base.schema import Strict, nested
from simulator.base.value_errors import Expected
from simulator.formats.study.overrides import Override, literal
from simulator.predict.data_loading import DataLoading
from simulator.predict.energy import Energy
from simulator.predict.parameter_server import Servers
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.plan import Plan
from simulator.work.checkpoint import Checkpoint

T = TypeVar("T")

# One node of 8 H100 and the length Llama 3 was trained with; everything else is what PyTorch's FSDP2 does by itself.
DEFAULT: Final[Mapping[str, Any]] = {
    "model": "llama3-8b",
    "cluster": "hgx-h100-8",
    "plan": {"zero": 3, "seq_len": 8192},
}
DEFAULT_NAME: Final = "the embedded default"
# what --set reaches into
ROOTS: Final = ("plan", "model", "cluster", "device", "stack", "checkpoint", "data", "energy", "servers", "kernels")


class StudyFile(Strict):
    """A study as it is written. The values of `run` are judged by the verb that plays it."""

    model: Annotated[str, Expected("a preset's name as llama3-8b, a model's TOML file, or a config.json")] = Field(
        description="a preset's name or a public one (Qwen/Qwen3-32B), a model's TOML file, or a Hugging Face config.json"
    )
    like: Annotated[str | None, Expected("a family of config.json files as llama")] = Field(
        default=None, description="the family as which the model's config.json is read, whatever it says"
    )
    images: NonNegativeInt | None = Field(
        default=None,
        description="of a sequence, where the model has a tower for them ([guide](../guides/fine-tuning.md#images)); 0 leaves the "
        "tower out; not set: one",
    )
    image_size: PositiveInt | None = Field(
        default=None,
        description="pixels of an image's side, of towers that take images of any size; not set: 448",
    )
    cluster: Annotated[str, Expected("a preset's name as hgx-h100-8, or a cluster's TOML file")] = Field(
        description="a preset's name, or a cluster's TOML file"
    )
    nodes: int | None = Field(
        ge=1,
        le=MAX_NODES,
        default=None,
        description="how many of the cluster's nodes; not set: as many as its file says",
    )
    placement: Annotated[str | None, Expected("a table's file")] = Field(
        default=None, description="a table of the node and GPU of each rank"
    )
    calibration: Annotated[str | None, Expected("a preset's name, or a calibration's file")] = Field(
        default=None,
        description="a preset's name, or a calibration's file; `ideal` and `datasheet` are made from the device; not set: the "
        "device's own",
    )
    plan: Plan = Field(default=Plan(), description="how the model is placed and run")
    checkpoint: Checkpoint | None = Field(default=None, description="asks what one checkpoint costs")
    data: DataLoading | None = Field(
        default=None, description="where samples come from: asks whether they stall the step"
    )
    energy: Energy | None = Field(default=None, description="asks what a step draws")
    servers: Servers | None = Field(default=None, description="parameter servers: asks what the plan does with them")
    run: dict[str, Any] | None = Field(default=None, description="what `shardwise goodput` plays")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """--plan, --plan-format and --define as given."""

    path: Path
    form: str | None = None
    define: tuple[str, ...] = ()


class Faults(list[Fault]):
    """Collects faults, so that all of them can be reported together."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except InputError as exc:
            self.extend(exc.faults)
        except OSError as exc:
            self.append(Fault(place=str(exc.filename), problem=f"cannot be read: {exc.strerror}"))
        return None


def located(
    data: dict[str, Any], folder: Path, below: Iterable[tuple[str, str]] = (("plan", "stack"),)
) -> dict[str, Any]:
    """Relative paths in a file are relative to that file. below: (table, key) of those that are not at the top."""
    if isinstance(data.get("placement"), str):
        data["placement"] = str(folder / data["placement"])
    places = [(data, key) for key in ("model", "cluster", "calibration")]
    places += [(data[table], key) for table, key in below if isinstance(data.get(table), dict)]
    for table, key in places:
        value = table.get(key)
        if isinstance(value, str) and value.endswith((".toml", ".json", ".csv", ".gz")):
            table[key] = str(folder / value)
    return data


def counts_read(flags: Mapping[str, str]) -> dict[str, Any]:
    """Flags with the numbers that their texts are."""
    counts = ("nodes", "images", "image_size")
    return {key: literal(text) if key in counts else text for key, text in flags.items()}


def merged(
    base: Mapping[str, Any],
    flags: Mapping[str, str],
    plan_flags: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    keep_plan: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The study as plain data, its plan by flat names, and for each key that the command line gave, by which flag."""
    raw = {**base, **counts_read(flags)}
    origins = {key: f"--{key.replace('_', '-')}" for key in flags}
    plan = raw.get("plan", {}) if keep_plan else {}
    if isinstance(plan, dict):
        plan = Plan.flattened(plan)
        given = [(name, f"--{name.replace('_', '-')}", literal(text)) for name, text in plan_flags.items()]
        given += [(".".join(Plan.flat_path(o.path)), o.flag, o.value) for o in overrides if o.root == "plan"]
        for name, _, value in given:
            plan = nested(plan, name.split("."), value)
        origins |= {f"plan.{name}": flag for name, flag, _ in given}
    return {**raw, "plan": plan}, origins


def relabelled(fault: Fault, origins: Mapping[str, str], name: str, written: Mapping[str, Any]) -> Fault:
    """A fault of the study's table at the flag that caused it, else at the key in its file, whose plan is `written`."""
    path = fault.place.removeprefix(": ")
    flag = next(iter(flags_above(path, origins)), None)
    if fault.problem == "unknown key" and path in Plan.written_fields():
        fault = replace(fault, remedy="it belongs under [plan]")
    if flag and fault.problem.startswith("must be a table"):
        fault = replace(fault, remedy=f"--set {path}.KEY=VALUE")
    root, _, key = path.partition(".")
    if root == "plan" and key:
        head = re.split(r"[.\[]", key, maxsplit=1)[0]
        path = f"plan.{Plan.spelled(head, written)}{key.removeprefix(head)}"
    return replace(fault, place=flag or f"{name}: {path}")


def flags_above(path: str, origins: Mapping[str, str]) -> list[str]:
    """The flags of the key at `path` or of a table around it, behind which the key within that stands."""
    around = [key for key in origins if path == key or path.startswith((f"{key}.", f"{key}["))]
    return [f"{origins[key]}: {path.removeprefix(key).partition('.')[2]}".removesuffix(": ") for key in around]


def at_its_key(fault: Fault, origins: Mapping[str, str], name: str, table: str = "plan") -> Fault:
    """The fault of a preset's name at the flag or key that gave it. table: the one that names the stack."""
    key = f"{table}.stack" if fault.place == "stack" else fault.place
    if fault.place not in ("model", "cluster", "calibration", "stack") or not (key in origins or name != DEFAULT_NAME):
        return fault
    return replace(fault, place=origins.get(key) or f"{name}: {key}")


def of_root(overrides: Sequence[Override], root: str) -> list[Override]:
    """The `--set`s that reach into one noun."""
    return [override for override in overrides if override.root == root]
