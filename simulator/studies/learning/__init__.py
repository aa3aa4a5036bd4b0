"""Learning: a handful of a user's own measured steps in, coefficients with their widths out.

    lesson = learn(rows, "mine")
    lesson.learned.save(Path("mine.learned.json"))

docs/guides/learn.md explains the report; the file is that of `simulator.spec.calibration.learned`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simulator.base.errors import Fault, InputError
from simulator.studies.backtest.rows import BadRow, RunRow
from simulator.studies.learning.observed import Refused, observed, on_one_stack
from simulator.studies.learning.report import LearningReport, learning_report, lines
from simulator.studies.learning.traced import traced
from simulator.work.recorded.recording import Recording

__all__ = ["LearningReport", "learn", "lines"]

MOST_RUNS = 64


def learn(rows: Iterable[RunRow | BadRow], name: str, traces: Mapping[str, Recording] | None = None) -> LearningReport:
    """Coefficients learned from the rows. traces: of one rank's step, by the id of its row.

    Raises InputError where no row can teach, with the reason of each, where they are too many, or where a trace cannot.
    """
    rows = list(rows)
    if len(rows) > MOST_RUNS:
        problem = f"{len(rows)} runs; a handful teaches what there is to learn"
        raise InputError.at("runs", problem, f"at most {MOST_RUNS}: spread over sizes and nodes")
    bad = [
        Refused(row.id or f"line {row.line}", "; ".join(map(str, row.faults)))
        for row in rows
        if isinstance(row, BadRow)
    ]
    found, refused = observed(row for row in rows if isinstance(row, RunRow))
    if not found:
        raise InputError(
            [Fault(one.id, one.reason, "see docs/reference/runs-table.md") for one in (*bad, *refused)]
            or Fault("runs", "the table has no rows", "a row for each measured run")
        )
    runs = on_one_stack(found)
    return learning_report([*runs, *traced(runs, traces or {})], [*bad, *refused], name)
