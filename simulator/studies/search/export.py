"""The table as a file: CSV, JSON, or Parquet where pyarrow is there."""

from __future__ import annotations

import csv
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError, json_text
from simulator.base.files import write_whole
from simulator.base.schema import check_writable
from simulator.studies.search.report import SearchReport, flat

EXPORTS: Final = (".csv", ".json", ".parquet")


def check_export(path: Path) -> None:
    """Raises InputError where `export` could only fail: raised before a search, not after it."""
    if path.suffix not in EXPORTS:
        raise InputError.at("--export", f"{path.name} has no format", f"one of {', '.join(EXPORTS)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise InputError(_without_pyarrow(path))
    check_writable(path, "--export")


def export(report: SearchReport, path: Path) -> None:
    """Write the table; the ending says how. Raises InputError where it cannot be written."""
    made = {".csv": _csv, ".json": _json}
    data = made[path.suffix](report) if path.suffix in made else _parquet(report, path)
    write_whole(path, data, "--export")


def _json(report: SearchReport) -> str:
    return json_text(report.as_json()) + "\n"


def _rows(report: SearchReport) -> list[dict[str, Any]]:
    """One flat record a row: the plan's fields in columns of their own, those that any row sets."""
    names: dict[str, None] = {}
    records = []
    for row in report.rows:
        data = flat(row)
        against, plan = data.pop("against_best"), data.pop("plan")
        data["same"] = "; ".join(data["same"])
        names |= dict.fromkeys(plan)
        ratios = {f"step_over_best{end}": against[key] if against else None for end, key in _ENDS.items()}
        records.append((data | ratios, row.plan.model_dump(mode="json")))
    return [data | {f"plan.{name}": _cell(plan[name]) for name in names} for data, plan in records]


_ENDS: Final = {"": "ratio", "_low": "low", "_high": "high"}


def _cell(value: object) -> object:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _csv(report: SearchReport) -> str:
    rows = _rows(report)
    sink = io.StringIO()
    writer = csv.DictWriter(sink, fieldnames=list(rows[0]) if rows else ["rank"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()


def _parquet(report: SearchReport, path: Path) -> bytes:
    try:
        from pyarrow import Table, parquet
    except ImportError:
        raise InputError(_without_pyarrow(path)) from None
    sink = io.BytesIO()
    parquet.write_table(Table.from_pylist(_rows(report)), sink)
    return sink.getvalue()


def _without_pyarrow(path: Path) -> Fault:
    return Fault(str(path), "Parquet needs pyarrow", "pip install 'shardwise[parquet]', or export to .csv or .json")
