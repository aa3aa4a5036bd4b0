"""Our own study file: model, cluster, and the plan's fields that are not the default."""

from __future__ import annotations

import json
from typing import Any

from simulator.spec.plan import Plan


def study_toml(plan: Plan, head: dict[str, str | int]) -> str:
    """The file's text. head: model, cluster, nodes as far as they have names."""
    data = plan.model_dump(exclude_defaults=True, mode="json")
    data |= {name: plan.value(name) for name in ("zero", "micro_batch_size", "num_micro_batches", "seq_len")}
    if data.get("sharding_strategy"):
        data.pop("zero")
    tables = {name: data.pop(name) for name in [*data] if isinstance(data[name], dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in head.items()]
    lines += ["", "[plan]", *_entries(data, plan.num_data_parallel)]
    for name, table in tables.items():
        lines += ["", f"[plan.{name}]", *_entries(table)]
    return "\n".join(lines).lstrip() + "\n"


def _entries(table: dict[str, Any], data_parallel: int = 0) -> list[str]:
    if data_parallel == 1:  # else all devices of the cluster would shard the model
        table = {"dp_shard": 1, "dp_replicate": 1, **table}
    return [
        f'{key} = "{value}B"' if key.endswith("_bytes") else f"{key} = {json.dumps(value)}"
        for key, value in table.items()
        if value is not None
    ]
