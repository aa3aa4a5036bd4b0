"""`shardwise goodput`: what a predicted step comes to over weeks of failures, checkpoints and restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import nested, read_toml
from simulator.base.units import format_duration
from simulator.cli.extras import with_data_of
from simulator.cli.finite import FiniteRange
from simulator.cli.options import (
    all_of,
    answer_options,
    loaded_prices,
    price_options,
    print_answer,
    print_status,
    program_options,
    requested,
    set_option,
    study_options,
    write_json,
)
from simulator.cli.predict import plan_file_options, plan_options, study_of
from simulator.cli.programs import checkpoint_of, place_inputs, place_of, program_at, with_tokens
from simulator.cli.progress import CountLine, playing
from simulator.cli.watch import watch_option
from simulator.formats.readers.spot_table import read_offers
from simulator.formats.study import Study
from simulator.formats.study.overrides import literal, parse_overrides
from simulator.formats.study.tables import flags_above
from simulator.formats.writers.goodput import SCHEMA_VERSION, report
from simulator.predict import Prediction, predict
from simulator.predict.changes import degrees_on
from simulator.predict.energy import RunEnergy
from simulator.predict.program import predict_program
from simulator.spec.prices import Prices
from simulator.studies.goodput import Goodput, LongRun, goodput
from simulator.studies.goodput.elastic import Elastic, Offer, Size, follow
from simulator.work.captured.capture import Capture

if TYPE_CHECKING:
    from rich.console import RenderableType

# `shardwise goodput --spot`: the same run on machines that come and go, at prices that change.
_MOST_SIZES = 64  # each is a prediction, and runs played


spot_options = all_of(  # of spot machines
    click.option("--spot", type=click.Path(path_type=Path), metavar="OFFERS.csv", help="Also on spot machines: hour,price_per_gpu_hour,nodes, a line a change."),
    click.option("--max-price", type=FiniteRange(0, min_open=True), metavar="DOLLARS", help="With --spot: above it the job pauses."),
)  # fmt: skip


def checked_offers(spot: Path | None, study: Study | None, most_price: float | None) -> tuple[Offer, ...]:
    """The offers; none without --spot. Raises InputError with every fault."""
    if spot is None:
        if most_price is not None:
            raise click.UsageError("--max-price needs --spot")
        return ()
    offers = read_offers(spot)
    if study is not None and (study.cluster.exceptions or study.cluster.num_nodes == 1):
        problem = "a job of one node, or of nodes that differ, has no other sizes"
        raise InputError.at("--spot", problem, "--nodes, several of one kind")
    return offers


def _sizes_offered(offers: tuple[Offer, ...], most: int) -> list[int]:
    """The numbers of nodes, each of which is played. Raises InputError where they are too many."""
    wanted = sorted({min(offer.nodes, most) for offer in offers} - {0})
    if len(wanted) > _MOST_SIZES:
        problem = f"{len(wanted)} different numbers of nodes, each a run of its own"
        raise InputError.at("--spot", problem, f"at most {_MOST_SIZES}: round them down")
    return wanted


def _on_spot(
    offers: tuple[Offer, ...], study: Study, answer: Goodput, run: LongRun, most_price: float | None
) -> Elastic:
    """The run on what is offered; its length in tokens stays where other sizes have other steps.

    Raises InputError where no size can run.
    """
    most = study.cluster.num_nodes
    tokens = run.model_copy(update={"tokens": answer.tokens, "steps": None})
    played = {nodes: answer if nodes == most else _at(study, nodes, tokens) for nodes in _sizes_offered(offers, most)}
    sizes = {nodes: Size.of(nodes, found) for nodes, found in played.items() if found is not None}
    if not sizes:
        raise InputError.at("--spot", "no number of nodes that is offered runs the plan", f"{most}")
    return follow(offers, sizes, answer.tokens, most_price=most_price or inf, notice_s=run.spot_notice_s)


def _at(study: Study, nodes: int, run: LongRun) -> Goodput | None:
    """With the data-parallel ranks that so many nodes hold, the same batch a rank; None where there are none, or no room."""
    cluster = study.cluster.with_nodes(nodes)
    degrees = degrees_on(study.plan, cluster.num_devices)
    try:
        there = replace(study, cluster=cluster, plan=study.plan.copy_with(**degrees))
        prediction = _predicted(there, None)
        return _played(there, None, prediction, run, None) if prediction.fits else None
    except (InputError, ValueError):
        return None


_HELP = """Play a long training run: the predicted step, until something fails, and again.

