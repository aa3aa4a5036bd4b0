"""`shardwise sensitivity`: what a step's time or cost, and the choice between alternatives, hang on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import Collected, Fault, InputError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import more_than_once
from simulator.cli.compare import columns_of
from simulator.cli.finite import FiniteRange
from simulator.cli.goodput import read_run
from simulator.cli.options import (
    FILE,
    OF_ALL_STUDIES,
    answer_options,
    loaded_prices,
    of_all_studies,
    price_options,
    print_answer,
    print_notes,
    texts_of,
    tokens_option,
)
from simulator.cli.programs import is_program
from simulator.cli.progress import CountLine
from simulator.cli.sensitivity_study import FIGURES, Figure, SensitivityStudy, identity
from simulator.formats.study import Study, read_study
from simulator.play.lower import lowered
from simulator.predict import memory_of
from simulator.predict.play import step_seconds
from simulator.studies.goodput import LongRun
from simulator.studies.search import Journal
from simulator.studies.sensitivity import Range, render
from simulator.studies.sensitivity.failures import Failure, Failures, Hurt, failures_of, ranked, render_failures
from simulator.studies.sensitivity.text import WIDTH

_HELP = """How far a figure, and the choice between alternatives, hang on their inputs.

Alternatives are those of `compare`: STUDY.toml files, and --what-if variants of the first; one alone has no decision, but
figures. --vary KEY=LOW..HIGH is a range: a leaf as --set takes it (link.inter.bytes_per_s=200Gb/s..400Gb/s,
device.memory_bytes_per_s=x0.9..x1.1, kernels.gemm=x0.8..x1.2), price.KEY, run.KEY, or run.mtbf=x0.5..x2; B:KEY=... is the second alternative's alone. All vary at
once; beside them the errors of the prediction itself do, as far as the alternatives do not share them.

--failures answers another question of one study: which single link, card, GPU or node hurts most where it is slow or lost.

