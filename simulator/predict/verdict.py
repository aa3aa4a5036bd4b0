"""Why a plan fits or not, what retries of the allocator cost, and the one thing to try next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from simulator.base.fit import Fit
from simulator.base.sums import summed
from simulator.base.units import format_bytes, format_seconds
from simulator.memory import MemoryUse
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.use import RESERVED_HIGH
from simulator.parallel.legality import Case, faults
from simulator.parallel.model_shard import shard_of, whole_body
from simulator.play.lower import Lowering
from simulator.predict.play import SimulatedStep
from simulator.predict.prediction import OWN_ALLOCATOR, STALL, Remedy, Source
from simulator.spec.calibration import Calibration
from simulator.spec.plan import Plan
from simulator.work.offload import SIGMA
from simulator.work.script import paged_bytes

PAGED_SHARE: Final = 0.5  # of a link to the host, that pages reach (bitsandbytes, explanations/optimizers.mdx)
_WITH_SPLITS: Final = 1.1  # saved bytes with what the allocator rounds and splits: a margin, so that advice surely fits
_WAITING = ("idle", "bubble", "slow_peer")
_LESS_MOVED = "smaller micro-batches, recomputation or more GPUs to shard over leave more of it in HBM"
_ON_EQUAL_NODES = (
    "what would make it fit is looked for on equal nodes: predict the plan on a cluster of the GPU that is full"
)


def waiting_s(breakdown: Mapping[str, float]) -> float:
    """Of a breakdown, what its GPUs wait for others."""
    return summed(value for name, value in breakdown.items() if _waits(name))


def compute_s(breakdown: Mapping[str, float]) -> float:
    """Of a breakdown, what its GPUs compute, with all that slows it."""
    return summed(
        value
        for name, value in breakdown.items()
        if not _waits(name) and not name.startswith("exposed:") and name != "host"
    )


def _waits(category: str) -> bool:
    return category.startswith("wait:") or category in _WAITING


def cause_of(memory: MemoryUse) -> str:
    """Why `memory.fit` is what it is."""
    name, needed, there = memory.binding
    if name:
        return f"{format_bytes(needed)} of {name} needed on a node that has {format_bytes(there)}"
    outside = memory.outside_torch_bytes
    if memory.fit is Fit.FITS:
        below = f"HBM is full, {format_bytes(memory.spilled_bytes)} lie in the tiers below it at the peak"
        free = below if memory.spilled_bytes else f"{format_bytes(there - needed)} free at the peak"
        return f"{free} ({memory.peak_moment})"
    if not memory.live_tensors_fit:
        short = memory.peak_allocated_bytes + outside - there
        owner, size = max(memory.by_category.items(), key=lambda item: item[1])
        most = f"largest owner {owner.replace('_', ' ')} with {format_bytes(size)}"
        return f"live tensors alone are {format_bytes(short)} too much at {memory.peak_moment}: {most}"
    if memory.fit is Fit.DOES_NOT_FIT:
        return (
            f"fragmentation: {format_bytes(needed - there)} too much is reserved for "
            f"{format_bytes(memory.peak_allocated_bytes)} allocated, and giving cached segments back does not help"
        )
    beside = f"beside {format_bytes(outside)} outside torch"
    if memory.retries:
        return (
            f"fits only because the allocator gives its cache back and tries again: without a limit it would reserve "
            f"{format_bytes(memory.peak_reserved_bytes)} {beside}"
        )
    return (
        f"the upper end of the interval does not fit: with {format_bytes(memory.high_reserved_bytes)} reserved {beside}, "
        f"expect retries at {memory.peak_moment}"
    )


def with_stalls(played: SimulatedStep, memory: MemoryUse, calibration: Calibration) -> SimulatedStep:
    """The step with what the allocator's retries cost: segments given back to the driver and taken again.

    The host waits for the driver; that the device runs dry meanwhile is not in the figure. Unchanged where the plan does
    not fit, or the calibration has no `cuda_malloc` and `cuda_free`.
    """
    if memory.pool is not None:
        return _with_pool(played, memory, calibration)
    pressure = memory.pressure
    malloc, free = calibration.overheads.cuda_malloc, calibration.overheads.cuda_free
    if pressure is None or not pressure.num_retries or not memory.retries or malloc is None or free is None:
        return played
    stall_s = malloc.seconds(pressure.malloc_calls, pressure.malloc_bytes)
    stall_s += free.seconds(pressure.free_calls, pressure.free_bytes)
    return replace(
        played,
        step_s=played.step_s + stall_s,
        upper_s=played.upper_s + stall_s,
        breakdown={**played.breakdown, STALL: stall_s},
    )


def with_paging(played: SimulatedStep, memory: MemoryUse, lowering: Lowering) -> SimulatedStep:
    """The step with pages of optimizer states that come for its update and leave again, because the GPU has no room for them."""
    size, tier = paged_bytes(shard_of(lowering.model, lowering.plan), lowering.plan), lowering.cluster.host_tier
    out = min(size, memory.used_bytes + size - memory.capacity_bytes)
    if not size or out <= 0 or tier is None:
        return played
    paging_s = out / PAGED_SHARE * (1 / tier.h2d_bytes_per_s + 1 / tier.d2h_bytes_per_s)
    return replace(
        played,
        step_s=played.step_s + paging_s,
        upper_s=played.upper_s + paging_s,
        breakdown={**played.breakdown, "paging": paging_s},
    )


def _with_pool(played: SimulatedStep, memory: MemoryUse, calibration: Calibration) -> SimulatedStep:
    """The step with the host time of the plan's own memory pool.

    The host waits for its calls of the driver; an own allocator's time is exposed where the host is not ahead by it.
    """
    pool = memory.pool
    if pool is None or not memory.fit.runs:
        return played
    costs = DriverCosts.of(calibration)
    stall_s = summed(costs.all_seconds(call, count, pool.call_bytes[call]) for call, count in pool.calls.items())
    if pool.refill_every:
        stall_s += summed(costs.all_seconds(call, *more) for call, more in pool.refill.items()) / pool.refill_every
    ahead_s = float(played.step_s - played.host_s) if played.host_s else 0.0  # a host that waits is never ahead
    own_s = max(0.0, pool.host_s - ahead_s)
    return replace(
        played,
        step_s=played.step_s + stall_s + own_s + pool.compress_s,
        upper_s=played.upper_s + stall_s + pool.host_s + pool.compress_s,
        breakdown={
            **played.breakdown,
            **({STALL: stall_s} if stall_s else {}),
            **({OWN_ALLOCATOR: own_s} if own_s else {}),
            **({"compression": pool.compress_s} if pool.compress_s else {}),
        },
    )


def pool_sources(memory: MemoryUse, calibration: Calibration) -> tuple[Source, ...]:
    """What the time of a pool's calls rests on; nothing where the plan asks for none."""
    if memory.pool is None:
        return ()
    source = DriverCosts.of(calibration).source
    return (Source(what="pool", kind="assumed" if source.startswith("assumed") else "calibrated", detail=source),)


