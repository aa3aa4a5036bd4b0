"""Published runs in plain columns: writes experiments/measured/runs*-plain.csv.gz from the tables as they were published.

    python experiments/convert_runs.py                       # runs.csv.gz -> runs-plain.csv.gz, and runs-2 likewise
    python experiments/convert_runs.py --check               # writes nothing; 1 if a file is not what would be written
    python experiments/convert_runs.py other.csv plain.csv.gz

`runs_table/` knows what the table's sources mean: which software a name and a note stand for, whose recipe a row points to,
which model a name is of. This script writes that into columns that `shardwise backtest` takes as they stand
(docs/reference/runs-table.md): a row of the result needs no knowledge of who published it. It resolves each row both ways,
and stops where the two differ.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs_table import meaning, rules, tuning
from runs_table.frameworks import framework_rule
from runs_table.published import published
from runs_table.recipes import published_recipe

from simulator.base.errors import InputError, PlanError
from simulator.formats.readers.run_settings import column_of
from simulator.formats.readers.runs_table import COLUMNS, REQUIRED, RunRow, read_runs
from simulator.spec.plan import Plan
from simulator.studies.backtest.blanks import states_recompute
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import Run, resolve
from simulator.studies.backtest.rows import FlopConvention

HERE = Path(__file__).resolve().parent
RAW, PLAIN = HERE / "measured" / "runs.csv.gz", HERE / "measured" / "runs-plain.csv.gz"
RAW_2, PLAIN_2 = HERE / "measured" / "runs-2.csv.gz", HERE / "measured" / "runs-2-plain.csv.gz"
CARRIED = ((RAW, PLAIN), (RAW_2, PLAIN_2))  # runs that were open from the start, and those collected in November 2026

_CLUSTER_TOKENS = re.compile(r"\bcluster tokens/s=([0-9]+)")
# Columns of the table that it may leave blank, and what a row's meaning fills them with
_FILLED = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "mlp_kind", "vocab", "n_experts", "top_k", "n_gpus",
           "dp", "vpp", "zero_or_fsdp", "micro_batch", "global_batch", "act_ckpt")  # fmt: skip
_AS_PUBLISHED = ("framework", "notes", "model_name", "compile")  # where a row was read without them
_UNSAID = ("sources", "describes", "name", "framework", "date", "calibration_runs")  # no part of what is predicted


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="?")
    parser.add_argument("plain", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    if args.raw and not args.plain:
        parser.error("a table of your own needs a file to write to")
    others = 0
    for raw, plain in ((args.raw, args.plain),) if args.raw else CARRIED:
        written = zipped(table(raw))
        if args.check:
            others += plain.read_bytes() != written
        else:
            plain.write_bytes(written)
    return int(others > 0)


def table(raw: Path) -> str:
    """The converted table as CSV. Rows that cannot be read are left out: the reader names them."""
    rows = [_cells(converted(row)) for row in read_runs(raw) if isinstance(row, RunRow)]
    used = {name for row in rows for name in row}
    columns = [*(name for name in COLUMNS if name in used or name in REQUIRED), *sorted(used - set(COLUMNS))]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def zipped(text: str) -> bytes:
    """The same bytes whenever and wherever they are written."""
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", filename="", mtime=0) as stream:
        stream.write(text.encode())
    return data.getvalue()


def converted(row: RunRow) -> RunRow:
    """The row in plain columns. Raises AssertionError where they cannot say what the row means.

    Keys of plan, stack and model that the table itself states are kept as they stand.
    """
    own = dict(row.settings)
    row = replace(row, settings=tuple(one for one in row.settings if one[0].startswith("fabric.")))
    if (tuned := tuning.tuned(row)) is not None:
        found = replace(
            _also(_converted(tuned.row), tuned.settings), **{name: getattr(row, name) for name in _AS_PUBLISHED}
        )
    else:
        found = _converted(row)
    return _also(found, own) if own else found


def _converted(row: RunRow) -> RunRow:
    try:
        meant = meaning.resolve(row)
    except RefusedError as exc:
        return replace(_with_tokens(row), excluded=str(exc))
    except InputError as exc:
        return replace(_with_tokens(row), excluded=f"{exc.noun} refused: {'; '.join(map(str, exc.faults))}")
    stated = _with_columns(row, meant.row)
    stated = replace(stated, unmodelled=" ".join(meant.unmodelled), flop_convention=_convention(row, meant))
    if not states_recompute(row) and published_recipe(meant.row):
        stated = _also(stated, {"plan.recompute": meant.plan.recompute.mode})
    stated = _with_settings(stated, meant)
    if (
        meant.plan.ep > 1 and rules.noted_dispatcher(row) == meant.plan.experts.dispatcher
    ):  # stated, if only as it usually is
        stated = _also(stated, {"plan.dispatcher": meant.plan.experts.dispatcher})
    left = [*_differences(resolve(stated), meant)]
    assert not left, f"{row.id}: {left}"
    return stated


def _with_columns(row: RunRow, filled: RunRow) -> RunRow:
    """The row with the columns that stand for themselves: sizes, degrees, stack, preset, machine, metric."""
    known = published(filled)
    return replace(
        _with_tokens(row),
        **{name: getattr(filled, name) for name in _FILLED},
        stack=framework_rule(filled).stack(filled),
        model=known.name if known else "",
        machine=rules.machine(filled) or "",
        nvlink_domain_size=rules.rack_gpus(filled),
    )


def _convention(row: RunRow, meant: meaning.Run) -> FlopConvention | None:
    """The one that the row's own TFLOP/s count by."""
    return meant.rule.flop_convention if row.metric == "model_tflops_per_gpu" else None