Exit codes: 0 answered, 2 usage, 3 bad input, 130 interrupted (--journal keeps what was simulated)."""


@click.command("sensitivity", help=_HELP)
@click.argument("studies", nargs=-1, type=click.Path(path_type=Path), metavar="[STUDY.toml|CAPTURE]...")
@click.option(
    "--what-if", "variants", multiple=True, metavar="KEY=VALUE[,KEY=VALUE...]", help="A variant of the first."
)
@click.option("--vary", "ranges", multiple=True, metavar="KEY=LOW..HIGH", help="An input's range; may be repeated.")
@click.option(
    "--by", "figure", type=click.Choice(list(FIGURES)), help="What is compared. [cost with --prices, else time]"
)
@click.option("--no-errors", is_flag=True, help="Take the prediction's own errors for none.")
@click.option("--samples", type=click.IntRange(8, 65_536), default=128, show_default=True, help="A power of two.")
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True)
@of_all_studies
@tokens_option
@price_options
@click.option("--run-tokens", metavar="N", help="Tokens of a training run, as 15T; else the first study's [run].")
@click.option("--journal", type=FILE, metavar="FILE", help="Keep, and resume.")
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes. [the machine's cores]")
@click.option("--failures", is_flag=True, help="Instead: slow or lose one part at a time, and rank them.")
@click.option(
    "--left",
    type=FiniteRange(0.05, 0.99),
    default=0.5,
    show_default=True,
    help="With --failures: the share of its rate that a slowed part keeps.",
)
@answer_options
def command(
    studies: tuple[Path, ...],
    *,
    variants: tuple[str, ...],
    settings: tuple[str, ...],
    journal: Path | None,
    jobs: int | None,
    **options: Any,  # noqa: ANN401  one type an option
) -> int:
    """Sample the inputs, predict each point, and attribute the variance."""
    failures, left = options.pop("failures"), options.pop("left")
    alternatives = columns_of(studies, variants, settings)
    flags = texts_of(options, *OF_ALL_STUDIES, "tokens_per_step")
    if failures:
        _alone(studies, {**options, "--what-if": variants, "--journal": journal})
        failed = swept(alternatives[0][1], flags, settings, left, CountLine("predictions"))
        print_answer("failures", failed.as_json, lambda: render_failures(failed), width=WIDTH)
        return ExitCode.OK
    study = _study(alternatives, flags, options)
    with Journal(journal, identity(study)) if journal is not None else nullcontext() as store:
        answer = study.answer(store, jobs, CountLine("predictions"))
    print_answer("sensitivity", answer.as_json, lambda: render(answer), width=WIDTH)
    return ExitCode.OK


def _alone(studies: Sequence[Path], options: dict[str, Any]) -> None:
    """Raise UsageError for options that cannot be combined with --failures."""
    flags = {"ranges": "--vary", "figure": "--by", "tokens_per_step": "--tokens-per-step", "run_tokens": "--run-tokens"}
    flags |= {"prices": "--prices", "jobs": "--jobs", "no_errors": "--no-errors"}
    given = [flags.get(name, name) for name, value in options.items() if value and (name in flags or name[0] == "-")]
    given += ["a second study"] if len(studies) > 1 else []
    if given:
        raise click.UsageError(f"--failures asks of one study by itself, without {', '.join(given)}")


def _study(
    alternatives: Sequence[tuple[str, Path | None, tuple[str, ...]]], flags: dict[str, str], options: dict[str, Any]
) -> SensitivityStudy:
    """Raises InputError with every fault."""
    faults: list[Fault] = []
    ranges: list[Range] = []
    for text in options["ranges"]:
        with Collected(faults):
            ranges.append(Range.parse(text))
    faults += _range_faults(ranges, options)
    for one in ranges:
        if one.only is not None and one.only >= len(alternatives):
            remedy = f"A to {chr(ord('A') + len(alternatives) - 1)}"
            faults.append(Fault(f"--vary {one.key}", "there is no such alternative", remedy))
    prices = None
    with Collected(faults):
        prices = loaded_prices(options)
    run = _run(alternatives[0][1], options, faults)
    figure: Figure = options["figure"] or ("cost" if prices else "time")
    if figure in ("cost", "run-cost") and options["prices"] is None:
        faults.append(Fault(f"--by {figure}", "costs need prices", "--prices PRICES.toml"))
    if figure.startswith("run") and run is None and not faults:
        remedy = "--run-tokens 15T, or [run] in the first study"
        faults.append(Fault(f"--by {figure}", "the length of the run is not given", remedy))
    InputError.raise_for(faults)
    return SensitivityStudy(
        alternatives=tuple(alternatives),
        flags=flags,
        ranges=tuple(ranges),
        figure=figure,
        prices=prices,
        run=run if figure.startswith("run") else None,
        errors=not options["no_errors"],
        samples=options["samples"],
        seed=options["seed"],
    )


def _range_faults(ranges: Sequence[Range], options: dict[str, Any]) -> list[Fault]:
    faults = []
    if not options["ranges"] and options["no_errors"]:
        faults.append(Fault("--vary", "nothing varies", "--vary KEY=LOW..HIGH"))
    twice = sorted(more_than_once(one.key for one in ranges))
    faults += [Fault(f"--vary {key}", "varies twice", "keep one") for key in twice]
    if options["samples"] & (options["samples"] - 1):
        near = 2 ** (options["samples"].bit_length() - 1)
        faults.append(Fault("--samples", "is not a power of two", f"{near} or {2 * near}"))
    for one in ranges:
        if one.leaf.startswith("price.") and options["prices"] is None:
            faults.append(Fault(f"--vary {one.key}", "there are no prices", "--prices PRICES.toml"))
        if one.leaf.startswith("run.") and not str(options["figure"]).startswith("run"):
            faults.append(Fault(f"--vary {one.key}", "does not change a step", "--by run-days or run-cost"))
        if one.leaf.startswith("checkpoint."):
            problem = "what a checkpoint costs is taken as it is"
            faults.append(Fault(f"--vary {one.key}", problem, "shardwise goodput, with each value"))
        if one.leaf == "run.mtbf" and not one.prefix:
            faults.append(Fault("--vary run.mtbf", "must be given as a multiple", "run.mtbf=x0.5..x2"))
    return faults


def _run(first: Path | None, options: dict[str, Any], faults: list[Fault]) -> LongRun | None:
    """The long run of the first study, or of --run-tokens; None if neither is given."""
    tokens = options["run_tokens"]
    if not str(options["figure"]).startswith("run"):
        if tokens is not None:
            problem, remedy = "only counts for a whole run", "--by run-days or run-cost"
            faults.append(Fault("--run-tokens", problem, remedy))
        return None
    try:
        return read_run(first, {"tokens": tokens} if tokens is not None else {})
    except InputError as exc:
        faults += [fault for fault in exc.faults if "either tokens or steps" not in fault.problem or tokens]
        return None


# `shardwise sensitivity --failures`: each component slowed or lost in turn, ranked by the cost.
def _of_equal_nodes(file: Path | None, flags: Mapping[str, str], settings: tuple[str, ...]) -> Study:
    """The study. Raises InputError where one failure at a time has no meaning."""
    if is_program(file):
        problem = "a captured program has no plan that could be put on fewer nodes"
        raise InputError.at("--failures", problem, "a STUDY.toml")
    study = print_notes(read_study(file, flags, {}, settings))
    if study.cluster.exceptions:
        problem = "--failures adds one exception at a time, and there are some already"
        raise InputError.at("cluster: exceptions", problem, "a cluster of equal nodes")
    return study


def swept(
    file: Path | None,
    flags: Mapping[str, str],
    settings: tuple[str, ...],
    left: float,
    on_progress: Callable[[int, int], None],
) -> Failures:
    """Simulate every failure. Raises InputError if the study is wrong or its cluster has exceptions of its own."""
    study = _of_equal_nodes(file, flags, settings)
    lowering = lowered(*study.parts)
    step_s = step_seconds(lowering)
    base, cases = study.plan.tokens_per_step / step_s, list(failures_of(study.plan, study.cluster, left))
    found = []
    for done, one in enumerate(cases, 1):
        found.append(_hurt(one, file, flags, settings, base))
        on_progress(done, len(cases))
    return ranked(step_s, base, left, found, fits=memory_of(lowering, quick=True).memory.fit.runs)


def _hurt(
    failure: Failure, file: Path | None, flags: Mapping[str, str], settings: tuple[str, ...], base: float
) -> Hurt:
    """The step under a failure: it stops if the remaining GPUs cannot run or hold the plan; unmodelled failures give a reason."""
    gone = failure.nodes is not None
    nodes = {"nodes": str(failure.nodes)} if gone else {}
    try:
        study = read_study(file, {**flags, **nodes}, {}, (*settings, *failure.settings))
        lowering = lowered(*study.parts)
        if gone and not (usage := memory_of(lowering, quick=True)).memory.fit.runs:
            raise PlanError.at("memory", f"does not fit on the nodes that are left: {usage.cause}")
        step_s = step_seconds(lowering)
    except InputError as exc:
        reason = "; ".join(fault.problem for fault in exc.faults)
        return Hurt(failure=failure, step_s=None, lost=1.0 if gone else 0.0, reason=reason)
    return Hurt(failure=failure, step_s=step_s, lost=1 - study.plan.tokens_per_step / step_s / base)
