"""predict(): the path from (model, plan, cluster, calibration) to a Prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from simulator.base.arguments import checked
from simulator.base.fit import Fit
from simulator.base.garbage import collected_rarely
from simulator.memory import MemoryUse, simulate_memory
from simulator.play.lower import Lowering, lower
from simulator.play.lower.host_lead import passes_ahead
from simulator.predict.confidence import Z90, own_sigma, reaches, spread
from simulator.predict.gpu_kinds import StepMemory, kind_uses, mean_peak_flop_per_s, memory_by_device, worst_fit
from simulator.predict.origins import extrapolated, sources
from simulator.predict.play import bounds, play
from simulator.predict.played_again import inside_nodes, network_share, replayed
from simulator.predict.prediction import Prediction, Remedy, Source
from simulator.predict.tiers import with_lower_tiers, with_pages
from simulator.predict.verdict import cause_of, pool_sources, suggest, with_paging, with_stalls
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.parameters import model_flop

__all__ = ["Z90", "MemoryUse", "Prediction", "Remedy", "Source", "bounds", "memory_of", "predict", "prediction_of"]


@checked
def predict(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    curves: LinkCurves | None = None,
    fold: bool = True,
    advise: bool = False,
) -> Prediction:
    """Predict one training step.

    calibration: None takes the device's own, or its data sheet where nobody has measured it. stack: None loads the
    plan's. curves: None takes those that came with the calibration, or the published sweeps'. fold: False plays every
    rank and every micro-batch. advise: where the plan does not surely fit, also predict what would make it fit (up to
    a second; the command line does); over several nodes, what hangs on the network between them.
    Raises PlanError, ModelError, ClusterError, StackError or CalibrationError with every fault found.
    """
    with collected_rarely():
        stack = stack or Stack.of(plan)
        calibration = calibration or Calibration.for_device(cluster.device)
        curves = curves or calibration.links or default_curves()
        lowering = lower(model, plan, cluster, stack, calibration, curves)
        return prediction_of(lowering, memory_of(lowering), fold=fold, advise=advise)


def memory_of(lowering: Lowering, *, quick: bool = False, stages: Sequence[int] | None = None) -> StepMemory:
    """The memory of a lowered plan, and whether it fits; all of the prediction if it does not.

    quick: the peaks alone, and what is reserved does not matter where live tensors alone do not fit. stages: of a pipeline,
    those whose fullest rank is meant where all ranks have one kind of GPU and no lower tiers; None: all.
    """
    if lowering.rank_classes is not None:
        by_device = memory_by_device(lowering)
        name, one = worst_fit(by_device)
        cause = f"{name}: {one.cause}" if len(by_device) > 1 else one.cause
        return replace(one, cause=cause, by_device=by_device)
    if (pool := lowering.pool_tiers) is not None:
        memory, trace = pool.of_memory()
    else:
        inputs = (lowering.model, lowering.plan, lowering.stack, lowering.blocks, lowering.device)
        memory, trace = simulate_memory(*inputs, stages=stages, quick=quick, lead=passes_ahead(lowering))
    memory = with_pages(with_lower_tiers(memory, lowering), lowering)
    return StepMemory(memory=memory, trace=trace, cause=cause_of(memory))


def prediction_of(
    lowering: Lowering, step_memory: StepMemory, *, fold: bool = True, advise: bool = False, quick: bool = False
) -> Prediction:
    """The prediction of a lowered plan whose memory is known. quick: its figures, without words about them."""
    model, plan, cluster = lowering.model, lowering.plan, lowering.cluster
    memory = step_memory.memory
    alone = play(lowering, fold=fold)
    played = with_stalls(alone, memory, lowering.calibrations.get(step_memory.device, lowering.calibration))
    played = with_paging(played, memory, lowering)
    found, inside = None, partial(inside_nodes, lowering, memory, float(played.step_s)) if advise else str
    if advise and memory.fit is not Fit.FITS and lowering.rank_classes is None:
        from simulator.predict.remedy_search import remedies

        found = remedies(lowering, played.step_s, memory)
    parts = spread(lowering, played) | replayed(lowering, float(played.step_s), alone, fold=fold)
    peak_flop_per_s = mean_peak_flop_per_s(lowering)
    floor_s = lowering.hardware_flop / (plan.num_devices * peak_flop_per_s)
    own = own_sigma(lowering)
    down, up = reaches(own, parts)
    return Prediction(
        model=model.name,
        cluster=cluster.name,
        num_devices=plan.num_devices,
        step_s=played.step_s,
        low_s=max(played.step_s * math.exp(-down), min(played.step_s, floor_s)),
        high_s=played.step_s * math.exp(up),
        lower_s=played.lower_s,
        upper_s=played.upper_s,
        tokens_per_step=plan.tokens_per_step,
        model_flop_per_step=model_flop(model, plan),
        hardware_flop_per_step=lowering.hardware_flop,
        peak_flop_per_s=peak_flop_per_s,
        breakdown=dict(played.breakdown),
        communication=dict(played.communication),
        memory=memory,
        cause=step_memory.cause,
        suggestion="" if quick else suggest(lowering, played, memory, found, inside),
        extrapolated=() if quick else extrapolated(lowering),
        sources=() if quick else (*sources(lowering), *pool_sources(memory, lowering.calibration)),
        timeline=played.timeline,
        memory_trace=step_memory.trace,
        remedies=found or (),
        spread=parts,
        stack_sigma=own,
        kinds=kind_uses(lowering, played, step_memory.by_device),
        network=network_share(lowering, float(alone.step_s), fold=fold) if advise else None,
        num_played=played.num_played,
    )
