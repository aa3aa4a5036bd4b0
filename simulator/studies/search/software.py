"""A search under several software stacks: the best plan of each, in one table with other good layouts of any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from simulator.base.errors import InputError
from simulator.parallel.legality import software_of
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.search.driver import Interrupted, OnProgress, Progress, search
from simulator.studies.search.engines import Engine
from simulator.studies.search.journal import Journal
from simulator.studies.search.report import Counts, SearchReport, compared
from simulator.studies.search.study import SearchBrokenError, SearchStudy

# What is compared where no stack is named: FSDP2 without and with torch.compile, Megatron, DeepSpeed
USUAL: Final = ("torch-2.11-eager", "torch-2.11-compiled", "megatron-core-2025", "deepspeed-0.14")
_MORE: Final = 1.5  # times the budget of one stack, for all of several


def usual_stacks(fixed: Mapping[str, tuple[object, ...]]) -> tuple[str, ...]:
    """The usual stacks; where the data parallelism is fixed, those whose frameworks have it."""
    implementations = fixed.get("data_parallel")
    has = {one: software_of(Stack.load(one).framework).implementations for one in USUAL}
    return tuple(one for one in USUAL if implementations is None or set(implementations) & set(has[one])) or (
        Plan().stack,
    )


def search_stacks(
    study: SearchStudy, engine: Engine, journal: Journal | None = None, on_progress: OnProgress = lambda _: None
) -> SearchReport:
    """The best layouts under every stack of the study, each of which has a row. engine: of the whole study.

    A stack that has no legal plan is named in `without`. Raises InputError where none has any; Interrupted on Ctrl-C.
    """
    stacks: tuple[str, ...] = study.space.fixed.get("stack", ())
    if len(stacks) < 2 or not study.layouts:
        return search(study, engine, journal, on_progress)
    found: list[SearchReport] = []
    without: dict[str, InputError] = {}
    for number, stack in enumerate(stacks):

        def of_stack(progress: Progress, stack: str = f"{stack} ({number + 1} of {len(stacks)})") -> None:
            on_progress(replace(progress, stack=stack))

        try:
            left = study.budget * _MORE - sum(report.work for report in found)
            budget = int(left / (len(stacks) - number))  # what others leave is for the next
            found.append(search(_under(study, stack, budget), engine, journal, of_stack))
        except SearchBrokenError:
            raise
        except InputError as exc:
            without[stack] = exc
        except Interrupted as stop:
            found += [stop.report] if stop.report else []
            raise Interrupted(_joined(study, found, without) if found else None) from None
    if not found:
        raise InputError([fault for exc in without.values() for fault in exc.faults])
    return _joined(study, found, without)


def _under(study: SearchStudy, stack: str, budget: int) -> SearchStudy:
    fixed = {**study.space.fixed, "stack": (stack,)}
    return replace(study, space=replace(study.space, fixed=fixed), budget=budget)


def _joined(study: SearchStudy, reports: Sequence[SearchReport], without: dict[str, InputError]) -> SearchReport:
    firsts = [report.rows[0] for report in reports if report.rows]
    others = sorted((row for report in reports for row in report.rows[1:]), key=lambda row: row.order(study))
    rows = sorted([*firsts, *others[: max(0, study.top - len(firsts))]], key=lambda row: row.order(study))
    still = [report.quickest_open for report in reports if report.quickest_open is not None]
    return SearchReport(
        study=study,
        rows=compared(rows),
        counts=_sum([report.counts for report in reports]),
        failures=dict(sum((Counter(report.failures) for report in reports), Counter[str]())),
        quickest_open=min(still, default=None),
        num_left_out=sum(report.num_left_out for report in reports),
        work=sum(report.work for report in reports),
        interrupted=any(report.interrupted for report in reports),
        without=tuple((stack, str(exc.faults[0])) for stack, exc in without.items())
        + tuple((_stack(report), "no plan fits") for report in reports if not report.rows and not report.interrupted),
    )


def _stack(report: SearchReport) -> str:
    name: str = report.study.space.fixed["stack"][0]
    return name


def _sum(counts: Sequence[Counts]) -> Counts:
    refused: Counter[str] = sum((Counter(one.refused) for one in counts), Counter())
    simulated = {status: sum(one.simulated[status] for one in counts) for status in counts[0].simulated}
    numbers = ("unchecked", "legal", "equal", "too_large", "too_slow", "open", "scouts")
    sums = {name: sum(getattr(one, name) for one in counts) for name in numbers}
    return Counts(refused=dict(refused.most_common()), simulated=simulated, **sums)
