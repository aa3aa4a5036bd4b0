"""Our own messages for a value of the wrong type or range: what was given, and what would be right."""

from __future__ import annotations

import difflib
import heapq
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import no_info_before_validator_function

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_SEPARATORS: Final = re.compile(r"[-_.\s]+")
FEW: Final = 12  # names that a reader takes in at one glance
_MOST_COMPARED: Final = 1000  # names that a wrong one is compared with
_LONGEST: Final = 40  # characters of a value that a message repeats

_KINDS: Final = {
    "string_type": "text in quotes", "int_type": "a whole number", "int_parsing": "a whole number",
    "int_from_float": "a whole number", "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false", "model_type": "a table",
    "model_attributes_type": "a table", "dict_type": "a table", "list_type": "a list in [ ]", "tuple_type": "a list in [ ]",
    "date_type": "a date, as 2026-01-31 without quotes", "finite_number": "a finite number",
}  # fmt: skip
_NO_TAGS: Final = {"int", "float", "number", "count", "table"}  # branches of a union that no discriminator names
_LIMITS: Final = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "greater than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
}
_PLAIN: Final[Mapping[object, str]] = {
    str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false", date: "a date, as 2026-01-31",
    dict: "a table", list: "a list", tuple: "a list",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotation of a `str` field: the allowed names, loaded lazily."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._known, handler(source))

    def _known(self, value: object) -> object:
        names = self.names()
        if value in names:
            return value
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, names))})

    def __get_pydantic_json_schema__(self, source: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(source), "enum": list(self.names())}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a field expects, as short text for faults: `Annotated[str, Expected("a table's file")]`."""

    text: str


def wrong_value(detail: ErrorDetails, field: FieldInfo | None) -> tuple[str, str] | None:
    """Problem and remedy of a value of the wrong type, beyond a limit, or that is none of a field's words.

    field: what the value was for; its `Expected`, where it has one, is the remedy. None: pydantic's words say it best.
    """
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in _LIMITS:
        key, limit = _LIMITS[kind]
        return f"must be {limit.format(_number(context[key]))}; it is {shown(value)}", ""
    if kind == "literal_error":
        words: list[object] = words_of(field.annotation if field else None) or re.findall(
            r"'([^']*)'", str(context["expected"])
        )
        expected = ", ".join(shown(word) for word in words) or str(context["expected"])
        near = did_you_mean(close_names(str(value), map(str, words), most=2, cutoff=0.5))
        return f"must be one of {expected}; it is {shown(value)}", near
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = sorted(branches_of(field.annotation if field else None) - _NO_TAGS)
        found = f"is {shown(context['tag'])}" if "tag" in context else "is missing"
        return f"{context['discriminator']} must be one of {', '.join(tags)}; it {found}", ""
    if kind not in _KINDS:
        return None
    expected = _KINDS[kind]
    return f"must be {expected}; it is {_given(value)}", _stated(field) or _unquoted(value, expected)


def expected_for(field: FieldInfo | None) -> str:
    """What a missing field expects: its `Expected`, its legal words, or its type; empty if none is simple enough."""
    if field is None:
        return ""
    words = words_of(field.annotation)
    if (stated := _stated(field)) or words:
        return stated or f"one of {', '.join(str(word) for word in words)}"
    if field.metadata:
        return ""  # a quantity that is written with its unit, or the like
    plain = [part for part in _parts(field.annotation) if part is not NoneType]
    origin = get_origin(plain[0]) or plain[0]
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return _keys(origin)
    return _PLAIN.get(origin, "")


def _stated(field: FieldInfo | None) -> str:
    return next((one.text for one in field.metadata if isinstance(one, Expected)), "") if field else ""


def shown(value: object) -> str:
    """A value as written in TOML or JSON, shortened if it is long."""
    if isinstance(value, date | time):
        return str(value)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _given(value: object) -> str:
    """The value and what it is: `the text "3"`, `a table`."""
    match value:
        case bool() | int() | float() | date() | time():
            return shown(value)
        case str():
            return f"the text {shown(value)}"
        case None:
            return "null"
        case Mapping():
            return "a table"
        case list() | tuple():
            return f"the list {shown(value)}"
        case _:
            return f"a {type(value).__name__}"


def _unquoted(value: object, expected: str) -> str:
    """A number or boolean that was given in quotes, without the quotes."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return ""
    wanted = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}.get(expected, ())
    try:
        inside = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return f"{value.strip()} without quotes" if type(inside) in wanted else ""


