"""Play a plan on fake tensors with a fake process group: its memory at any size, on any machine, without hardware."""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.machine import describe
from validate.parallel import Built, build, materialise
from validate.players.hooks import reduced_in_place
from validate.players.memory import MICRO_BATCHES, track_stage, track_step
from validate.report import RankReport
from validate.steps import TrainingStep
from validate.task import Task
from validate.torch_private import (
    PROPAGATE,
    FakeStore,
    FakeTensorMode,
    ShardingPropagator,
    unset_fake_temporarily,
    without_modes,
)
from validate.tracker import TrackedMemory

_LONG_S: Final = 5.0  # a play of which nobody need hear


def play(
    model: Model,
    plan: Plan,
    stack: Stack,
    device_type: str = "cpu",
    rank: int = 0,
    report: RankReport | None = None,
) -> TrackedMemory:
    """Memory of one of `plan.num_devices` ranks. Uses the process's default group: one call a process at a time.

    report: is told how long the play takes, where that is long.
    """
    device = torch.device(device_type)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_devices)
    try:
        fake = FakeTensorMode()
        with _fake_empties(
            fake, device
        ):  # the modules themselves are made outside: cutting a fake tensor into shards is slow
            built = build(model, plan, stack, device, direct_flash=device.type == "cuda")
        with fake, _real_meshes(), _unseen_propagation():
            fake.allow_non_fake_inputs = True  # the modules come without storage, and as plain tensors
            materialise(built, device)
            fake.allow_non_fake_inputs = False
            if report is not None:
                _tell_how_long(built, plan, report)
            with _quiet_ddp():
                if plan.pp > 1:
                    from validate.pipelined import LonePipelinedStep

                    stage = LonePipelinedStep(built, model, plan, stack, device)
                    return track_stage(built, stage, plan, device, reduced_in_place(plan))
                step = TrainingStep(built, model, plan, stack, device)
                return track_step(built, step, plan, device, reduced_in_place(plan))
    finally:
        dist.destroy_process_group()


def _tell_how_long(built: Built, plan: Plan, report: RankReport) -> None:
    """Once an eighth of the first forward is through, say how long the play takes, and take that long without a fault."""
    layers = [layer for chunk in built.chunks for layer in chunk.layers]
    micro_batches = plan.num_micro_batches if plan.pp > 1 else min(plan.num_micro_batches, MICRO_BATCHES)
    passes = len(layers) * micro_batches * (3 if plan.recompute.mode == "none" else 4)  # backward is two of forward
    begun: list[float] = []

    def layer_begins(*_: object) -> None:
        begun.append(time.monotonic())
        if len(begun) == 2 + len(layers) // 8:
            seconds = (begun[-1] - begun[0]) / (len(begun) - 1) * passes
            if seconds > _LONG_S:
                report.phase(f"memory of {len(layers):,} layers, some {seconds:,.0f} s left", seconds)

    for layer in layers:
        layer.register_forward_pre_hook(layer_begins)


def run(task: Task, report: RankReport) -> dict[str, Any]:
    """The task's memory as a rank reports it, and that of the first rank of each pipeline stage."""
    report.phase("memory")
    inputs, plan = (task.model, task.plan, task.stack, task.device), task.plan
    memory = play(*inputs, task.rank, report).as_json()
    found: dict[str, Any] = {}
    if plan.pp > 1:
        del memory["by_category"]  # whose the bytes are, nobody has followed
        each = plan.num_devices // plan.pp
        found["memory_by_stage"] = []
        for stage in range(plan.pp):
            report.phase(f"memory of stage {stage}")
            one = memory if stage * each == task.rank else play(*inputs, stage * each, report).as_json()
            one.pop("by_category", None)
            found["memory_by_stage"].append(one)
    machine = describe(
        torch, "cpu", num_ranks=task.plan.num_devices, threads=task.threads, command=task.command.split()
    )
    return {"rank": task.rank, "machine": machine, "memory": memory, **found}


@contextlib.contextmanager
def _fake_empties(fake: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """fully_shard makes an empty tensor on the device, which may not exist."""
    with torch.device("meta"):
        torch.zeros(1)  # torch lists its factories once, and that must not be while one of them is another function
    original = torch.empty

    def empty(*args: object, **kwargs: object) -> Any:  # noqa: ANN401  a tensor
        there = kwargs.get("device")
        with fake if there is not None and torch.device(there).type == device.type else contextlib.nullcontext():
            return original(*args, **kwargs)

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = original


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """DeviceMesh keeps its ranks in small tensors and reads their values, which fake ones do not have."""
    originals: dict[str, Any] = {
        name: value
        for name, value in vars(DeviceMesh).items()
        if isinstance(value, types.FunctionType | property) and (name == "__init__" or not name.startswith("__"))
    }
    for name, value in originals.items():
        real = property(_unfaked(value.fget)) if isinstance(value, property) else _unfaked(value)
        setattr(DeviceMesh, name, real)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(DeviceMesh, name, value)


@contextlib.contextmanager
def _unseen_propagation() -> Iterator[None]:
    """DTensor finds an operator's result by playing it on fake tensors of the whole shape, once for each new shape.

    A tracker would count those: torch's own passes them over since 2.13, earlier ones do not. So none is on meanwhile.
    """
    original = getattr(ShardingPropagator, PROPAGATE)

    @functools.wraps(original)
    def unseen(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        with without_modes():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, PROPAGATE, unseen)
    try:
        yield
    finally:
        setattr(ShardingPropagator, PROPAGATE, original)


def _unfaked(function: Any) -> Callable[..., Any]:  # noqa: ANN401  methods and getters alike
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _quiet_ddp() -> Iterator[None]:
    """DDP's logger reads device timers, which fake tensors do not have."""
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp._pre_forward  # noqa: SLF001  no public switch

    def pre_forward(self: Any, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        self.logger = types.SimpleNamespace(set_runtime_stats_and_log=lambda: None)
        return original(self, *args, **kwargs)

    ddp._pre_forward = pre_forward  # noqa: SLF001
    try:
        yield
    finally:
        ddp._pre_forward = original  # noqa: SLF001
