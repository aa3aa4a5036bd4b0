"""`shardwise predict --program`: a captured program instead of a described model and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import Collected, Fault
from simulator.base.schema import check_writable
from simulator.cli.fabric import with_fabric
from simulator.cli.options import also_as_page, page_asked, print_status
from simulator.cli.programs import place_inputs, place_of, program_at
from simulator.formats.drawing import FORMATS
from simulator.formats.study import Study
from simulator.predict import Prediction
from simulator.work.captured.capture import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What else is to be written; None: not. scale_with: read, beside the program."""

    trace: Path | None
    memory: Path | None
    links: Path | None
    snapshot: Path | None
    scale_with: Path | None = None

    def faults(self) -> list[Fault]:
        """What would go wrong with them, reported before the prediction."""
        found: list[Fault] = []
        if self.links is not None:
            problem = "the links of a captured program are not drawn"
            found.append(Fault(place=f"--links {self.links}", problem=problem, remedy="--trace shows its collectives"))
        if self.memory is not None and self.memory.suffix not in FORMATS:
            remedy = f"ending in {' or '.join(FORMATS)}"
            found.append(Fault(place=f"--memory {self.memory}", problem="no picture format", remedy=remedy))
        for flag, path in (("--trace", self.trace), ("--memory", self.memory), ("--snapshot", self.snapshot)):
            if path is not None:
                with Collected(found):
                    check_writable(path, flag)
        return found


def answer(
    program: Path,
    flags: Mapping[str, Any],
    settings: tuple[str, ...],
    files: Files,
    tokens_per_step: int | None,
    *,
    as_json: bool,
    plain: bool,
    brief: bool,
) -> int:
    """Predict, print, write. The exit code says whether it fits."""
    from simulator.cli.answer_cache import cached
    from simulator.predict.program import predict_program

    given = {name: value for name, value in flags.items() if name != "fabric"}
    asked = place_of(given, settings, files.faults(), pool=True)
    asked = replace(asked, cluster=with_fabric(asked.cluster, flags.get("fabric", ())))
    program_of = cache(lambda: program_at(program, asked, tokens_per_step, files.scale_with))

    def predicted() -> Prediction:
        given = (program_of(), asked.cluster, asked.calibration, asked.stack)
        return predict_program(*given, memory=asked.plan.memory, advise=True)

    whole = page_asked() or files != Files(trace=None, memory=None, links=None, snapshot=None)
    found = predicted() if whole else cached(program, asked, tokens_per_step, predicted)
    found = replace(found, sources=(*asked.sources, *found.sources))
    if as_json:
        from simulator.formats.writers.json_report import to_json

        click.echo(to_json(found, place_inputs(program, asked)), nl=False)
    else:
        from simulator.cli.terminal import show_prediction

        show_prediction(found, plain=plain, brief=brief)
    if whole:
        _write(program_of(), asked, found, files)
        also_as_page("predict", lambda: _report(found, program, asked), lambda: _drawing(program_of(), asked, found))
    return found.verdict.exit_code


def _report(found: Prediction, program: Path, asked: Study) -> Mapping[str, Any]:
    """What --json prints."""
    from simulator.formats.writers.json_report import report

    return report(found, place_inputs(program, asked))


def _drawing(one: Capture, asked: Study, found: Prediction) -> Mapping[str, Any]:
    from simulator.formats.html.step import program_drawing
    from simulator.predict.program import program_history

    return program_drawing(found, program_history(one, asked.cluster, asked.plan.memory))


def _write(one: Capture, asked: Study, found: Any, files: Files) -> None:  # noqa: ANN401  a Prediction
    """The files beside the answer, which is out already."""
    if files.trace is not None:
        from simulator.formats.writers.chrome_trace import write_chrome_trace

        write_chrome_trace(files.trace, found)
        print_status(f"trace written to {files.trace}")
    if files.memory is None and files.snapshot is None:
        return
    from simulator.predict.program import program_history

    history = program_history(one, asked.cluster, asked.plan.memory)
    if files.memory is not None:
        from simulator.formats.writers.memory_plot import write_memory_plot

        write_memory_plot(files.memory, found, history)
        print_status(f"memory drawn in {files.memory}")
    if files.snapshot is not None:
        from simulator.formats.writers.snapshot import write_snapshot
        from simulator.memory.pools import settings_of

        write_snapshot(files.snapshot, history, settings_of(asked.plan))
        print_status(f"snapshot written to {files.snapshot}: open it at https://pytorch.org/memory_viz")
