"""The uncertainty of a prediction: the parts of its interval, and their sum."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from simulator.base.kernels import Stream
from simulator.base.sums import summed
from simulator.memory.pools import asks_for_pool
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import Lowering
from simulator.play.lower.power import step_kernels
from simulator.predict.play import SimulatedStep
from simulator.predict.prediction import STALL
from simulator.predict.slopes import (
    HOST,
    LATENCY_SIGMA,
    OVERHEAD_SIGMA,
    OVERLAP_SIGMA,
    UNKNOWN_OVERLAP_SIGMA,
    Sent,
    sent,
    slopes,
)
from simulator.spec.calibration.collective_curves import DOUBLING_SIGMA
from simulator.spec.calibration.intervals import HOST_SIGMA, Part, intervals
from simulator.spec.calibration.learned import CoefficientName, Learned
from simulator.spec.calibration.narrow import BLOCKS_SIGMA, FP4_SIGMA, ROWS_SIGMA
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.work.collectives import sigma as collective_sigma
from simulator.work.offload import SIGMA as TRANSFER_SIGMA

LINKS = "communication"
# What carries a collective, each with curves, and errors, of its own
CARRIERS: Final[Mapping[str, Part]] = {
    "node links": "links",
    "PCIe": "pcie",
    "network": "network",
    "exchanges between nodes": "exchanges",
}
SLOWER = "slower "  # of a part at its slow end: what the step takes longer than its share of it says. No step is shorter for it
EAGER = "eager experts"
UNCOUNTED = "uncounted host work"
Z90 = 1.6449  # two-sided 90 % of a normal distribution
RELEASE = "release"
SHEET = "network by its sheet"
WAITING = "hosts that may wait for every rank"
RETRIES = "ranks whose allocators retry apart"
# torchao's products with a scale a row gain nothing over 16-bit ones beside DTensors: 0.96 of their speed with tp 2 on four H100
# (github.com/pytorch/torchtitan issue 1207), where layers alone gain. No cause is published, so they may: twice as long is the end
ROWS = "fp8 by rows under tensor parallelism"
# Megatron wants one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS) beside tensor or context parallelism, and more of them beside exchanges
# of experts that overlap: its training/arguments.py warns that a run has one of the two. No plan says which; in one queue they overlap nothing
QUEUE = "exchanges in one hardware queue"
_LATE_ALONE = (SHEET, WAITING, RETRIES, ROWS, QUEUE)
SOFTWARE = "software"
LEARNED = "learned"
UNTIMED = "kernels without a measurement"
_SMALL = 1e-4  # of a step: parts of a sigma below it are left out where it was learned
# Of a stack's own sigma: what it errs by in all steps alike, and so what a few of them teach. The rest is each step's own; as much
# of one as of the other, for lack of a better prior
OF_ALL_STEPS = math.sqrt(0.5)
# One sigma of what stacks make of each part of a step, where nobody says which runs: attention kernels of one GPU lie 10 to 50 %
# apart, eager and fused blocks a factor 2 in what streams over memory (../docs/background/kernels.md). Of software that nobody
# described overlap is unknown too, the host, and what is left: experiments/unnamed_software.py predicts each source of runs as if its
# stack did not exist. Half take longer, by 0.38 (root mean square, of log time), the others less, by 0.12: programs hide and join less.
_UNNAMED = {
    "attention": 0.35,
    "gemm": 0.05,
    LINKS: 0.25,
    HOST: 0.0,
    "bubble": 0.05,
    "stragglers": 0.0,
    "recompute": 0.1,
}
_UNNAMED_STREAMS = 0.4
_UNNAMED_EXPOSED = 0.5  # of the hidden communication: the end of the 90 %
_UNKNOWN_SOFTWARE = 0.2  # and as much again above
# One sigma of the logarithm of what a layer costs the host in programs of one kind: 0.9, 3.4, 3.8, 3.8 and 8.9 ms each of Llama 3 8B's
# on an H100's host in five stacks of hand-written layers (topologies/stacks), which is 0.8, or 0.7 without the one whose launches block
_UNKNOWN_HOST = 0.7
# Of programs that nobody described, how rows come to their experts is not known: as slices in one padded tensor, one expert after
# another or sorted lie a factor of 1.05 to 4.4 apart on six plans of one cluster (../docs/background/experts.md); 2 taken for the
# end of the 90 %
_UNKNOWN_EXPERTS = math.log(2) / Z90
# Of programs whose way was read in their code, half of that (in logs): their passes are counted, and no kernel of them was timed
_EAGER_EXPERTS = _UNKNOWN_EXPERTS / 2
# One sigma of the logarithm of a kernel's time that its bytes alone price: a factor of two taken for the end of the 90 %
_UNTIMED = math.log(2) / Z90
# What a host does beside the operators that are counted only adds to its time: logs, timers, checks, loaders, other threads. As much
# again taken for the end of the 90 %, and OVERHEAD_SIGMA a step
_UNCOUNTED = 1.0


def reaches(own: float, parts: Mapping[str, float]) -> tuple[float, float]:
    """(down, up): logarithms of the step over the ends of its 90 % interval.

    Errors within a category are taken as fully correlated (one curve prices them all), between categories as
    independent; each weighs as its share of the step. own: the stack's own spread, what kernels cannot explain, adds in
    quadrature. A network that is known by its sheet may be slower, but hardly faster; so may what else is `slower`.
    Hosts wait or they do not: the ends hold in either case.
    """
    waits = parts.get(WAITING, 0.0)
    late = summed(one**2 for name, one in parts.items() if upward(name) and name != WAITING)
    squares = own**2 + summed(one**2 for name, one in parts.items() if not upward(name))
    return Z90 * math.sqrt(squares), Z90 * (math.sqrt(squares + late) + waits)


def upward(name: str) -> bool:
    """A part of the interval's upper end alone."""
    return name in (*_LATE_ALONE, UNCOUNTED) or name.startswith(SLOWER)


