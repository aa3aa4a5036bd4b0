"""`shardwise serve`: latencies, throughput and memory of a model under a stream of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import InputError
from simulator.base.units import format_number
from simulator.cli.options import (
    SCREEN_WIDTH,
    answer_options,
    loaded_prices,
    price_options,
    print_answer,
    print_status,
    requested,
    set_option,
    study_options,
    write_files,
)
from simulator.cli.progress import CountLine
from simulator.cli.serve_search import OF_SEARCH, launch_of, option_faults, rate_of_users, run_search, search_options
from simulator.cli.watch import watch_option
from simulator.formats.study.serving import ServingStudy, flag_of, read_serving_study
from simulator.formats.writers.serving import render, report
from simulator.predict import Source
from simulator.studies.serving import InferencePlan, Serving, serve, token_costs
from simulator.studies.serving import highest_rate as sought

_HELP = """Serve a model under an inference plan to a stream of requests, on a simulated clock.

STUDY.toml holds `model`, `cluster`, `nodes`, `calibration` and the tables [inference], [workload] and [slo]
(docs/reference/inference-file.md); flags override it. Without a file the embedded default is served: Llama 3 8B on one H100,
4 requests a second.

--search finds the plans that meet every --slo at the rate on the fewest GPUs: tensor, pipeline and expert parallelism, how
many engines, and prompts on engines of their own or not. Settings of [inference] that are given are kept.

Exit codes: 0 answered (a queue that grows without end is an answer), 2 usage, 3 bad input, 4 it does not fit in memory, or
no plan meets the limits, 130 interrupted (what is known is shown)."""

_WORKLOAD = {
    "rate": ("NUMBER", "Requests a second, by a Poisson process; 0: all at once."),
    "burstiness": ("NUMBER", "Shape of the gamma-distributed gaps between arrivals; below 1: bursts. [1]"),
    "concurrency": ("INTEGER", "A closed loop of so many users instead of a rate: each sends when it is answered."),
    "ramp_s": ("TIME", "Its users come evenly within so long. [0s: all at once]"),
    "num_requests": ("INTEGER", "How many. [1000]"),
    "prompt_tokens": ("INTEGER|TABLE", "Tokens of a prompt, or a distribution as an inline TOML table. [512]"),
    "output_tokens": ("INTEGER|TABLE", "Tokens of an answer, likewise. [128]"),
    "prefix_tokens": ("INTEGER", "Before every prompt, the same for all: a system prompt. [0]"),
    "turns": ("INTEGER", "Requests of a conversation, each behind all that was said before. [1]"),
    "turn_gap_s": (
        "TIME",
        "Between two of them, in the mean; with --concurrency from an answer to its user's next request. [30s]",
    ),
    "cache_hits": ("FRACTION", "Of the requests that find such beginnings in the cache. [1]"),
    "seed": ("INTEGER", "Of arrivals and lengths. [0]"),
    "trace": ("CSV", "Traced requests instead: arrival_s, prompt_tokens, output_tokens."),
    "warmup": ("FRACTION", "Of the requests, the first to arrive, that no figure counts. [0.1]"),
}
_SLO = {
    "ttft": "Limit on the time to the first token: 500ms (of the p99), or p95=500ms, or p50=200ms,p99=1s.",
    "tpot": "Limit on the time per output token.",
    "latency": "Limit on the time of a whole request.",
}


def _options(function: Callable[..., int]) -> Callable[..., int]:
    """Flags of the three tables. Values are judged with the file's, so that all faults are reported together."""
    rows = [(f"slo.{name}", "[PXX=]TIME[,...]", text) for name, text in _SLO.items()]
    rows = [(f"workload.{name}", metavar, text) for name, (metavar, text) in _WORKLOAD.items()] + rows
    plan = [
        (f"inference.{name}", "VALUE", f"default {info.default}" if info.default not in (None, ()) else "")
        for name, info in InferencePlan.model_fields.items()
    ]
    for key, metavar, text in reversed([*plan, *rows]):
        function = click.option(flag_of(key), key.replace(".", "__"), metavar=metavar, help=text)(function)
    return function


