"""JSON schemas of study and stack files, for editors that complete and check TOML (Taplo, Even Better TOML)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from simulator.base.records import Nested
from simulator.formats.study.tables import StudyFile
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.goodput import LongRun


def study_schema() -> dict[str, Any]:
    """JSON schema of a study's file."""
    schema = _plain(StudyFile, "A study of shardwise")
    run = _plain(LongRun, "")
    definitions = schema["definitions"] | run.pop("definitions")
    definitions["LongRun"] = {key: value for key, value in run.items() if key not in ("$schema", "title")}
    schema["properties"]["run"] = {"$ref": "#/definitions/LongRun"}
    definitions["Plan"] = _with_flat_keys(Plan, definitions["Plan"], definitions, "plan.")
    return {**schema, "definitions": dict(sorted(definitions.items()))}


def stack_schema() -> dict[str, Any]:
    """JSON schema of a stack's file."""
    schema = _plain(Stack, "A stack of shardwise")
    return _with_flat_keys(Stack, schema, schema["definitions"], "")


def _plain(noun: type[BaseModel], title: str) -> dict[str, Any]:
    """Pydantic's schema as TOML files need it: without null, titles and defaults that are tables."""
    schema = noun.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs", {})
    cleaned: dict[str, Any] = _cleaned(schema)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **cleaned}


def _cleaned(schema: Any) -> Any:  # noqa: ANN401  any part of a schema
    """A schema without titles and null, and with only those defaults that are valid in TOML."""
    if isinstance(schema, list):
        return [_cleaned(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    apart = ("default", "discriminator", "title", "properties", "definitions")
    found = {key: _cleaned(value) for key, value in schema.items() if key not in apart}
    for key in ("properties", "definitions"):  # whose keys are names
        if key in schema:
            found[key] = {name: _cleaned(value) for name, value in schema[key].items()}
    if "anyOf" in found:
        alternatives = [one for one in found.pop("anyOf") if one != {"type": "null"}]
        found |= alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    default = schema.get("default")
    if isinstance(default, bool | str) or (isinstance(default, int | float) and "format" not in found):
        found["default"] = default
    return found


def _with_flat_keys(
    noun: type[Nested], schema: dict[str, Any], definitions: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Also accept keys at their old flat places, and a record given as its main field alone."""
    properties = dict(schema["properties"])
    for flat, place in noun.flat_names.items():
        record, _, field = place.partition(".")
        if not field:
            continue
        table = definitions[schema["properties"][record]["$ref"].rpartition("/")[2]]
        one = table["properties"][field]
        if flat == record:
            properties[flat] = {**properties[flat], "anyOf": [{"$ref": properties[flat]["$ref"]}, one]}
            del properties[flat]["$ref"]
        else:
            properties[flat] = {**one, "deprecated": True, "description": f"now {prefix}{place}"}
    required = [name for name in schema.get("required", ()) if name != "kernels"]
    return {**schema, "properties": properties} | ({"required": required} if required else {})