def close_names(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known names closest to a name, best first; case, `-`, `_`, `.` and blanks are ignored.

    cutoff: least share of letters in common (difflib's ratio). A name of the same letters, or in which a word begins with the whole text, is nearer.
    """
    wanted = _folded(name)
    letters = sorted(wanted)
    matchers = [difflib.SequenceMatcher(None, "", text) for text in (wanted, name.lower())]

    def likeness(other: str) -> float:
        words = _SEPARATORS.split(other.lower())
        part = sorted(_folded(other)) == letters or (
            len(wanted) > 1 and any("".join(words[n:]).startswith(wanted) for n in range(len(words)))
        )
        for matcher, text in zip(matchers, (_folded(other), other.lower()), strict=True):
            matcher.set_seq1(text)
        # bounds from above, the cheaper first
        near = (m for m in matchers if part or (m.real_quick_ratio() >= cutoff and m.quick_ratio() >= cutoff))
        return part + max((m.ratio() for m in near), default=0.0)

    names = set(known)
    if len(names) > _MOST_COMPARED:  # names of somebody's file, not of ours
        names = set(heapq.nsmallest(_MOST_COMPARED, names, key=lambda one: (abs(len(one) - len(name)), one)))
    rated = sorted((-likeness(one), one) for one in names)
    return [one for negative, one in rated[:most] if -negative >= cutoff]


def did_you_mean(names: Sequence[str]) -> str:
    """The question that ends a message; empty without names."""
    several = f"{', '.join(names[:-1])} or " if len(names) > 1 else ""
    return f"did you mean {several}{names[-1]}?" if names else ""


def _folded(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


def _number(limit: object) -> object:
    return int(limit) if isinstance(limit, float) and limit.is_integer() and abs(limit) < 1e15 else limit


def _parts(annotation: object) -> list[Any]:
    """The alternatives of a union; of anything else itself."""
    return list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]


def branches_of(annotation: object) -> set[str]:
    """What pydantic calls the alternatives of a union, of two or more: `int`, a Tag, a discriminator's word."""
    parts = [part for part in _parts(annotation) if part is not NoneType]
    return {name for part in parts for name in _branch(part)} if len(parts) > 1 else set()


def _branch(part: object) -> set[str]:
    if get_origin(part) is Annotated:
        inner, *metadata = get_args(part)
        return _branch(inner) | {one.tag for one in metadata if isinstance(one, Tag)}
    if get_origin(part) in (Union, UnionType):
        return branches_of(part)
    if isinstance(part, type) and issubclass(part, BaseModel):
        return {str(word) for field in part.model_fields.values() for word in words_of(field.annotation)}
    return {getattr(get_origin(part) or part, "__name__", "")}


def words_of(annotation: object) -> list[object]:
    """The words of a Literal or a OneOf, bare, optional, or the items of a list."""
    found: list[object] = []
    for part in _parts(annotation):
        if get_origin(part) is Literal:
            found += get_args(part)
        elif get_origin(part) is Annotated:
            found += [word for one in part.__metadata__ if isinstance(one, OneOf) for word in one.names()]
        elif get_origin(part) in (tuple, list):
            found += [word for inner in get_args(part) for word in words_of(inner)]
    return found


def _keys(model: type[BaseModel]) -> str:
    names = list(model.model_fields)
    return f"a table with {', '.join(names)}" if len(names) <= FEW else "a table"
