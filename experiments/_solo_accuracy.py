"""The page docs/accuracy/one-h200.md: single-GPU steps: one rank of sharded jobs on one H200, its collectives free."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.spec.software.stack import Stack
from simulator.studies.backtest.text import percent
from validate.compare import compare_run
from validate.records import read_records

RUNS = Path(__file__).resolve().parent / "measured" / "h200-solo-2026-11-20" / "runs.jsonl"

INTRODUCTION = """Thirteen plans of `experiments/measured/h200-solo-2026-11-20`, run by `shardwise validate run --mode solo`.
`gemm_factor` of the eager stack was fitted on five steps of an earlier run on the same kind of device (its
`calibration_runs`). For three of these plans the kernel fits have seen the profiled kernels (`SEEN`), but never a step's time:
8B with 2 x 8192 tokens, 1B over 8 replicas, 3B with selective recomputation. Communication is excluded from the step.
Kernel by kernel (`python experiments/kernels_in_steps.py`), the absolute errors of the held-out plans' ops are 3.5 % of their
time. The last plan waits for the host (see the samples' README).
"""


def section() -> Iterator[str]:
    """Markdown: one line a plan, and the medians."""
    compared = [compare_run(_as_shipped(record)) for record in read_records(RUNS)[0]]
    yield "\n## One rank on one H200\n"
    yield INTRODUCTION
    yield "| plan | step | peak allocated | peak reserved |"
    yield "|---|--:|--:|--:|"
    errors: dict[str, list[float]] = {}
    for run in compared:
        cells = {name: _relative(run, name) for name in ("step_s", "allocated_bytes", "reserved_bytes")}
        for name, value in cells.items():
            if value is not None:
                errors.setdefault(name, []).append(abs(value))
        yield f"| {run['what']} | {' | '.join('–' if v is None else f'{100 * v:+.2f} %' for v in cells.values())} |"
    medians = [f"{percent(statistics.median(e))} (worst {percent(max(e))})" for e in errors.values()]
    yield f"| median of the absolute error | {' | '.join(medians)} |"


def _as_shipped(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record under its stack's coefficients of today; it holds those of its own day."""
    stack = Stack.load(record["stack"]["name"])
    return {**record, "stack": stack.model_dump(mode="json", exclude_unset=True)}


def _relative(run: Mapping[str, Any], name: str) -> float | None:
    lines = [line for part in run.values() if isinstance(part, list) for line in part if isinstance(line, dict)]
    found = next((line for line in lines if line.get("name") == name), None)
    return None if found is None or found["relative_error"] is None else float(found["relative_error"])
