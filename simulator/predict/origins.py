"""Sources of a prediction's inputs, its assumptions, and extrapolations beyond the calibration."""

from __future__ import annotations

from simulator.base.kernels import Kernel
from simulator.base.sums import summed
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import Lowering
from simulator.predict.prediction import Source
from simulator.work.collectives import Links, calibrated
from simulator.work.collectives import source as links_source
from simulator.work.script import units

_KNOWN = {
    "described": "",
    "assumed": ": nobody named the software (--stack), and the interval is wider for it",
    "unknown": ": no stack describes the software that runs, and the interval is wider for it",
}
_PADDED = 1.1  # bytes of shards over those of the parameters from which on a report says so


def extrapolated(lowering: Lowering) -> tuple[str, ...]:
    """What lies outside the range that the calibration measured."""
    found: dict[str, None] = {}
    for kernel in _kernels(lowering):
        note = lowering.calibration.extrapolated(kernel, lowering.stack.attention)
        if note:
            found[note] = None
    return tuple(found)


def _kernels(lowering: Lowering) -> list[Kernel]:
    return list(
        dict.fromkeys(
            kernel for one in lowering.blocks.kinds for op in one.ops for kernel in (*op.forward, *op.backward)
        )
    )


def sources(lowering: Lowering) -> tuple[Source, ...]:
    """Provenance of every input."""
    stack, calibration, device = lowering.stack, lowering.calibration, lowering.device
    fitted = f"; coefficients from {len(stack.fitted.calibration_runs)} runs" if stack.fitted.calibration_runs else ""
    tier = lowering.transfers.tier if lowering.transfers else None
    detail = f"{tier.name}: topologies/tiers" if tier and tier.name else "given"
    below = [Source(what="tiers", kind="datasheet", detail=detail)] if tier else []
    model = f"{lowering.model.name}, {lowering.model.num_parameters:,} parameters"
    software, known = f"{stack.name}{fitted}{_KNOWN[stack.known]}", "calibrated" if fitted else "assumed"
    return (
        *below,
        *_exceptions(lowering),
        *_assumptions(lowering),
        Source(what="model", kind="given", detail=model),
        Source(what="device", kind="datasheet", detail=device.name),
        Source(what="kernels", kind=calibration.kind, detail=_kernels_from(lowering)),
        Source(what="links", kind=_links_kind(lowering), detail=_links_detail(lowering)),
        Source(what="stack", kind=known, detail=software),
    )


def _exceptions(lowering: Lowering) -> list[Source]:
    """Kinds of GPUs that differ, and what their kernels' times rest on."""
    if lowering.kinds is None:
        return []
    usual, *others = lowering.kinds.kinds
    found = [Source(what="exceptions", kind="given", detail="; ".join(kind.unlike(usual) for kind in others))]
    for name, calibration in lowering.calibrations.items():
        if name != usual.device:
            found.append(Source(what=f"kernels of {name}", kind=calibration.kind, detail=calibration.name))
    return found


def _padding(lowering: Lowering) -> list[Source]:
    """What shards hold beyond the parameters, where that is much."""
    shard, plan = shard_of(lowering.model, lowering.plan), lowering.plan
    cut = units(shard, plan)
    numel = summed(unit.numel for unit in cut)  # none where nothing that is trained is sharded
    factor = summed(unit.padded_numel for unit in cut) / numel if numel else 1.0
    if factor < _PADDED:
        return []
    dealt = {"experts"} if plan.ep > 1 else {"experts", "rows_with_ep"}
    by_expert = shard.experts is not None and shard.experts.cut_by in dealt
    divided, avoided = ("experts", "cutting rows") if by_expert else ("rows", "ep")
    detail = f"{factor:.1f} x: shards hold whole {divided}; dp_replicate or {avoided} avoids it"
    return [Source(what="padded shards", kind="assumed", detail=detail)]


def _assumptions(lowering: Lowering) -> list[Source]:
    """Assumptions that hold only from some step on, and padding of shards."""
    plan, found = lowering.plan, _padding(lowering)
    if plan.ddp.comm_hook.kind == "powersgd":
        detail = f"a step after the first {plan.ddp.comm_hook.start_step:,}, in which gradients travel whole"
        found.append(Source(what="PowerSGD", kind="assumed", detail=detail))
    if plan.deepspeed.one_bit.any:
        detail = f"signs with error feedback train as well as gradients; a step after the first {plan.deepspeed.one_bit.freeze_step:,}"
        found.append(Source(what="one-bit optimizer", kind="assumed", detail=detail))
    if plan.sync_every_steps > 1:
        detail = (
            f"replicas up to {plan.sync_every_steps:,} steps apart, that training bears it; mean over that many steps"
        )
        found.append(Source(what="staleness", kind="assumed", detail=detail))
    return found


def _links_detail(lowering: Lowering) -> str:
    """The calibration source of the links, and NCCL variables of the stack that are not modelled."""
    nccl = lowering.fabric.nccl
    unmodelled = nccl.environment.unmodelled
    detail = links_source(lowering.cluster, lowering.curves, nccl=nccl)
    detail += (
        "; between nodes by the data sheet alone, which the interval's upper end allows for"
        if lowering.network_by_sheet
        else ""
    )
    return f"{detail}; not modelled: {', '.join(unmodelled)}" if unmodelled else detail


def _kernels_from(lowering: Lowering) -> str:
    calibration = lowering.calibration
    date = f", {calibration.provenance.date}" if calibration.provenance.date else ""
    learned = calibration.learned
    own = f"; as {len(learned.runs)} runs of your own taught ({learned.name})" if learned else ""
    return f"{calibration.name}: {calibration.provenance.machine}{date}{own}"


def _links_kind(lowering: Lowering) -> str:
    if lowering.curves.ideal_links:
        return "ideal"
    return "calibrated" if calibrated(Links.of(lowering.cluster), lowering.curves) else "datasheet"
