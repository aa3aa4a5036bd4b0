"""What the verbs `shardwise validate run` and `compare` do with their options. No torch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click

from simulator.base.errors import Fault, InputError, json_text, listed, printable, printable_lines
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import check_writable, read_toml
from simulator.formats.study import Study, read_study
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import run_plan
from validate.engines import engine_of
from validate.launch import Launch, threads_each
from validate.machine import count_gpus
from validate.records import read_records
from validate.task import Mode, Task
from validate.text import comparison_text, run_text

Options = Mapping[str, Any]


def run(study: Path | None, options: Options) -> int:
    """Play the plan or the program, print the record, keep it. The exit code says how it went."""
    if options["program"] is not None:
        return _run_program(study, options)
    _check_usage(options)
    loaded, out = _study(study, options), options["out"]
    if out is not None:
        check_writable(out, "-o")
    task = _task(loaded, options)
    record = run_plan.play(
        task,
        run_plan.deadlines(options["minutes"], task, options["patience"]),
        patience=options["patience"],
        files=_stem(out) if out is not None else None,
        study={"cluster": loaded.cluster.model_dump(mode="json"), "calibration": _calibration(study)},
        progress=_progress(),
    )
    if options["mode"] == "full" and (rank := Launch.of_environment().rank):
        if record["trouble"] and record["trouble"]["rank"] in (0, rank):  # rank 0, which tells it, may be gone
            click.echo(printable_lines("\n".join(run_text(record).splitlines()[:2])), err=True)
        return _status(record["verdict"], is_written=True)
    is_written = _keep(out, record)
    if options["as_json"] or not is_written:
        click.echo(json_text(record, indent=None))
    else:
        click.echo(printable_lines(run_text(record)))
    return _status(record["verdict"], is_written=is_written)


def _run_program(study: Path | None, options: Options) -> int:
    """A program of the user's own instead of a plan."""
    from validate.capture.played import PlayedProgram, play_program

    options_given = {
        "STUDY.toml": study,
        "--model": options["model"],
        "--set": options["settings"] or None,
        "--record": options["record"] or None,
        "--rank": options["rank"],
    }
    wrong = [name for name, value in options_given.items() if value is not None]
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)}: a --program has its own model and plan")
    out = options["out"]
    if out is not None:
        check_writable(out, "-o")
    request = PlayedProgram(
        target=options["program"], arguments=options["arguments"], ranks=options["ranks"], device=options["device"] or _found_device(),
        warm_up=options["warm_up"], steps=options["steps"], threads=options["threads"] or 1, minutes=options["minutes"],
        capture=options["capture"], cluster=Cluster.load(options["cluster"] or "hgx-h100-8"),
        command=shlex.join(["shardwise", *sys.argv[1:]]),
    )  # fmt: skip
    record = play_program(request, files=_stem(out) if out is not None else None, progress=_progress())
    is_written = _keep(out, record)
    click.echo(
        json_text(record, indent=None) if options["as_json"] or not is_written else printable_lines(run_text(record))
    )
    return _status(record["verdict"], is_written=is_written)


def _found_device() -> str:
    """CUDA where there is a GPU."""
    return "cuda" if count_gpus() else "cpu"


def _check_usage(options: Options) -> None:
    """Options that a mode does not have."""
    mode = options["mode"]
    if options["device"] == "cuda" and mode == "cpu":
        raise click.UsageError("--mode cpu runs on cpu; --device is for the other modes")
    if options["rank"] is not None and mode not in ("solo", "fake"):
        raise click.UsageError(f"--mode {mode} plays every rank; --rank is for solo and fake")
    if options["record"] and (mode == "fake" or _device(options) != "cuda"):
        raise click.UsageError("--record keeps the events of a GPU's allocator: --mode full or solo on --device cuda")
    if options["record"] and options["out"] is None:
        raise click.UsageError("--record keeps a file beside the record: -o RUNS.jsonl")


def _study(study: Path | None, options: Options) -> Study:
    """The study with the stack of the torch that will run it, where it names none."""
    flags = {name: options[name] for name in ("model", "cluster", "nodes") if options[name] is not None}
    settings = options["settings"]
    loaded = read_study(study, flags, {}, settings)
    if loaded.draft is None and "stack" not in loaded.plan.model_fields_set:
        name = _installed_stack(loaded.plan, options["mode"], _device(options))
        loaded = read_study(study, flags, {}, (*settings, f"plan.stack={name}"))
    for note in loaded.notes:
        click.echo(printable(f"shardwise: {note}"), err=True)
    return loaded


def _calibration(study: Path | None) -> str | None:
    """What the study calls its calibration; a file by its whole path, so that it is found from elsewhere."""
    name = read_toml(study, InputError).get("calibration") if study is not None else None
    if study is None or not isinstance(name, str):
        return None
    return str((study.parent / name).resolve()) if name.endswith(".json") else name


