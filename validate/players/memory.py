"""A tracked step: which bytes are alive when, on fake tensors or on real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from simulator.spec.plan import Plan
from validate.parallel import POWERSGD_BEGINS, Built, make_optimizer, replicate
from validate.steps import TrainingStep
from validate.tracker import PlainTracker, ShardedTracker, TotalTracker, TrackedMemory

if TYPE_CHECKING:
    from validate.pipelined import LonePipelinedStep

MICRO_BATCHES = 3  # what a third micro-batch finds, every later one finds too


def track_step(
    built: Built, step: TrainingStep, plan: Plan, device: torch.device, hook: Callable[..., Any] | None = None
) -> TrackedMemory:
    """Bytes over one step with the optimizer's state in place. Puts DDP around the modules on the way.

    DDP is built under the tracker because its buckets are made in C++, where nothing else would show them; so the
    step is DDP's first, before it rebuilds its buckets in the order of the gradients. Their sum stays the same.
    """
    built.optimizer = make_optimizer(built, plan)
    step.make_optimizer_state()
    sharded = plan.traits.shards_rows
    tracker = ShardedTracker(built.module, built.optimizer) if sharded else PlainTracker()
    buckets = 0
    tracker.prepare(device, lambda: buckets)
    if sharded:
        tracker.track_inputs(step.inputs)
    else:
        state = getattr(built.optimizer, "optim", built.optimizer)  # ZeRO-1 keeps this rank's optimizer inside
        tracker.track_external(built.module, state, *step.inputs)
    with tracker:
        before = tracker.total()
        replicate(built, plan, hook)
        buckets = tracker.total() - before
        if (
            plan.ddp.comm_hook.kind == "powersgd"
        ):  # what its first compressed step makes is there before the tracked one
            for _ in range(POWERSGD_BEGINS + 1):
                step.run(num_micro_batches=1)
                tracker.reset_mod_stats()
        step.run(tracker.announce, min(plan.num_micro_batches, MICRO_BATCHES))
        return tracker.tracked()


def track_stage(
    built: Built, step: LonePipelinedStep, plan: Plan, device: torch.device, hook: Callable[..., Any]
) -> TrackedMemory:
    """Bytes of a pipeline stage over its first step, which makes the buffers of its messages before the first pass.

    All micro-batches are played, since a schedule is one of so many. DDP would rebuild its buckets behind that step, which
    fake tensors cannot.
    """
    built.optimizer = make_optimizer(built, plan)
    step.make_optimizer_state()
    tracker = TotalTracker()
    tracker.prepare(device, lambda: 0)
    tracker.track_external(built.module, getattr(built.optimizer, "optim", built.optimizer), *step.inputs)
    with tracker:
        replicate(built, plan, hook)
        step.run(tracker.announce)
        return tracker.tracked()


def track_live_step(built: Built, step: TrainingStep, plan: Plan, device: torch.device) -> TrackedMemory:
    """The same for modules that have been training: whose bytes they are, beside what the allocator itself says.

    DDP's buckets exist already, unseen; on a GPU they are added, on a CPU an allocator's account has them (`with_buckets`).
    """
    sharded = plan.traits.shards_rows
    tracker = ShardedTracker(built.module, built.optimizer) if sharded else PlainTracker()
    tracker.prepare(device, lambda: 0)
    if sharded:
        tracker.track_inputs(step.inputs)
    else:
        tracker.track_external(built.module, getattr(built.optimizer, "optim", built.optimizer), *step.inputs)
    with tracker:
        step.run(tracker.announce, min(plan.num_micro_batches, MICRO_BATCHES))
        tracked = tracker.tracked()
    if device.type == "cuda" and (buckets := bucket_bytes(built)):
        tracked.add("buckets", buckets)
    return tracked


def bucket_bytes(built: Built) -> int:
    """Of DDP's buckets: as many as of the parameters."""
    if built.network is built.module:
        return 0
    return sum(p.numel() * p.element_size() for p in built.module.parameters())


def with_buckets(memory: Mapping[str, Any], buckets: int) -> dict[str, Any]:
    """A CPU allocator's account of a step (`TrackedMemory.as_json`'s keys) with the tracker's categories, and DDP's buckets among these.

    The tracker meets only the parts of buckets that a backward has written: as what backwards make.
    """
    categories = {}
    for moment, seen in memory["by_category"].items():
        left = buckets - min(buckets, max(0, memory[f"{moment}_bytes"] - sum(seen.values())))
        named = dict(seen)
        for name in ("temporaries", "activations"):
            part = min(left, named.get(name, 0))
            named[name] = named.get(name, 0) - part
            left -= part
        named["buckets"] = buckets - left
        categories[moment] = {name: size for name, size in sorted(named.items()) if size}
    return {**memory, "by_category": categories}