def own_sigma(lowering: Lowering) -> float:
    """The uncertainty that kernels, links and host do not explain: the stack's, or the scatter of the user's own steps."""
    learned = lowering.calibration.learned
    stack = lowering.stack
    return seen(own_part(stack), stack.fitted.sigma) if learned is None else learned.scatter * learned.reach / Z90


def own_part(stack: Stack) -> Part:
    """What a stack leaves unexplained is less where its framework brings the layers than where a user's model calls operators."""
    return "stack" if stack.traits.own_layers else "model code"


def seen(name: str, one: float) -> float:
    """A part of a sigma as published runs scatter: what we knew beforehand times what its kind of part was off by."""
    return one * intervals().factor(kind_of(name))


def kind_of(name: str) -> Part | None:
    """The kind of a part; None: a kind that no runs judged."""
    name = name.removeprefix(SLOWER)
    kind, _, _ = name.partition(" of ")
    if name in (*_LATE_ALONE, "imbalance"):
        return None
    if name in TRANSFER_SIGMA:
        return "transfers"
    known: dict[str, Part] = {
        HOST: "host",
        UNCOUNTED: "uncounted",
        EAGER: "eager experts",
        UNTIMED: "untimed",
        "stack": "stack",
        "model code": "model code",
        RELEASE: "experts",
        **CARRIERS,
    }
    return "software" if name.partition(":")[0] == SOFTWARE else known.get(kind, "kernels")


def spread(lowering: Lowering, played: SimulatedStep) -> dict[str, float]:
    """The effect of each category's error on the step: one sigma, relative. The stack's own is not included.

    A release of the software does to a mixture of experts what it does: to all its plans alike.
    """
    if lowering.calibration.learned is not None:
        return _learned_spread(lowering, played, lowering.calibration.learned)
    stack, plan, found = lowering.stack, lowering.plan, dict[str, float]()
    if stack.fitted.experts_sigma and lowering.model.experts is not None:
        found |= _experts(stack)
    weights = shares(played.breakdown, played.step_s)
    for category, weight in weights.items():
        if category not in (HOST, LINKS, *TRANSFER_SIGMA):
            found[category] = weight * _kernel_sigma(lowering, category)
    if plan.precision.fp8_recipe == "rowwise" and plan.tp > 1:
        found[ROWS] = math.log1p(weights.get("gemm", 0.0)) / Z90
    if STALL in played.breakdown and not asks_for_pool(plan):  # at each rank's own time, and others wait
        found[RETRIES] = math.log1p((plan.num_devices - 1) * played.breakdown[STALL] / played.step_s) / Z90
    found |= _links(lowering, played)
    if lowering.calibration.kind != "ideal":
        found |= host_parts(played)
        found |= _untimed(lowering, played)
        if stack.known != "described":
            experts = lowering.model.experts is not None and stack.kernels.expert_rows == "sorted"
            found |= _unnamed(played, unknown=stack.known == "unknown", experts=experts)
    return {name: seen(name, one) for name, one in found.items()}


