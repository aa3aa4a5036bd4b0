"""The strict base of everything a person writes: frozen, no unknown keys, no NaN or infinity, every fault at once."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from simulator.base.errors import ArgumentError, Fault, InputError
from simulator.base.files import ordinary
from simulator.base.units import FROM_FILE, UnitError
from simulator.base.value_errors import branches_of, close_names, did_you_mean, expected_for, wrong_value

_T = TypeVar("_T", bound=Hashable)

if TYPE_CHECKING:
    from pydantic._internal._model_construction import (
        ModelMetaclass as _Called,
    )  # for type checkers, a call is the class's
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

else:

    class _Called(type(BaseModel)):
        """A call from Python names the faults of all its arguments in our words, with the nearest names."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  of any class
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as exc:
                model = cls if issubclass(cls, BaseModel) else None
                raise ArgumentError(faults_of(exc, cls.__name__, model, kwargs)) from None


_MOST_PARTS: Final = 32
_MOST_FAULTS: Final = 1000  # of one file, told one by one
_LONGEST_BITS: Final = 128  # of a whole number: TOML has 64, and products of a few still are floats
_DOTTED = re.compile(
    rf"""(?:^|[{{,\[])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{_MOST_PARTS}}}""", re.MULTILINE
)
MOST_TEXT_BYTES: Final = 64 * 2**20
_MANY: Final = 56  # names that a message lists at most
_LIKE_A_FILE: Final = 0.85  # files of one folder often differ in one word
# Which option takes a file that was given in another one's place, by its suffix
_SETTINGS: Final = dict.fromkeys(
    (".sh", ".slurm", ".sbatch", ".yml", ".yaml"), "--plan takes a launch script or a framework's settings"
)
_TAKEN_BY: Final = {**_SETTINGS, ".json": "--model takes a config.json, --plan a framework's settings"}
_PYTHON: Final = "is Python code, which is not read here"


class Strict(BaseModel, metaclass=_Called):
    """Base of the inputs that come from files and flags."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: object, place: str, error: type[InputError], *, from_file: bool = False) -> Self:
        """Validate `data`, turning every pydantic fault into ours. `place` names the file or flag.

        from_file: `data` was written by a person, so a bare number where a unit is due is a fault.
        """
        try:
            return cls.model_validate(data, context=FROM_FILE if from_file else None)
        except ValidationError as exc:
            raise error(faults_of(exc, place, cls, data)) from None

    @classmethod
    def of_json(cls, file: Path, error: type[InputError]) -> Self:
        """A JSON file of lists and tables as `save` writes them. Raises `error` with every fault."""
        try:
            return cls.model_validate_json(json.dumps(read_json(file, error)))
        except ValidationError as exc:
            raise error(faults_of(exc, file.name)) from None

    @classmethod
    def written_fields(cls) -> Mapping[str, FieldInfo]:
        """Every key that may be written."""
        return cls.model_fields

    @classmethod
    def flat_path(cls, path: Sequence[Any]) -> tuple[Any, ...]:
        """A path of keys with the flat name of a field that a record holds (simulator/base/records.py)."""
        return tuple(path)


def faults_of(
    exc: ValidationError, place: str, model: type[BaseModel] | None = None, data: object = None, leaf: object = None
) -> list[Fault]:
    """One `Fault` a pydantic error, its location written as in the file: `links[2].bytes_per_s`.

    model: what was validated; with it an unknown key's remedy names the nearest known ones. data: what was written.
    leaf: the type of what was validated, where that is no model.
    """
    details = exc.errors(include_url=False)
    beyond = len(details) - _MOST_FAULTS
    details = details[:_MOST_FAULTS]
    misspelled = [e["loc"] for e in details if e["type"] == "extra_forbidden"]
    found: dict[object, Fault] = {}
    for number, detail in enumerate(details):
        if not _is_misspelled(detail, misspelled):
            loc = _untagged(detail["loc"], model, leaf)
            fault = _fault({**detail, "loc": loc}, place, model, data)
            key = number if loc == detail["loc"] else fault.place  # the branches of a union refuse one value each
            found[key] = _either(found[key], fault) if key in found else fault
    more = [Fault(place=place, problem=f"has {beyond:,} more faults", remedy="mend these first")] if beyond > 0 else []
    return [*found.values(), *more]


def _either(one: Fault, other: Fault) -> Fault:
    """One fault of a value that both types of a union refuse, which names both."""
    expected, it_is, given = one.problem.partition("; it is ")
    takes = other.problem.partition(it_is)[0].removeprefix("must be ")
    return replace(one, problem=f"{expected} or {takes}{it_is}{given}") if it_is else one


def _untagged(loc: Sequence[int | str], model: type[BaseModel] | None, leaf: object) -> tuple[int | str, ...]:
    """A location without pydantic's names for the branches of a union."""
    found: list[int | str] = []
    for part in loc:
        field = _field_at(model, found) if found else None
        tag = str(part).partition("[")[0].removeprefix("constrained-")
        if tag not in branches_of(field.annotation if field else None if found else leaf):
            found.append(part)
    return tuple(found)


