"""`shardwise place`: which GPU each rank gets, and what that gains over the order of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole
from simulator.base.schema import check_writable
from simulator.base.units import format_seconds
from simulator.cli import place_tensors
from simulator.cli.export import head_of, job_of
from simulator.cli.options import (
    FILE,
    answer_options,
    page_path,
    placement_option,
    print_answer,
    print_status,
    set_option,
    study_options,
    write_files,
)
from simulator.cli.place_tensors import tensor_options
from simulator.cli.predict import plan_file_options, plan_options, study_of
from simulator.cli.progress import StatusLine
from simulator.cli.watch import watch_option
from simulator.formats.study import Study

_HELP = """Find the GPU of each rank of a plan: groups that talk most on the fastest roads between GPUs.

The plan is a study's, --plan's and the flags', as for predict. Every placement of a node that symmetry leaves is priced by
the roads that its groups get; where these are too many, quadratic assignment and exchanges of pairs look for the cheapest.
The best are played as steps, and so is the order of ranks: what is printed as a gain was seen there. Where GPUs differ,
ranks and (--layers) layers move to those that suit them. A placement that is given (--placement, or the study's) is played
beside them, and stays where none is better.

--tensors places tensors instead of ranks: which GPU of a node holds each of them when, with what crosses its roads; with
--evict, what moves between HBM and the tiers below it in a step.

-o writes the table that --placement of predict, compare and export reads; --launch-kit all that starts it.

Exit codes: 0 placed, 2 usage, 3 bad input."""


_OF_RANKS = ("hosts", "topology", "across_nodes", "layers", "placement")  # what is asked of ranks alone


@click.command("place", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@click.option("-o", "--out", type=FILE, metavar="RANKS.tsv", help="The table.")
@click.option("--launch-kit", "kit", type=click.Path(path_type=Path), metavar="DIR", help="As export --to launch-kit.")
@click.option("--hosts", metavar="HOSTLIST", help="The nodes' names, for the launch kit, as node[1-8].")
@click.option("--topology", metavar="SOURCE", help="One node, as for `shardwise topo`: its bus ids stand in the table.")
@placement_option
@click.option("--across-nodes", is_flag=True, help="Ranks may leave their node: other axes may fill the nodes.")
@click.option("--layers", is_flag=True, help="Where GPUs differ, stages may hold other numbers of layers.")
@tensor_options
@plan_file_options
@study_options
@plan_options
@set_option("As for predict. May be repeated.")
@watch_option
@answer_options
def command(
    study: Path | None,
    *,
    out: Path | None,
    kit: Path | None,
    settings: tuple[str, ...],
    **flags: Any,  # noqa: ANN401  text of Plan's fields, a plan's file, and how to place
) -> int:
    """Place, confirm, print, write."""
    from simulator.cli.launch_kit import check_kit, kit_files, placed, table_of
    from simulator.studies.place import place
    from simulator.studies.place.text import WIDTH, as_data, render

    of_tensors = {name: flags.pop(name) for name in place_tensors.NAMES}
    if of_tensors["tensors"] is not None:
        of_ranks = {"out": out, "launch-kit": kit, "html": page_path()}
        of_ranks |= {name.replace("_", "-"): flags.pop(name) for name in _OF_RANKS}
        others = [f"--{name}" for name, value in of_ranks.items() if value]
        if others:
            raise click.UsageError(f"{', '.join(others)}: of ranks, not of --tensors")
        return place_tensors.answer(study_of(study, flags, settings), of_tensors)
    if any(value is not None for value in of_tensors.values()):
        raise click.UsageError("--room, --evict and --moves are of --tensors")
    hosts, topology, across, layers = (flags.pop(name) for name in ("hosts", "topology", "across_nodes", "layers"))
    if hosts is not None and kit is None:
        raise click.UsageError("--hosts is the launch kit's: --launch-kit DIR")
    table = flags.pop("placement") if topology is not None else None  # whose bus ids are that node's
    host, loaded = placed(study_of(study, flags, settings), topology, Path(table) if table is not None else None)
    check_kit(loaded, job_of(loaded), hosts, host, kit)
    if out is not None:
        check_writable(out, "-o")
    with _progress() as show_progress:
        found = place(*loaded.parts, across_nodes=across, deal_layers=layers, on_progress=show_progress)
    loaded = replace(loaded, plan=found.plan, cluster=found.cluster)
    print_answer(
        "place",
        lambda: as_data(found, loaded.inputs()),
        lambda: render(found),
        lambda: _drawing(loaded, float(found.placed.step_s)),
        width=WIDTH,
    )
    if out is not None:
        write_whole(out, table_of(loaded, job_of(loaded), host), "-o")
        print_status(f"written to {out}")
    if kit is not None:
        write_files(kit_files(loaded, job_of(loaded), head_of(loaded), hosts, host), kit)
    return ExitCode.OK


def _drawing(study: Study, step_s: float) -> Mapping[str, Any]:
    from simulator.formats.html.step import placed_drawing

    return placed_drawing(*study.parts, step_s)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """What was done how often, and for how long, on stderr; gone at the end."""
    from simulator.studies.place.uneven import MOST_TRIALS

    line, since = StatusLine(), time.monotonic()

    def show_progress(phase: str, count: int) -> None:
        took = time.monotonic() - since
        if phase == "played" and count:
            left = format_seconds(took / count * (MOST_TRIALS - count))
            line.show(f"{count:,} of {MOST_TRIALS:,} placements played, {took:,.0f} s, at most {left} left")
        else:
            line.show(f"{count:,} placements {phase}, {took:,.0f} s")

    show_progress("played", 0)
    try:
        yield show_progress
    finally:
        line.clear()