def _experts(stack: Stack) -> dict[str, float]:
    """Grouped products of sorted rows by what releases of a software differ by; loops over experts are less known than that."""
    loops = stack.kernels.expert_rows != "sorted"
    return {EAGER: _EAGER_EXPERTS} if loops else {f"{RELEASE} of {stack.name}": stack.fitted.experts_sigma}


def _learned_spread(lowering: Lowering, played: SimulatedStep, learned: Learned) -> dict[str, float]:
    """The same after a user's own steps: what each coefficient leaves, and what is less known here than where it was learned."""
    j, wider = slopes(lowering, played, HOST_SIGMA), learned.reach / Z90
    before = {one.name: one.prior_sigma for one in learned.coefficients}
    names = [one.name for one in learned.coefficients]
    parts = {
        name: j.get(name, 0.0) * summed(c * j.get(other, 0.0) for c, other in zip(row, names, strict=True))
        for name, row in zip(names, learned.covariance, strict=True)
    }
    positive = summed(part for part in parts.values() if part > 0)
    scale = summed(parts.values()) / positive if positive else 0.0  # what errs against each other makes one less
    found = {
        f"{LEARNED}: {n.replace('_', ' ')}": wider * math.sqrt(scale * part) for n, part in parts.items() if part > 0
    }
    for name, one in priors(lowering, played).items():
        less = abs(j.get(name, 0.0)) * math.sqrt(max(0.0, one**2 - before.get(name, 0.0) ** 2))
        if less > _SMALL:
            found[f"{name.replace('_', ' ')}, as not learned"] = less
    for category, weight in shares(played.breakdown, played.step_s).items():
        if category in TRANSFER_SIGMA:
            found[category] = weight * TRANSFER_SIGMA[category]
    return found | _untimed(lowering, played)


def priors(lowering: Lowering, played: SimulatedStep) -> dict[CoefficientName, float]:
    """One sigma of each coefficient before any step was measured: the parts of a prediction's interval."""
    stack = lowering.stack
    named, unknown = stack.known == "described", stack.known == "unknown"
    more = dict.fromkeys(_UNNAMED, 0.0) if named else _UNNAMED
    streams = 0.0 if named else _UNNAMED_STREAMS
    experts = _UNKNOWN_EXPERTS if unknown else summed(_experts(stack).values())
    calls = tuple(sent(lowering, played))
    near, far = (
        max((_sigma(lowering, one) for one in calls if one.shape.spans_domain is spans), default=0.0)
        for spans in (False, True)
    )
    return {
        "products": math.hypot(_kernel_sigma(lowering, "gemm"), more["gemm"]),
        "attention": math.hypot(_kernel_sigma(lowering, "attention"), more["attention"]),
        "elementwise": math.hypot(_kernel_sigma(lowering, "elementwise"), streams),
        "operators": HOST_SIGMA,
        "collectives": HOST_SIGMA,
        "node_links": math.hypot(near, more[LINKS]),
        "network": math.hypot(far, more[LINKS]),
        "growth": DOUBLING_SIGMA,
        "latency": LATENCY_SIGMA,
        "overlap": UNKNOWN_OVERLAP_SIGMA if unknown else OVERLAP_SIGMA,
        "overhead": OVERHEAD_SIGMA,
        "software": math.hypot(
            OF_ALL_STEPS * stack.fitted.sigma,
            experts if lowering.model.experts is not None else 0.0,
            math.sqrt(1.5) * _UNKNOWN_SOFTWARE if unknown else 0.0,  # the mean of both sides
        ),
    }