def suggest(
    lowering: Lowering,
    played: SimulatedStep,
    memory: MemoryUse,
    remedies: Sequence[Remedy] | None,
    inside: Callable[[], str],
) -> str:
    """What to try: changes found to fit where the plan does not surely, else from what dominates the time.

    remedies: None where nobody looked for them. inside: asks what shards inside nodes would do for the step.
    """
    if memory.fit is not Fit.FITS:
        return fitting(remedies, lowering.plan.num_devices) if lowering.rank_classes is None else _ON_EQUAL_NODES
    return _waited_for(lowering, played) or _moved(played, memory) or _faster(lowering, played, memory, inside)


def _moved(played: SimulatedStep, memory: MemoryUse) -> str:
    """What to try where moves of a pool between HBM and the tiers below it are most of what compute waits for."""
    kinds = {f"exposed:{kind}" for kind in SIGMA}
    share = {name: value / played.step_s for name, value in played.breakdown.items() if name.startswith("exposed:")}
    moved = summed(value for name, value in share.items() if name in kinds)
    if not memory.spilled_bytes or moved < 0.05 or moved < summed(share.values()) / 2:
        return ""
    return f"{100 * moved:.0f} % of the step waits for what moves between HBM and the tiers below it: {_LESS_MOVED}"


def _waited_for(lowering: Lowering, played: SimulatedStep) -> str:
    """The kind of GPU whose compute all others wait for, where that is most of what could be gained.

    Stages of a pipeline have different work, so that what is longest there is not always slow.
    """
    if lowering.rank_classes is None or lowering.plan.pp > 1 or 0 not in played.kinds:
        return ""
    kinds = lowering.rank_classes.kinds
    seconds = {number: compute_s(each) for number, each in played.kinds.items()}
    slowest = max(seconds, key=lambda number: seconds[number])
    longer_s = seconds[slowest] - seconds[0]
    if longer_s < 0.03 * played.step_s:
        return ""
    count = summed(number == slowest for number in kinds.of_rank.values())
    difference = kinds.kinds[slowest].unlike(kinds.kinds[0])
    whom = f"{count:,} GPU{'s' if count != 1 else ''} ({difference}) compute{'' if count != 1 else 's'}"
    return f"{whom} {format_seconds(longer_s)} longer than the others, which wait: a plan without them may be faster"