def _is_misspelled(detail: ErrorDetails, unknown: Iterable[tuple[int | str, ...]]) -> bool:
    """A key that is missing because it stands beside misspelled: the unknown key is reported, with this one's name."""
    loc = detail["loc"]
    beside = (str(one[-1]) for one in unknown if one[:-1] == loc[:-1])
    return detail["type"] == "missing" and any(close_names(one, [str(loc[-1])]) for one in beside)


def _fault(detail: ErrorDetails, place: str, model: type[BaseModel] | None, data: object) -> Fault:
    loc = detail["loc"]
    where = _where(place, as_written(loc, model, data))
    if detail["type"] == "extra_forbidden":
        owner = model_at(model, loc[:-1])
        return Fault(place=where, problem="unknown key", remedy=nearest_key(str(loc[-1]), owner) if owner else "")
    field = _field_at(model, loc)
    if detail["type"] == "missing":
        return Fault(place=where, problem="is missing", remedy=expected_for(field))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, UnitError):
        return Fault(place=where, problem=cause.problem, remedy=cause.remedy)
    wrong = wrong_value(detail, field)
    if wrong is not None:
        return Fault(place=where, problem=wrong[0], remedy=wrong[1])
    return Fault(place=where, problem=detail["msg"].removeprefix("Value error, "))


def as_written(loc: Sequence[int | str], model: type[BaseModel] | None, data: object) -> tuple[int | str, ...]:
    """A location with the flat name of a field (simulator/base/records.py), unless `data` has the field's record."""
    found: list[int | str] = []
    rest = tuple(loc)
    while rest:
        table = data if isinstance(data, dict) else {}
        if model is not None and issubclass(model, Strict) and not isinstance(table.get(rest[0]), dict):
            rest = model.flat_path(rest)
        head, rest = rest[0], rest[1:]
        found.append(head)
        model, data = model_at(model, [head]), table.get(head)
    return tuple(found)


def _field_at(model: type[BaseModel] | None, loc: Sequence[int | str]) -> FieldInfo | None:
    """The field at the end of `loc`, or the field whose item `loc` names."""
    names = [part for part in loc if isinstance(part, str)]
    owner = model_at(model, names[:-1])
    return owner.model_fields.get(names[-1]) if owner is not None and names else None


def model_at(model: type[BaseModel] | None, loc: Sequence[int | str]) -> type[BaseModel] | None:
    """The pydantic class found by walking the field names of `loc` from `model`; None where there is none."""
    for part in loc:
        if isinstance(part, int) or model is None:
            continue
        info = model.model_fields.get(part)
        if info is None and issubclass(model, Strict):
            info = model.written_fields().get(part)
        model = None if info is None else _model_in(info.annotation)
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg)) is not None), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy: the known names nearest to `name`, or all where none is near; empty where that would be more than a few lines."""
    return _nearest(name, tuple(sorted(known)))


@lru_cache(maxsize=1000)  # a table's column may hold one wrong word in each of its rows
def _nearest(name: str, names: tuple[str, ...]) -> str:
    listed = f"known: {', '.join(names)}" if 0 < len(names) <= _MANY else ""
    return did_you_mean(close_names(name, names)) or listed


def more_than_once(items: Iterable[_T]) -> list[_T]:
    """Those that appear more than once, each once, in the order of their first place."""
    return [item for item, count in Counter(items).items() if count > 1]


def nearest_key(name: str, owner: type[BaseModel]) -> str:
    """The same of a table's keys; of those that have moved (simulator/base/records.py) only near ones."""
    known = owner.written_fields() if issubclass(owner, Strict) else owner.model_fields
    return did_you_mean(close_names(name, known)) or nearest(name, owner.model_fields)


def unknown_name(noun: str, name: str, known: Iterable[str], files: str) -> Fault:
    """The fault of a name that no preset has. files: what else would do, as "a cluster's .toml"."""
    if name.endswith(".py"):
        return Fault(place=noun, problem=f"{name} {_PYTHON}", remedy=f"give a preset's name, or the path of {files}")
    path, near = (
        f"the path of {files}",
        close_names(name.rpartition("/")[2], known := tuple(known)),
    )  # without its owner
    some = nearest(name, known) or f"{len(known)} are known, as {', '.join(close_names(name, known, 6, cutoff=0))}"
    remedy = did_you_mean([*near, path]) if near else f"{some}; or {path}"
    return Fault(place=noun, problem=f"no preset is called {name!r}", remedy=remedy)


