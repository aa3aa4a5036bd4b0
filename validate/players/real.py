"""Play a plan with real tensors: `cpu` (gloo), `full` (NCCL), `solo` (one device, every collective at once done)."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Timeline
from validate.engines import engine_of
from validate.every_thread import count_every_thread
from validate.launch import Launch, host_name
from validate.machine import describe
from validate.parallel import build, make_optimizer, materialise, replicate
from validate.players.allocated import count_step
from validate.players.hooks import gathered_at_once, reduced_in_place, settled_collectives
from validate.players.memory import bucket_bytes, track_live_step, with_buckets
from validate.players.timed import (
    AllocatorTimeline,
    allocator_bytes,
    profiled_step,
    recorded_step,
    timed_steps,
    wait,
)
from validate.report import RankReport
from validate.slow_ranks import own_s
from validate.steps import TrainingStep
from validate.task import Task

# The stack's kernel first, then what torch would take where that one cannot run (on a CPU, in fp32).
_FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_BACKENDS = {"math": [SDPBackend.MATH], "cudnn": [SDPBackend.CUDNN_ATTENTION, *_FLASH]}


def run(task: Task, report: RankReport) -> dict[str, Any]:
    """Everything one rank measures."""
    rank, device = int(os.environ.get("RANK", "0")), _device(task)
    report.phase("join")
    hook = _join(task, rank, device)
    total, cap = _limit(task, device)
    try:
        with sdpa_kernel(_BACKENDS.get(task.stack.attention.kernel, _FLASH), set_priority=True):
            found = _played(task, report, rank, device, hook, total)
            found["memory"] |= {"cap_bytes": cap} if cap else {}
            return {"rank": rank, "host": host_name(), **found}
    finally:
        dist.destroy_process_group()


def _device(task: Task) -> torch.device:
    if task.device == "cpu":
        return torch.device("cpu")
    number = Launch.of_environment().device(torch.cuda.device_count()) if task.mode == "full" else 0
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _join(task: Task, rank: int, device: torch.device) -> Callable[..., Any] | None:
    """Join the others; for `solo`, pretend: the hook stands for DDP's all-reduce."""
    world = task.plan.num_devices
    if task.mode == "solo":
        from validate.torch_private import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=task.rank, world_size=world)
        return reduced_in_place(task.plan)
    world_size = int(os.environ.get("WORLD_SIZE", str(world)))
    if world_size != world:
        msg = f"world size is {world_size} here, and the plan has {world} ranks"
        raise ValueError(msg)
    backend = "nccl" if device.type == "cuda" else "gloo"
    scratch = os.environ.get("SHARDWISE_RENDEZVOUS")
    if scratch:
        dist.init_process_group(backend, store=dist.FileStore(scratch, world), rank=rank, world_size=world)
    else:
        dist.init_process_group(backend)  # torchrun's own store
    return None


def _limit(task: Task, device: torch.device) -> tuple[int, int]:
    """Stay below a share of what is free; the device's total and the allocator's limit are returned, 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    share = min(task.memory_fraction * free / total, task.plan.memory_fraction)
    torch.cuda.set_per_process_memory_fraction(share)
    return int(total), int(share * total)


def _played(
    task: Task, report: RankReport, rank: int, device: torch.device, hook: Callable[..., Any] | None, total: int
) -> dict[str, Any]:
    engine = engine_of(task.plan)
    machine = describe(
        torch, task.device, num_ranks=task.num_processes, threads=task.threads, command=task.command.split()
    )
    if engine is not None:
        machine["packages"] = {engine.package: engine.installed}
    report.partial(machine=machine)
    report.phase("build")
    step: TrainingStep = _torch_step(task, device, hook) if engine is None else _engine_step(task, device)
    result: dict[str, Any] = {"machine": machine, "memory": {}}
    if device.type == "cpu":
        report.phase("memory")
        result["memory"] = _counted_bytes(task, step, device)
        report.partial(memory=result["memory"])
    barrier = _barrier(task)
    with gathered_at_once(step.built) if task.mode == "solo" else contextlib.nullcontext():
        result |= timed_steps(step, device, report, warm_up=task.num_warm_up, count=task.num_steps, barrier=barrier)
        if device.type == "cuda":
            result["memory"] = _allocator_account(report, step, device, total)
            report.partial(memory=result["memory"])
        result |= _extras(task, report, step, device, rank, barrier)
    if device.type == "cuda" and _trackable(task):
        report.phase("memory by owner")
        result["memory"]["tracked"] = track_live_step(step.built, step, task.plan, device).as_json()
    return result | _from_everybody(task, result)


def _trackable(task: Task) -> bool:
    """A tracker sees operators, and compiled blocks have none; a pipeline's passes and an engine's own it cannot follow."""
    return task.stack.traits.runs_operators and task.plan.pp == 1 and engine_of(task.plan) is None


def _counted_bytes(task: Task, step: TrainingStep, device: torch.device) -> dict[str, Any]:
    """A CPU allocator's account; whose the bytes are, a tracker says of another step. It counts where the allocator does not."""
    with settled_collectives():
        found = count_step(step, Path(os.environ.get("SHARDWISE_SCRATCH", ".")), counted=count_every_thread())
    count_every_thread(counts=False)
    if not _trackable(task):
        return found
    memory = {**track_live_step(step.built, step, task.plan, device).as_json(), **found}
    return with_buckets(memory, bucket_bytes(step.built))


