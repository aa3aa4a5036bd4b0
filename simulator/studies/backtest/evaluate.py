"""Evaluation: every row of a table predicted and compared with its measurement. A failing row does not stop the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final

from simulator.base.errors import InputError
from simulator.base.processes import mapped
from simulator.base.remembered import recent
from simulator.memory import MemoryUse
from simulator.play.lower import lowered
from simulator.predict import Prediction, memory_of, predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import memory_rows
from simulator.studies.backtest.blanks import filled_rows, filled_words, states_recompute
from simulator.studies.backtest.measured import MEMORY_FIGURES, memory_bytes
from simulator.studies.backtest.outcome import Progress, RefusedError, RowOutcome, gathered, judged
from simulator.studies.backtest.report import BacktestReport, make_report
from simulator.studies.backtest.resolve import Run, resolve
from simulator.studies.backtest.rows import BadRow, CollectiveRow, MemoryRow, RunRow, ServingRow, Table
from simulator.studies.backtest.unstated import also, beyond, counted_otherwise
from simulator.studies.backtest.work import measured_step_s, work_of

_STAGES: Final = {"rank 0": 0, "last rank": -1}  # whose memory a table states
_NEARLY = 1.25  # of the capacity: nine reserved peaks in ten are predicted to a quarter (docs/accuracy.md)

Row = RunRow | MemoryRow | CollectiveRow | ServingRow | BadRow


def run(table: Table, *, progress: Progress | None = None, jobs: int = 1) -> BacktestReport:
    """Predict every row of a table of runs or of tracked memory, in the table's order.

    progress is called after each row. jobs: processes; the report does not depend on it. Ctrl-C ends it early: the report
    then holds the rows done so far and is marked `interrupted`.
    """
    outcomes, interrupted = gathered(mapped(evaluate_row, table.rows, jobs), len(table.rows), progress)
    marked = _without_repeats(table.rows, outcomes)
    return make_report(table.name, marked, interrupted=interrupted, unread=table.unread)


def evaluate_row(row: Row) -> RowOutcome:
    """The outcome of one row. Never raises: an unexpected exception is the outcome `failed`."""
    if isinstance(row, CollectiveRow | ServingRow):
        raise TypeError("rows of collectives and of servers have studies of their own")
    if isinstance(row, BadRow):
        return RowOutcome(id=row.id, line=row.line, status="bad", reason="; ".join(map(str, row.faults)))
    if isinstance(row, RunRow):
        run_start = _started(row)
        return judged(run_start, lambda: _predicted(row, run_start))
    start = memory_rows.started(row)
    return judged(start, lambda: memory_rows.judged(row, start))


def _started(row: RunRow) -> RowOutcome:
    return RowOutcome(
        id=row.id,
        line=row.line,
        status="failed",
        source=row.source,
        gpu=row.gpu,
        precision=row.precision,
        mem_metric=_metric_name(row),
        measured_memory_bytes=memory_bytes(row),
        measured_oom=row.mem_metric == "oom",
        unread=row.unread,
        framework=row.framework,
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A row with its blanks filled, and its prediction."""

    run: Run
    prediction: Prediction

    def seconds(self, of_plan: float) -> float:
        """A time of the plan, whose micro-batches are all full, as the run's."""
        return float(of_plan) * self.run.time_factor


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's prediction: the chosen variant, all variants that may have run, whether it fits, and what that depends on."""

    variant: Variant
    spanned: tuple[Variant, ...]
    fits: bool | None
    hangs_on: str


def _predicted(row: RunRow, start: RowOutcome) -> RowOutcome:
    """The prediction of the first variant that fits, or of the one that needs least; the interval spans all that may have run."""
    found = answer(row)
    run, prediction = found.variant.run, found.variant.prediction
    low_s, high_s = _interval(found.variant, found.spanned)
    return replace(
        start,
        status="calibration" if row.id in run.stack.fitted.calibration_runs else "ok",
        predicted_step_s=found.variant.seconds(prediction.step_s),
        low_step_s=low_s,
        high_step_s=high_s,
        measured_step_s=measured_step_s(run),
        predicted_memory_bytes=memory_figure(run, prediction.memory),
        fits=found.fits,
        open=found.hangs_on,
        work=work_of(run),
        unmodelled=run.unmodelled,
        stack=run.stack.name,
        described=run.stack.known == "described",
    )


def answer(row: RunRow) -> Answer:
    """The prediction of a row. Raises InputError or RefusedError."""
    variants = _variants(row)
    fitting = [variant for variant in variants if variant.prediction.fits]
    least = min(variants, key=lambda one: one.prediction.memory.used_bytes)
    variant = (*fitting, least)[0]
    fits, hangs_on, spanned = _verdict(variant, stated=states_recompute(row))
    if len(variants) > 1:
        (verdict, taken), spanned = (
            _open_verdict(variant, variants, fitting),
            [*_may_have_run(variants, variant), *spanned],
        )
        fits, hangs_on = (verdict, taken) if fitting else (fits, "; ".join(filter(None, (taken, hangs_on))))
    besides = [each for each in _played(also(variant.run.row, variant.run.stack)) if _worth_it(each, variant)]
    return Answer(variant, (*spanned, *besides), fits, hangs_on)


def _worth_it(one: Variant, variant: Variant) -> bool:
    """Nobody interleaves stages where that takes longer."""
    return one.run.row.vpp == variant.run.row.vpp or one.prediction.step_s < variant.prediction.step_s


