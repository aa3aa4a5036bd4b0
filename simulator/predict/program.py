"""predict_program(): a captured program on a cluster, by the same road as a described plan.

Time and memory are read off its script; what is not known of a program that nobody described (tokens, what a remedy would
change) is not said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from simulator.base.errors import EngineError, InputError
from simulator.base.fit import Fit
from simulator.base.kernels import Attention, Gemm, Kernel
from simulator.base.units import counted, format_bytes
from simulator.memory.allocator import AllocatorSettings
from simulator.memory.history import History, script_history, step_live_bytes
from simulator.memory.outside import capacity_bytes, outside_torch_bytes, workspace_bytes
from simulator.memory.pools import asks_for_pool, compressed
from simulator.memory.use import MemoryUse, history_use, memory_trace
from simulator.parallel.mesh import Mesh
from simulator.play.engine import run
from simulator.play.lower.script import script_program
from simulator.predict.confidence import seen
from simulator.predict.play import SimulatedStep, bounds, issuing_s, launched_s
from simulator.predict.prediction import KindUse, Prediction, Source
from simulator.predict.program_remedies import advised
from simulator.predict.program_sources import input_sources, listed, program_reach, program_spread, sources_of
from simulator.predict.verdict import cause_of, compute_s, pool_sources, waiting_s, with_stalls
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.plan import Plan
from simulator.spec.plan.memory import USUAL_MEMORY, MemoryPlan
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture
from simulator.work.captured.meetings import Column, columns, unlike
from simulator.work.captured.script import CapturedScript, Prices, captured_script
from simulator.work.program import COMPUTE_STREAM, Collective, Program
from simulator.work.trace import MemoryTrace, Timeline

Change = Callable[[Capture], Capture | None]  # of one rank; None: it stays as it is
STACK = "torch-2.11-eager"  # what a program's host takes, unless somebody names another
COMPILED = "torch-2.11-compiled"  # the same where some of it is compiled


def usual_stack(capture: Capture) -> Stack:
    """Compiled PyTorch's where Inductor wrote some of the program's kernels, else eager PyTorch's."""
    return Stack.load(COMPILED if any(name.startswith("inductor.") for name, _, _ in capture.signatures) else STACK)


