"""`shardwise validate`: run a plan for real, and put prediction and measurement side by side.

Names and options only; what they do is in the package `validate`, loaded when a verb runs, and torch is loaded in the
ranks' own processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simulator.cli.finite import FiniteRange
from simulator.cli.options import (
    FILE,
    also_as_page,
    html_option,
    memory_fraction_option,
    needs_torch,
    patience_option,
    set_option,
)


@click.group("validate")
def command() -> None:
    """Run a plan for real, and compare the prediction with it."""


_RUN = """Run the plan of STUDY.toml (as `predict` takes it) for real.

\b
full  one process a GPU, NCCL; on several nodes under torchrun
solo  one GPU plays rank 0 of a job of any size: real kernels, real allocator, collectives that return at once
cpu   gloo, 1 to 4 processes on this machine
fake  no arithmetic at all: memory at any size, on any machine

--program plays a training script of your own instead, on CUDA or (gloo) on the CPU, and captures it beside.

Ctrl-C, a deadline or a dead rank end the run; what was measured until then is kept and marked as partial.

Exit codes: 0 done, 2 usage, 3 bad input, 5 the run failed, 130 interrupted."""


@command.command("run", help=_RUN)
@click.argument("study", required=False, metavar="[STUDY.toml]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option("--program", metavar="SCRIPT.py|MODULE:FUNCTION", help="A program instead of a plan, with ARGS; it is captured too, and compared.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of a --program.")
@click.option("--capture", type=FILE, metavar="FILE", help="The --program's capture. [made now]")
@click.option("--mode", type=click.Choice(["full", "solo", "cpu", "fake"]), default="fake", show_default=True)
@click.option("--model", metavar="NAME|FILE", help="As for predict.")
@click.option("--cluster", metavar="NAME|FILE", help="As for predict; only the comparison uses it.")
@click.option("--nodes", metavar="INTEGER", help="As for predict.")
@set_option("As for predict: plan.seq_len=4096.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Of solo and fake. [solo: cuda; fake: cpu]")
@click.option("--rank", type=click.IntRange(0), help="The one that solo and fake play. [0]")
@click.option("--steps", type=click.IntRange(1, 10_000), default=8, show_default=True, help="Steps that are timed.")
@click.option("--warm-up", type=click.IntRange(1, 1000), default=3, show_default=True, help="Steps before them.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Of each rank. [CPU: 1; GPU: the cores shared evenly]")
@click.option("--minutes", type=FiniteRange(0.05, 1440), default=8.0, show_default=True, help="Deadline of the run.")
@patience_option
@memory_fraction_option
@click.option("--record", is_flag=True, help="Also keep the allocator's events of one step (GPU).")
@click.option("--no-profile", is_flag=True, help="No profiled step.")
@click.option("-o", "--out", type=FILE, metavar="RUNS.jsonl", help="Add the record to a file.")
@click.option("--json", "as_json", is_flag=True, help="Write the record as JSON (docs/reference/validate.md).")
def run(study: str | None, **options: Any) -> int:  # noqa: ANN401  one type an option
    """Run the plan, print the comparison, write the run's files."""
    if options["program"] is not None:  # what stands behind -- is the program's
        options["arguments"], study = (*([study] if study is not None else []), *options["arguments"]), None
    elif options["arguments"]:
        raise click.UsageError(f"{' '.join(options['arguments'])}: arguments are those of a --program")
    elif options["capture"] is not None:
        raise click.UsageError("--capture: only of a --program")
    needs_torch()
    from validate.command import run as validate_run

    return validate_run(Path(study) if study is not None else None, options)


_REHEARSE = """Rehearse a cluster's faults on this machine: 8 ranks of two "nodes" on gloo, as torchrun and srun start them.

Ranks die, hang, run out of memory or disk, lose their node, or have other versions; each fault must be named with rank,
host and cause within its deadline, and leave no process, port or file. All take minutes, --quick half a minute.

Exit codes: 0 every fault was named, 2 usage, 3 bad input, 5 one was not."""


@command.command("rehearse", help=_REHEARSE)
@click.option("--quick", is_flag=True, help="Only one of each kind.")
@click.option("--only", default="", metavar="TEXT", help="Only scenarios with this in their name.")
@patience_option
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `scenarios`.")
def rehearse(*, quick: bool, only: str, patience: float, as_json: bool) -> int:
    """Try the measuring programs on this machine."""
    needs_torch()
    from validate.rehearse.command import rehearse as play

    return play(quick=quick, only=only, patience=patience, as_json=as_json)


_COMPARE = """Compare predictions with the runs in RUNS.jsonl, written by `validate run`.

For each run: off by = prediction - measurement, also relative to the measurement, and one sigma of that from the
prediction's and the measurement's uncertainties (u_val of ASME V&V 20): less is lost in the noise. The last line of a
run says which part of the model explains most of the error."""


@command.command("compare", help=_COMPARE)
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUNS.jsonl")
@click.option("--cluster", metavar="NAME|FILE", help="Predict for this cluster. [the one of the run's study]")
@click.option("--nodes", type=click.IntRange(min=1), metavar="INTEGER", help="How many of --cluster's nodes.")
@click.option("--calibration", metavar="NAME|FILE", help="Predict with this. [the study's, or the device's own]")
@click.option("--trace", type=FILE, metavar="OUT.json.gz", help="Also write predicted and measured rows, for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (docs/reference/validate.md).")
@html_option
def compare(runs: Path, **options: Any) -> int:  # noqa: ANN401  one type an option
    """Predict every run, print the table."""
    if options["nodes"] is not None and options["cluster"] is None:
        raise click.UsageError("--nodes counts the nodes of --cluster NAME|FILE")
    from validate.command import compare as validate_compare

    return validate_compare(runs, {**options, "page": lambda answer: also_as_page("validate-compare", lambda: answer)})