def _faster(lowering: Lowering, played: SimulatedStep, memory: MemoryUse, inside: Callable[[], str]) -> str:
    """What to try where memory is no matter."""
    plan = lowering.plan
    share = {name: seconds / played.step_s for name, seconds in played.breakdown.items()}
    exposed = summed(value for name, value in share.items() if name.startswith("exposed"))
    room = memory.capacity_bytes - memory.used_bytes
    if share.get("host", 0) > max(exposed, 0.1):
        return "the host launches kernels slower than the GPU runs them: compile the blocks or use larger micro-batches"
    if share.get("bubble", 0) > max(exposed, 0.1):
        return _smaller_bubble(plan, share["bubble"])
    if share.get("exposed:all_to_all", 0) > exposed / 2 > 0.05 and plan.ep > 1:
        return _nearer_experts(lowering, share["exposed:all_to_all"])
    if exposed > 0.1:
        return _less_waiting(lowering, memory, exposed, share.get("exposed:cpu_adam", 0), inside)
    if share.get("recompute", 0) > 0.05 and room > memory.peak_allocated_bytes // 2:
        less = _less_recomputed(lowering, room, played.breakdown["recompute"])
        if less:
            return f"memory is left over: {less}"
    larger = f"memory is left over: micro_batch_size = {2 * plan.micro_batch_size} makes larger, faster kernels"
    dominates = "compute dominates: a faster attention kernel or compiled blocks (--stack) is what is left"
    return larger if room > memory.peak_allocated_bytes else dominates


def _recomputing_less(lowering: Lowering) -> str:
    """The ways to recompute less that plan and model can take."""
    plan, every = lowering.plan, 2 * lowering.plan.recompute.every
    ways = {"recompute = selective": ("selective", 1), f"every_k with recompute_every = {every}": ("every_k", every)}
    if plan.recompute.mode == "selective":
        ways = {"recompute = none": ("none", 1)}
    plans = {way: plan.copy_with(recompute=mode, recompute_every=each) for way, (mode, each) in ways.items()}
    return " or ".join(way for way, less in plans.items() if not faults(Case(plan=less, model=lowering.model)))


def _less_recomputed(lowering: Lowering, room: int, seconds: float) -> str:
    """To recompute nothing if what the layers then keep of a micro-batch surely has room, else less; empty where none can."""
    plan, took = lowering.plan, f"about {format_seconds(seconds)} a step"
    sizes = {block.name: block.saved_bytes - block.input_bytes for block in lowering.blocks.body}
    kept = sum(sizes[kind] for kind in whole_body(lowering.model, plan))
    if plan.recompute.mode == "full" and plan.pp == 1 and _WITH_SPLITS * kept < room:
        return f"recompute = none keeps {format_bytes(kept)} more, of {format_bytes(room)} free, and saves {took}"
    less = _recomputing_less(lowering)
    return less and f"recompute less ({less}) to save {took}"


def fitting(remedies: Sequence[Remedy] | None, num_devices: int) -> str:
    """A line a remedy, cheapest first."""
    if remedies is None:
        return "predict(..., advise=True) looks for what would make it fit"
    if not remedies:
        return "no change that was tried makes it fit: more devices to shard over, or shorter sequences per rank (cp)"
    return "\n".join(f"{number}. {_line(remedy, num_devices)}" for number, remedy in enumerate(remedies, start=1))


