"""A row of a table of tracked memory -> predicted bytes by moment; rows that a plan cannot express are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from simulator.base.errors import ModelError, PlanError
from simulator.memory.live_bytes import tracked_phase_bytes
from simulator.parallel.legality import check
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import Moment, RefusedError, RowOutcome
from simulator.studies.backtest.rows import MemoryRow

MEM_METRIC = "tracked_peak_bytes"
_STACKS = {"cpu": "torch-2.13-fake-cpu", "cuda": "torch-2.13-fake-cuda"}
_MEASURED = {
    "start": "start_bytes",
    "after_fwd": "after_fwd_bytes",
    "after_bwd": "after_bwd_bytes",
    "peak_fwd": "peak_fwd",
    "peak_bwd": "peak_bwd",
    "peak_opt": "peak_opt",
    "peak": "peak_bytes",
}

_stack = cache(Stack.load)


def started(row: MemoryRow) -> RowOutcome:
    """The outcome of a row before its prediction."""
    return RowOutcome(
        id=row.row,
        line=row.line,
        status="failed",
        source=row.tool,
        gpu=row.device,
        precision=row.param_dtype,
        mem_metric=MEM_METRIC,
        measured_memory_bytes=row.peak_bytes,
        moments={name: Moment(measured_bytes=getattr(row, column)) for name, column in _MEASURED.items()},
    )


def judged(row: MemoryRow, start: RowOutcome) -> RowOutcome:
    """The row predicted. Raises RefusedError, PlanError or ModelError."""
    predicted = tracked_phase_bytes(*resolve_memory(row), cuda=row.device == "cuda").as_dict()
    return replace(
        start,
        status="ok",
        predicted_memory_bytes=predicted["peak"],
        moments={name: replace(start.moments[name], predicted_bytes=size) for name, size in predicted.items()},
    )


def resolve_memory(row: MemoryRow) -> tuple[Model, Plan, Stack]:
    """Model, plan and stack of a row, by the rules of docs/reference/memory-table.md.

    Raises RefusedError with every reason found, or PlanError, ModelError where the inputs refuse.
    """
    reasons = list(_inexpressible(row))
    if reasons:
        raise RefusedError(*reasons)
    model, plan = _model(row), _plan(row)
    if row.n_params not in (None, model.num_parameters):
        detail = f"n_params = {row.n_params:,}, a Llama of these sizes has {model.num_parameters:,}"
        raise RefusedError(("another model", detail))
    return model, plan, _stack(plan.stack)


def _inexpressible(row: MemoryRow) -> Iterator[tuple[str, str]]:
    """Faults: features that a plan cannot express, and contradictory cells."""
    world, replicate = row.world or 1, row.replicate or 1
    if row.strategy == "single" and world > 1:
        yield "degrees do not multiply to world", f"single on {world} ranks"
    if row.strategy == "hsdp" and world % replicate:
        yield "degrees do not multiply to world", f"{replicate} replicas on {world} ranks"
    sharded = row.strategy.startswith("fsdp2") or row.strategy == "hsdp"
    if sharded and row.amp != "none":
        yield "autocast over sharded parameters", f"amp = {row.amp}"
    if not sharded and row.amp == "none" and row.store_dtype != row.param_dtype:
        yield "whole parameters in two dtypes", f"store_dtype = {row.store_dtype}, param_dtype = {row.param_dtype}"
    kernel = _attention(row)
    if row.attn not in ("", kernel):
        yield "another attention kernel", f"attn = {row.attn}, on {row.device} in {_compute(row)} it is {kernel}"


def _attention(row: MemoryRow) -> str:
    """The kernel that the stack of the row's device runs."""
    if row.device == "cpu":
        return "sdpa_repeat"
    return "eff_repeat" if _compute(row) == "fp32" else "flash_gqa"


def _compute(row: MemoryRow) -> str:
    return row.param_dtype if row.amp == "none" else row.amp


def _model(row: MemoryRow) -> Model:
    fields = {
        "name": row.model or f"row {row.row}",
        "family": "llama",
        "num_layers": row.n_layers,
        "d_model": row.d_model,
        "num_heads": row.n_heads,
        "num_kv_heads": row.n_kv_heads or row.n_heads,
        "d_ff": row.d_ff,
        "vocab_size": row.vocab,
    }
    return Model.parse(fields, f"line {row.line}", ModelError)


def _plan(row: MemoryRow) -> Plan:
    fields: dict[str, Any] = {
        "seq_len": row.seq_len,
        "micro_batch_size": row.micro_batch,
        "master_dtype": row.store_dtype,
        "precision": _compute(row),
        "optimizer_dtype": row.opt_dtype or row.store_dtype,
        "optimizer_impl": row.opt_impl.removeprefix("adamw_"),
        "recompute": row.ac,
        "gradient_as_bucket_view": bool(row.ddp_bucket_view),
        "stack": _STACKS[row.device],
        **_sharding(row),
    }
    plan = Plan.parse(fields, f"line {row.line}", PlanError)
    check(plan, f"line {row.line}")
    return plan


def _sharding(row: MemoryRow) -> dict[str, Any]:
    world, replicas = row.world or 1, (row.replicate or 1) if row.strategy == "hsdp" else 1
    if row.strategy == "tp":
        return {"zero": 0, "tp": row.tp or world, "vocab_parallel": False}  # torch's styles on the blocks alone
    tp = {"tp": row.tp, "vocab_parallel": False} if (row.tp or 1) > 1 else {}
    world //= row.tp or 1
    if row.strategy in ("single", "ddp"):
        return {"zero": 0, "data_parallel": "ddp", "dp_replicate": world, **tp}
    return {
        "zero": 3,
        "data_parallel": "fsdp2",
        "dp_shard": world // replicas,
        "dp_replicate": replicas,
        "reduce_dtype": row.reduce_dtype,
        "reshard_after_forward": False if row.strategy == "fsdp2_noreshard" else None,
        **tp,
    }
