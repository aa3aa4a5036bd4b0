"""A serving answer as JSON with a schema version. docs/reference/json-output.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from simulator.studies.serving import Serving
from simulator.studies.serving.memory import ServingMemory

SCHEMA_VERSION: Final = 2


def report(serving: Serving, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document as plain data. Units are suffixes of the names."""
    fields = asdict(serving)
    for name in ("memory", "prefill_memory"):
        memory: ServingMemory | None = getattr(serving, name)
        if memory is not None:
            fields[name] |= {each: getattr(memory, each) for each in ("kv_bytes", "kv_tokens", "used_bytes")}
    return {"schema_version": SCHEMA_VERSION, "inputs": dict(inputs or {}), "fits": serving.fits, **fields}