STUDY.toml is that of `predict` with a [run] table (docs/guides/goodput.md) and perhaps a [checkpoint] table; flags override
it. Failures strike at the rates of Llama 3's pre-training unless the study has rates of its own.

Exit codes: 0 answered, 2 usage, 3 bad input, 4 the step does not fit in memory."""

_METAVARS = {
    **dict.fromkeys(("tokens", "steps"), "COUNT"),
    **dict.fromkeys(("straggler_slowdown", "jitter"), "FRACTION|TABLE"),
    "checkpoint_interval_s": "TIME|optimal",
    "failures": "llama3|none",
    "straggler_detect_s": "TIME|TABLE",
    "price_per_gpu_hour": "DOLLARS",
}


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def _run_options(function: Callable[..., int]) -> Callable[..., int]:
    """A flag for each field of [run], with the field's own words."""
    for name, info in reversed(LongRun.model_fields.items()):
        metavar = _METAVARS.get(name) or ("TIME" if name.endswith("_s") else "INTEGER")
        usual = info.default if isinstance(info.default, int | float) else "llama3" if name == "failures" else None
        shown = format_duration(usual) if isinstance(usual, float) and name.endswith("_s") else usual
        text = str(info.description).replace("`", "") + ("." if usual is None else f". [{shown}]")
        text = text[0].upper() + text[1:]
        function = click.option(_flag(name), f"run__{name}", metavar=metavar, help=text)(function)
    return function


