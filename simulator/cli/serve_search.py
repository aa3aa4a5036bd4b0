"""`shardwise serve --search`: the layouts and numbers of engines that meet a rate and its limits on the fewest GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.processes import cores
from simulator.base.units import format_seconds, parse_seconds
from simulator.cli.options import FILE, all_of, fixed_by, loaded_prices, print_answer, quantity, strays, write_files
from simulator.cli.progress import StatusLine

if TYPE_CHECKING:
    from simulator.formats.study.serving import ServingStudy
    from simulator.studies.search.driver import Progress
    from simulator.studies.serving import InferencePlan
    from simulator.studies.serving_search import ServingSearch

# of --search alone
OF_SEARCH: Final = ("gpus_needed", "max_gpus", "fixes", "disaggregated", "top", "every", "journal", "jobs")
_ONE_ENGINE = dict.fromkeys(("tp", "pp", "dp", "prefill_tp", "prefill_pp", "pcp", "prefill_pcp"), 1) | {"prefill_dp": 0}


search_options = all_of(  # of `serve --search`, named as in `search`
    click.option("--search", "searched", is_flag=True, help="The plans that meet every --slo on the fewest GPUs."),
    click.option("--gpus-needed", is_flag=True, help="Of --search: as many nodes as needed, not --nodes."),
    click.option("--max-gpus", type=click.IntRange(min=1), help="Of --search: no plan on more devices."),
    click.option(
        "--fix",
        "fixes",
        multiple=True,
        metavar="FIELD=V[,V...]",
        help="Of --search: values that a field may take.",
    ),
    click.option(
        "--disaggregated",
        type=click.Choice(["both", "yes", "no"]),
        help="Of --search: prompts on engines of their own. [both]",
    ),
    click.option("--top", type=click.IntRange(1, 10_000), help="Of --search: plans in the table. [10]"),
    click.option("--all", "every", is_flag=True, help="Of --search: every plan that meets the limits."),
    click.option("--journal", type=FILE, metavar="FILE", help="Of --search: keep, and resume."),
    click.option("--jobs", type=click.IntRange(1, 1024), help="Of --search: processes. [the machine's cores]"),
    click.option("--users", type=click.IntRange(min=1), help="Instead of --rate: so many users, ..."),
    click.option("--every", "between", metavar="TIME", help="... each with a request every so often, as 60s."),
)


def rate_of_users(
    users: int | None, between: str | None, given: Mapping[str, str]
) -> tuple[dict[str, str], list[Fault]]:
    """The rate in --rate's format, and its faults."""
    if users is None and between is None:
        return {}, []
    faults: list[Fault] = []
    seconds = 0.0
    if users is None or between is None:
        place, other = ("--every", "--users 1000") if users is None else ("--users", "--every 60s")
        faults.append(Fault(place, "says half of a rate", other))
    elif between is not None:
        with Collected(faults):
            seconds = quantity("--every", parse_seconds, between)
            if seconds <= 0:
                raise InputError.at("--every", f"must be above zero; it is {between}")
    faults += [
        Fault("--users", f"gives the rate, and so does {flag}", "one of them")
        for key, flag in (("workload.rate", "--rate"), ("workload.trace", "--trace"))
        if key in given
    ]
    return ({"workload.rate": repr((users or 0) / seconds)} if not faults else {}), faults


def option_faults(options: Mapping[str, Any], of_a_plan: Mapping[str, bool]) -> list[Fault]:
    """Options that need --search or exclude it, and wrong values of --fix. of_a_plan: flag -> whether it is given."""
    if options["searched"]:
        of_one = [Fault(flag, "is of one plan", "no --search") for flag, given in of_a_plan.items() if given]
        if options["fixes"]:
            from simulator.studies.serving_search import fix_faults

            of_one += [fault for text in options["fixes"] for fault in fixed_by(text, fix_faults)[2]]
        return of_one
    return strays(options, OF_SEARCH, "--search")


def launch_of(study: ServingStudy, folder: Path, plan: InferencePlan | None = None) -> dict[str, str]:
    """Files that start the study's plan, or another. Raises InputError where they cannot be written, before anything is played."""
    from simulator.formats.writers.serving_launch import launch_files

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError.at(f"--export {folder}", "is not empty", "a new folder")
    return launch_files(plan or study.plan, study.model, study.cluster, study.stack, checkpoint=study.checkpoint)


def run_search(loaded: ServingStudy, options: Mapping[str, Any]) -> int:
    """Search and print; the exit code says whether a plan meets the limits."""
    from simulator.studies.serving_search import Notes, SearchInterrupted, search_serving

    study, exported = study_of(loaded, options), options["exported"]
    if exported is not None:
        launch_of(loaded, exported, loaded.plan.model_copy(update=_ONE_ENGINE))
    prices = loaded_prices(options)
    if prices is not None:
        prices.of(study.cluster)  # an error now, not after the search
    jobs = options["jobs"] or cores()
    journal: Path | None = options["journal"]
    interrupted = False
    with Notes(journal, study.identity) if journal is not None else nullcontext() as notes:
        try:
            report = search_serving(study, jobs=jobs, notes=notes, prices=prices, tell=_progress_line())
        except SearchInterrupted as stop:
            report, interrupted = stop.report, True
    from simulator.studies.serving_search.text import WIDTH, render

    print_answer("serve-search", report.as_json, lambda: render(report), width=WIDTH)
    if exported is not None and report.best is not None:
        write_files(launch_of(loaded, exported, report.best.answer.plan), exported)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if report.best is not None else ExitCode.DOES_NOT_FIT


def study_of(loaded: ServingStudy, options: Mapping[str, Any]) -> ServingSearch:
    """The study of the command line, whose options have been judged. Raises InputError with every fault."""
    from simulator.studies.serving_search import ServingSearch, degrees_given

    faults: list[Fault] = []
    fixed = degrees_given(loaded.plan)
    for text in options["fixes"]:
        name, values, _ = fixed_by(text, lambda *_: [])
        if name in fixed:
            problem = f"is given twice: {', '.join(map(str, fixed[name]))} too"
            faults.append(Fault(f"--fix {name}", problem, "one of them"))
        fixed[name] = values
    try:
        study = ServingSearch(
            model=loaded.model,
            cluster=loaded.cluster,
            plan=loaded.plan,
            workload=loaded.workload,
            slo=loaded.slo,
            stack=loaded.stack,
            calibration=loaded.calibration,
            fixed=fixed,
            max_gpus=options["max_gpus"],
            any_nodes=options["gpus_needed"],
            disaggregated=options["disaggregated"] or "both",
            top=options["top"] or 10,
            every=options["every"],
        )
    except InputError as exc:
        raise InputError([*faults, *exc.faults]) from None
    InputError.raise_for(faults)
    return study


def _progress_line() -> Callable[[Progress], None]:
    """Progress, elapsed time, and what is left of the step that it is at."""
    line, since = StatusLine(), time.monotonic()
    last_s = step_s = since

    def show_progress(progress: Progress) -> None:
        nonlocal last_s, step_s
        now = time.monotonic()
        step_s = last_s if progress.done == 1 else step_s
        last_s = now
        best = "" if progress.best is None else f", fewest so far {progress.best:,.0f} GPUs"
        left = format_seconds((now - step_s) * ((progress.total or 0) / progress.done - 1))
        stage = f"{progress.phase}: {progress.done:,} of {progress.total or 0:,} for engines of this size"
        line.show(f"{stage}{best}, {format_seconds(now - since)}, some {left} left")

    return show_progress