def _task(loaded: Study, options: Options) -> Task:
    mode: Mode = options["mode"]
    device = _device(options)
    return Task(
        mode=mode,
        model=loaded.model,
        plan=loaded.plan,
        stack=loaded.stack or Stack.of(loaded.plan),
        device=device,
        rank=options["rank"] or 0,
        num_steps=options["steps"],
        num_warm_up=options["warm_up"],
        threads=options["threads"] or (threads_each(_ranks_here(loaded, mode)) if device == "cuda" else 1),
        memory_fraction=options["memory_fraction"],
        profile=not options["no_profile"],
        record=options["record"],
        command=shlex.join(["shardwise", *sys.argv[1:]]),
    )


def _device(options: Options) -> Literal["cuda", "cpu"]:
    """What --device says, else the mode's usual one."""
    usual = "cuda" if options["mode"] in ("full", "solo") else "cpu"
    return "cuda" if (options["device"] or usual) == "cuda" else "cpu"


def _installed_stack(plan: Plan, mode: Mode, device: str) -> str:
    """The stack of the torch, or of the engine with layers of its own, that will run the plan; said on stderr."""
    engine = engine_of(plan)
    if engine is not None and engine.stacks:
        package, installed = engine.package, engine.installed or engine.tried
        name = nearest_stack(installed, "local-cpu" if device == "cpu" else "local", engine.stacks)
    else:
        package, installed = "torch", version("torch")
        name = nearest_stack(installed, f"fake-{device}" if mode == "fake" else "cpu" if device == "cpu" else "eager")
    if not Launch.of_environment().rank:
        said = f"shardwise: stack {name}, the nearest to {package} {installed} here; the plan names none"
        click.echo(printable(said), err=True)
    return name


def nearest_stack(installed: str, kind: str, whose: str = "torch") -> str:
    """Of the shipped stacks of that kind the newest that is no newer than what is installed, else the oldest."""
    found = (re.fullmatch(rf"{whose}-(\d+)\.(\d+)-{kind}", name) for name in Stack.names())
    there = sorted((int(one[1]), int(one[2])) for one in found if one is not None)
    own = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    major, minor = max((one for one in there if one <= own), default=there[0])
    return f"{whose}-{major}.{minor}-{kind}"


def _ranks_here(loaded: Study, mode: Mode) -> int:
    """Ranks that share this machine's cores."""
    launch = Launch.of_environment()
    return 1 if mode != "full" else launch.local_size if launch.outside else loaded.plan.num_devices


def _progress() -> Callable[[int, str], None]:
    """Rank 0's phases on stderr: one line that changes on a terminal, a line each elsewhere."""
    live, first = sys.stderr.isatty(), not Launch.of_environment().rank

    def show(rank: int, phase: str) -> None:
        if rank == 0 and first:
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
    try:
        run_plan.append(out, record)
    except OSError as exc:
        click.echo(printable(f"shardwise: {out}: {exc.strerror}; the record follows on stdout"), err=True)
        return False
    return True


def _status(verdict: str, *, is_written: bool) -> int:
    if verdict == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.OK if verdict == "ok" and is_written else ExitCode.RUN_FAILED


def _must_exist(cluster: str | None, calibration: str | None) -> None:
    """Raises InputError for a name that nothing has, also where no run is predicted with it."""
    if cluster is not None:
        Cluster.load(cluster)
    if calibration not in (None, "ideal", "datasheet"):
        Calibration.load(calibration)


def compare(runs: Path, options: Options) -> int:
    """Compare every run of a results file with its prediction; bad lines are told, the rest goes on."""
    from validate.capture.compared import compare_program
    from validate.compare import compare_run

    records, faults = read_records(runs)
    for fault in faults:
        click.echo(printable(f"shardwise: {fault}"), err=True)
    where = {name: options[name] for name in ("cluster", "nodes", "calibration")}
    _must_exist(where["cluster"], where["calibration"])
    found: list[dict[str, Any]] = []
    refused: list[Fault] = []
    for number, record in enumerate(records, 1):
        try:
            if record["mode"] == "program":
                found.append(compare_program(record, runs.parent, **where))
            else:
                found.append(compare_run(record, **where))
        except InputError as exc:
            refused += [replace(fault, place=f"{runs}: run {number}: {fault.place}") for fault in exc.faults]
    if not found:
        raise InputError(refused)
    for line in listed(refused):
        click.echo(printable(f"shardwise: {line}"), err=True)
    if options["trace"] is not None:
        from validate.side_by_side import write_side_by_side

        count = write_side_by_side(options["trace"], records, runs.parent, **where)
        click.echo(printable(f"shardwise: {count} runs beside their predictions in {options['trace']}"), err=True)
    answer = {"schema_version": 1, "runs": found}
    if options["as_json"]:
        click.echo(json_text(answer))
    else:
        click.echo(printable_lines("\n\n".join(comparison_text(one) for one in found)))
    options["page"](answer)
    return ExitCode.OK