def _with_tokens(row: RunRow) -> RunRow:
    """The cluster's tokens/s from the notes where it is the column's number with more digits."""
    noted = _CLUSTER_TOKENS.search(row.notes)
    per_gpu = row.metric == "tokens_per_s_per_gpu"
    if (
        not noted
        or not per_gpu
        or row.value is None
        or not row.n_gpus
        or abs(int(noted[1]) / row.n_gpus - row.value) > 1
    ):
        return row
    return replace(row, metric="tokens_per_s", value=float(noted[1]))


def _with_settings(row: RunRow, meant: meaning.Run) -> RunRow:
    """The row with every key of plan, model and stack that its columns leave at another value than is meant."""
    if meant.model.pattern and not row.model:
        hybrid = meant.model.model_dump(mode="json", include={"pattern", "mamba"})
        row = _also(row, dict(_between("model", {}, hybrid)))
    try:
        run = resolve(row)
    except PlanError:  # its columns alone are no legal plan: every key of the plan that is meant
        plain = Plan().model_dump(mode="json")
        row = _also(row, dict(_between("plan", plain, meant.plan.model_dump(mode="json"))))
        run = resolve(row)
    if run.micro_batches != meant.micro_batches and meant.micro_batches == int(meant.micro_batches):
        row = replace(row, num_micro_batches=int(meant.micro_batches))
        run = resolve(row)
    return _also(row, dict(_differences(run, meant)))


def _also(row: RunRow, settings: Mapping[str, Any]) -> RunRow:
    return replace(row, settings=tuple(sorted({**dict(row.settings), **settings}.items())))


def _differences(run: Run, meant: meaning.Run) -> Iterator[tuple[str, Any]]:
    """(key behind its noun, the value that is meant) of all that the two differ in."""
    for noun in ("plan", "model", "stack"):
        mine, its = (getattr(each, noun).model_dump(mode="json") for each in (run, meant))
        yield from _between(noun, mine, its)
    assert run.cluster == meant.cluster, f"{run.row.id}: cluster"
    assert run.unmodelled == meant.unmodelled, f"{run.row.id}: unmodelled"


def _between(path: str, mine: Mapping[str, Any], its: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in its.items():
        if key in _UNSAID or (path == "plan" and key in COLUMNS) or mine.get(key) == value:
            continue
        below = mine.get(key)
        if isinstance(value, Mapping):
            yield from _between(f"{path}.{key}", below if isinstance(below, Mapping) else {}, value)
        else:
            yield f"{path}.{key}", tuple(value) if isinstance(value, list) else value


def _cells(row: RunRow) -> dict[str, str]:
    """The row as a table writes it; blank cells are left out."""
    metric = f"{row.mem_metric}({row.mem_metric_detail})" if row.mem_metric_detail else row.mem_metric
    columns = {name: getattr(row, name) for name in COLUMNS} | {"mem_metric": metric}
    settings = {column_of(key): value for key, value in row.settings}
    cells = {name: _cell(value) for name, value in (columns | settings).items()}
    return {name: cell for name, cell in cells.items() if cell}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return str(int(value)) if value == int(value) else repr(value)
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
