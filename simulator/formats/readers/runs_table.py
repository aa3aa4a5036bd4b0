"""Reader of tables of measured training runs: CSV in, one typed row or one list of faults a line out.

The columns are documented in docs/reference/runs-table.md. An unknown word of `mem_metric` costs that cell alone. The reader streams: it holds one record at a time, whatever
the file's size. A row that is wrong costs that row only; a file that is not a table at all raises TableError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from simulator.base.errors import Fault, PlanError, TableError
from simulator.base.schema import nearest
from simulator.formats.readers.csv_table import (
    CellError,
    Parser,
    Spelling,
    header_names,
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
from simulator.formats.readers.run_settings import setting_of, setting_parser
from simulator.formats.readers.spelled_columns import advice, folded, gives, has_result, names, own_names, parsers
from simulator.spec.model.files import preset_names
from simulator.spec.plan import Plan
from simulator.studies.backtest.rows import FP8_RECIPES, BadRow, FlopConvention, MemoryMetric, Metric, RunRow

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "RunRow", "read_runs"]

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", *FP8_RECIPES, "nvfp4")
_MLP_KINDS = ("gelu", "swiglu", "squared_relu", "relu")
_SHARDING = re.compile(r"ddp|zero[123]|zero1_intragroup[1-9][0-9]{0,5}|fsdp_full|fsdp_grad_op|hsdp")
_UNKNOWN = frozenset(("-", "–", "—", "?", "n/a", "na", "nan", "null", "unknown", "tbd"))  # where no free text is due
# of a mesh, which has columns of its own
_AXIS = re.compile(r"(?:[dtpces]p|vpp|hybrid|tensor|pipeline|context|expert|sequence|[2-5n]d)(?:parallel(?:ism)?)?")
_SHARDING_WORDS = ("ddp", "zero1", "zero2", "zero3", "zero1_intragroup8", "fsdp_full", "fsdp_grad_op", "hsdp")


_NO_COLUMNS: Final = ("line", "mem_metric_detail", "settings", "unread")
COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(RunRow) if f.name not in _NO_COLUMNS)
# Blank where a table has no such column: who runs what, and what rules or documents fill
_ALWAYS_BLANK: Final = (
    "id",
    "framework",
    "mlp_kind",
    "vocab",
    "zero_or_fsdp",
    "micro_batch",
    "global_batch",
    "precision",
)
_OF_A_MODEL: Final = ("n_layers", "d_model", "n_heads", "d_ff")
REQUIRED: tuple[str, ...] = (*_ALWAYS_BLANK, *_OF_A_MODEL, "seq_len", "gpu", "n_gpus", "metric", "value")


def read_runs(path: str | Path) -> Iterator[RunRow | BadRow]:
    """The table's records in order. `path` is a .csv, or the same compressed with gzip.

    Columns may have other names and results columns of their own (`spelled_columns`). Raises TableError if the file cannot be
    read, is empty, or has a header that lacks a required column, repeats one or has two of one field. A bad record is yielded as a BadRow and the rest goes on.
    """
    seen: dict[str, int] = {}
    needed = _needed(SPELLING.own(header_names(Path(path))))
    with open_table(Path(path), (*COLUMNS, *parsers()), needed, others=True, spelled=SPELLING) as (header, records):
        settings = {column: key for column in header if column not in _PARSERS and (key := setting_of(column))}
        _refuse_two_spellings(path, settings)
        cells = {**_PARSERS, **parsers(), **{column: setting_parser(key) for column, key in settings.items()}}
        cells |= {
            column: _either(settings[column], cells[column], own, cells[own])
            for column, own in names()["column"].items()
            if column in settings and own not in header
        }
        cells = {
            column: parse if parse in (text_cell, name_cell) else _or_blank(parse) for column, parse in cells.items()
        }
        for record in records:
            row = _row(parse_record(record, header, cells, "id"), record.line, settings)
            if isinstance(row, RunRow) and row.id in seen:
                row = repeated(row.line, row.id, seen[row.id], "id")
            seen.setdefault(row.id, row.line)
            yield row


SPELLING: Final = Spelling(lambda header: own_names(header, COLUMNS), advice, gives)


def _needed(header: Sequence[str]) -> Sequence[str]:
    """Columns that a table with such a header lacks: who names a model or a machine need not say what follows from it."""
    follow = set(_ALWAYS_BLANK)
    follow |= set(_OF_A_MODEL) if {"model", "model_name"} & set(header) else set()
    follow |= {"gpu"} if "machine" in header else set()
    follow |= {"n_gpus"} if {"n_nodes", "gpus_per_node"} <= set(header) or "dp" in header else set()
    follow |= {"metric", "value"} if has_result(header) else set()
    return [column for column in REQUIRED if column not in follow]


def _refuse_two_spellings(path: str | Path, settings: Mapping[str, str]) -> None:
    """Of one field there is one column: `schedule` or `pipeline.schedule`."""
    columns: dict[str, list[str]] = {}
    for column, key in settings.items():
        columns.setdefault(key, []).append(column)
    faults = [
        Fault(f"{path}: line 1", f"the columns {' and '.join(each)} are one field", "keep one")
        for each in columns.values()
        if len(each) > 1
    ]
    TableError.raise_for(faults)


def _row(values: dict[str, Any] | BadRow, line: int, settings: Mapping[str, str]) -> RunRow | BadRow:
    """The typed row, or everything that is wrong with it."""
    if isinstance(values, BadRow):
        return values
    ours = [(column, one) for column, one in values.items() if isinstance(one, _Ours)]
    values |= {column: None for column, _ in ours} | {one.column: one.value for _, one in ours}
    values = _public_model(folded({"id": f"line {line}", **values}))
    word, detail, unread = values.get("mem_metric") or (None, "", "")
    values |= {"mem_metric": word, "mem_metric_detail": detail, **({"mem_value": None} if unread else {})}
    faults = [
        Fault(f"line {line}: {column}", problem, remedy) for column, problem, remedy in _contradictions(values, unread)
    ]
    if faults:
        return BadRow(line=line, id=printable(str(values["id"])), faults=tuple(faults))
    stated = {key: values.pop(column) for column, key in settings.items()}
    return RunRow(
        line=line,
        settings=tuple((key, value) for key, value in stated.items() if value is not None),
        unread=(unread,) if unread else (),
        **values,
    )


class _Ours(NamedTuple):
    """A cell of a plan's key that the plan does not take so: `recompute` is `yes`, as a column of ours has it."""

    column: str
    value: object