@click.command("serve", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@study_options
@_options
@set_option("Any leaf of inference, workload, slo, model, cluster, device or stack. May be repeated.")
@click.option("--interval", is_flag=True, help="Also play with all times at the ends of their 90 % interval.")
@click.option("--brief", is_flag=True, help="Only what decides, on one screen of 80 columns.")
@click.option(
    "--highest-rate",
    is_flag=True,
    help="Instead of --rate: the highest at which every --slo holds (plays the requests eight times).",
)
@click.option(
    "--export",
    "exported",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Into a new folder: commands that start the plan (of --search: the best) in the stack's engine, and a Kubernetes manifest.",
)
@search_options
@price_options
@watch_option
@answer_options
def command(
    study: Path | None,
    *,
    settings: tuple[str, ...],
    interval: bool,
    brief: bool,
    highest_rate: bool,
    users: int | None,
    between: str | None,
    **flags: Any,  # noqa: ANN401  one type an option
) -> int:
    """Serve, print, and say by the exit code whether it fits."""
    options = {name: flags.pop(name) for name in (*OF_SEARCH, "searched", "prices", "price_kind", "exported")}
    given = {name: text for name, text in flags.items() if text is not None}
    tables = {name.replace("__", "."): text for name, text in given.items() if "__" in name}
    if brief and requested("json"):
        raise click.UsageError("--brief and --json are two answers: give one of them")
    rate, faults = rate_of_users(users, between, tables)
    faults += option_faults(options, {"--interval": interval, "--brief": brief, "--highest-rate": highest_rate})
    nouns = {k: v for k, v in given.items() if "__" not in k}
    try:
        loaded = read_serving_study(study, nouns, tables | rate, settings, searched=options["searched"])
    except InputError as exc:
        raise InputError([*exc.faults, *faults]) from None
    InputError.raise_for(faults)
    if options["searched"]:
        return run_search(loaded, options)
    exported: Path | None = options["exported"]
    files = {} if exported is None else launch_of(loaded, exported)
    listed = loaded_prices(options)
    if listed is not None:
        listed.of(loaded.cluster)  # an error now, not after all requests
    loaded, serving = (
        _highest(loaded, interval=interval) if highest_rate else (loaded, _served(loaded, interval=interval))
    )
    if listed is not None and serving.load is not None:
        tokens = sum(request.output_tokens for request in loaded.requests) / len(loaded.requests)
        serving = replace(serving, costs=token_costs(serving.load, tokens, serving.num_devices, loaded.cluster, listed))
        if not serving.costs:
            note = "no request ended in the measured time, so none has a cost; --requests plays more of them"
            print_status(f"shardwise: {note}")
    serving = replace(serving, sources=(*loaded.sources, *serving.sources))
    data, text = partial(report, serving, loaded.inputs()), partial(render, serving, brief=brief)
    print_answer("serve", data, text, width=SCREEN_WIDTH if brief else None)
    if exported is not None and serving.fits:
        write_files(files, exported)
    return serving.memory.fit.exit_code


def _served(study: ServingStudy, *, interval: bool) -> Serving:
    """The answer, with its progress on stderr."""
    requested, played = study.workload.num_requests, len(study.requests)
    if study.workload.trace is None and played < requested:
        print_status(
            f"shardwise: the first {played:,} of {requested:,} requests are played; more change no percentile beyond its noise"
        )
    return serve(
        study.model,
        study.plan,
        study.cluster,
        study.requests,
        study.calibration,
        study.stack,
        slo=study.slo,
        warmup=study.workload.warmup,
        users=study.workload.users(),
        interval=interval,
        progress=CountLine("requests"),
    )


def _highest(loaded: ServingStudy, *, interval: bool) -> tuple[ServingStudy, Serving]:
    """The study at the highest rate within the limits, or at the lowest that was tried, and its answer."""
    if not loaded.slo.any or loaded.workload.trace is not None or loaded.workload.concurrency:
        own = "a closed loop" if loaded.workload.concurrency else "a trace"
        problem = "needs a limit to stay within" if not loaded.slo.any else f"{own} has its own arrivals"
        remedy = "--slo-ttft, --slo-tpot or --slo-latency" if not loaded.slo.any else "drawn requests"
        raise InputError.at("--highest-rate", problem, remedy)

    def at(rate: float) -> ServingStudy:
        workload = loaded.workload.model_copy(update={"rate": rate})
        found = Source(what="workload", kind="given", detail=f"rate = {rate:.6g} (--highest-rate)")
        requests = workload.requests(loaded.model.image_tokens)
        return replace(loaded, workload=workload, requests=requests, sources=(*loaded.sources, found))

    def show_rate(rate: float, holds: bool) -> None:  # noqa: FBT001  what was tried
        print_status(f"{format_number(rate)} requests/s: {'within' if holds else 'above'}")

    tried: list[float] = []

    def play(rate: float) -> Serving:
        tried.append(rate)
        return _served(at(rate), interval=False)

    first = _served(loaded if loaded.workload.rate else at(1.0), interval=False)
    if not first.fits:
        return loaded, first
    rate, _ = sought(play, first, show_rate)
    if not rate:
        print_status("no rate that was tried holds")
    study = at(rate or min(tried))
    return study, _served(study, interval=interval)