def _where(place: str, loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return f"{place}: {path}" if path else place


def check_writable(path: Path, flag: str) -> None:
    """Raise InputError if a file cannot be written there, before any long work."""
    problem = ""
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written"
    if problem:
        raise InputError.at(f"{flag} {path}", problem, "a path that can be written")


def read_toml(path: Path, error: type[InputError]) -> dict[str, Any]:
    """A TOML file as plain data. TOML refuses duplicate keys; the strict models that take it refuse NaN and infinity."""
    text = _read_text(path, error)
    try:
        data = parse_toml(text)
    except (ValueError, RecursionError) as exc:  # ValueError: not TOML, or digits beyond what Python reads
        raise error(Fault(place=str(path), problem=f"not TOML: {exc}", remedy=_TAKEN_BY.get(path.suffix, ""))) from None
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """The text of a TOML file. Raises ValueError or RecursionError.

    tomllib's time and memory grow with the square of a dotted key's parts: 40 kB of them take 20 s and 1.6 GB.
    """
    if _DOTTED.search(text):
        msg = f"a key of more than {_MOST_PARTS} parts"
        raise ValueError(msg)
    data = tomllib.loads(text)
    refuse_long_numbers(data)
    return data


def refuse_long_numbers(data: object) -> None:
    """Raises ValueError where plain data hold a whole number beyond all counts: hexadecimal ones are read at any length."""
    left = [data]
    while left:
        match left.pop():
            case dict() as table:
                left += table.values()
            case list() as several:
                left += several
            case int() as number if number.bit_length() > _LONGEST_BITS:
                msg = "a whole number beyond 2**128"
                raise ValueError(msg)


def read_json(path: Path, error: type[InputError], *, finite: bool = True) -> Any:  # noqa: ANN401  JSON is any of six types
    """A JSON file as plain data; duplicate keys are refused, and NaN and infinity unless Python wrote them (`finite`)."""
    return parse_json(_read_text(path, error), path, error, finite=finite)


def parse_json(text: str, path: Path, error: type[InputError], *, finite: bool = True) -> Any:  # noqa: ANN401
    """The text of a JSON file, likewise."""
    faults: list[Fault] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted(more_than_once(k for k, _ in pairs))
        faults.extend(Fault(place=str(path), problem=f"key {k!r} appears twice", remedy="keep one") for k in twice)
        return dict(pairs)

    def constant(name: str) -> float:
        faults.append(Fault(place=str(path), problem=f"{name} is not a number", remedy="write a finite number"))
        return 0.0

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant if finite else float)
        if finite:
            _refuse_non_finite(data, str(path), error)
    except (ValueError, RecursionError) as exc:  # ValueError: not JSON, or digits beyond what Python reads
        raise error(Fault(place=str(path), problem=f"not JSON: {exc}", remedy=_SETTINGS.get(path.suffix, ""))) from None
    error.raise_for(faults)
    return data


def _read_text(path: Path, error: type[InputError]) -> str:
    if path.suffix == ".py":
        raise error(is_python(str(path)))
    return read_text(path, error, MOST_TEXT_BYTES)


def read_text(path: Path, error: type[InputError], most_bytes: int) -> str:
    """The text of a file in UTF-8 of at most that many bytes. Raises `error` where it is none."""
    try:
        return ordinary(path, most_bytes).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise error(unreadable(path, exc)) from None


def is_python(file: str) -> Fault:
    """Python where a file that states a study, a model or a plan is due."""
    remedy = (
        "predict --program captures a training script; models are config.json or .toml, plans what launches the job"
    )
    return Fault(place=file, problem=_PYTHON, remedy=remedy)


def unreadable(path: Path, exc: OSError | UnicodeDecodeError) -> Fault:
    """A file that cannot be opened, or that is no UTF-8."""
    if isinstance(exc, OSError):
        beside = [one.name for one in path.parent.glob("*")] if isinstance(exc, FileNotFoundError) else []
        near = close_names(path.name, beside, cutoff=_LIKE_A_FILE)
        remedy = did_you_mean([str(path.parent / one) for one in near])
        return Fault(place=str(path), problem=f"cannot be read: {exc.strerror or exc}", remedy=remedy)
    return Fault(place=str(path), problem=f"cannot be read: byte {exc.start} is not UTF-8", remedy="save it as UTF-8")


def _refuse_non_finite(data: object, place: str, error: type[InputError]) -> None:
    faults = [
        Fault(place=f"{place}: {p}", problem="is not a finite number below 2**128") for p in _non_finite(data, "")
    ]
    error.raise_for(faults)


def _non_finite(data: object, path: str) -> list[str]:
    if isinstance(data, dict):
        return [p for k, v in data.items() for p in _non_finite(v, f"{path}.{k}" if path else str(k))]
    if isinstance(data, list):
        return [p for i, v in enumerate(data) for p in _non_finite(v, f"{path}[{i}]")]
    too_large = isinstance(data, int) and data.bit_length() > _LONGEST_BITS
    return [path] if too_large or (isinstance(data, float) and not math.isfinite(data)) else []


def nested(table: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """`table` with the value set at the path; values on the way that are not tables are replaced by tables."""
    name, *rest = path
    if not rest:
        return {**table, name: value}
    below = table.get(name)
    return {**table, name: nested(below if isinstance(below, Mapping) else {}, rest, value)}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with the keys of `above`, recursively."""
    both = {**below, **above}
    for key in above.keys() & below.keys():
        if isinstance(above[key], Mapping) and isinstance(below[key], Mapping):
            both[key] = merged(below[key], above[key])
    return both