def predict_program(  # noqa: PLR0913  what a prediction hangs on
    capture: Capture,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    curves: LinkCurves | None = None,
    tokens_per_step: int | None = None,
    expandable_segments: bool = False,
    memory: MemoryPlan = USUAL_MEMORY,
    advise: bool = False,
) -> Prediction:
    """Predict one step of a captured program.

    cluster: as many devices as the capture has ranks; another device than that of the capture is priced as it is, and runs
    the kernels that were captured. tokens_per_step: of all ranks, for throughput; None: as the capture says, 0 where nobody
    does. expandable_segments: as PYTORCH_CUDA_ALLOC_CONF says it. memory: the pool, and what its calls take; without tiers below HBM. advise: where it does not surely fit, also predict what
    would make it fit. Raises InputError, ClusterError or CalibrationError with every fault found.
    """
    asked = _asked(capture, cluster, calibration, stack, curves, memory)
    found, played = _predicted(asked, tokens_per_step, expandable=expandable_segments)
    if not advise:
        return found
    again = partial(_remedied, stack=stack, memory=memory)
    return advised(found, capture, cluster, calibration, curves, again, asked.scripts, played)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A capture on a cluster, and what prices it.

    scripts: of the capture's ranks, as far as they are written; filled. change: what becomes of a rank, None: nothing.
    """

    capture: Capture
    cluster: Cluster
    calibration: Calibration
    stack: Stack
    curves: LinkCurves
    plan: Plan
    columns: Sequence[Column]
    scripts: dict[int, CapturedScript]
    change: Change | None

    def programs(self) -> list[Program]:
        """What the engine plays."""
        (column, *_), given = self.columns, (self.plan, self.cluster, self.stack, self.calibration, self.curves)
        parts = [(rank, column.num_ranks) if len(column.ranks) > 1 else None for rank in column.ranks]
        of_ranks = zip(column.ranks, parts, strict=True)
        return [script_program(self.scripts[rank].step, *given, part=part) for rank, part in of_ranks]


def _asked(  # noqa: PLR0913  what predict_program is asked, and what is known already
    capture: Capture, cluster: Cluster, calibration: Calibration | None, stack: Stack | None, curves: LinkCurves | None,
    memory: MemoryPlan = USUAL_MEMORY, scripts: dict[int, CapturedScript] | None = None, change: Change | None = None,
    *, known: bool = False,
) -> _Asked:  # fmt: skip
    """known: it exchanges the messages of one that has been predicted."""
    _check(capture, cluster)
    calibration = calibration or Calibration.for_device(cluster.device)
    return _Asked(
        capture=capture, cluster=cluster, calibration=calibration, stack=stack or usual_stack(capture),
        curves=curves or calibration.links or default_curves(), columns=columns(capture, known=known), change=change,
        plan=_plan(capture).model_copy(update={"memory": memory}), scripts={} if scripts is None else scripts,
    )  # fmt: skip


def _predicted(asked: _Asked, tokens_per_step: int | None, *, expandable: bool) -> tuple[Prediction, SimulatedStep]:
    """Also the step in time before what its memory costs."""
    capture, cluster, stack, calibration = asked.capture, asked.cluster, asked.stack, asked.calibration
    found = _memory_of_ranks(asked, expandable=expandable)
    assert found is not None
    uses, (use, trace_of) = found
    column, *others = asked.columns
    scripts = {rank: asked.scripts[rank] for rank in column.ranks}
    alone = played_programs(capture.target, asked.programs())
    script = scripts.get(int(alone.program.name.removeprefix("rank") or capture.rank), scripts[capture.rank])
    played = with_stalls(alone, use, calibration)
    spread = program_spread(played, script, stack, calibration, Mesh(asked.plan, cluster), asked.curves)
    ranks = (*sources_of(capture, scripts), *_beside(column, others, uses))
    peak_flop_per_s = _peak(scripts.values(), cluster.device)
    low_s, high_s = program_reach(played.step_s, scripts.values(), spread, stack, peak_flop_per_s)
    prediction = Prediction(
        model=capture.target, cluster=cluster.name, num_devices=capture.world_size, step_s=played.step_s, low_s=low_s, high_s=high_s,
        lower_s=played.lower_s, upper_s=played.upper_s, model_flop_per_step=0, peak_flop_per_s=peak_flop_per_s,
        tokens_per_step=capture.tokens_per_step if tokens_per_step is None else tokens_per_step,
        hardware_flop_per_step=column.num_ranks * sum(one.flop for one in scripts.values()),
        breakdown=dict(played.breakdown), communication=dict(played.communication), memory=use, cause=cause_of(use), suggestion="",
        extrapolated=_extrapolated(scripts.values(), calibration, stack), timeline=played.timeline, memory_trace=trace_of(),
        sources=(*ranks, *input_sources(cluster, calibration, stack), *pool_sources(use, calibration)),
        spread=spread, stack_sigma=seen("stack", stack.fitted.sigma), kinds=_kinds(column, played, uses, cluster.device),
    )  # fmt: skip
    return prediction, alone


def _remedied(  # noqa: PLR0913  what predict_program is asked, and what is known already
    capture: Capture, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None, *,
    curves: LinkCurves | None = None, expandable_segments: bool = False, memory: MemoryPlan = USUAL_MEMORY,
    scripts: dict[int, CapturedScript] | None = None, played: SimulatedStep | None = None, change: Change | None = None,
) -> tuple[float, MemoryUse] | None:  # fmt: skip
    """Seconds of a step and memory of what would make a program fit; None where it does not surely, before time is played.

    played: the step in time, where it is that of the program as it is.
    """
    asked = _asked(capture, cluster, calibration, stack, curves, memory, scripts, change, known=True)
    found = _memory_of_ranks(asked, expandable=expandable_segments, only_fitting=True)
    if found is None:
        return None
    _, (use, _) = found
    return with_stalls(played or played_briefly(asked.programs()), use, asked.calibration).step_s, use


def _scripts(asked: _Asked) -> Iterator[tuple[Capture, CapturedScript]]:
    """Each captured rank with its script; those not known yet are written, and kept, when they are asked for."""
    prices, alive = dict[int, Prices](), list[object]()  # whose ids are prices' keys
    column, known = asked.columns[0], asked.scripts
    for one in (asked.capture, *asked.capture.others):
        if one.rank not in known:
            changed = (asked.change(one) if asked.change else None) or one
            alive.append(changed.signatures)
            known[one.rank] = captured_script(changed, column if one.rank in column.ranks else None, prices)
        yield one, known[one.rank]


def lowered_programs(
    capture: Capture, cluster: Cluster, stack: Stack, calibration: Calibration, curves: LinkCurves
) -> list[Program]:
    """The programs that the engine simulates."""
    asked = _asked(capture, cluster, calibration, stack, curves)
    for _ in _scripts(asked):  # which keeps each one
        pass
    return asked.programs()


def played_programs(target: str, programs: Sequence[Program]) -> SimulatedStep:
    """The programs' step in time, seen from the one that computes longest. Raises InputError where they never end, or nothing runs."""
    try:
        timeline = run(programs)
    except EngineError as exc:
        remedy = "calls in one order on both sides, or batch_isend_irecv for what goes both ways"
        raise InputError.at(target, f"as on GPUs, {exc}", remedy) from None
    if not timeline.step_s:
        raise InputError.at(target, "nothing of it takes time", "a step that computes")
    program = max(programs, key=lambda one: timeline.busy(one.name, COMPUTE_STREAM))
    limits = [bounds(one) for one in programs]
    lower_s, upper_s = max(one for one, _ in limits), sum(one for _, one in limits)
    kinds = dict.fromkeys(op.kind for op in program.runs if isinstance(op, Collective))
    waits = timeline.communication(kinds, program.name)
    step_s, breakdown = float(timeline.step_s), _breakdown(timeline, program.name)
    if "send_recv" in waits and len(programs) > 1:  # waiting for the other end is the bubble
        waits["send_recv"] = breakdown.get("exposed:send_recv", 0.0), waits["send_recv"][1]
    return SimulatedStep(
        step_s=step_s,
        lower_s=min(float(lower_s), step_s),
        upper_s=max(float(upper_s), step_s),
        breakdown=breakdown,
        communication=waits,
        timeline=timeline,
        program=program,
        num_played=1,
        host_s=max(map(launched_s, programs)),
        issuing_s=max(map(issuing_s, programs)),
    )