@click.command("goodput", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@_run_options
@spot_options
@price_options
@plan_file_options
@study_options
@plan_options
@set_option("Any leaf of run, plan, model, cluster, device, stack or checkpoint. May be repeated.")
@program_options
@watch_option
@answer_options
def command(
    study: Path | None,
    *,
    prices: Path | None,
    price_kind: str | None,
    settings: tuple[str, ...],
    **flags: Any,  # noqa: ANN401  text of Plan's and LongRun's fields, and a plan's file
) -> int:
    """Predict the step, play the run, print."""
    run_given = {name: flags.pop(name) for name in [n for n in flags if n.startswith("run__")]}
    run_flags = {name.removeprefix("run__"): text for name, text in run_given.items() if text is not None}
    spot, most_price = flags.pop("spot"), flags.pop("max_price")
    faults: list[Fault] = []
    loaded = run = listed = None
    offers: tuple[Offer, ...] = ()
    of_run = [setting for setting in settings if setting.partition(".")[0].strip() == "run"]
    left = tuple(one for one in settings if one not in of_run)
    program, tokens, other = (flags.pop(name) for name in ("program", "tokens_per_step", "scale_with"))
    alone = {"--tokens-per-step": tokens, "--scale-with": other}
    if program is None and (found := [flag for flag, value in alone.items() if value is not None]):
        raise click.UsageError(f"{', '.join(found)}: only of a --program")
    with Collected(faults):
        loaded = study_of(study, flags, left) if program is None else place_of({**flags, "study": study}, left)
    with Collected(faults):
        run = read_run(study, run_flags, of_run)
    with Collected(faults):
        listed = loaded_prices({"prices": prices, "price_kind": price_kind})
        if loaded is not None and listed is not None:
            listed.of(loaded.cluster)  # refused where the cluster has none
    with Collected(faults):
        offers = checked_offers(spot, loaded, most_price)
    if loaded is None or run is None or faults:
        raise InputError(dict.fromkeys(faults))
    if program is not None and offers:
        raise click.UsageError("--spot: a captured program has one size")
    captured = None if program is None else with_tokens(program_at(program, loaded, tokens, other), str(program))
    prediction = _predicted(loaded, captured)
    if not prediction.fits:
        if requested("json"):
            write_json({"schema_version": SCHEMA_VERSION, "verdict": prediction.verdict, "cause": prediction.cause})
        print_status(f"shardwise: a step does not fit: {prediction.cause}; `shardwise predict` has remedies")
        return prediction.verdict.exit_code
    answer = _played(loaded, captured, prediction, run, listed)
    answer = replace(answer, sources=(*loaded.sources, *prediction.sources, *answer.sources))
    if captured is None and loaded.energy is not None:
        answer = replace(answer, energy=_energy(loaded, prediction, answer))
    elastic = _on_spot(offers, loaded, answer, run, most_price) if offers else None
    inputs = loaded.inputs() if program is None else place_inputs(program, loaded)
    inputs |= {"run": run.model_dump(mode="json")}
    print_answer("goodput", partial(report, answer, inputs, elastic), partial(_text, answer, elastic))
    return ExitCode.OK


def _text(answer: Goodput, elastic: Elastic | None) -> RenderableType:
    from simulator.formats.writers.goodput import render

    return render(answer, elastic)


def _energy(study: Study, prediction: Prediction, answer: Goodput) -> RunEnergy:
    """Of the mean run. Raises InputError where a cap of the study's cannot be tried."""
    from simulator.predict.energy import Energy, energy_of, energy_of_run

    found = energy_of((study.energy or Energy()).model_copy(update={"caps_w": ()}), prediction, *study.parts)
    return energy_of_run(found, study.cluster.device, answer.steps, sum(part.seconds for part in answer.parts))


def read_run(study: Path | None, flags: Mapping[str, str], settings: Sequence[str] = ()) -> LongRun:
    """The study's [run] table under the flags and `--set`s. Raises InputError; a fault of a flag names the flag."""
    table = read_toml(study, InputError).get("run", {}) if study is not None else {}
    if not isinstance(table, dict):
        return LongRun.parse(table, f"{study}: run", InputError)  # refuses it in the words of the study's own reader
    overrides, wrong = parse_overrides(settings, ("run",))
    given = [((name,), literal(text)) for name, text in flags.items()] + [(one.path, one.value) for one in overrides]
    if {path[0] for path, _ in given} & {"tokens", "steps"}:  # a goal given here replaces the file's
        table = {name: value for name, value in table.items() if name not in ("tokens", "steps")}
    for path, value in given:
        table = nested(table, path, {"preset": value} if path == ("failures",) and isinstance(value, str) else value)
    name = "run" if study is None else f"{study}: run"
    places = {".".join(one.path): one.flag for one in overrides} | {field: _flag(field) for field in flags}
    try:
        run = LongRun.parse(table, name, InputError, from_file=True)
    except InputError as exc:
        raise InputError([*wrong, *(_relabelled(fault, name, places) for fault in exc.faults)]) from None
    InputError.raise_for(wrong)
    return run


def _relabelled(fault: Fault, name: str, places: Mapping[str, str]) -> Fault:
    path = fault.place.removeprefix(name).strip(": .")
    found = flags_above(path, places) or [flag for key, flag in places.items() if key.startswith(f"{path}.")]
    return replace(fault, place=found[0] if found else fault.place)


def _predicted(study: Study, captured: Capture | None) -> Prediction:
    if captured is None:
        with playing(study.plan, study.cluster):
            return with_data_of(study, predict(*study.parts))[0]
    return predict_program(captured, study.cluster, study.calibration, study.stack)


def _played(
    study: Study, captured: Capture | None, prediction: Prediction, run: LongRun, prices: Prices | None
) -> Goodput:
    """The answer, with its progress on stderr."""
    saved, load_s = checkpoint_of(captured, study)
    return goodput(prediction, run, saved, load_s, cluster=study.cluster, prices=prices, progress=CountLine("runs"))