def _either(setting: str, parse: Callable[[str], object], own: str, parse_own: Callable[[str], object]) -> Parser:
    """The parser of a column that is a plan's key and another name of one of ours: as the plan takes it, else as ours."""

    def parsed(cell: str) -> object:
        value = parse(cell)
        try:
            if value is not None:
                Plan.parse({setting.removeprefix("plan."): value}, "", PlanError)
        except PlanError:
            return _Ours(own, parse_own(cell))
        return value

    return parsed


def _public_model(values: dict[str, Any]) -> dict[str, Any]:
    """A model's cell that is no preset's name is a public one."""
    if values.get("model") and not values.get("model_name") and values["model"] not in preset_names():
        values |= {"model_name": values["model"], "model": ""}
    return values


def _contradictions(values: Mapping[str, Any], unread: str) -> Iterator[tuple[str, str, str]]:
    """Contradictions between cells: (column, problem, remedy). unread: an unknown memory metric."""
    if (values.get("metric") is None) != (values.get("value") is None):
        yield "value", "metric and value come together, one of them is blank", "both, or neither"
    memory, amount = values.get("mem_metric"), values.get("mem_value")
    if values.get("metric") == "mfu" and (values.get("value") or 0) > 1:
        yield "value", "an MFU above 1", "a fraction, or the column mfu_percent"
    if memory != "oom" and (memory is None) != (amount is None):
        yield "mem_value", "mem_metric and mem_value come together, one of them is blank", "both, or neither"
    if values.get("value") is None and memory is None:
        known = f"mem_metric is not a known word ({unread})" if unread else "neither metric nor mem_metric"
        yield "metric", f"nothing was measured: {known}", f"one of {', '.join(get_args(Metric))}"


def _sharding(cell: str) -> str:
    """The word of a cell, or of its parts that are no axes of a mesh: `FSDP2 + TP + PP`. Blank where all are: `3D`."""
    word, parts = _sharding_word(cell), [part for part in re.split(r"[+,/&]", cell) if not _AXIS.fullmatch(_bare(part))]
    word = word if _SHARDING.fullmatch(word) else _sharding_word("".join(parts))
    if word and not _SHARDING.fullmatch(word):
        raise CellError(f"unknown word {shown(cell)}", nearest(cell[:60], _SHARDING_WORDS))
    return word


def _sharding_word(text: str) -> str:
    return text if _SHARDING.fullmatch(text) else names()["words"]["sharding"].get(_bare(text), _bare(text))


def _bare(cell: str) -> str:
    return re.sub(r"[\s_\-()+/]+", "", cell.casefold())


def _or_blank(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda cell: parse("" if cell.casefold() in _UNKNOWN else cell)


def _length(cell: str) -> int | None:
    """Tokens: 8192, or 8k."""
    found = re.fullmatch(r"([0-9]{1,6})k", cell, re.IGNORECASE)
    return integer_cell(str(int(found[1]) * 1024) if found else cell)


def _spelled(parse: Callable[[str], object], kind: str) -> Callable[[str], object]:
    """The parser of a cell that may hold a word in another spelling."""
    return lambda cell: parse(names()["words"][kind].get(_bare(cell), cell.casefold()))


def _memory_metric(cell: str) -> tuple[str | None, str, str] | None:
    """(word, detail, what is not read): `peak_allocated_gib(last rank)` -> ("peak_allocated_gib", "last rank", "")."""
    if not cell:
        return None
    word, _, detail = text_cell(cell).partition("(")
    if word in get_args(MemoryMetric) and (not detail or detail.endswith(")")):
        return word, detail.removesuffix(")"), ""
    near = nearest(word[:60], get_args(MemoryMetric))
    return None, "", f"mem_metric {shown(cell)}{f': {near}' if near else ''}"


_INTEGER_COLUMNS = (
    "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "n_experts", "top_k", "n_gpus",
    "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "vpp", "micro_batch", "global_batch", "nvlink_domain_size",
    "num_micro_batches",
)  # fmt: skip
_PARSERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(COLUMNS, text_cell),
    **dict.fromkeys(_INTEGER_COLUMNS, integer_cell),
    **dict.fromkeys(("inter_link_gbps_per_node", "value", "mem_value"), number_cell),
    **dict.fromkeys(("flash_attn", "seq_parallel", "compile"), _spelled(one_of("y", "n", blank=None), "yes_no")),
    "id": name_cell,
    "seq_len": _length,
    "mlp_kind": _spelled(one_of(*_MLP_KINDS), "mlp"),
    "precision": _spelled(one_of(*_PRECISIONS), "precision"),
    "act_ckpt": _spelled(one_of("none", "full", "selective"), "recompute"),
    "zero_or_fsdp": _sharding,
    "metric": one_of(*get_args(Metric), blank=None),
    "mem_metric": _memory_metric,
    "flop_convention": one_of(*get_args(FlopConvention), blank=None),
}
