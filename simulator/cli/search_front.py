"""`shardwise search --front`: the quickest plan of each number of nodes, time against cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import counted, parse_count
from simulator.cli.options import loaded_prices, print_answer, print_status, quantity, strays
from simulator.formats.drawing import check_picture
from simulator.formats.writers.front_plot import Point, write_front_plot
from simulator.spec.prices import Prices
from simulator.studies.search import Engine, Front, Interrupted, Progress, SearchStudy, front, render_front
from simulator.studies.search.front_text import WIDTH


def refuse_without_front(options: dict[str, Any]) -> None:
    """Raise InputError for options that need --front."""
    InputError.raise_for(strays(options, ("prices", "price_kind", "run_tokens", "days", "plot"), "--front"))


def run_front(
    study: SearchStudy,
    options: dict[str, Any],
    journal: Path | None,
    engine: Callable[[SearchStudy, dict[str, Any]], Engine],
    on_progress: Callable[[Progress], None],
) -> int:
    """Search every size, print, draw."""
    prices, tokens = _judged(options)
    try:
        found = front(
            study, lambda one: engine(one, options), journal, prices=prices, run_tokens=tokens, on_progress=on_progress
        )
    except Interrupted:
        return ExitCode.INTERRUPTED
    days, plot = options["days"], options["plot"]
    print_answer(
        "front", lambda: found.as_json() | _enough(found, days), lambda: render_front(found, days), width=WIDTH
    )
    if plot is not None:
        write_front_plot(plot, _points(found), "seconds a step", f"{found.currency} a billion tokens")
        print_status(f"written to {plot}")
    return ExitCode.OK if any(row.best is not None for row in found.rows) else ExitCode.DOES_NOT_FIT


def _enough(found: Front, days: float | None) -> dict[str, int | float | None]:
    """The smallest sizes that finish the run in time, as JSON."""
    if days is None:
        return {}
    size, sure = found.enough(days)
    return {"days": days, "enough_nodes": size.nodes if size else None, "surely_nodes": sure.nodes if sure else None}


def _judged(options: dict[str, Any]) -> tuple[Prices | None, int | None]:
    """Prices and the run's tokens. Raises InputError with every fault, before anything is searched."""
    faults: list[Fault] = []
    prices = tokens = None
    with Collected(faults):
        prices = loaded_prices(options)
    with Collected(faults):
        tokens = None if options["run_tokens"] is None else quantity("--run-tokens", parse_count, options["run_tokens"])
    if tokens is not None and tokens < 1:
        faults.append(Fault(place="--run-tokens", problem="a run has at least one token", remedy="--run-tokens 15T"))
    if options["days"] is not None and options["run_tokens"] is None:
        faults.append(Fault(place="--days", problem="of what run?", remedy="--run-tokens 15T"))
    if options["plot"] is not None:
        with Collected(faults):
            check_picture(options["plot"], "--plot")
    if options.get("exported") is not None:
        problem, remedy = "writes one table of plans, and --front makes several", "--json, or leave out --front"
        faults.append(Fault(place="--export", problem=problem, remedy=remedy))
    InputError.raise_for(faults)
    return prices, tokens


def _points(found: Front) -> list[Point]:
    points = []
    for row in found.rows:
        if row.best is None or row.billion_tokens is None:
            continue
        o = row.best.outcome
        assert o.step_s is not None
        assert o.low_s is not None
        assert o.high_s is not None
        label = counted(o.num_devices, "GPU")
        points.append(
            Point(label=label, time=o.step_s, low=o.low_s, high=o.high_s, money=row.billion_tokens, best=row.on_front)
        )
    return points
