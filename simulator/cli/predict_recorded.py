"""`shardwise predict --program TRACE.json`: a recorded step replayed, unchanged and with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.schema import check_writable
from simulator.base.units import format_bytes
from simulator.cli.finite import FiniteRange
from simulator.cli.options import all_of, print_answer, print_status, texts_of

if TYPE_CHECKING:
    from simulator.predict.recorded import ReplayedStep, WhatIf
    from simulator.spec.calibration import Calibration
    from simulator.spec.cluster import Cluster
    from simulator.work.recorded.recording import Recording

NAMES = ("step", "recorded_on", "faster", "communication", "graphed_host", "dp_ranks", "tokens_times")
_TAKEN = ("cluster", "nodes", "calibration", "recompute")
_OF_PLACE = ("cluster", "device")


recorded_options = all_of(  # of a recorded trace
    click.option("--step", type=click.IntRange(0), metavar="N", help="Of a recorded --program: ProfilerStep#N. [the median one]"),
    click.option("--recorded-on", metavar="NAME|FILE", help="Of a recorded --program or --measured step: the cluster that it ran on."),
    click.option("--faster", multiple=True, metavar="REGEX=N", help="What if, of a recorded --program: kernels (by name or category) N times as fast."),
    click.option("--communication", type=click.Choice(["hidden", "free"]), help="What if, of a recorded --program."),
    click.option("--graphed-host", is_flag=True, help="What if, of a recorded --program: launches cost nothing, as from a CUDA graph."),
    click.option("--dp-ranks", type=click.IntRange(2), metavar="N", help="What if, of a recorded --program: N data-parallel ranks."),
    click.option("--tokens-times", type=FiniteRange(min=0, min_open=True), metavar="X", help="What if, of a recorded --program: X times the tokens of a micro-batch."),
)  # fmt: skip


def refuse(flags: Mapping[str, Any]) -> None:
    """Raise UsageError if any of these options is given although the program is not a recording."""
    found = [f"--{name.replace('_', '-')}" for name in NAMES if flags.get(name) not in (None, (), False)]
    if found:
        raise click.UsageError(f"{', '.join(found)}: only of a --program that is a profiler's trace")


def answer(program: Path, flags: Mapping[str, Any], settings: tuple[str, ...], files: Mapping[str, Path | None]) -> int:
    """Read, play, print, write."""
    from simulator.formats.readers.recording import read_recordings
    from simulator.formats.writers.recorded_text import as_json, render
    from simulator.predict.recorded import replay_recording

    _check(flags, settings, files)
    changes = _what_if(flags, settings)
    recordings = read_recordings(program, flags["step"], lambda read: print_status(f"read {format_bytes(read)}"))
    found = replay_recording(_timed(recordings, changes), changes)
    print_answer("recorded", partial(as_json, found), partial(render, found), partial(_drawing, found))
    if files["--trace"] is not None:
        from simulator.formats.writers.chrome_trace import write_timeline

        write_timeline(files["--trace"], found.timeline)
        print_status(f"trace written to {files['--trace']}")
    return 0


def _timed(recordings: Sequence[Recording], changes: WhatIf) -> Sequence[Recording]:
    """The recordings with modelled times for collectives that have none, if the cluster is named."""
    cluster = changes.recorded_on
    if cluster is None:
        return recordings
    from simulator.predict.repriced import with_collective_times
    from simulator.spec.calibration.collective_curves import default_curves

    open_ones = [any(op.carried and not op.duration_s for op in one.ops) for one in recordings]
    curves = default_curves()
    return [
        with_collective_times(one, cluster, curves) if untimed else one
        for one, untimed in zip(recordings, open_ones, strict=True)
    ]


def _drawing(found: ReplayedStep) -> Mapping[str, Any]:
    from simulator.formats.html.timeline import timeline_of

    return {"timeline": timeline_of(found.timeline)}


def _check(flags: Mapping[str, Any], settings: tuple[str, ...], files: Mapping[str, Path | None]) -> None:
    """Raise InputError with every flag that a recording cannot take."""
    own = "a recorded program has its own model, plan and software"
    faults = [
        Fault(place=f"--{name.replace('_', '-')}", problem=own, remedy="leave it out")
        for name, value in flags.items()
        if value not in (None, (), False) and name not in (*_TAKEN, *NAMES)
    ]
    if flags["recompute"] not in (None, "none"):
        problem = "what a recording repeats can only be left out"
        faults.append(Fault(place=f"--recompute {flags['recompute']}", problem=problem, remedy="--recompute none"))
    leaves = f"leaves of {' and '.join(_OF_PLACE)} can be set"
    faults += [
        Fault(place=f"--set {one}", problem="is not known of a recorded program", remedy=leaves)
        for one in settings
        if one.partition(".")[0] not in _OF_PLACE
    ]
    faults += [
        Fault(place=f"{flag} {path}", problem="is not drawn of a recorded program", remedy="--trace")
        for flag, path in files.items()
        if path is not None and flag != "--trace"
    ]
    with Collected(faults):
        if files["--trace"] is not None:
            check_writable(files["--trace"], "--trace")
    InputError.raise_for(faults)


def _other_cluster(flags: Mapping[str, Any], settings: tuple[str, ...]) -> tuple[Cluster | None, Calibration | None]:
    """What the recording is to run on, with its calibration; None where it stays where it was."""
    from simulator.formats.study import read_study

    changed = settings or flags["nodes"] or flags["calibration"]
    named = flags["cluster"] or (flags["recorded_on"] if changed else None)
    if named is None and changed:
        problem = "changes a cluster that is not named"
        raise InputError.at("--set, --nodes or --calibration", problem, "--cluster, or --recorded-on")
    if named is None:
        return None, None
    study = read_study(None, {"cluster": named, **texts_of(flags, "nodes", "calibration")}, {}, settings)
    return study.cluster, study.calibration


def _what_if(flags: Mapping[str, Any], settings: tuple[str, ...]) -> WhatIf:
    from simulator.predict.recorded import WhatIf
    from simulator.spec.cluster import Cluster

    faster = tuple(_times(text) for text in flags["faster"])
    recorded_on = Cluster.load(flags["recorded_on"]) if flags["recorded_on"] else None
    cluster, calibration = _other_cluster(flags, settings)
    return WhatIf(
        faster=faster, communication=flags["communication"], without_host=flags["graphed_host"], cluster=cluster,
        without_recompute=flags["recompute"] == "none",
        data_parallel=flags["dp_ranks"], tokens=flags["tokens_times"] or 1.0, calibration=calibration, recorded_on=recorded_on,
    )  # fmt: skip


def _times(text: str) -> tuple[str, float]:
    """REGEX=N of --faster. Raises InputError."""
    pattern, _, number = text.rpartition("=")
    try:
        times = float(number)
    except ValueError:
        times = 0.0
    if not pattern or not 0 < times < float("inf"):
        raise InputError.at(f"--faster {text}", "is not REGEX=N with a number above 0", "--faster gemm=2")
    return pattern, times
