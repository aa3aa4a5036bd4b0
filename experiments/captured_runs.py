"""Published runs of plain PyTorch, as programs: captured and predicted beside the described road.

    python experiments/captured_runs.py --captures FOLDER [--only REGEX] [--write]

Each run of KempnerForge in `experiments/measured/runs-2-plain.csv.gz` is `experiments/programs/experts.py` under its options.
What the program does it does as their code (github:KempnerInstitute/KempnerForge@5666d0d: model/, distributed/, scripts/train.py,
and the options in benchmarks/*/*.sh); no line is theirs, and their tables were not looked at for it. Both roads get the run's
cluster, and experts as untrained routers fill them (`experiments/untrained_routing.py`). The described road is the backtest's, with the stack that describes KempnerForge (`described`), and with that of plain
PyTorch (`plain`), as if nobody had described it; a captured program runs on the latter. Captures are kept in FOLDER and used
again (half a minute each). --write puts the tables into docs/guides/capture.md. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from simulator.formats.readers.capture import read_capture  # noqa: E402
from simulator.formats.readers.measured_table import read_measured  # noqa: E402
from simulator.predict.program import predict_program  # noqa: E402
from simulator.spec.software.stack import Stack  # noqa: E402
from simulator.studies.backtest.evaluate import evaluate_row  # noqa: E402
from simulator.studies.backtest.resolve import resolve  # noqa: E402
from simulator.studies.backtest.rows import RunRow  # noqa: E402
from simulator.studies.backtest.unstated import untrained  # noqa: E402
from simulator.work.captured.capture import Capture, Kind  # noqa: E402
from validate.capture.command import Job, captured_json  # noqa: E402
from validate.capture.written import write_capture  # noqa: E402

TABLE = ROOT / "experiments" / "measured" / "runs-2-plain.csv.gz"
PROGRAM = "experiments/programs/experts.py"
PAGE = ROOT / "docs" / "guides" / "capture.md"
BEGIN, END = "<!-- experiments/captured_runs.py writes from here -->", "<!-- end of captured_runs -->"
SOURCE = "KempnerInstitute/KempnerForge"
ROADS = ("captured", "described", "plain")
STACKS = {False: "torch-2.11-eager", True: "torch-2.11-compiled"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run and what each road says of it: predicted / measured - 1. captured_bytes: at the peak since the program began."""

    row: RunRow
    measured_s: float
    step: dict[str, float]
    peak: dict[str, float]

    @property
    def compiled(self) -> bool:
        return self.row.compile == "y"

    @property
    def name(self) -> str:
        row = self.row
        joined = ", joined" * ("packed experts" in row.notes and not _apart(row))
        experts = f", {row.n_experts} experts{joined}" if row.n_experts else ""
        split = f", tp {row.tp}" * ((row.tp or 1) > 1) + f", ep {row.ep}" * ((row.ep or 1) > 1)
        return f"{row.id}: {row.n_gpus} GPUs{split}{experts}"


def _apart(row: RunRow) -> bool:
    return "unpacked" in row.notes


def options(row: RunRow) -> tuple[str, ...]:
    """The run as options of the program."""
    data = (row.n_gpus or 1) // ((row.tp or 1) * (row.ep or 1))
    named = {
        "layers": row.n_layers, "width": row.d_model, "hidden": row.d_ff, "heads": row.n_heads, "kv-heads": row.n_kv_heads,
        "vocab": row.vocab, "seq": row.seq_len, "batch": row.micro_batch,
        "accumulate": (row.global_batch or 1) // (data * (row.micro_batch or 1)),
        "tp": row.tp or 1, "ep": row.ep or 1, "experts": row.n_experts or 0, "top-k": row.top_k or 1,
    }  # fmt: skip
    flags = ["--joined"] * (bool(row.n_experts) and not _apart(row)) + ["--compile"] * (row.compile == "y")
    return (*(f"--{name}={value}" for name, value in named.items()), *flags)


