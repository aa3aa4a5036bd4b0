"""`shardwise predict --program`: a captured program instead of a described model and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.schema import check_writable
from simulator.base.units import parse_seconds
from simulator.cli.fabric import with_fabric
from simulator.cli.options import FILE, SCREEN_WIDTH, all_of, page_requested, print_answer, print_status, quantity
from simulator.cli.programs import place_inputs, place_of, program_at
from simulator.formats.drawing import FORMATS
from simulator.formats.study import Study
from simulator.formats.writers.json_report import report
from simulator.predict import Prediction
from simulator.work.captured.capture import Capture

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simulator.memory.history import History
    from simulator.spec.plan import Plan


measured_options = all_of(
    click.option("--measured", metavar="SECONDS|TRACE", help="What a step of the program of --of took: 980ms, or a profiler's trace of it. This one's time follows."),
    click.option("--of", type=FILE, metavar="CAPTURE", help="The program that --measured measured, on the same cluster or that of --recorded-on."),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Output files; None: not written. scale_with: a second capture to read. measured, of, recorded_on: another's step."""

    trace: Path | None
    memory: Path | None
    links: Path | None
    snapshot: Path | None
    scale_with: Path | None = None
    measured: str | None = None
    of: Path | None = None
    recorded_on: str | None = None

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
        one = predict_program(*given, memory=study.plan.memory, advise=True)
        return _as_measured(one, program_of(), study, files) if files.measured else one

    in_full = page_requested() or files != Files(trace=None, memory=None, links=None, snapshot=None)
    found = predicted() if in_full else cached(program, study, tokens_per_step, predicted)
    found = replace(found, sources=(*study.sources, *found.sources))

    def text() -> RenderableType:
        from simulator.cli.terminal import prediction_text

        return prediction_text(found, brief=brief)

    drawing = partial(_drawing, program_of, study, found)
    width = SCREEN_WIDTH if brief else None
    print_answer("predict", lambda: report(found, place_inputs(program, study)), text, drawing, width=width)
    if in_full:
        _write(program_of(), study, found, files)
    return found.verdict.exit_code


def _as_measured(found: Prediction, program: Capture, study: Study, files: Files) -> Prediction:
    """The prediction by what the program of `--of` took on its cluster."""
    from simulator.predict.anchored import anchored, shared_kernels
    from simulator.predict.program import predict_program
    from simulator.predict.repriced import sized
    from simulator.spec.calibration import Calibration
    from simulator.spec.cluster import Cluster

    assert files.measured is not None
    assert files.of is not None
    measured_s = _measured_s(files.measured)
    cluster = Cluster.load(files.recorded_on) if files.recorded_on else study.cluster
    other = program_at(files.of, replace(study, cluster=cluster))
    there = sized(cluster, other.world_size, "--of")
    if other.world_size < there.gpus_per_node:  # on a part of a node
        there = there.model_copy(update=dict.fromkeys(("gpus_per_node", "nvlink_domain_size"), other.world_size))
    same = cluster.device == study.cluster.device
    here = study.calibration if same else None
    before = predict_program(other, there, here, study.stack, memory=study.plan.memory)
    timer = (here or Calibration.for_device(cluster.device)).timer(cluster.device)
    shared = shared_kernels(program, other, timer) if same else 0.0
    return anchored(found, before, measured_s, shared, files.of.name)


def _measured_s(text: str) -> float:
    """Seconds of a step, stated or of a recording. Raises InputError."""
    from simulator.formats.readers.recording import read_recordings

    if Path(text).exists():
        return max(one.step_s for one in read_recordings(Path(text)))
    seconds = quantity("--measured", parse_seconds, text, "as 980ms, or a profiler's trace")
    if not 0 < seconds < float("inf"):
        raise InputError.at(f"--measured {text}", "a step takes longer than 0 s and ends", "as 980ms")
    return seconds


def _drawing(program: Callable[[], Capture], study: Study, found: Prediction) -> Mapping[str, Any]:
    from simulator.formats.html.step import program_drawing
    from simulator.predict.program import program_history

    return program_drawing(found, program_history(program(), study.cluster, study.plan.memory))


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
    write_memory(found, history, study.plan, files.memory, files.snapshot)


def write_memory(found: Prediction, history: History, plan: Plan, picture: Path | None, snapshot: Path | None) -> None:
    """Draw a step's memory, and write its allocator's snapshot, where these are requested."""
    if picture is not None:
        from simulator.formats.writers.step_plots import write_memory_plot

        write_memory_plot(picture, found, history)
        print_status(f"memory drawn in {picture}")
    if snapshot is not None:
        from simulator.formats.writers.snapshot import write_snapshot
        from simulator.memory.pools import settings_of

        write_snapshot(snapshot, history, settings_of(plan))
        if plan.memory.policy not in ("caching", "expandable"):
            print_status("snapshot: the format is that of PyTorch's allocator, so it serves the requests there")
        print_status(f"snapshot written to {snapshot}: open it at https://pytorch.org/memory_viz")
