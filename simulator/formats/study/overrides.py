"""`--set key=value`: reach any leaf of what a prediction is made from.

`link.` is short for the links of a cluster: link.inter.bytes_per_s is what one NIC sends. `x2` is twice what the
leaf is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from simulator.base.errors import Fault, InputError
from simulator.base.records import Nested
from simulator.base.schema import Strict, faults_of, model_at, nearest, nearest_key, parse_toml
from simulator.base.units import FROM_FILE
from simulator.base.value_errors import did_you_mean
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

InputT = TypeVar("InputT", bound=Strict)

_FACTOR: Final = re.compile(r"[x×*]\s*(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12})")
_BARE: Final = re.compile(
    r"(=\s*)((?!(?:true|false|inf|nan)\b)(?:[A-Za-z]|\d[\d.]*(?!e[\d-]|x)[A-Za-z])[\w./-]*)(?=\s*[,}])"
)
_LINK: Final = "link"  # a root of its own, wherever there is a cluster

_LEAF: Final = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `root.path=value`, as given. `flag` is how the reader finds it again on the command line.

    meant: the value, where the text stands for something else than itself.
    """

    root: str
    path: tuple[str, ...]
    text: str
    flag: str
    meant: object = None

    @property
    def value(self) -> object:
        return literal(self.text) if self.meant is None else self.meant

    @property
    def factor(self) -> float | None:
        """What a relative value (`x2`) multiplies by; None for any other."""
        found = _FACTOR.fullmatch(self.text.strip())
        return float(found.group(1)) if found else None


def literal(text: str) -> object:
    """What TOML would read in `key = text`, or in `key = 0.5` of `.5`; text that is no TOML value is a string ("400Gb/s", bf16).

    So it is in a table: {distribution=lognormal, median=1s} needs no quotes.
    """
    found = _toml(text)
    if found is text and text.startswith("{"):
        table = _toml(_BARE.sub(r'\1"\2"', text))
        return table if isinstance(table, dict) else text
    return found


def _toml(text: str) -> object:
    try:
        table = parse_toml(f"value = {'0' * text[:1].startswith('.')}{text}")
    except (ValueError, RecursionError):  # not TOML, or digits beyond what Python reads
        return text
    return table["value"] if list(table) == ["value"] else text


def parse_overrides(settings: Iterable[str], roots: Sequence[str]) -> tuple[list[Override], list[Fault]]:
    """The overrides among `settings`, and a fault for each that is none. A multiple may follow a value of its key."""
    found: list[Override] = []
    keys: set[str] = set()
    faults: list[Fault] = []
    roots = (*roots, _LINK) if "cluster" in roots else roots
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        root, *path = key.split(".")
        flag = f"--set {key}"
        if root not in roots:
            faults.append(Fault(place=flag, problem=f"there is no table {root!r}", remedy=_table_of(root, roots)))
        elif not path:
            another = f", or --{root} NAME for another one" if root in ("model", "cluster") else ""
            faults.append(Fault(place=flag, problem="is a table", remedy=f"--set {root}.KEY=VALUE{another}"))
        elif not equals:
            faults.append(Fault(place=flag, problem="has no value", remedy=f"--set {key}=VALUE"))
        elif key in keys and not _FACTOR.fullmatch(text):
            faults.append(Fault(place=flag, problem="is set twice", remedy="keep one"))
        else:
            found.append(_override(root, tuple(path), text, flag))
            keys.add(key)
    return found, faults


def set_twice(plan_flags: Mapping[str, str], settings: Iterable[str]) -> list[Fault]:
    """Fields of the plan that have a flag of their own and a `--set`; a multiple follows the flag."""
    found: list[Fault] = []
    for setting in settings:
        key, _, text = (part.strip() for part in setting.partition("="))
        root, *path = key.split(".")
        name = str(Plan.flat_path(path)[0]) if path and root == "plan" else ""
        if name in plan_flags and not _FACTOR.fullmatch(text):
            found.append(Fault(f"--set {key}", f"is set twice, by --{name.replace('_', '-')} too", "keep one"))
    return found


def _table_of(key: str, roots: Sequence[str]) -> str:
    """The keys that may have been meant by one without its table, or by a table that is none."""
    from simulator.studies.serving import InferencePlan, Workload  # which take long to load

    owners: Mapping[str, type[Strict]] = {
        "inference": InferencePlan,
        "workload": Workload,
        "plan": Plan,
        "model": Model,
        "cluster": Cluster,
        "device": Device,
        "stack": Stack,
    }
    fields = [f"{root}.{key}" for root, owner in owners.items() if root in roots and key in owner.written_fields()]
    return did_you_mean(fields) or nearest(key, roots)