def _line(remedy: Remedy, num_devices: int) -> str:
    marks = [f"step {format_seconds(remedy.step_s)}", f"{format_bytes(remedy.used_bytes)} used"]
    marks += [f"{remedy.cost - 1:+.1%} device time a token"]
    marks += [f"{remedy.num_devices:,} devices"] if remedy.num_devices != num_devices else []
    marks += ["changes the numerics"] if remedy.changes_numerics else []
    return f"{remedy.change}: {', '.join(marks)}"


def _nearer_experts(lowering: Lowering, share: float) -> str:
    """What to try where tokens wait on their way to experts and back."""
    plan, domain = lowering.plan, lowering.cluster.nvlink_domain_size
    percent = f"{100 * share:.0f} % of the step sends tokens to their experts and back"
    if not lowering.fabric.shape("ep").spans_domain:
        return f"{percent}: a smaller ep where memory allows, or larger micro-batches"
    group = plan.ep * plan.experts.etp
    if group <= domain:
        used = domain // group * group
        return (
            f"{percent}: groups of {group} straddle NVLink domains of {domain}; jobs on {used} GPUs of each keep inside"
        )
    inside = (n for n in range(2, plan.ep + 1) if plan.ep % n == 0 and domain % (n * plan.experts.etp) == 0)
    near = max(inside, default=1)
    other = ', or dispatcher = "deep_ep", which sends a token once to each node'
    deep = "" if plan.experts.dispatcher == "deep_ep" else other
    return f"{percent}, past the NVLink of {domain} GPUs: ep = {near} stays inside it{deep}"


def _smaller_bubble(plan: Plan, bubble: float) -> str:
    """What to try where stages wait for each other: (pp - 1) / (m + pp - 1) of a plain pipeline (arXiv:2104.04473, 2.2)."""
    enough = 4 * plan.pp  # leaves a fifth
    halved = f"micro_batch_size = {plan.micro_batch_size // 2} makes twice as many of the same batch"
    if plan.num_micro_batches < enough:
        more = f"num_micro_batches = {enough} instead of {plan.num_micro_batches}"
        more += f" ({halved})" if plan.micro_batch_size % 2 == 0 else ""
    else:
        more = halved if plan.micro_batch_size % 2 == 0 else "more micro-batches"
    chunks = "" if plan.pipeline.virtual_stages > 1 else ", virtual stages"
    return f"{100 * bubble:.0f} % of the step is the pipeline's bubble: {more}{chunks}, or fewer stages"


def _less_waiting(
    lowering: Lowering, memory: MemoryUse, exposed: float, stepped: float, inside: Callable[[], str]
) -> str:
    """stepped: of what is exposed, the optimizer on the host."""
    plan = lowering.plan
    if stepped > exposed / 2:
        percent = f"{100 * stepped:.0f} % of the step waits for the optimizer on the host's cores"
        return f"{percent}: num_micro_batches = {4 * plan.num_micro_batches} spreads it over four times the tokens"
    percent = f"{100 * exposed:.0f} % of the step waits for communication"
    if (whole := _whole_bytes(plan, memory)) <= memory.capacity_bytes:
        held = f"each GPU holds them (some {format_bytes(whole)})"
        return f"{percent}: zero = 0, data_parallel = ddp gathers no frozen weights, {held}"
    if plan.zero == 3 and plan.dp_replicate == 1:
        return f"{percent}: {inside()}{'accumulate fewer, ' if plan.num_micro_batches > 1 else ''}larger micro-batches"
    return f"{percent}: larger micro-batches give each collective more compute to hide behind"


def _whole_bytes(plan: Plan, memory: MemoryUse) -> float:
    """About what a rank needs that shards nothing, where weights beside adapters are sharded and nothing else is; else without end."""
    if not plan.peft.adds or plan.zero < 3 or plan.dp_shard != plan.num_devices or plan.offload.any:
        return inf
    gathered = memory.by_category.get("unsharded_parameters", 0) + memory.by_category.get("all_gather", 0)
    live = memory.peak_allocated_bytes - gathered + memory.resident_bytes * (plan.dp_shard - 1)
    return live * RESERVED_HIGH + memory.outside_torch_bytes
