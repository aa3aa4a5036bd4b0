"""A prediction as JSON with a schema version. docs/reference/json-output.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from simulator.base.errors import json_text
from simulator.memory import MemoryUse
from simulator.predict import Prediction

SCHEMA_VERSION: Final = 2  # rises when a key is removed or changes its meaning; new keys do not raise it


def to_json(prediction: Prediction, inputs: Mapping[str, Any] | None = None) -> str:
    """One JSON document, keys in a fixed order, ending in a newline. inputs: what was asked, as plain data."""
    return json_text(report(prediction, inputs)) + "\n"


def report(prediction: Prediction, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document as plain data. Units are suffixes of the names; `_s` is seconds."""
    p = prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": dict(inputs or {}),
        "model": p.model,
        "cluster": p.cluster,
        "num_devices": p.num_devices,
        "verdict": p.verdict,
        "fits": p.fits,
        "cause": p.cause,
        "suggestion": p.suggestion,
        "remedies": [asdict(remedy) for remedy in p.remedies],
        "step_s": float(p.step_s),
        "low_s": float(p.low_s),
        "high_s": float(p.high_s),
        "floor_s": p.floor_s,
        "uncertainty": p.uncertainty,
        "lower_s": float(p.lower_s),
        "upper_s": float(p.upper_s),
        "tokens_per_step": p.tokens_per_step,
        "tokens_per_s": p.tokens_per_s,
        "model_flop_per_step": p.model_flop_per_step,
        "hardware_flop_per_step": p.hardware_flop_per_step,
        "peak_flop_per_s": p.peak_flop_per_s,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "breakdown_s": {category: float(seconds) for category, seconds in p.breakdown.items()},
        "communication": {
            kind: {"exposed_s": float(exposed), "hidden_s": float(hidden)}
            for kind, (exposed, hidden) in p.communication.items()
        },
        **({} if p.network is None else {"network": asdict(p.network)}),
        "checkpoint": None if p.checkpoint is None else {**asdict(p.checkpoint), "total_s": p.checkpoint.total_s},
        "memory": _memory(p.memory),
        "kinds": [
            {
                **asdict(kind),
                "memory": _memory(kind.memory),
                "verdict": kind.verdict,
                "used_bytes": kind.memory.used_bytes,
            }
            for kind in p.kinds
        ],
        "extrapolated": list(p.extrapolated),
        "sources": [asdict(source) for source in p.sources],
    }


def _memory(use: MemoryUse) -> dict[str, Any]:
    data = asdict(use)
    if use.pool is None:
        del data["pool"]
    if not use.spilled_bytes:
        del data["spilled_bytes"]
    return {**data, "reserved_bytes": use.reserved_bytes, "used_bytes": use.used_bytes, "retries": use.retries}
