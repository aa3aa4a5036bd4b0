"""`shardwise predict --program`: a captured program instead of a described model and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from simulator.base.errors import Collected, Fault
from simulator.base.schema import check_writable
from simulator.cli.fabric import with_fabric
from simulator.cli.options import also_as_page, page_requested, print_status, write_json
from simulator.cli.programs import place_inputs, place_of, program_at
from simulator.formats.drawing import FORMATS
from simulator.formats.study import Study
from simulator.predict import Prediction
from simulator.work.captured.capture import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Output files; None: not written. scale_with: a second capture to read."""

    trace: Path | None
    memory: Path | None
    links: Path | None
    snapshot: Path | None
    scale_with: Path | None = None

    def faults(self) -> list[Fault]:
        """Faults of the output files, reported before the prediction."""
        found: list[Fault] = []
        if self.links is not None:
            problem = "the links of a captured program are not drawn"
            found.append(Fault(f"--links {self.links}", problem, "--trace shows its collectives"))
        if self.memory is not None and self.memory.suffix not in FORMATS:
            found.append(Fault(f"--memory {self.memory}", "no picture format", f"ending in {' or '.join(FORMATS)}"))
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
    study = place_of(given, settings, files.faults(), pool=True)
    study = replace(study, cluster=with_fabric(study.cluster, flags.get("fabric", ())))
    program_of = cache(lambda: program_at(program, study, tokens_per_step, files.scale_with))

    def predicted() -> Prediction:
        given = (program_of(), study.cluster, study.calibration, study.stack)
        return predict_program(*given, memory=study.plan.memory, advise=True)

    in_full = page_requested() or files != Files(trace=None, memory=None, links=None, snapshot=None)
    found = predicted() if in_full else cached(program, study, tokens_per_step, predicted)
    found = replace(found, sources=(*study.sources, *found.sources))
    if as_json:
        write_json(_report(found, program, study))
    else:
        from simulator.cli.terminal import show_prediction

        show_prediction(found, plain=plain, brief=brief)
    if in_full:
        _write(program_of(), study, found, files)
        also_as_page("predict", lambda: _report(found, program, study), lambda: _drawing(program_of(), study, found))
    return found.verdict.exit_code


def _report(found: Prediction, program: Path, study: Study) -> Mapping[str, Any]:
    """What --json prints."""
    from simulator.formats.writers.json_report import report

    return report(found, place_inputs(program, study))


def _drawing(one: Capture, study: Study, found: Prediction) -> Mapping[str, Any]:
    from simulator.formats.html.step import program_drawing
    from simulator.predict.program import program_history

    return program_drawing(found, program_history(one, study.cluster, study.plan.memory))


def _write(one: Capture, study: Study, found: Any, files: Files) -> None:  # noqa: ANN401  a Prediction
    """Write the output files after the answer is printed."""
    if files.trace is not None:
        from simulator.formats.writers.chrome_trace import write_chrome_trace

        write_chrome_trace(files.trace, found)
        print_status(f"trace written to {files.trace}")
    if files.memory is None and files.snapshot is None:
        return
    from simulator.predict.program import program_history

    history = program_history(one, study.cluster, study.plan.memory)
    if files.memory is not None:
        from simulator.formats.writers.memory_plot import write_memory_plot

        write_memory_plot(files.memory, found, history)
        print_status(f"memory drawn in {files.memory}")
    if files.snapshot is not None:
        from simulator.formats.writers.snapshot import write_snapshot
        from simulator.memory.pools import settings_of

        write_snapshot(files.snapshot, history, settings_of(study.plan))
        print_status(f"snapshot written to {files.snapshot}: open it at https://pytorch.org/memory_viz")
