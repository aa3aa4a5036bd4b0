"""`shardwise explore`: a study over the values of some inputs, as a table and as a what-if page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.fit import Fit
from simulator.base.processes import cores
from simulator.base.schema import more_than_once, read_json
from simulator.base.units import counted, format_bytes, format_seconds
from simulator.cli.explore_points import FIGURES, Axis, Exploration, PointJournal, Record, explored
from simulator.cli.options import (
    FILE,
    answer_options,
    loaded_prices,
    price_options,
    print_answer,
    print_notes,
    set_option,
    study_options,
    texts_of,
)
from simulator.cli.progress import CountLine
from simulator.formats.writers import layout

SCHEMA: Final = 1
TOP: Final = 10  # plans that are printed
_TABLES: Final = (".csv", ".parquet")  # what a search exports besides JSON
_HELP = """Predict a study at every combination of some values, and look at all of them: --html writes a what-if page.

STUDY.toml is a study as for predict, or the plans that `search --export plans.json` wrote (then there is nothing to
vary). A combination that is not legal, or does not fit, is an answer like any other.

Ctrl-C keeps what is done in the --journal, and the same command goes on from there.

Exit codes: 0, 2 usage, 3 bad input, 4 nothing fits, 130 interrupted."""


@click.command("explore", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml|PLANS.json]")
@click.option("--vary", "varied", multiple=True, metavar="KEY=V,V[,V...]", help="An axis: nodes, cluster, plan.tp, ...")
@study_options
@set_option("As for predict. May be repeated.")
@price_options
@click.option("--journal", type=FILE, metavar="FILE", help="Keep, and resume.")
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes. [the machine's cores]")
@answer_options
def command(
    study: Path | None,
    *,
    varied: tuple[str, ...],
    settings: tuple[str, ...],
    journal: Path | None,
    jobs: int | None,
    **options: Any,  # noqa: ANN401  one type an option
) -> int:
    """Predict all, print the best, write the page."""
    if study is not None and study.suffix in (".json", *_TABLES):
        if varied or settings:
            raise click.UsageError("--vary and --set: the plans of a search are what they are")
        answer = of_export(study)
    else:
        exploration = _exploration(study, varied, settings, options)
        found = exploration.check()
        print_notes(found)
        with PointJournal(journal, exploration.identity) if journal else nullcontext() as store:
            records = explored(exploration, store, jobs or cores(), CountLine("predictions"))
        answer = answer_of(records, exploration.axes, exploration.points, found.inputs(), command_of(exploration))
    print_answer("explore", lambda: answer, lambda: _text(answer))
    runs = {one for one in answer["columns"]["verdict"] if one in ("fits", "tight")}
    return ExitCode.OK if runs else ExitCode.DOES_NOT_FIT


def _exploration(
    study: Path | None, varied: Sequence[str], settings: tuple[str, ...], options: Mapping[str, Any]
) -> Exploration:
    """Raises InputError with every fault of the axes and prices."""
    faults: list[Fault] = []
    axes: list[Axis] = []
    for text in varied:
        with Collected(faults):
            axes.append(Axis.parse(text))
    twice = sorted(more_than_once(axis.key for axis in axes))
    faults += [Fault(place=f"--vary {key}", problem="varies twice", remedy="one axis with all values") for key in twice]
    if not varied:
        faults.append(Fault(place="--vary", problem="nothing varies", remedy="--vary plan.tp=1,2,4 --vary nodes=1,2"))
    prices = None
    with Collected(faults):
        prices = loaded_prices(options)
    InputError.raise_for(faults)
    flags = texts_of(options, "model", "like", "images", "image_size", "cluster", "nodes", "calibration")
    return Exploration(file=study, flags=flags, settings=settings, axes=tuple(axes), prices=prices)


def command_of(exploration: Exploration) -> list[str]:
    """The command line that predicts the unchanged study; the axes' settings are appended to it."""
    flags = [word for name, text in exploration.flags.items() for word in (f"--{name.replace('_', '-')}", text)]
    settings = [word for one in exploration.settings for word in ("--set", one)]
    file = [str(exploration.file)] if exploration.file is not None else []
    return ["shardwise", "predict", *file, *flags, *settings]


