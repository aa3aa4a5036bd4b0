"""The reference of studies, stacks and `--json`, written from the fields and keys themselves: tables of pages, and two schemas.

    python experiments/reference_tables.py      rewrites docs/reference/{plan-file,stack-file,json-output}.md and *.schema.json

A page is written by hand but for its tables, which stand between `<!-- fields of plan.pipeline -->`, or `<!-- keys of search -->`,
and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from simulator.base.records import Nested
from simulator.base.schema import model_at
from simulator.formats import answer_keys
from simulator.formats.editor_schema import stack_schema, study_schema
from simulator.formats.study.tables import StudyFile
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.goodput import LongRun

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
_PAGES: Final = ("plan-file.md", "stack-file.md", "json-output.md")
_TABLE: Final = re.compile(r"(<!-- (fields|keys) of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ROOTS: Final[Mapping[str, type[BaseModel]]] = {"study": StudyFile, "plan": Plan, "run": LongRun, "stack": Stack}
_QUANTITIES: Final = {"a size in bytes": "size", "a data rate": "data rate", "a time": "time"}
_TIMES: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def pages() -> dict[Path, str]:
    """Every file that is written, and its text."""
    found = {FOLDER / name: _page((FOLDER / name).read_text(encoding="utf-8")) for name in _PAGES}
    for name, schema in (("study", study_schema()), ("stack", stack_schema())):
        found[FOLDER / f"{name}.schema.json"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    return found


def _page(text: str) -> str:
    tables = {"fields": _table, "keys": answer_keys.table}
    return _TABLE.sub(lambda found: found[1] + "\n".join(tables[found[2]](found[3])) + "\n" + found[4], text)


def _table(name: str) -> Iterator[str]:
    """The lines of one table: of `study`, `plan`, `plan.pipeline`, `checkpoint`, `run`, `stack`, `stack.host`, ..."""
    root, *path = name.split(".")
    noun = _ROOTS.get(root)
    model = model_at(StudyFile, [root]) if noun is None else model_at(noun, path)
    if model is None:
        raise ValueError(f"no table is called {name}")
    flat = _flat_names(noun, path) if noun is not None and issubclass(noun, Nested) else {}
    heads = ["key", *(["flat name"] if flat else []), "values", "default", "meaning"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    properties = _properties(model)
    for key, info in model.model_fields.items():
        names = [f"`{flat[key]}`"] if flat else []
        values = _values(properties[key])
        if noun is not None and issubclass(noun, Nested) and not path and noun.is_main(key):
            values = f"{_values(_properties(_class(info))[noun.flat_names[key].partition('.')[2]])}, or a table"
        yield f"| {' | '.join([f'`{key}`', *names, values, _default(info), info.description or ''])} |"


def _class(info: FieldInfo) -> type[BaseModel]:
    kind = info.annotation
    assert isinstance(kind, type)
    assert issubclass(kind, BaseModel)
    return kind


def _flat_names(noun: type[Nested], path: list[str]) -> dict[str, str]:
    """The flat names of a record's fields: what flags and reports call them, and files once did."""
    split = {flat: place.rpartition(".") for flat, place in noun.flat_names.items()}
    return {field: flat for flat, (record, _, field) in split.items() if record and record == ".".join(path)}


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """A class's schema, its tables marked."""
    schema = model.model_json_schema()
    known = schema.get("$defs", {})
    return {key: _resolved(value, known) for key, value in schema["properties"].items()}


def _resolved(schema: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return known[name] if name else schema


def _values(schema: Mapping[str, Any]) -> str:
    """The legal values in a word or two."""
    parts = schema.get("anyOf") or schema.get("oneOf") or [schema]
    words = [_kind(part) for part in parts if part.get("type") != "null"]
    return ", ".join(dict.fromkeys(word for word in words if word))


def _kind(schema: Mapping[str, Any]) -> str:
    kind = str(schema.get("type", ""))
    if {"$ref", "properties", "oneOf"} & schema.keys():
        return "a table"
    if words := schema.get("enum") or [schema[key] for key in ("const",) if key in schema]:
        return ", ".join(f"`{word}`" for word in words)
    if kind in ("array", "object"):
        return _collection(schema)
    if kind in ("integer", "number"):
        return _limits(schema) or "number"
    return _QUANTITIES.get(schema.get("format", ""), "text" if kind == "string" else kind)


def _collection(schema: Mapping[str, Any]) -> str:
    """A list, or a table with user-defined names."""
    if schema["type"] == "array":
        inner = _kind(schema.get("items", {}))
        return "list of tables" if inner == "a table" else f"list of {inner.replace('number', 'numbers')}"
    values = schema.get("additionalProperties")
    return f"table: name → {_values(values)}" if isinstance(values, dict) else "a table"


def _limits(schema: Mapping[str, Any]) -> str:
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if low is not None and high is not None and high <= 1000:
        return f"{low:g} to {high:g}"
    if above is not None and high is not None and high <= 1:
        return f"> {above:g}, ≤ {high:g}"
    return f"≥ {low:g}" if low is not None else f"> {above:g}" if above is not None else ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is None or isinstance(info.default, BaseModel):
        return ""
    return f"`{_literal(info.default, _quantity(info))}`"


def _quantity(info: FieldInfo) -> str:
    """What a bare number of the field counts: a time, a size, or nothing."""
    parts = [part for part in get_args(info.annotation) if part is not NoneType]
    marks = [*info.metadata, *(mark for part in parts for mark in getattr(part, "__metadata__", ()))]
    schemas = [getattr(mark, "json_schema", None) or {} for mark in marks]
    return next((_QUANTITIES[one["format"]] for one in schemas if one.get("format") in _QUANTITIES), "")


def _literal(value: object, quantity: str) -> str:
    """As TOML has it, without quotes."""
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if quantity and isinstance(value, int | float):
        scales = _TIMES if quantity == "time" else _SIZES
        scale, unit = next(((s, u) for s, u in scales if _whole(value / s)), (1, "s" if quantity == "time" else "B"))
        return f"{round(value / scale)}{unit}"
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(list(plain) if isinstance(plain, tuple) else plain)


def _whole(number: float) -> bool:
    return number >= 1 and abs(number - round(number)) < 1e-9 * number


def main() -> None:
    """Rewrite the pages and schemas."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