def found(row: RunRow, folder: Path) -> Found:
    """All roads of a run. Raises InputError where one of them refuses it."""
    run = resolve(row)
    cluster, size = run.cluster, row.n_gpus or 1
    path = folder / f"{row.id}.capture.gz"
    if not path.exists():
        job = Job(
            target=PROGRAM, arguments=options(row), world_size=size, gpus_per_node=cluster.gpus_per_node,
            device=cluster.device, expert_imbalance=untrained(row) if row.n_experts else 1.0,
        )  # fmt: skip
        write_capture(path, captured_json(job))
    capture = read_capture(path)
    one = predict_program(capture, cluster, stack=Stack.load(STACKS[row.compile == "y"]))
    others = {"described": evaluate_row(row), "plain": evaluate_row(replace(row, stack=STACKS[row.compile == "y"]))}
    measured_s = others["described"].measured_step_s
    if measured_s is None or any(each.step_error is None or each.memory_error is None for each in others.values()):
        reasons = "; ".join(str(each.reason) for each in others.values() if each.reason)
        raise SystemExit(f"{row.id}: {reasons or 'nothing measured'}")
    measured_bytes = others["described"].measured_memory_bytes or 1
    peak = max(one.memory.peak_allocated_bytes, most_alive(capture))
    return Found(
        row=row,
        measured_s=measured_s,
        step={"captured": one.step_s / measured_s - 1}
        | {name: each.step_error or 0.0 for name, each in others.items()},
        peak={"captured": peak / measured_bytes - 1}
        | {name: each.memory_error or 0.0 for name, each in others.items()},
    )


def most_alive(capture: Capture) -> int:
    """Bytes alive at the peak since the program began: the runs never reset torch's counter, and building a model counts."""
    alive, total, most = dict[int, int](), 0, 0
    for kind, *values in capture.events:
        if kind == Kind.ALLOCATE:
            alive[values[0]] = values[1]
            total += values[1]
            most = max(most, total)
        elif kind == Kind.FREE:
            total -= alive.pop(values[0])
    return most


def table(every: Sequence[Found]) -> Iterator[str]:
    """Markdown: a line a run, then what each road's errors come to."""
    heads = [f"{figure}, {road}" for figure in ("step", "peak") for road in ROADS]
    yield f"| run | measured step | {' | '.join(heads)} |"
    yield f"|---|--:|{'--:|' * len(heads)}"
    for one in every:
        cells = [f"{100 * of[road]:+.1f} %" for of in (one.step, one.peak) for road in ROADS]
        yield f"| {one.name} | {one.measured_s:.2f} s | {' | '.join(cells)} |"
    yield ""
    yield "| runs | n | what | road | median | p90 | bias | nearer than described |"
    yield "|---|--:|---|---|--:|--:|--:|--:|"
    for compiled, group in groupby(sorted(every, key=lambda one: one.compiled), key=lambda one: one.compiled):
        of_kind = list(group)
        for figure in ("step", "peak"):
            for road in ROADS:
                yield _summary(
                    "compiled" if compiled else "eager", figure, road, [getattr(one, figure) for one in of_kind]
                )


def _summary(kind: str, figure: str, road: str, errors: Sequence[dict[str, float]]) -> str:
    """A road's errors of one kind of run. p90: of ten, the largest but one, by linear interpolation."""
    sizes = sorted(abs(one[road]) for one in errors)
    place = 0.9 * (len(sizes) - 1)
    below = sizes[int(place)]
    p90 = below + (place - int(place)) * (sizes[min(int(place) + 1, len(sizes) - 1)] - below)
    nearer = sum(abs(one[road]) < abs(one["described"]) for one in errors)
    bias = statistics.median(one[road] for one in errors)
    nearer_text = "–" if road == "described" else f"{nearer} of {len(errors)}"
    figures = f"{100 * statistics.median(sizes):.1f} % | {100 * p90:.1f} % | {100 * bias:+.1f} %"
    return f"| {kind} | {len(errors)} | {figure} | {road} | {figures} | {nearer_text} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Capture, predict, print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=Path, required=True, help="a folder to keep captures in")
    parser.add_argument("--only", default="", help="ids of runs that match")
    parser.add_argument("--write", action="store_true", help="into docs/guides/capture.md")
    options = parser.parse_args(argv)
    options.captures.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_measured(TABLE).rows if isinstance(row, RunRow) and row.source == SOURCE]
    every = []
    for row in rows:
        if re.search(options.only, row.id):
            every.append(found(row, options.captures))
            print(f"{row.id}: {every[-1].step} {every[-1].peak}", file=sys.stderr, flush=True)
    text = "\n".join(table(every))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