def played_briefly(programs: Sequence[Program]) -> SimulatedStep:
    """How long the step takes, and nothing more."""
    timeline = run(programs, briefly=True)
    step_s = float(timeline.step_s)
    return SimulatedStep(
        step_s=step_s, lower_s=step_s, upper_s=step_s, breakdown={}, communication={}, program=programs[0], num_played=1,
        timeline=timeline, host_s=max(map(launched_s, programs)),
    )  # fmt: skip


def _breakdown(timeline: Timeline, name: str) -> dict[str, float]:
    """Where a program's step goes. Waiting for the other end of a message is the bubble of a pipeline."""
    found = {part: float(value) for part, value in timeline.breakdown(name).items()}
    if len(timeline.programs) > 1:
        bubble = sum(found.pop(part, 0.0) for part in ("wait:send_recv", "idle"))
        found |= {"bubble": bubble} if bubble else {}
    return found


def program_history(capture: Capture, cluster: Cluster, memory: MemoryPlan = USUAL_MEMORY) -> History:
    """The allocations and frees of the rank that holds most, event by event: all until the recorded step, then that step."""
    column, *_ = columns(capture)
    scripts = [captured_script(one, column) for one in (capture, *capture.others)]
    histories = [_history(one, cluster.device, memory) for one in scripts]
    return max(histories, key=lambda one: step_live_bytes(one).peak[0])


def _history(script: CapturedScript, device: Device, memory: MemoryPlan) -> History:
    workspaces = zip(script.products, workspace_bytes(device), strict=False)  # a CPU has none
    return compressed(script_history(script.step, script.before, script.categories, workspaces), memory)


def _memory_of_ranks(
    asked: _Asked, *, expandable: bool, only_fitting: bool = False
) -> tuple[dict[int, MemoryUse], tuple[MemoryUse, partial[MemoryTrace]]] | None:
    """Memory by captured rank, and the fullest rank's with its trace; only_fitting: None at the first rank that does not fit."""
    settings = None if asks_for_pool(asked.plan) else AllocatorSettings(expandable_segments=expandable)
    uses, fullest = dict[int, MemoryUse](), list[tuple[MemoryUse, partial[MemoryTrace]]]()
    for one, script in _scripts(asked):
        fullest.append(_memory_use(one, script, asked, settings, quick=only_fitting))
        uses[one.rank] = fullest[-1][0]
        if only_fitting and uses[one.rank].fit is not Fit.FITS:
            return None
        fullest = [min(fullest, key=lambda one: (-one[0].fit.rank, one[0].capacity_bytes - one[0].used_bytes))]
    return uses, fullest[0]


