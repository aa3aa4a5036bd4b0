"""predict_program(): a captured program on a cluster, by the same road as a described plan.

Time and memory are read off its script; what is not known of a program that nobody described (tokens, what a remedy would
change) is not said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from simulator.base.errors import Fault, InputError
from simulator.base.kernels import Attention, Gemm, Kernel
from simulator.memory.history import History, script_history, step_live_bytes
from simulator.memory.outside import outside_torch_bytes, workspace_bytes
from simulator.memory.use import history_memory
from simulator.parallel.mesh import Mesh
from simulator.play.engine import run
from simulator.play.lower.script import script_program
from simulator.predict.confidence import Z90, shares
from simulator.predict.play import SimulatedStep, bounds
from simulator.predict.prediction import Prediction, Source
from simulator.predict.verdict import cause_of, with_stalls
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture
from simulator.work.captured.script import CapturedScript, captured_script
from simulator.work.collectives import sigma as collective_sigma
from simulator.work.program import Collective, Program
from simulator.work.script.instructions import Launch

STACK = "torch-2.11-eager"  # what an eager program's host takes, unless somebody names another
UNPRICED_SIGMA = math.log(2)  # of kernels that bytes alone price: assumed, a factor of two either way is one sigma
_COMMUNICATION = "communication"


def predict_program(
    capture: Capture,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    curves: LinkCurves | None = None,
    tokens_per_step: int = 0,
) -> Prediction:
    """Predict one step of a captured program.

    cluster: as many devices as the capture has ranks; another device than that of the capture is priced as it is, and runs
    the kernels that were captured. tokens_per_step: of all ranks, for throughput; 0: nobody says. Raises InputError,
    ClusterError or CalibrationError with every fault found.
    """
    _check(capture, cluster)
    stack = stack or Stack.load(STACK)
    calibration = calibration or Calibration.for_device(cluster.device)
    curves = curves or calibration.links or default_curves()
    script = captured_script(capture)
    plan = _plan(capture)
    program = script_program(script.step, plan, cluster, stack, calibration, curves)
    device = cluster.device
    history = _history(script, device)
    outside = outside_torch_bytes(device, plan, sum(len(group) > 1 for group in capture.groups), stack=stack)
    memory, trace = history_memory(history, step_live_bytes(history), plan, device, outside)
    played = with_stalls(_played(program), memory, calibration)
    spread = _spread(played, script, stack, calibration, Mesh(plan, cluster), curves)
    peak_flop_per_s = _peak(script, device)
    floor_s = script.flop / peak_flop_per_s
    reach = Z90 * math.sqrt(stack.fitted.sigma**2 + sum(one**2 for one in spread.values()))
    return Prediction(
        model=capture.target,
        cluster=cluster.name,
        num_devices=capture.world_size,
        step_s=played.step_s,
        low_s=max(played.step_s * math.exp(-reach), min(played.step_s, floor_s)),
        high_s=played.step_s * math.exp(reach),
        lower_s=played.lower_s,
        upper_s=played.upper_s,
        tokens_per_step=tokens_per_step,
        model_flop_per_step=0,
        hardware_flop_per_step=script.flop * capture.world_size,
        peak_flop_per_s=peak_flop_per_s,
        breakdown=dict(played.breakdown),
        communication=dict(played.communication),
        memory=memory,
        cause=cause_of(memory),
        suggestion="",
        extrapolated=_extrapolated(script, calibration, stack),
        sources=(*_sources(capture, script), *_inputs(cluster, calibration, stack)),
        timeline=played.timeline,
        memory_trace=trace,
        spread=spread,
        stack_sigma=stack.fitted.sigma,
    )


def _played(program: Program) -> SimulatedStep:
    """The program's step in time."""
    timeline = run([program])
    lower_s, upper_s = bounds(program)
    kinds = dict.fromkeys(op.kind for op in program.ops if isinstance(op, Collective))
    waits = {k: (float(timeline.exposed(k, program.name)), float(timeline.hidden(k, program.name))) for k in kinds}
    step_s = float(timeline.step_s)
    return SimulatedStep(
        step_s=step_s,
        lower_s=min(float(lower_s), step_s),
        upper_s=max(float(upper_s), step_s),
        breakdown={name: float(value) for name, value in timeline.breakdown(program.name).items()},
        communication=waits,
        timeline=timeline,
        program=program,
        num_played=1,
    )


def program_history(capture: Capture, cluster: Cluster) -> History:
    """The program's allocations and frees, event by event: all until the recorded step, then that step."""
    return _history(captured_script(capture), cluster.device)


def _history(script: CapturedScript, device: Device) -> History:
    return script_history(script.step, script.before, workspace_bytes(device))


