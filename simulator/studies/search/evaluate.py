"""One candidate simulated: its memory first, and its time where it fits."""

from __future__ import annotations

from dataclasses import replace

from simulator.base.errors import InputError
from simulator.base.fit import Fit
from simulator.play.lower import lower
from simulator.play.lower.priced_stages import PricedBlocks
from simulator.predict import memory_of, prediction_of
from simulator.studies.search.outcome import PlanOutcome, parsed
from simulator.studies.search.study import SearchStudy


def evaluate(study: SearchStudy, key: str) -> PlanOutcome:
    """The outcome of a plan. Never raises: what cannot be predicted is `failed`, with the reason."""
    try:
        return _evaluated(study, key)
    except InputError as exc:
        return PlanOutcome(key=key, status="failed", reason="; ".join(map(str, exc.faults)))
    except Exception as exc:  # noqa: BLE001  one plan's defect must not cost the others
        return PlanOutcome(
            key=key, status="failed", reason=f"{type(exc).__name__}: {next(iter(str(exc).splitlines()), '')}"
        )


def _evaluated(study: SearchStudy, key: str) -> PlanOutcome:
    plan, nodes = parsed(key)
    context = study.context(study.cluster(nodes), plan.stack)
    inputs, known = (context.stack, context.calibration, context.curves), context.blocks_like(plan)
    lowering = lower(context.model, plan, context.cluster, *inputs, known)
    if known is None:
        context.keep(plan, PricedBlocks(lowering.blocks))
    usage = memory_of(lowering, quick=True)
    memory = usage.memory
    found = PlanOutcome(
        key=key,
        status=usage.verdict,
        num_devices=plan.num_devices,
        used_bytes=memory.used_bytes,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        capacity_bytes=memory.capacity_bytes,
    )
    if not usage.verdict.runs or (study.fits_only and usage.verdict is not Fit.FITS):
        return replace(found, reason=usage.cause)
    prediction = prediction_of(lowering, usage, quick=True)
    return replace(
        found,
        status=prediction.verdict,
        step_s=float(prediction.step_s),
        low_s=float(prediction.low_s),
        high_s=float(prediction.high_s),
        tokens_per_step=prediction.tokens_per_step,
        mfu=float(prediction.mfu),
        breakdown={name: float(seconds) for name, seconds in prediction.breakdown.items()},
        spread={name: float(one) for name, one in prediction.spread.items()},
        stack_sigma=prediction.stack_sigma,
    )
