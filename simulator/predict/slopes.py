"""How a step follows each coefficient that can be learned (`spec.calibration.learned`), and how sure each is beforehand.

A slope is the relative change of the step for a relative change of the coefficient: its share of the step. Waits for slower GPUs
and for other pipeline stages have no coefficient of their own; they grow with the rest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from simulator.base.sums import summed
from simulator.parallel.mesh import GroupShape
from simulator.play.lower import Lowering
from simulator.predict.play import SimulatedStep, collective_s
from simulator.spec.calibration.learned import CoefficientName
from simulator.work.offload import SIGMA as TRANSFER_SIGMA
from simulator.work.program import Collective, Compute

HOST: Final = "host"
Slopes = dict[CoefficientName, float]
# Categories of a breakdown that follow all others, and those with a coefficient of their own; the rest are streams
_FOLLOWING: Final = ("bubble", "stragglers", "recompute", "overhead")
_OWN: Final[Mapping[str, CoefficientName]] = {"gemm": "products", "attention": "attention", "interference": "overlap"}
# One sigma before any step was measured, where the interval of a step has no part of that name. Latencies: residuals of small
# messages in the sweeps of links. Overlap: published losses beside collectives lie within a few percent of the physical ones
# where the software is described; elsewhere as much as half of the hidden communication may show (end of the 90 %).
LATENCY_SIGMA: Final = 0.25
OVERHEAD_SIGMA: Final = 0.005  # seconds a step of loaders, logs and loops: milliseconds
OVERLAP_SIGMA, UNKNOWN_OVERLAP_SIGMA = 0.03, 0.3


def group_shape(lowering: Lowering, stream: str) -> GroupShape:
    """The group that meets on a stream of the program."""
    role = stream.removeprefix("nccl:")
    return lowering.mesh.pair_shape(0, 1) if role.startswith("pp") else lowering.fabric.shape(role)


def slopes(lowering: Lowering, played: SimulatedStep, host_sigma: float) -> Slopes:
    """The slope of each coefficient. host_sigma: of a host's time, by which one that keeps ahead may fall behind."""
    found: defaultdict[CoefficientName, float] = defaultdict(float)
    moving = summed(seconds for name, seconds in played.breakdown.items() if name not in _FOLLOWING) or played.step_s
    links, issuing = _links_of(lowering, played), _host_of_collectives(lowering, played)
    for name, seconds in played.breakdown.items():
        share, kind = seconds / moving, name.removeprefix("exposed:")
        if name in _FOLLOWING or kind in TRANSFER_SIGMA:
            continue
        if name == HOST:
            found["operators"] += share * (1 - issuing)
            found["collectives"] += share * issuing
        elif name.startswith("exposed:"):
            for coefficient, part in links.get(kind, {"node_links": 1.0}).items():
                found[coefficient] += share * part
        elif name != "interference":
            found[_OWN.get(name, "elementwise")] += share
    late = math.log(max(1.0, math.exp(host_sigma) * played.issuing_s / played.step_s)) / host_sigma
    found["operators"] = max(found["operators"], late * (1 - issuing))
    found["collectives"] = max(found["collectives"], late * issuing)
    active_s = summed(hidden for _, hidden in played.communication.values())
    found["overlap"] = active_s / played.step_s
    found["overhead"] = 1 / played.step_s
    found["software"] = 1.0
    return dict(found)


def _links_of(lowering: Lowering, played: SimulatedStep) -> dict[str, Slopes]:
    """Of each kind of collective: which coefficients its time hangs on; `growth` in doublings of the nodes."""
    learned = lowering.curves.learned
    first = (learned.nodes if learned else 1.0) * lowering.cluster.nvlink_domain_size / lowering.cluster.gpus_per_node
    weights: defaultdict[str, defaultdict[CoefficientName, float]] = defaultdict(lambda: defaultdict(float))
    total: defaultdict[str, float] = defaultdict(float)
    for one in sent(lowering, played):
        of, flow_s = weights[one.kind], one.seconds - one.latency_s
        of["latency"] += one.latency_s
        of["network" if one.shape.spans_domain else "node_links"] += flow_s
        if one.shape.spans_domain:
            of["growth"] += flow_s * math.log2(one.shape.num_nodes / first)
        total[one.kind] += one.seconds
    return {
        kind: {name: part / total[kind] for name, part in of.items()} for kind, of in weights.items() if total[kind]
    }


@dataclass(frozen=True, slots=True)
class Sent:
    """Equal calls of a program: seconds and latency_s are those of all together, alone on the links.

    awaited_s: of latency_s, until the last rank has come, where the stack says so.
    """

    kind: str
    shape: GroupShape
    size_bytes: int
    seconds: float
    latency_s: float
    awaited_s: float = 0.0


def sent(lowering: Lowering, played: SimulatedStep) -> Iterator[Sent]:
    """A step's collectives, including those inside blocks, without copies to and from hosts."""
    program = played.program
    ops = {(op.kind, op.stream, op.size_bytes): op for op in program.ops if isinstance(op, Collective)}
    counts = Counter((op.kind, op.stream, op.size_bytes) for op in program.ops if isinstance(op, Collective))
    for (kind, stream, size), op in ops.items():
        if kind not in TRANSFER_SIGMA:
            count = counts[kind, stream, size]
            seconds, latency_s = float(collective_s(op, program)), float(op.cost.latency_s)
            yield Sent(kind, group_shape(lowering, stream), size, count * seconds, count * latency_s)
    for kind, role, size, count in program.exchanges:
        if kind in TRANSFER_SIGMA or kind.startswith("copied"):
            continue
        cost = lowering.fabric.price(kind, role, size)[0]
        flow_s = max(
            (float(b) / float(program.links[k]) for k, b in cost.link_bytes.items() if k in program.links), default=0.0
        )
        awaited_s = count * lowering.stack.fitted.collective_wait_s
        latency_s = count * float(cost.latency_s) + awaited_s
        yield Sent(kind, lowering.fabric.shape(role), size, count * flow_s + latency_s, latency_s, awaited_s)


def _host_of_collectives(lowering: Lowering, played: SimulatedStep) -> float:
    """Of the host's time: the part that collectives take, those inside a block among them."""
    ops, host = played.program.ops, lowering.stack.host
    issued = float(summed(op.host_s for op in ops if isinstance(op, Collective)))
    every = issued + float(summed(op.host_s for op in ops if isinstance(op, Compute))) + played.program.hosted_s
    inside = summed(count for *_, count in played.program.exchanges) * (host.collective_s + host.redistribute_s)
    return min(1.0, (issued + inside) / every) if every else 0.0