def _torch_step(task: Task, device: torch.device, hook: Callable[..., Any] | None) -> TrainingStep:
    """Of torch's own parts."""
    plan = task.plan
    built = build(task.model, plan, task.stack, device, pinned=plan.offload.pinned and device.type == "cuda")
    if device.type == "cpu":
        count_every_thread()  # not what meshes hold, on the CPU wherever the model is
    materialise(built, device)
    step = _step(task)(built, task.model, plan, task.stack, device)
    built.optimizer = make_optimizer(built, plan)
    replicate(built, plan, hook)
    return step


def _engine_step(task: Task, device: torch.device) -> Any:  # noqa: ANN401  a TrainingStep in all that is asked of it
    """By the package of the plan's data parallelism."""
    if device.type == "cpu":
        count_every_thread()
    with warnings.catch_warnings():  # of what else is not installed
        warnings.simplefilter("ignore")
        if task.plan.traits.core_layers:
            from validate.players import megatron_core as player
        else:
            from validate.players import deepspeed_engine as player  # type: ignore[no-redef]
    return player.make_step(task, device)


def _step(task: Task) -> type[TrainingStep]:
    if task.plan.pp == 1:
        return TrainingStep
    from validate.pipelined import LonePipelinedStep, PipelinedStep

    return LonePipelinedStep if task.mode == "solo" else PipelinedStep


def _from_everybody(task: Task, result: dict[str, Any]) -> dict[str, Any]:
    """Under a launcher no parent hears all ranks: they tell each other their steps and peaks."""
    if task.mode != "full" or "SHARDWISE_RENDEZVOUS" in os.environ:
        return {}
    peaks = {k: v for k, v in result["memory"].items() if k in ("peak_allocated_bytes", "peak_bytes")}
    gathered: list[Any] = [None] * dist.get_world_size()
    own = {name: result[name] for name in ("step_times_s", "reference_times_s")}
    own |= {"memory": peaks, "host": host_name(), "own_s": own_s(result.get("profile"))}
    dist.all_gather_object(gathered, own)
    return {"by_rank": gathered}


def _barrier(task: Task) -> Callable[[], None]:
    """All ranks start a step together; alone, there is nobody to wait for.

    NCCL's takes a tensor on some GPU, by the rank's number if nobody says which: another rank's, where a launcher deals
    ranks to nodes in turn.
    """
    if task.mode == "solo":
        return lambda: None
    where = {"device_ids": [torch.cuda.current_device()]} if task.device == "cuda" else {}
    return lambda: dist.barrier(**where) and None


def _allocator_account(report: RankReport, step: TrainingStep, device: torch.device, total: int) -> dict[str, Any]:
    """Peaks of everything until now, then bytes at the borders of one more step's phases."""
    peaks = allocator_bytes(total)
    report.partial(memory=peaks)
    report.phase("memory")
    tracked = AllocatorTimeline()
    torch.cuda.reset_peak_memory_stats()
    step.run(tracked.announce)
    wait(device)
    return {**peaks, **tracked.as_json()}


def _extras(
    task: Task, report: RankReport, step: TrainingStep, device: torch.device, rank: int, barrier: Callable[[], None]
) -> dict[str, Any]:
    """What goes to files: spans of a profiled step, the allocator's events of another."""
    extras: dict[str, Any] = {}
    if task.record and device.type == "cuda":
        report.phase("record")
        barrier()
        if rank == 0:
            recorded_step(step, device, Path(os.environ["SHARDWISE_SCRATCH"]) / "allocator.json.gz")
            extras["allocator_trace"] = "allocator.json.gz"
        else:  # a step has collectives: rank 0 cannot take one alone
            step.run()
            wait(device)
    if task.profile:
        report.phase("profile")
        timeline = profiled_step(step, device, rank, barrier)
        extras["profile"] = _summary(timeline)
        if rank == 0:
            from validate.spanfile import write_spans

            write_spans(Path(os.environ.get("SHARDWISE_SCRATCH", ".")) / "spans.json.gz", timeline)
            extras["spans"] = "spans.json.gz"
    return extras


def _summary(timeline: Timeline) -> dict[str, Any]:
    """A profiled step in numbers: seconds on the compute stream by category, collectives exposed and hidden."""
    kinds = dict.fromkeys(span.category for span in timeline.spans if span.is_collective)
    compute: dict[str, float] = {}
    for span in timeline.spans:
        if span.stream == COMPUTE_STREAM:
            compute[span.category] = compute.get(span.category, 0.0) + float(span.end_s - span.start_s)
    return {
        "step_s": float(timeline.step_s),
        "compute_s": compute,
        "communication": {
            kind: {"exposed_s": float(timeline.exposed(kind)), "hidden_s": float(timeline.hidden(kind))}
            for kind in kinds
        },
    }
