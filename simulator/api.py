"""The questions that need more than one prediction, as functions: `from simulator import search, search_serving, serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from simulator.base.arguments import checked
from simulator.base.errors import ArgumentError, Fault, InputError
from simulator.formats.readers.capture import kind_of, read_capture
from simulator.formats.study.serving import requests_of
from simulator.predict.prediction import Prediction
from simulator.predict.program import predict_program as predicted_program
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.prices import Prices
from simulator.spec.software.stack import Stack
from simulator.studies.search import (
    Journal,
    Objective,
    Processes,
    SearchReport,
    SearchStudy,
    Serial,
    Space,
    search_stacks,
    usual_stacks,
)
from simulator.studies.search.space import fix_faults as plan_faults
from simulator.studies.serving import InferencePlan, Serving, Slo, Workload, with_defaults
from simulator.studies.serving import serve as served
from simulator.studies.serving_search import (
    DISAGGREGATED,
    Disaggregated,
    Notes,
    ServingSearch,
    ServingSearchReport,
    degrees_given,
    fix_faults,
)
from simulator.studies.serving_search import search_serving as find_plans
from simulator.work.captured.scaled import scaled


@checked
def search(  # noqa: PLR0913  an option of the command line each
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    nodes: int | Sequence[int] | None = None,
    max_gpus: int | None = None,
    fix: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    stack: str | Sequence[str] | Stack | None = None,
    objective: Objective = "step",
    top: int = 10,
    every: bool = False,
    fits_only: bool = False,
    jobs: int = 1,
    journal: str | Path | None = None,
) -> SearchReport:
    """The best plans, as `shardwise search` finds them (docs/guides/search.md).

    global_batch: sequences a step. nodes: numbers of nodes to try; None: the cluster's. fix: a field of Plan -> the value
    it has, or a list of those it may have. stack: one or several by name, or one of your own; None: the usual ones.
    every: every good plan instead of the best of each layout. fits_only: no plan whose memory is tight. jobs: processes;
    from a script, more than one needs `if __name__ == "__main__"`. journal: a file that keeps what is known, to resume from.
    Raises ArgumentError, or PlanError where no plan is legal; Interrupted, with what is known, on Ctrl-C.
    """
    counts = (cluster.num_nodes,) if nodes is None else (nodes,) if isinstance(nodes, int) else tuple(nodes)
    fixed, own = _fixed(fix or {}), stack if isinstance(stack, Stack) else None
    if own is None:
        names = (stack,) if isinstance(stack, str) else stack
        fixed["stack"] = tuple(names) if names else fixed.get("stack") or usual_stacks(fixed)
    space = Space(
        model=model,
        clusters=tuple(cluster.with_nodes(count) for count in sorted(set(counts))),
        global_batch=global_batch,
        seq_len=seq_len,
        fixed=fixed,
        max_devices=max_gpus,
    )
    study = SearchStudy(
        space=space,
        calibration=calibration,
        stack=own,
        objective=objective,
        top=top,
        fits_only=fits_only,
        layouts=not every,
    )
    store = Journal(Path(journal), study.identity) if journal is not None else nullcontext()
    with store as notes, Processes(study, jobs) if jobs > 1 else Serial(study) as engine:
        return search_stacks(study, engine, notes)


@checked
def predict_program(
    program: str | Path,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    scale_with: str | Path | None = None,
    tokens_per_step: int | None = None,
    expandable_segments: bool = False,
    advise: bool = False,
) -> Prediction:
    """One step of a captured program, as `shardwise predict --program` predicts it (docs/guides/capture.md).

    program: a file that `shardwise capture` wrote. scale_with: one at another number of ranks, where the cluster has neither's:
    sizes follow from both. tokens_per_step: of all ranks; None: as the file says. stack: None:
    eager PyTorch's, or compiled PyTorch's where some of it is compiled. expandable_segments: of PYTORCH_CUDA_ALLOC_CONF. advise: where it does not surely fit, also predict
    what would make it fit. Raises InputError with every fault found.
    """
    path = Path(program)
    if kind_of(path) == "script":
        remedy = f"shardwise capture {path} -o {path.stem}.capture.gz, and predict that file"
        raise InputError.at(str(path), "a script is run by the command line only", remedy)
    found = [read_capture(path), *([read_capture(Path(scale_with))] if scale_with is not None else [])]
    fits = [one for one in found if one.world_size == cluster.num_devices]
    return predicted_program(
        fits[0] if fits else scaled(found[0], found[1], cluster.num_devices) if len(found) > 1 else found[0],
        cluster,
        calibration,
        stack,
        tokens_per_step=tokens_per_step,
        expandable_segments=expandable_segments,
        advise=advise,
    )


@checked
def serve(
    model: Model,
    plan: InferencePlan,
    cluster: Cluster,
    workload: Workload,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    slo: Slo | None = None,
    interval: bool = False,
) -> Serving:
    """Latencies, throughput and memory of a model that is served, as `shardwise serve` predicts them.

    What the plan leaves open is as the stack's engine has it. interval: also with all times at the ends of their 90 % interval.
    A plan that does not fit is an answer.
    Raises PlanError, StackError, CalibrationError, or InputError with every fault found.
    """
    return served(
        model,
        with_defaults(plan, stack or Stack.of(plan), cluster.device, model),
        cluster,
        requests_of(workload, model.image_tokens),
        calibration,
        stack,
        slo=slo,
        warmup=workload.warmup,
        users=workload.users(),
        interval=interval,
    )


@checked
def search_serving(  # noqa: PLR0913  an option of the command line each
    model: Model,
    cluster: Cluster,
    workload: Workload,
    slo: Slo,
    *,
    plan: InferencePlan | None = None,
    gpus_needed: bool = False,
    max_gpus: int | None = None,
    fix: Mapping[str, Any] | None = None,
    disaggregated: Disaggregated = "both",
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    prices: Prices | None = None,
    top: int = 10,
    every: bool = False,
    jobs: int = 1,
    journal: str | Path | None = None,
) -> ServingSearchReport:
    """The plans that meet the limits at the workload's rate on the fewest GPUs, as `shardwise serve --search` finds them.

    plan: what is not searched; degrees that it sets are kept. gpus_needed: as many of the cluster's nodes as needed. fix: a
    field of InferencePlan -> the value it has, or a list of those it may have. disaggregated: prompts on engines of their
    own: "yes", "no" or "both" ways. every: every plan that meets the limits. jobs, journal: as `search` takes them.
    Raises ArgumentError, PlanError where no layout is legal, or InputError; SearchInterrupted, with what is known, on Ctrl-C.
    """
    base = plan or InferencePlan()
    given = {name: tuple(v) if isinstance(v, list | tuple) else (v,) for name, v in (fix or {}).items()}
    faults = [f for name, values in given.items() for f in fix_faults(name, values, f"search_serving(fix=): {name}")]
    if disaggregated not in DISAGGREGATED:
        place, remedy = "search_serving(disaggregated=)", f"one of {', '.join(DISAGGREGATED)}"
        faults.append(Fault(place, f"is {disaggregated!r}", remedy))
    ArgumentError.raise_for(faults)
    study = ServingSearch(
        model=model,
        cluster=cluster,
        plan=base,
        workload=workload,
        slo=slo,
        stack=stack or Stack.of(base),
        calibration=calibration,
        fixed=degrees_given(base) | given,
        max_gpus=max_gpus,
        any_nodes=gpus_needed,
        disaggregated=disaggregated,
        top=top,
        every=every,
    )
    store = Notes(Path(journal), study.identity) if journal is not None else nullcontext()
    with store as notes:
        return find_plans(study, jobs=jobs, notes=notes, prices=prices)


def _fixed(fix: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The values that each field may have. Raises ArgumentError with every unknown field and illegal value."""
    found = {name: tuple(values) if isinstance(values, list | tuple) else (values,) for name, values in fix.items()}
    place = "search(fix=)"
    faults = (
        plan_faults(name, values, f"{place}: {name}", others="global_batch and seq_len", at=place, from_file=False)
        for name, values in found.items()
    )
    ArgumentError.raise_for(list(chain.from_iterable(faults)))
    return found
