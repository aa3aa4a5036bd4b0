"""Reader of tables of measured training runs: CSV in, one typed row or one list of faults a line out.

The columns are documented in docs/reference/runs-table.md. The reader streams: it holds one record at a time, whatever
the file's size. A row that is wrong costs that row only; a file that is no table at all raises TableError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, cast, get_args

from simulator.base.errors import Fault
from simulator.base.schema import nearest
from simulator.formats.readers.csv_table import (
    BadRow,
    CellError,
    Record,
    integer_cell,
    name_cell,
    number_cell,
    one_of,
    open_table,
    parse_record,
    printable,
    repeated,
    shown,
    text_cell,
)

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "MemoryMetric", "Metric", "RunRow", "read_runs"]

Metric = Literal["step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s", "model_tflops_per_gpu"]
MemoryMetric = Literal["peak_allocated_gib", "peak_reserved_gib", "nvidia_smi_used_gb", "gpu_memory_gb", "oom"]
YesNo = Literal["y", "n"]

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8_mx", "nvfp4")
_MLP_KINDS = ("gelu", "swiglu", "squared_relu", "relu")
_SHARDING = re.compile(r"ddp|zero[123]|zero1_intragroup[1-9][0-9]{0,5}|fsdp_full|fsdp_grad_op|hsdp")
# Other spellings of the tables' words, small and without separators
_SHARDING_ALSO = {
    **dict.fromkeys(("dp", "none", "zero0", "noshard", "replicated"), "ddp"),
    **dict.fromkeys(("zero1", "distopt", "distributedoptimizer", "zero1distributedoptimizer"), "zero1"),
    **dict.fromkeys(
        ("fsdp", "fsdp1", "fsdp2", "fullshard", "fsdpfullshard", "megatronfsdp", "fullysharded"), "fsdp_full"
    ),
    **dict.fromkeys(("shardgradop", "fsdpshardgradop", "fsdpgradop"), "fsdp_grad_op"),
    **dict.fromkeys(("hybridshard", "fsdphybrid", "fsdphybridshard", "fsdphsdp"), "hsdp"),
    **dict.fromkeys(("gemini", "zero3gemini"), "zero3"),
}
_MLP_ALSO = {"geglu": "swiglu", "gelu_tanh": "gelu", "gelu_new": "gelu", "silu": "swiglu", "relu2": "squared_relu"}
_PRECISION_ALSO = {
    **dict.fromkeys(("bfloat16", "bf16mixed", "bf16true", "ampbf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16mixed", "half", "ampfp16"), "fp16"),
    **dict.fromkeys(("float8", "fp8cs", "fp8tensorwise", "fp8delayed", "fp8ds", "fp8hybrid"), "fp8"),
    **dict.fromkeys(("mxfp8", "fp8mx"), "fp8_mx"),
    "float32": "fp32",
}
_RECOMPUTE_ALSO = {
    **dict.fromkeys(("n", "no", "off", "false", "disabled"), "none"),
    **dict.fromkeys(("y", "yes", "on", "true", "fullac", "full_ac", "uniform"), "full"),
    **dict.fromkeys(("sac", "selectiveac", "selective_ac", "selectiveop", "op"), "selective"),
}
_SHARDING_WORDS = ("ddp", "zero1", "zero2", "zero3", "zero1_intragroup8", "fsdp_full", "fsdp_grad_op", "hsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One measured run as its table states it; None (or "") where the table is silent. Units are the table's.

    `line` is the physical line where the record starts (the header is line 1). Every other field is a column.
    """

    line: int
    id: str
    source: str = ""
    source_location: str = ""
    framework: str = ""
    model_name: str = ""
    n_layers: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_ff: int | None = None
    mlp_kind: str = ""
    vocab: int | None = None
    seq_len: int | None = None
    n_experts: int | None = None
    top_k: int | None = None
    gpu: str = ""
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_node: float | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    vpp: int | None = None
    zero_or_fsdp: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    act_ckpt: str = ""
    flash_attn: YesNo | None = None
    seq_parallel: YesNo | None = None
    compile: YesNo | None = None
    metric: Metric | None = None
    value: float | None = None
    mem_metric: MemoryMetric | None = None
    mem_metric_detail: str = ""  # what stands in parentheses behind mem_metric
    mem_value: float | None = None
    notes: str = ""


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(RunRow) if f.name not in ("line", "mem_metric_detail"))
REQUIRED: tuple[str, ...] = (
    "id",
    "framework",
    "n_layers",
    "d_model",
    "n_heads",
    "d_ff",
    "mlp_kind",
    "vocab",
    "seq_len",
    "gpu",
    "n_gpus",
    "zero_or_fsdp",
    "micro_batch",
    "global_batch",
    "precision",
    "metric",
    "value",
)


