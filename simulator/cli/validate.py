"""`shardwise validate`: run a plan for real, and put prediction and measurement side by side.

What measures is loaded only when asked for; torch only in the ranks' own processes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from simulator.cli import ExitCode
from simulator.errors import Fault, InputError

if TYPE_CHECKING:
    from simulator.cli.study import Study
    from validate.task import Task

Mode = Literal["full", "solo", "cpu", "fake"]


@click.group("validate")
def command() -> None:
    """Run a plan for real, and compare the prediction with it."""


_RUN = """Run the plan of STUDY.toml (as `predict` takes it) for real.

\b
full  one process a GPU, NCCL; on several nodes under torchrun
solo  one GPU plays rank 0 of a job of any size: real kernels, real allocator, collectives that return at once
cpu   gloo, 1 to 4 processes on this machine
fake  no arithmetic at all: memory at any size, on any machine

Ctrl-C, a deadline or a dead rank end the run; what was measured until then is kept and marked as partial.

Exit codes: 0 done, 2 usage, 3 bad input, 5 the run failed, 130 interrupted."""


@command.command("run", help=_RUN)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@click.option("--mode", type=click.Choice(["full", "solo", "cpu", "fake"]), default="fake", show_default=True)
@click.option("--model", metavar="NAME|FILE", help="As for predict.")
@click.option("--cluster", metavar="NAME|FILE", help="As for predict; only the comparison uses it.")
@click.option("--nodes", metavar="INTEGER", help="As for predict.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As for predict: plan.seq_len=4096.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Of solo and fake. [solo: cuda; fake: cpu]")
@click.option("--steps", type=click.IntRange(1, 10_000), default=8, show_default=True, help="Steps that are timed.")
@click.option("--warm-up", type=click.IntRange(1, 1000), default=3, show_default=True, help="Steps before them.")
@click.option("--threads", type=click.IntRange(1, 4096), default=1, show_default=True, help="Of each rank, on CPUs.")
@click.option(
    "--minutes", type=click.FloatRange(0.05, 1440), default=8.0, show_default=True, help="Deadline of the run."
)
@click.option("--record", is_flag=True, help="Also keep the allocator's events of one step (GPU).")
@click.option("--no-profile", is_flag=True, help="No profiled step.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="RUNS.jsonl",
    help="Add the record to a file.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the record as JSON (docs/reference/validate.md).")
def run(study: Path | None, *, out: Path | None, as_json: bool, minutes: float, **options: Any) -> int:  # noqa: ANN401
    """Play, print, keep."""
    if find_spec("torch") is None:
        raise InputError(Fault(place="torch", problem="is not installed", remedy="pip install 'shardwise[validate]'"))
    from validate.run_plan import deadlines, play  # noqa: PLC0415  only what is asked for is loaded

    asked = _asked(study, options)
    task = _task(asked, options)
    record = play(
        task,
        deadlines(minutes),
        files=_stem(out) if out is not None else None,
        study={"cluster": asked.cluster.model_dump(mode="json"), "calibration": asked.inputs()["calibration"]},
        progress=_progress(),
    )
    kept = _keep(out, record)
    if as_json or not kept:
        click.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))
    else:
        from validate.text import run_text  # noqa: PLC0415

        click.echo(run_text(record))
    return _status(record["verdict"], kept=kept)


def _asked(study: Path | None, options: dict[str, Any]) -> Study:
    from simulator.cli.study import read_study  # noqa: PLC0415

    flags = {name: options[name] for name in ("model", "cluster", "nodes") if options[name] is not None}
    return read_study(study, flags, {}, options["settings"])


def _task(asked: Study, options: dict[str, Any]) -> Task:
    from simulator.stack import Stack  # noqa: PLC0415
    from validate.task import Task  # noqa: PLC0415

    mode: Mode = options["mode"]
    usual = {"full": "cuda", "solo": "cuda", "cpu": "cpu", "fake": "cpu"}[mode]
    if options["device"] is not None and mode in ("full", "cpu") and options["device"] != usual:
        raise click.UsageError(f"--mode {mode} runs on {usual}; --device is for solo and fake")
    return Task(
        mode=mode,
        model=asked.model,
        plan=asked.plan,
        stack=asked.stack or Stack.load(asked.plan.stack),
        device="cuda" if (options["device"] or usual) == "cuda" else "cpu",
        num_steps=options["steps"],
        num_warm_up=options["warm_up"],
        threads=options["threads"],
        profile=not options["no_profile"],
        record=options["record"],
        command=shlex.join(["shardwise", *sys.argv[1:]]),
    )


def _progress() -> Callable[[int, str], None]:
    """Rank 0's phases on stderr: one line that changes on a terminal, a line each elsewhere."""
    live = sys.stderr.isatty()

    def show(rank: int, phase: str) -> None:
        if rank == 0:
            click.echo(f"\r\033[K{phase}" if live else phase, err=True, nl=not live)

    return show


def _stem(out: Path) -> Path:
    """Files beside a record bear its number: the line it will have."""
    lines = out.read_bytes().count(b"\n") if out.is_file() else 0
    return out.with_name(f"{out.stem}-{lines + 1}")


def _keep(out: Path | None, record: dict[str, Any]) -> bool:
    """Add the record to the file; if that fails the record goes to stdout instead, and nothing is lost."""
    if out is None:
        return True
    from validate.run_plan import append  # noqa: PLC0415

    try:
        append(out, record)
    except OSError as exc:
        click.echo(f"shardwise: {out}: {exc.strerror}; the record follows on stdout", err=True)
        return False
    return True


def _status(verdict: str, *, kept: bool) -> int:
    if verdict == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.OK if verdict == "ok" and kept else ExitCode.RUN_FAILED


_COMPARE = """Compare predictions with the runs in RUNS.jsonl, written by `validate run`.

For each run: E = prediction - measurement, and u_val from the prediction's and the measurement's uncertainties
(ASME V&V 20). |E| <= u_val is lost in the noise. The last line of a run says which part of the model explains most
of the error."""


@command.command("compare", help=_COMPARE)
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUNS.jsonl")
@click.option("--cluster", metavar="NAME|FILE", help="Predict for this cluster. [the one of the run's study]")
@click.option("--nodes", metavar="INTEGER", help="How many of the cluster's nodes.")
@click.option("--calibration", metavar="NAME|FILE", help="Predict with this. [the study's, or the device's own]")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (docs/reference/validate.md).")
def compare(runs: Path, *, cluster: str | None, nodes: str | None, calibration: str | None, as_json: bool) -> int:
    """Predict every run, print the table."""
    from validate.compare import compare_run  # noqa: PLC0415
    from validate.run_plan import read_records  # noqa: PLC0415

    records, faults = read_records(runs)
    for fault in faults:
        click.echo(f"shardwise: {fault}", err=True)
    found = [compare_run(record, cluster=cluster, nodes=nodes, calibration=calibration) for record in records]
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "runs": found}, ensure_ascii=False, allow_nan=False, indent=2))
    else:
        from validate.text import comparison_text  # noqa: PLC0415

        click.echo("\n\n".join(comparison_text(one) for one in found))
    return ExitCode.OK
