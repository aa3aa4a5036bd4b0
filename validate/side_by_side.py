"""Runs and their predictions as one trace: a process of predicted rows above one of measured rows, from the same moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.formats.writers.chrome_trace import write_timeline
from simulator.predict import predict
from simulator.work.trace import Span, Timeline
from validate.compare import incomparable
from validate.compare.run import Run
from validate.spanfile import read_spans

SPANS = "spans.json.gz"


def write_side_by_side(out: Path, records: Sequence[Mapping[str, Any]], folder: Path, **where: Any) -> int:  # noqa: ANN401
    """Write the trace of every run whose spans lie in `folder`; how many there were. Raises InputError where none does.

    where: cluster, nodes and calibration, as `compare` takes them.
    """
    spans: list[Span] = []
    longest, count = 0.0, 0
    for number, record in enumerate(records, 1):
        for title, timeline in _rows(record, folder, **where):
            name = f"run {number}: {title}" if len(records) > 1 else title
            begin = min((float(span.start_s) for span in timeline.spans), default=0.0)
            spans += [_from(begin, span, f"{name} {span.program}") for span in timeline.spans]
            longest, count = max(longest, float(timeline.step_s)), count + (title == "measured")
    if not count:
        problem = "no run has a file of spans beside it whose step can be predicted"
        remedy = (
            "validate run -o FILE, without --no-profile; --cluster, if the study's is another machine than the run's"
        )
        raise InputError(Fault(place="--trace", problem=problem, remedy=remedy))
    write_timeline(out, Timeline(spans=tuple(spans), step_s=longest))
    return count


def _from(begin_s: float, span: Span, program: str) -> Span:
    return span._replace(program=program, start_s=float(span.start_s) - begin_s, end_s=float(span.end_s) - begin_s)


def _rows(
    record: Mapping[str, Any], folder: Path, *, cluster: str | None, nodes: int | None, calibration: str | None
) -> Iterator[tuple[str, Timeline]]:
    """The predicted step and the measured one; nothing of a run that has no spans or no cluster."""
    name = (record.get("files") or {}).get(SPANS)
    if not isinstance(name, str) or record["mode"] == "program":
        return
    run = Run.of(record)
    machine = run.cluster(cluster, nodes)
    if machine is None or (cluster is None and nodes is None and incomparable(run, machine)):
        return
    measured = read_spans(folder / Path(name).name)
    yield "predicted", predict(run.model, run.plan, machine, run.calibration(calibration, machine), run.stack).timeline
    yield "measured", measured