def read_runs(path: str | Path) -> Iterator[RunRow | BadRow]:
    """The table's records in order. `path` is a .csv, or the same compressed with gzip.

    Raises TableError if the file cannot be read, is empty, or has a header that lacks a required column, repeats one
    or has an unknown one. A bad record is yielded as a BadRow and the rest goes on.
    """
    seen: dict[str, int] = {}
    with open_table(Path(path), COLUMNS, REQUIRED) as (header, records):
        for record in records:
            row = _row(record, header)
            if isinstance(row, RunRow) and row.id in seen:
                row = repeated(row.line, row.id, seen[row.id], "id")
            seen.setdefault(row.id, row.line)
            yield row


def _row(record: Record, header: list[str]) -> RunRow | BadRow:
    """The typed row, or everything that is wrong with it."""
    values = parse_record(record, header, _PARSERS, "id")
    if isinstance(values, BadRow):
        return values
    line = record.line
    values["mem_metric"], values["mem_metric_detail"] = cast("tuple[str, str]", values.get("mem_metric") or (None, ""))
    faults = [Fault(place=f"line {line}: {c}", problem=p, remedy=r) for c, p, r in _contradictions(values)]
    if faults:
        return BadRow(line=line, id=printable(str(values["id"])), faults=tuple(faults))
    return RunRow(line=line, **values)  # type: ignore[arg-type]  # _PARSERS gives each column its field's type


def _contradictions(values: dict[str, object]) -> Iterator[tuple[str, str, str]]:
    """Contradictions between cells: (column, problem, remedy)."""
    if (values.get("metric") is None) != (values.get("value") is None):
        yield "value", "metric and value come together, one of them is blank", "both, or neither"
    memory, amount = values.get("mem_metric"), values.get("mem_value")
    if memory != "oom" and (memory is None) != (amount is None):
        yield "mem_value", "mem_metric and mem_value come together, one of them is blank", "both, or neither"
    if values.get("value") is None and memory is None:
        yield "metric", "nothing was measured: neither metric nor mem_metric", f"one of {', '.join(get_args(Metric))}"


def _sharding(cell: str) -> str:
    word = cell if _SHARDING.fullmatch(cell) else _SHARDING_ALSO.get(_bare(cell), _bare(cell))
    if word and not _SHARDING.fullmatch(word):
        raise CellError(f"unknown word {shown(cell)}", nearest(cell[:60], _SHARDING_WORDS))
    return word


def _bare(cell: str) -> str:
    return re.sub(r"[\s_\-()]+", "", cell.casefold())


def _spelled(parse: Callable[[str], object], also: Mapping[str, str]) -> Callable[[str], object]:
    """The parser of a cell that may hold a word in another spelling."""
    return lambda cell: parse(also.get(_bare(cell), also.get(cell.casefold(), cell)))


def _memory_metric(cell: str) -> tuple[str, str] | None:
    """`peak_allocated_gib(last rank)` -> ("peak_allocated_gib", "last rank")."""
    if not cell:
        return None
    word, _, detail = text_cell(cell).partition("(")
    if word not in get_args(MemoryMetric) or (detail and not detail.endswith(")")):
        raise CellError(f"unknown word {shown(cell)}", nearest(word[:60], get_args(MemoryMetric)))
    return word, detail.removesuffix(")")


_INTEGER_COLUMNS = (
    "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "n_experts", "top_k", "n_gpus",
    "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "vpp", "micro_batch", "global_batch",
)  # fmt: skip
_PARSERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(COLUMNS, text_cell),
    **dict.fromkeys(_INTEGER_COLUMNS, integer_cell),
    **dict.fromkeys(("inter_link_gbps_per_node", "value", "mem_value"), number_cell),
    **dict.fromkeys(("flash_attn", "seq_parallel", "compile"), one_of("y", "n", blank=None)),
    "id": name_cell,
    "mlp_kind": _spelled(one_of(*_MLP_KINDS), _MLP_ALSO),
    "precision": _spelled(one_of(*_PRECISIONS), _PRECISION_ALSO),
    "act_ckpt": _spelled(one_of("none", "full", "selective"), _RECOMPUTE_ALSO),
    "zero_or_fsdp": _sharding,
    "metric": one_of(*get_args(Metric), blank=None),
    "mem_metric": _memory_metric,
}