def _unnamed(played: SimulatedStep, *, unknown: bool, experts: bool) -> dict[str, float]:
    """The relative effect of other software on the step, one sigma: by the nature of its parts."""
    found = dict[str, float]()
    for category, weight in shares(played.breakdown, played.step_s).items():
        name = category if category in _UNNAMED else "elementwise"
        found[name] = found.get(name, 0.0) + weight * _UNNAMED.get(category, _UNNAMED_STREAMS)
    late = dict[str, float]()
    if unknown:
        found["rest"] = late["rest"] = _UNKNOWN_SOFTWARE
        found[HOST], late[HOST] = _host_ends(played, _UNKNOWN_HOST)
        hidden_s = summed(hidden for _, hidden in played.communication.values())
        late["overlap"] = math.log1p(_UNNAMED_EXPOSED * hidden_s / played.step_s) / Z90
        late["experts"] = _UNKNOWN_EXPERTS if experts else 0.0
    named = {f"{SOFTWARE}: {name}": one for name, one in found.items()}
    named |= {f"{SLOWER}{SOFTWARE}: {name}": one for name, one in late.items()}
    return {name: one for name, one in named.items() if one}


def _untimed(lowering: Lowering, played: SimulatedStep) -> dict[str, float]:
    """The effect of kernels without calibration, by their share of the time of all kernels."""
    if not lowering.blocks.untimed:
        return {}
    timed = {False: 0.0, True: 0.0}
    shard = shard_of(lowering.model, lowering.plan)
    for _, kernel, times in step_kernels(shard, lowering.plan, lowering.stack, lowering.blocks):
        timed[isinstance(kernel, Stream) and kernel.untimed] += times * lowering.clock.seconds(kernel)
    weights = shares(played.breakdown, played.step_s)
    busy = summed(one for category, one in weights.items() if category not in (LINKS, HOST, *TRANSFER_SIGMA))
    return {UNTIMED: _UNTIMED * busy * timed[True] / summed(timed.values())}


def host_parts(played: SimulatedStep) -> dict[str, float]:
    """The effect of a slower or faster host on the step.

    Where the step waits for it, by that share. Where it runs ahead of the device, only once launching the step would take longer than
    the step: what a host at the end of the 90 % adds. A host that waits for the device on the way (collectives that block, reads of the
    loss) is no faster for it: its own time bounds the step all the same.
    """
    sure, late = _host_ends(played, HOST_SIGMA)
    more = (_host_share(played) * _UNCOUNTED, Z90 * OVERHEAD_SIGMA / played.step_s)
    return {HOST: sure, SLOWER + HOST: late, UNCOUNTED: math.hypot(*map(math.log1p, more)) / Z90}


def _host_ends(played: SimulatedStep, sigma: float) -> tuple[float, float]:
    """What a host whose times are known to one `sigma` of their logarithm makes of a step: (both ends, the upper one besides)."""
    step_s, slow = played.step_s, math.exp(Z90 * sigma)
    host_s = _host_share(played) * step_s
    return _ends(host_s * (1 - 1 / slow), max(step_s + host_s * (slow - 1), slow * played.issuing_s), step_s)


def _ends(less_s: float, slow_s: float, step_s: float) -> tuple[float, float]:
    """One sigma of a step that may take less_s less at one end of the 90 %, and slow_s at the other: (both ends, the upper one besides)."""
    sure = -math.log1p(-less_s / step_s) / Z90
    return sure, math.sqrt(max(0.0, (math.log(max(1.0, slow_s / step_s)) / Z90) ** 2 - sure**2))


