"""Where a captured program's prediction comes from: the program, what was answered for it, what priced its kernels, and how sure it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from simulator.parallel.mesh import Mesh
from simulator.predict.confidence import LINKS, carrier, host_parts, reaches, seen, shares
from simulator.predict.play import SimulatedStep
from simulator.predict.prediction import Source
from simulator.predict.slopes import HOST
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture
from simulator.work.captured.script import CapturedScript
from simulator.work.captured.solvers import SOLVERS
from simulator.work.collectives import sigma as collective_sigma
from simulator.work.offload import SIGMA
from simulator.work.script.instructions import Communicate


def listed(ranks: Sequence[int]) -> str:
    """The first of the ranks, and the last."""
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} … {ranks[-1]}"


def sources_of(capture: Capture, scripts: Mapping[int, CapturedScript]) -> list[Source]:
    """Facts of the program, and the answers that it was given for unknown values."""
    launched = sum(each.launches for each in scripts.values())
    ranks = tuple(scripts)
    who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} of {capture.world_size:,}"
    detail = f"{launched:,} operators with kernels a step, {who}, torch {capture.torch}"
    found = [Source(what="program", kind="given", detail=detail)]
    answers, unpriced, unmodelled = Counter[str](), Counter[str](), Counter[str]()
    for one in (capture, *capture.others):
        answers |= Counter(one.answers)
    for each in scripts.values():
        unpriced, unmodelled = unpriced + each.unpriced, unmodelled + each.unmodelled
    for question, times in sorted(answers.items()):
        found.append(
            Source(what="answered", kind="assumed", detail=f"{question}{f' ({times} times)' if times > 1 else ''}")
        )
    for counts, how in (unpriced, ""), (unmodelled, "no cost model: takes no time here"):
        for name, count in sorted(counts.items()):
            detail = f"{name}, {count} times a step: {how or _priced_by(name)}"
            found.append(Source(what="no rule", kind="assumed", detail=detail))
    return found


def _priced_by(operator: str) -> str:
    name = operator.partition(".")[2].partition(".")[0]
    if name in SOLVERS:
        return "priced by LAPACK's count, a column after another"
    return "priced by a step after another" if name.startswith("_ctc_loss") else "priced by its bytes"


def input_sources(cluster: Cluster, calibration: Calibration, stack: Stack) -> list[Source]:
    """Where the prices of a program's kernels come from."""
    machine = f"{calibration.name}: {calibration.provenance.machine}"
    return [
        Source(what="device", kind="datasheet", detail=cluster.device.name),
        Source(what="kernels", kind=calibration.kind, detail=machine),
        Source(what="stack", kind="assumed", detail=f"{stack.name}: what the host takes to launch"),
    ]


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