def _check(capture: Capture, cluster: Cluster) -> None:
    if capture.world_size != cluster.num_devices:
        problem = f"was captured for {capture.world_size} ranks, and {cluster.name} has {cluster.num_devices} GPUs"
        remedy = f"shardwise capture … --ranks {cluster.num_devices}, or --nodes for as many GPUs as ranks"
        raise InputError(Fault(place=capture.target, problem=problem, remedy=remedy))
    if cluster.exceptions:
        problem = "a captured program is predicted on equal GPUs only"
        raise InputError(Fault(place="cluster: exceptions", problem=problem, remedy="a cluster without exceptions"))


def _plan(capture: Capture) -> Plan:
    """Who there is, and whether hooks around units issue the collectives, which takes the host time: FSDP2's operators say."""
    hooked = any(name.startswith("fsdp.") for name, _, _ in capture.signatures)
    if hooked and capture.world_size > 1:
        return Plan(dp_shard=capture.world_size, zero=3)
    return Plan(dp_replicate=capture.world_size, zero=0)


def _kernels(script: CapturedScript) -> Iterable[Kernel]:
    return (kernel for one in script.step if isinstance(one, Launch) for kernel in one.kernels)


def _peak(script: CapturedScript, device: Device) -> float:
    """The device's peak in the fastest precision that the program multiplies in; in any, where it multiplies nothing."""
    used = {kernel.dtype for kernel in _kernels(script) if isinstance(kernel, Gemm | Attention)}
    peaks = [device.peak(dtype) for dtype in used or ("fp16", "bf16", "fp32")]
    return max(peaks) or device.peak("fp32")


def _spread(
    played: SimulatedStep,
    script: CapturedScript,
    stack: Stack,
    calibration: Calibration,
    mesh: Mesh,
    curves: LinkCurves,
) -> dict[str, float]:
    """What each category's error makes of the step: one sigma, relative to it; operators that no rule knows widen it."""
    worst = {(op.kind, op.stream): op for op in played.program.ops if isinstance(op, Collective)}
    links = max(
        (
            collective_sigma(
                kind,
                op.size_bytes,
                mesh.group_shape(stream.removeprefix("nccl:")),
                mesh.cluster,
                curves,
                nccl=stack.software(),
            )
            for (kind, stream), op in worst.items()
        ),
        default=0.0,
    )
    found = {
        name: share * (links if name == _COMMUNICATION else calibration.sigma(name))
        for name, share in shares(played.breakdown, played.step_s).items()
    }
    unknown_s = _unpriced_s(played, script)
    return found | ({"operators without a rule": UNPRICED_SIGMA * unknown_s / played.step_s} if unknown_s else {})


def _unpriced_s(played: SimulatedStep, script: CapturedScript) -> float:
    """Seconds of operators that are priced by their bytes alone."""
    unknown = {name.partition(".")[2].partition(".")[0] for name in script.unpriced}
    return sum(
        float(span.nominal_s)
        for span in played.timeline.of(played.program.name)
        if span.label.rpartition(": ")[2].partition(" #")[0] in unknown
    )


def _extrapolated(script: CapturedScript, calibration: Calibration, stack: Stack) -> tuple[str, ...]:
    """What lies outside the range that the calibration measured."""
    kernels = dict.fromkeys(_kernels(script))
    notes = (calibration.extrapolated(kernel, stack.attention) for kernel in kernels)
    return tuple(dict.fromkeys(note for note in notes if note))


def _sources(capture: Capture, script: CapturedScript) -> list[Source]:
    """What is known of the program, and what had to be answered for it."""
    launched = sum(isinstance(one, Launch) for one in script.step)
    detail = f"{launched:,} operators with kernels a step, rank {capture.rank} of {capture.world_size:,}, torch {capture.torch}"
    found = [Source(what="program", kind="given", detail=detail)]
    for what, times in sorted(capture.answers.items()):
        found.append(
            Source(what="answered", kind="assumed", detail=f"{what}{f' ({times} times)' if times > 1 else ''}")
        )
    for name, count, how in (
        *_counted(script.unpriced, "priced by its bytes"),
        *_counted(script.unmodelled, "no cost model: takes no time here"),
    ):
        found.append(Source(what="no rule", kind="assumed", detail=f"{name}, {count} times a step: {how}"))
    return found


def _counted(counts: Counter[str], how: str) -> list[tuple[str, int, str]]:
    return [(name, count, how) for name, count in sorted(counts.items())]


def _inputs(cluster: Cluster, calibration: Calibration, stack: Stack) -> list[Source]:
    machine = f"{calibration.name}: {calibration.provenance.machine}"
    return [
        Source(what="device", kind="datasheet", detail=cluster.device.name),
        Source(what="kernels", kind=calibration.kind, detail=machine),
        Source(what="stack", kind="assumed", detail=f"{stack.name}: what the host takes to launch"),
    ]