def _memory_use(
    one: Capture, script: CapturedScript, asked: _Asked, settings: AllocatorSettings | None, *, quick: bool
) -> tuple[MemoryUse, partial[MemoryTrace]]:
    """Memory of a captured rank, and what makes its course; settings: None where the plan names the pool. quick: as `history_memory` has it.

    On another device with equal workspaces the allocator does the same as long as it does not end.
    """
    plan, device = asked.plan, asked.cluster.device
    groups = sum(len(group) > 1 and one.rank in group for group in one.groups)
    outside = outside_torch_bytes(device, plan, groups, stack=asked.stack)
    key = (workspace_bytes(device), plan.memory.model_dump_json(), settings)
    if quick and key in script.memory_uses:
        room = capacity_bytes(device, plan, outside)
        use = replace(script.memory_uses[key], outside_torch_bytes=outside, capacity_bytes=room, pressure=None)
        return use, partial(MemoryTrace, samples=(), peak_index=0, by_category=use.by_category)
    history = _history(script, device, plan.memory)
    live = step_live_bytes(history)
    use, reserved = history_use(history, live, plan, device, outside, settings, quick=quick)
    if not quick and settings is not None:
        script.memory_uses[key] = use
    return use, partial(memory_trace, history, live, reserved, use, quick=quick)


def _kinds(column: Column, played: SimulatedStep, uses: Mapping[int, MemoryUse], device: Device) -> tuple[KindUse, ...]:
    """Time and memory of each kind of rank, if there are several."""
    if len(column.ranks) == 1:
        return ()
    parts = {rank: _breakdown(played.timeline, f"rank{rank}") for rank in column.ranks}
    return tuple(
        KindUse(
            kind=f"rank {rank}",
            device=device.name,
            num_devices=column.num_ranks,
            compute_s=compute_s(seconds),
            waiting_s=waiting_s(seconds),
            memory=uses[rank],
            cause=cause_of(uses[rank]),
        )
        for rank, seconds in parts.items()
    )


def _beside(column: Column, others: Sequence[Column], uses: Mapping[int, MemoryUse]) -> list[Source]:
    """Ranks that are not simulated because they equal others: their differences and memory."""
    found = []
    for other in others:
        differs = unlike(column, other)
        does = differs or f"the same collectives as rank{'s' if len(column.ranks) > 1 else ''} {listed(column.ranks)}"
        most = max(uses[rank].peak_allocated_bytes for rank in other.ranks)
        detail = f"{does}; {format_bytes(most)} allocated at the peak"
        found.append(Source(what=f"rank {listed(other.ranks)}", kind="assumed" if differs else "given", detail=detail))
    return found


def _check(capture: Capture, cluster: Cluster) -> None:
    if (ranks := capture.world_size) != (gpus := cluster.num_devices):
        problem = f"was captured for {counted(ranks, 'rank')}, and {cluster.name} has {gpus} GPUs"
        remedy = (
            f"shardwise capture … --ranks {gpus}, or --nodes or --gpus {ranks}xGPU for as many GPUs as ranks, "
            "or --scale-with a capture at another number of ranks"
        )
        raise InputError.at(capture.target, problem, remedy)
    if cluster.exceptions:
        problem = "a captured program is predicted on equal GPUs only"
        raise InputError.at("cluster: exceptions", problem, "a cluster without exceptions")


def _plan(capture: Capture) -> Plan:
    """Who there is, and whether hooks around units issue the collectives, which takes the host time: FSDP2's operators say."""
    hooked = any(name.startswith("fsdp.") for name, _, _ in capture.signatures)
    if hooked and capture.world_size > 1:
        return Plan(dp_shard=capture.world_size, zero=3)
    return Plan(dp_replicate=capture.world_size, zero=0)


def _kernels(scripts: Iterable[CapturedScript]) -> Iterable[Kernel]:
    """Each of them at least once."""
    return (kernel for each in scripts for kernels in each.kernels for kernel in kernels)


def _peak(scripts: Iterable[CapturedScript], device: Device) -> float:
    """The device's peak in the fastest precision that the program multiplies in; in any, where it multiplies nothing."""
    used = {kernel.dtype for kernel in _kernels(scripts) if isinstance(kernel, Gemm | Attention)}
    peaks = [device.peak(dtype) for dtype in used or ("fp16", "bf16", "fp32")]
    return max(peaks) or device.peak("fp32")


def _extrapolated(scripts: Iterable[CapturedScript], calibration: Calibration, stack: Stack) -> tuple[str, ...]:
    """Kernels outside the range that the calibration measured."""
    kernels = dict.fromkeys(_kernels(scripts))
    notes = (calibration.extrapolated(kernel, stack.attention) for kernel in kernels)
    return tuple(dict.fromkeys(note for note in notes if note))
