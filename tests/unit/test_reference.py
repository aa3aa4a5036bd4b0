"""The reference pages and the editors' schemas are what the fields say, and the schemas know legal files from wrong ones."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference_tables import pages

from simulator.formats.editor_schema import stack_schema, study_schema
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

ROOT = Path(__file__).parents[2]
STUDY, STACK = study_schema(), stack_schema()
TYPES = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict}


def wrong(value: object, schema: dict[str, Any], whole: dict[str, Any], place: str = "") -> Iterator[str]:
    """Where a value does not follow a schema: the part of JSON schema that ours use."""
    if "$ref" in schema:
        schema = whole["definitions"][schema["$ref"].rpartition("/")[2]]
    kind, options = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if options:
        if all(list(wrong(value, option, whole, place)) for option in options):
            yield f"{place}: none of its kinds"
    elif kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: no {kind}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from wrong(one, schema.get("items", {}), whole, f"{place}[{number}]")
    elif isinstance(value, dict):
        yield from wrong_table(value, schema, whole, place)
    elif value not in schema.get("enum", [value]) or value != schema.get("const", value) or beyond(value, schema):
        yield f"{place}: {value}"


def beyond(value: object, schema: dict[str, Any]) -> bool:
    number = isinstance(value, int | float)
    return number and not schema.get("minimum", value) <= value <= schema.get("maximum", value)


def wrong_table(table: dict[str, object], schema: dict[str, Any], whole: dict[str, Any], place: str) -> Iterator[str]:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in table)
    for name, one in table.items():
        if name in known or isinstance(rest, dict):
            yield from wrong(one, known.get(name, rest), whole, f"{place}.{name}")
        elif rest is False:
            yield f"{place}.{name}: unknown"


def studies() -> dict[str, dict[str, Any]]:
    """The golden studies' files and the pages' examples that hold a plan."""
    found = {}
    for file in sorted((ROOT / "tests/golden/studies").glob("*.toml")):
        for name, text in tomllib.loads(file.read_text(encoding="utf-8")).get("files", {}).items():
            if "[plan]" in text and not file.stem.startswith("error") and name not in ("wrong.toml", "twice.toml"):
                found[f"{file.stem}/{name}"] = tomllib.loads(text)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if "[plan]" in text and re.search(r"^model = ", text, re.MULTILINE):
                found[f"{page.stem}/{number}"] = tomllib.loads(text)
    return found


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_pages_and_schemas_are_what_the_fields_say(path: Path) -> None:
    """`python experiments/reference_tables.py` writes them."""
    assert path.read_text(encoding="utf-8") == pages()[path]


@pytest.mark.parametrize("name", studies())
def test_studies_follow_their_schema(name: str) -> None:
    assert list(wrong(studies()[name], STUDY, STUDY)) == []


@pytest.mark.parametrize("name", Stack.names())
def test_shipped_stacks_follow_their_schema_and_have_no_flat_keys(name: str) -> None:
    data = tomllib.loads((ROOT / "topologies/stacks" / f"{name}.toml").read_text(encoding="utf-8"))
    assert list(wrong(data, STACK, STACK)) == []
    assert Stack.moved_keys(data) == {}


@pytest.mark.parametrize(
    "plan",
    [
        {"tpp": 2},
        {"tp": 0},
        {"tp": "2"},
        {"recompute": "ful"},
        {"recompute": {"mode": "ful"}},
        {"pipeline": {"virtual_stage": 2}},
        {"bucket_bytes": 25},
        {"ddp": {"bucket_bytes": 25}},
        {"offload": {"optimizer": "disk"}},
    ],
)
def test_the_schema_refuses(plan: dict[str, object]) -> None:
    assert list(wrong({"model": "gpt2", "cluster": "hgx-h100-8", "plan": plan}, STUDY, STUDY)) != []


def test_the_schema_has_every_spelling() -> None:
    properties = STUDY["definitions"]["Plan"]["properties"]
    assert set(properties) == set(Plan.written_fields())
    assert {name for name, one in properties.items() if one.get("deprecated")} == set(
        Plan.moved_keys(dict.fromkeys(Plan.flat_names))
    )
    assert json.loads(json.dumps(STUDY)) == STUDY


def test_every_field_is_described() -> None:
    fields = {**Plan.written_fields(), **Stack.written_fields()}
    assert [name for name, info in fields.items() if not info.description] == []
