"""A long run's answer as JSON with a schema version. docs/reference/json-output.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from simulator.studies.goodput import Goodput
from simulator.studies.goodput.elastic import Elastic

SCHEMA_VERSION: Final = 1


def report(answer: Goodput, inputs: Mapping[str, Any] | None = None, elastic: Elastic | None = None) -> dict[str, Any]:
    """The document as plain data. elastic: on spot machines, where that was asked."""
    fields = asdict(answer) | {"interruptions": dict(answer.interruptions)}
    fields = fields if answer.energy is not None else {name: one for name, one in fields.items() if name != "energy"}
    spot = {} if elastic is None else {"spot": elastic.report()}
    return {"schema_version": SCHEMA_VERSION, "inputs": dict(inputs or {}), **fields, **spot}
