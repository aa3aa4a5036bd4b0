"""`shardwise sensitivity --failures`: each component slowed or lost in turn, ranked by the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from simulator.base.errors import InputError, PlanError
from simulator.cli.options import print_notes
from simulator.cli.programs import is_program
from simulator.formats.study import Study, read_study
from simulator.play.lower import lowered
from simulator.predict import memory_of
from simulator.predict.play import step_seconds
from simulator.studies.sensitivity.failures import Failure, Failures, Hurt, failures_of, ranked


def _of_equal_nodes(file: Path | None, flags: Mapping[str, str], settings: tuple[str, ...]) -> Study:
    """The study. Raises InputError where one failure at a time has no meaning."""
    if is_program(file):
        problem = "a captured program has no plan that could be put on fewer nodes"
        raise InputError.at("--failures", problem, "a STUDY.toml")
    study = print_notes(read_study(file, flags, {}, settings))
    if study.cluster.exceptions:
        problem = "--failures adds one exception at a time, and there are some already"
        raise InputError.at("cluster: exceptions", problem, "a cluster of equal nodes")
    return study


def swept(
    file: Path | None,
    flags: Mapping[str, str],
    settings: tuple[str, ...],
    left: float,
    on_progress: Callable[[int, int], None],
) -> Failures:
    """Simulate every failure. Raises InputError if the study is wrong or its cluster has exceptions of its own."""
    study = _of_equal_nodes(file, flags, settings)
    lowering = lowered(*study.parts)
    step_s = step_seconds(lowering)
    base, cases = study.plan.tokens_per_step / step_s, list(failures_of(study.plan, study.cluster, left))
    found = []
    for done, one in enumerate(cases, 1):
        found.append(_hurt(one, file, flags, settings, base))
        on_progress(done, len(cases))
    return ranked(step_s, base, left, found, fits=memory_of(lowering, quick=True).memory.fit.runs)


def _hurt(
    failure: Failure, file: Path | None, flags: Mapping[str, str], settings: tuple[str, ...], base: float
) -> Hurt:
    """The step under a failure: it stops if the remaining GPUs cannot run or hold the plan; unmodelled failures give a reason."""
    nodes = {"nodes": str(failure.nodes)} if failure.nodes is not None else {}
    try:
        study = read_study(file, {**flags, **nodes}, {}, (*settings, *failure.settings))
        step_s = _step_s(study, holds=failure.nodes is not None)
    except InputError as exc:
        gone = failure.nodes is not None
        reason = "; ".join(fault.problem for fault in exc.faults)
        return Hurt(failure=failure, step_s=None, lost=1.0 if gone else 0.0, reason=reason)
    return Hurt(failure=failure, step_s=step_s, lost=1 - study.plan.tokens_per_step / step_s / base)


def _step_s(study: Study, *, holds: bool = False) -> float:
    """Seconds of a step. holds: raise PlanError where it does not fit in memory."""
    lowering = lowered(*study.parts)
    if holds and not (usage := memory_of(lowering, quick=True)).memory.fit.runs:
        raise PlanError.at("memory", f"does not fit on the nodes that are left: {usage.cause}")
    return step_seconds(lowering)
