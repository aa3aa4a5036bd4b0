"""A plan that a search found: a row of `shardwise search --json`, the best one unless another is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.base.errors import PlanError
from simulator.formats.readers.plans.draft import Draft

RANK = "rank"  # --define rank=2


def read_search(data: Mapping[str, Any], file: str, define: Mapping[str, str]) -> Draft:
    """The plan of one row, with the model, the cluster and the length that were searched for. Raises PlanError."""
    rows, inputs = data.get("plans"), data.get("inputs")
    if not isinstance(rows, list) or not isinstance(inputs, Mapping):
        raise PlanError.at(file, "is not a report of a search", "what `search --json` printed")
    text = define.get(RANK, "1")
    found = [row for row in rows if isinstance(row, Mapping) and str(row.get("rank")) == text]
    if not found or not isinstance(found[0].get("plan"), Mapping):
        problem = f"has no plan of rank {text}" if rows else "found no plan"
        raise PlanError.at(file, problem, f"--define {RANK}=1 to {len(rows)}" if rows else "")
    row = found[0]
    fields = {"dp_shard": 1, "dp_replicate": 1, "seq_len": inputs.get("seq_len"), **row["plan"]}
    model, cluster, devices = inputs.get("model"), inputs.get("cluster"), row.get("num_devices")
    counted = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
    return Draft(
        format="search",
        software="shardwise search",
        file=file,
        fields={name: value for name, value in fields.items() if value is not None},
        places={name: f"{file}: plans, rank {text}: {name}" for name in fields},
        leftover=None,
        model=model if isinstance(model, str) else None,
        cluster=cluster if isinstance(cluster, str) else None,
        num_devices=devices if counted else None,
        stack=str(row["plan"].get("stack", "torch-2.6-eager")),
        stack_why="the searched plan's own",
    )
