"""How sure a captured program's step is: the parts of its interval, and the interval's ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from simulator.parallel.mesh import Mesh
from simulator.predict.confidence import LINKS, carrier, host_parts, reaches, seen, shares
from simulator.predict.play import SimulatedStep
from simulator.predict.slopes import HOST
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.software.stack import Stack
from simulator.work.captured.script import CapturedScript
from simulator.work.collectives import sigma as collective_sigma
from simulator.work.offload import SIGMA
from simulator.work.script.instructions import Communicate

UNPRICED_SIGMA = math.log(2)  # of kernels that bytes alone price: assumed, a factor of two either way is one sigma


def program_spread(
    played: SimulatedStep,
    script: CapturedScript,
    stack: Stack,
    calibration: Calibration,
    mesh: Mesh,
    curves: LinkCurves,
) -> dict[str, float]:
    """The effect of each category's error on the step: one sigma, relative; unknown operators widen it."""
    calls = {
        (one.kind, one.role): one.size_bytes for one in script.step if isinstance(one, Communicate) and one.size_bytes
    }
    links = [
        (collective_sigma(kind, size, shape, mesh.cluster, curves, nccl=stack.software()), kind, shape.spans_domain)
        for (kind, role), size in calls.items()
        for shape in (mesh.group_shape(role),)
        if shape.num_ranks > 1
    ]
    worst, kind, spans = max(links, default=(0.0, "", False))
    parts, step_s = shares(played.breakdown, played.step_s), played.step_s
    device, cpu = mesh.cluster.device, played.breakdown.get("exposed:CPU", 0.0) / step_s
    found = {name: part * calibration.sigma(name, device) for name, part in parts.items() if name not in (HOST, LINKS)}
    found |= {
        carrier(kind, mesh.cluster, spans_domain=spans): worst * (parts.get(LINKS, 0.0) - cpu),
        "CPU": SIGMA["cpu_add"] * cpu,
    }
    found |= host_parts(played) if calibration.kind != "ideal" else {}
    found = {name: seen(name, one) for name, one in found.items() if one}
    unknown_s = unpriced_s(played, script)
    return found | ({"operators without a rule": UNPRICED_SIGMA * unknown_s / step_s} if unknown_s else {})


def program_reach(
    step_s: float,
    scripts: Collection[CapturedScript],
    spread: Mapping[str, float],
    stack: Stack,
    peak_flop_per_s: float,
) -> tuple[float, float]:
    """Ends of the 90 % interval, not below the largest rank's FLOP at the device's peak."""
    down, up = reaches(seen("stack", stack.fitted.sigma), spread)
    floor_s = max(one.flop for one in scripts) / peak_flop_per_s
    return max(step_s * math.exp(-down), min(step_s, floor_s)), step_s * math.exp(up)


def unpriced_s(played: SimulatedStep, script: CapturedScript) -> float:
    """Seconds of operators that are priced by their bytes alone."""
    if not script.unpriced:
        return 0.0
    unknown = {name.partition(".")[2].partition(".")[0] for name in script.unpriced}
    return sum(
        float(span.nominal_s)
        for span in played.timeline.of(played.program.name)
        if span.label.rpartition(": ")[2].partition(" #")[0] in unknown
    )