def answer_of(
    records: Sequence[Record],
    axes: Sequence[Axis],
    points: Sequence[Sequence[str]],
    inputs: Mapping[str, Any],
    words: Sequence[str],
) -> dict[str, Any]:
    """The answer as one list per column, to stay small. at: index of the point's value on each axis."""
    places = {axis.key: {f"{axis.key}={value}": i for i, value in enumerate(axis.values)} for axis in axes}
    reasons = list(dict.fromkeys(one["why"] for one in records if "why" in one))
    return {
        "schema_version": SCHEMA,
        "inputs": dict(inputs),
        "command": list(words),
        "counts": dict(Counter(one["verdict"] for one in records)),
        "axes": [{"key": axis.key, "values": list(axis.values)} for axis in axes],
        "at": {axis.key: [places[axis.key][point[i]] for point in points] for i, axis in enumerate(axes)},
        "columns": _columns(records, reasons),
        "reasons": reasons,
    }


def _columns(records: Sequence[Record], reasons: Sequence[str]) -> dict[str, list[Any]]:
    return {
        "verdict": [one["verdict"] for one in records],
        "why": [reasons.index(one["why"]) if "why" in one else None for one in records],
        **{name: [one.get(name) for one in records] for name in FIGURES if any(name in one for one in records)},
    }


def of_export(file: Path) -> dict[str, Any]:
    """The same for plans exported by a search as JSON; the fields that differ are the axes. Raises InputError."""
    if file.suffix in _TABLES:
        raise InputError.at(
            str(file), "holds the plans alone, and not what was searched", "search --export plans.json, which has both"
        )
    data = read_json(file, InputError)
    try:
        plans, inputs = data["plans"], data["inputs"]
        settings = [
            {
                **{f"plan.{k}": v if isinstance(v, str) else json.dumps(v) for k, v in one["plan"].items()},
                "nodes": str(one["nodes"]),
            }
            for one in plans
        ]
        records = [{"verdict": str(Fit(one["verdict"])), **_figures_of(one, inputs)} for one in plans]
        words = ["shardwise", "predict", "--model", str(inputs["model"]), "--cluster", str(inputs["cluster"])]
        words += ["--set", f"plan.seq_len={int(inputs['seq_len'])}"]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as exc:
        problem, remedy = f"is no export of a search: {type(exc).__name__}", "search --export plans.json"
        raise InputError.at(str(file), problem, remedy) from None
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: tuple(dict.fromkeys(one.get(key, _UNSET) for one in settings)) for key in keys}
    axes = [Axis(key=key, values=values[key]) for key in keys if len(values[key]) > 1 or key == "nodes"]
    points = [[f"{axis.key}={one.get(axis.key, _UNSET)}" for axis in axes] for one in settings]
    return answer_of(records, axes, points, {}, words)


_UNSET: Final = "as usual"  # of a field that a plan leaves to its default


def _figures_of(row: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, float]:
    tokens = float(inputs["global_batch"]) * float(inputs["seq_len"])
    rates = {name: float(row[name]) for name in ("step_s", "low_s", "high_s", "tokens_per_s", "mfu")}
    whole = {name: int(row[name]) for name in ("used_bytes", "capacity_bytes", "num_devices")}
    found = rates | whole | {"device_s_per_token": rates["step_s"] * whole["num_devices"] / tokens}
    if not all(0 < one < float("inf") for one in found.values()):
        raise ValueError("a figure that is none")
    return found


def _values(answer: Mapping[str, Any], point: int) -> Iterator[str]:
    """The values of a point on the axes where it has any."""
    for axis in answer["axes"]:
        value = axis["values"][answer["at"][axis["key"]][point]]
        if value != _UNSET:
            yield f"{axis['key'].removeprefix('plan.')} {value}"


def _text(answer: Mapping[str, Any]) -> Any:  # noqa: ANN401  what rich shows
    """The counts, and the points that take the least device time a token."""
    columns = answer["columns"]
    runs = [i for i, verdict in enumerate(columns["verdict"]) if verdict in ("fits", "tight")]
    best = sorted(runs, key=lambda i: (columns["device_s_per_token"][i], i))[:TOP]
    rows = [
        (
            columns["verdict"][i],
            format_seconds(columns["step_s"][i]),
            f"{format_seconds(columns['low_s'][i])} to {format_seconds(columns['high_s'][i])}",
            format_bytes(columns["used_bytes"][i]),
            f"{columns['num_devices'][i]:,}",
            format_seconds(columns["device_s_per_token"][i] * 1e6),
            " · ".join(_values(answer, i)),
        )
        for i in best
    ]
    head = ("verdict", "step", "90 % interval", "memory", "GPUs", "GPU time a million tokens", "values")
    title = f"{counted(len(columns['verdict']), 'combination')}: {', '.join(f'{count:,} {verdict}' for verdict, count in answer['counts'].items())}"
    return layout.section(title, layout.table([head, *rows], "lrlrrrl"))