def _interval(variant: Variant, spanned: Sequence[Variant]) -> tuple[float, float]:
    """The 90 % interval of a row's step in seconds, over all variants that may have run."""
    run, middle = variant.run, variant.seconds(variant.prediction.step_s)
    low = min(each.seconds(each.prediction.low_s) for each in spanned)
    high = max(each.seconds(each.prediction.high_s) for each in spanned if each.run.row.vpp == run.row.vpp)
    if run.unmodelled:
        low, high = (middle * beyond(end / middle) for end in (low, high))
    longer = counted_otherwise(run.row, run.model, run.plan.num_devices)
    return low / max(longer, 1.0), high / min(longer, 1.0)


def _variants(row: RunRow) -> list[Variant]:
    """Every variant of the row that a plan can express. Raises the first one's error if there is none."""
    refused = list[Exception]()
    found = list(_played(filled_rows(row), refused))
    if not found:
        raise refused[0]
    return found


def _played(rows: Iterable[RunRow], refused: list[Exception] | None = None) -> Iterator[Variant]:
    """Predictions of the variants that a plan can express; errors of the others go into `refused`."""
    for each in rows:
        try:
            run = resolve(each)
            played = Variant(run, _prediction(run.model, run.plan, run.cluster, run.stack))
        except (InputError, RefusedError) as exc:
            if refused is not None:
                refused.append(exc)
        else:
            yield played


@recent(4)  # tables list the same run measured again, and seeds of it, one below the other
def _prediction(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Prediction:
    return predict(model, plan, cluster, stack=stack)


def _nearly_fits(one: Variant) -> bool:
    """Whether it may have run: peaks of incompletely described software are uncertain by a few percent."""
    memory = one.prediction.memory
    return one.prediction.fits or memory.used_bytes <= _NEARLY * memory.capacity_bytes


def _may_have_run(variants: Sequence[Variant], variant: Variant) -> Iterator[Variant]:
    """Variants that nearly fit, and those that differ from the prediction only in recomputation.

    Between the two lie others that a run can take: some layers recomputed, some tensors kept, as every framework offers.
    """
    for each in variants:
        if _nearly_fits(each) or replace(each.run.row, act_ckpt=variant.run.row.act_ckpt) == variant.run.row:
            yield each


def _open_verdict(variant: Variant, variants: Sequence[Variant], fitting: Sequence[Variant]) -> tuple[bool | None, str]:
    """Whether a row with several variants fits: in all (True), in none (False), or in some (None)."""
    rows = [each.run.row for each in variants]
    taken = f"predicted with {filled_words(variant.run.row, rows)}, which the row does not state"
    if not fitting:
        return False, taken
    more = f"; {len(fitting)} of {len(variants)} ways to fill it fit"
    return (True if len(fitting) == len(variants) else None), taken + more


def _verdict(variant: Variant, *, stated: bool) -> tuple[bool | None, str, list[Variant]]:
    """Whether it fits, what that depends on, and variants that may have run.

    Where a row does not say what was recomputed, all that could be may be.
    """
    run, prediction = variant.run, variant.prediction
    if prediction.fits or stated or run.plan.recompute.mode == "full":
        return prediction.fits, "", [variant]
    plan = run.plan.copy_with(recompute="full")
    least = _prediction(run.model, plan, run.cluster, run.stack)
    if not least.fits:
        return False, "", [variant]
    hangs_on = f"recomputation is not stated: too much with {run.plan.recompute.mode}, fits with full"
    return None, hangs_on, [variant, Variant(replace(run, plan=plan), least)]


def memory_figure(run: Run, fullest: MemoryUse) -> int:
    """The figure of the row's memory metric, on the measured GPU; otherwise all memory of the fullest GPU."""
    row = run.row
    figure = MEMORY_FIGURES[row.mem_metric][0] if row.mem_metric in MEMORY_FIGURES else "used"
    stage = _STAGES.get(row.mem_metric_detail)
    memory = fullest if stage is None or run.plan.pp == 1 else _of_stage(run, stage % run.plan.pp)
    return {"allocated": memory.peak_allocated_bytes, "reserved": memory.reserved_bytes, "used": memory.used_bytes}[
        figure
    ]


def _of_stage(run: Run, stage: int) -> MemoryUse:
    """Memory of a rank of one pipeline stage."""
    lowering = lowered(run.model, run.plan, run.cluster, stack=run.stack)
    return memory_of(lowering, quick=True, stages=(stage,)).memory


def _metric_name(row: RunRow) -> str:
    if row.mem_metric is None:
        return ""
    return f"{row.mem_metric}({row.mem_metric_detail})" if row.mem_metric_detail else row.mem_metric


def _without_repeats(rows: Iterable[Row], outcomes: Iterable[RowOutcome]) -> list[RowOutcome]:
    """A row equal to an earlier one in all but id, place and notes reports the same measurement: it is not scored."""
    seen: dict[tuple[object, ...], str] = {}
    marked = []
    for row, outcome in zip(rows, outcomes, strict=False):
        if isinstance(row, RunRow):
            key = astuple(replace(row, id="", line=0, source_location="", notes=""))
            first = seen.setdefault(key, row.id)
            marked.append(replace(outcome, duplicate_of="" if first == row.id else first))
        else:
            marked.append(outcome)
    return marked