def _override(root: str, path: tuple[str, ...], text: str, flag: str) -> Override:
    if root == _LINK:
        root, path = "cluster", ("inter", "nic_bytes_per_s") if path == ("inter", "bytes_per_s") else path
    return Override(root=root, path=path, text=text, flag=flag)


def patched(target: InputT, overrides: Iterable[Override], error: type[InputError]) -> InputT:
    """`target` with the leaves replaced, validated again. Raises `error` with every fault."""
    overrides = [_with_text(type(target), replace(one, path=type(target).flat_path(one.path))) for one in overrides]
    if not overrides:
        return target
    for number, override in enumerate(overrides):  # a multiple of what one before it has set
        if override.factor is not None and any(one.path == override.path for one in overrides[:number]):
            return patched(patched(target, overrides[:number], error), overrides[number:], error)
    data = target.model_dump(exclude_unset=True)
    faults: list[Fault] = []
    for override in overrides:
        if override.factor is not None:
            faults += _multiplied(target, data, override)
        else:
            faults += _leaf_faults(type(target), override) or _put(data, override)
        if "sources" in type(target).model_fields and override.path[0] != "sources":
            data["sources"] = {**data.get("sources", {}), override.path[0]: f"given: {override.flag}={override.text}"}
    error.raise_for(faults)
    return type(target).parse(data, ", ".join(override.flag for override in overrides), error)


def _with_text(root: type[Strict], override: Override) -> Override:
    """Of a table of texts, as `stack.nccl_env`, a value is its text, so 4 needs no quotes."""
    owner = model_at(root, override.path[:-2]) if len(override.path) > 1 else None
    if owner is None or not issubclass(owner, Strict) or isinstance(override.value, str):
        return override
    field = owner.written_fields().get(override.path[-2])
    of_texts = field is not None and field.annotation == dict[str, str]
    return replace(override, meant=override.text) if of_texts else override


def _multiplied(target: Strict, data: dict[str, Any], override: Override) -> list[Fault]:
    """Put a multiple of what the leaf is."""
    here: object = target
    for part in override.path:
        here = here.get(part) if isinstance(here, dict) else _field(here, part)
    if isinstance(here, bool) or not isinstance(here, int | float):
        known = _leaf_faults(type(target), override) if here is None else []
        problem = f"{override.text} multiplies a number, and this is {'not set' if here is None else 'none'}"
        return known[:1] or [Fault(place=override.flag, problem=problem, remedy="a value of its own")]
    assert override.factor is not None
    value = here * override.factor
    return _put(data, replace(override, meant=round(value) if isinstance(here, int) else value))


def _field(owner: object, name: str) -> object:
    """A field by its flat name; None where there is none."""
    if isinstance(owner, Nested):
        return owner.value(name) if name in owner.flat_names else None
    return getattr(owner, name, None)


def _leaf_faults(root: type[Strict], override: Override) -> list[Fault]:
    """Faults of the value alone, judged as in a file: a bare number where a unit is due is one."""
    owner = model_at(root, override.path[:-1])
    name = override.path[-1]
    if owner is None:
        return []  # below a plain table: the noun's own validation decides
    info = (owner.written_fields() if issubclass(owner, Strict) else owner.model_fields).get(name)
    if info is None:
        problem = f"{override.flag.removeprefix('--set ').rpartition('.')[0]} has no {name!r}"
        return [Fault(place=override.flag, problem=problem, remedy=nearest_key(name, owner))]
    main = issubclass(owner, Nested) and owner.is_main(name)
    table = isinstance(override.value, dict) if main else not isinstance(override.value, list)
    if model_at(root, override.path) is not None and table:
        return []  # a table set as a whole
    annotation: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    # which has its own configuration
    alone = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    try:
        TypeAdapter(annotation, config=None if alone else _LEAF).validate_python(override.value, context=FROM_FILE)
    except ValidationError as exc:
        return faults_of(exc, override.flag, leaf=info.annotation)
    return []


def _put(data: dict[str, Any], override: Override) -> list[Fault]:
    """Write the value into nested plain data; parts of the path that were unset become tables."""
    here: Any = data
    for part in override.path[:-1]:
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        if not isinstance(here, dict) or not isinstance(here[part], dict):
            return [Fault(place=override.flag, problem=f"{part} is not a table", remedy="set it as a whole")]
        here = here[part]
    here[override.path[-1]] = override.value
    return []