def _links(lowering: Lowering, played: SimulatedStep) -> dict[str, float]:
    """What links make of a step, by what carries the messages, where they are as fast or slow as the ends of their 90 %.

    What is exposed shrinks and grows by that factor, and the step takes at least as long as one kind of collective or copy is on its
    way, hidden or not.
    """
    step_s, interference = played.step_s, played.breakdown.get("interference", 0.0)
    less, late, longest = (defaultdict[str, float](float) for _ in range(3))
    for (kind, carrier), (weight, of_all, sigma) in _carried(lowering, played).items():
        slow, (exposed_s, hidden_s) = math.exp(Z90 * sigma), played.communication.get(kind, (0.0, 0.0))
        waited_s = weight * played.breakdown.get(f"exposed:{kind}", 0.0) + of_all * interference
        less[carrier] += waited_s * (1 - 1 / slow)
        late[carrier] += waited_s * (slow - 1)
        if kind != "send_recv":  # waiting for another stage is no time of a link
            longest[carrier] = max(longest[carrier], slow * weight * (exposed_s + hidden_s))
    found: dict[str, float] = {}
    for carrier, less_s in less.items():
        ends = _ends(less_s, max(step_s + late[carrier], longest[carrier]), step_s)
        found |= dict(zip((carrier, SLOWER + carrier), ends, strict=True))
    return {name: one for name, one in found.items() if one}


def _carried(lowering: Lowering, played: SimulatedStep) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(kind, what carries it) -> (its part of the kind's time, of that of all collectives, one sigma). Copies carry themselves."""
    sums = defaultdict[tuple[str, str], list[float]](lambda: [0.0, 0.0])
    for one in sent(lowering, played):
        here = sums[one.kind, carrier(one.kind, lowering.cluster, spans_domain=one.shape.spans_domain)]
        here[0] += one.seconds
        here[1] += (one.seconds - one.awaited_s) * _sigma(lowering, one) + one.awaited_s * HOST_SIGMA
    total = defaultdict[str, float](float)
    for (kind, _), (seconds, _) in sums.items():
        total[kind] += seconds
    every = summed(total.values())
    found = {key: (s / total[key[0]], s / every, weighed / s) for key, (s, weighed) in sums.items() if s}
    copies = {(kind, kind): (1.0, 0.0, sigma) for kind, sigma in TRANSFER_SIGMA.items() if kind in played.communication}
    return found | copies


def carrier(kind: str, cluster: Cluster, *, spans_domain: bool) -> str:
    """What carries a collective of this kind, inside of a domain or beyond."""
    if spans_domain:
        return "exchanges between nodes" if kind == "all_to_all" else "network"
    return "PCIe" if cluster.intra.shape == "pcie" else "node links"


def _sigma(lowering: Lowering, one: Sent) -> float:
    fabric = lowering.fabric
    return collective_sigma(one.kind, one.size_bytes, one.shape, fabric.cluster, fabric.curves, nccl=fabric.nccl)


def _host_share(played: SimulatedStep) -> float:
    """Of a step: what waits for hosts. Pipeline stages that wait for each other wait for each other's hosts as well."""
    share = played.breakdown.get(HOST, 0.0) / played.step_s
    if "bubble" not in played.breakdown:
        return share
    host_s = worked_s = 0.0
    for found in map(played.timeline.breakdown, played.timeline.programs):
        host_s += float(found.get(HOST, 0.0))
        worked_s += summed(float(s) for name, s in found.items() if name != "idle" and not name.startswith("wait:"))
    return max(share, host_s / worked_s)


def _kernel_sigma(lowering: Lowering, category: str) -> float:
    """The calibration's; products that it has no curve of have that of their factor beside it."""
    one, plan = lowering.calibration.sigma(category, lowering.device), lowering.plan
    if category != "gemm" or not one:
        return one
    if plan.precision.compute == "nvfp4":
        return math.hypot(one, FP4_SIGMA)
    scaled: dict[str | None, float] = {
        "blockwise": BLOCKS_SIGMA if lowering.device.architecture == "hopper" else 0.0,
        "rowwise": ROWS_SIGMA,
    }
    return math.hypot(one, scaled.get(plan.precision.fp8_recipe, 0.0) if plan.narrow else 0.0)


def shares(breakdown: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Parts of a step by what their errors have in common: waits for the links are one, kernels are by category."""
    found: dict[str, float] = {}
    for name, seconds in breakdown.items():
        waiting = name.startswith("exposed") or name == "interference"
        kind = name.removeprefix("exposed:")
        category = kind if kind in TRANSFER_SIGMA else LINKS if waiting else name
        found[category] = found.get(category, 0.0) + seconds / step_s
    return found
