"""Our own study file: model, cluster, and the plan's fields that are not the default."""

from __future__ import annotations

import json
from typing import Any

from simulator.spec.plan import Plan


def study_toml(plan: Plan, head: dict[str, str | int]) -> str:
    """The file's text. head: model, cluster, nodes as far as they have names."""
    data = plan.model_dump(exclude_defaults=True, mode="json")
    data |= {name: plan.value(name) for name in ("zero", "micro_batch_size", "num_micro_batches", "seq_len")}
    if "stack" in plan.model_fields_set:  # also the usual one: unnamed, another may run, and the interval is wider
        data["stack"] = plan.stack
    if data.get("sharding_strategy"):
        data.pop("zero")
    lines = [f"{key} = {json.dumps(value)}" for key, value in head.items()]
    lines += _table("plan", Plan.in_records(data), plan.num_data_parallel)
    return "\n".join(lines).lstrip() + "\n"


def _table(name: str, table: dict[str, Any], data_parallel: int = 0) -> list[str]:
    """A table's lines and those of the tables in it."""
    below = {key: value for key, value in table.items() if isinstance(value, dict)}
    entries = _entries({key: value for key, value in table.items() if key not in below}, data_parallel)
    lines = ["", f"[{name}]", *entries] if entries else []
    for key, inner in below.items():
        lines += _table(f"{name}.{key}", inner)
    return lines


def _entries(table: dict[str, Any], data_parallel: int = 0) -> list[str]:
    if data_parallel == 1:  # else all devices of the cluster would shard the model
        table = {"dp_shard": 1, "dp_replicate": 1, **table}
    return [
        f'{key} = "{value}B"' if key.endswith("_bytes") else f"{key} = {json.dumps(value)}"
        for key, value in table.items()
        if value is not None
    ]
