"""The verdict on memory, and the one thing to try next."""

from __future__ import annotations

from simulator.lower import Lowering
from simulator.memory import MemoryUse
from simulator.plan import Plan
from simulator.predict.play import Played
from simulator.predict.prediction import Verdict
from simulator.units import format_bytes


def verdict_of(memory: MemoryUse) -> tuple[Verdict, str]:
    """FITS / TIGHT / OOM and why.

    OOM: even with no fragmentation (allocated + outside torch) the device is too small; no allocator can help.
    TIGHT: the upper end of reserved's interval does not fit: the allocator would have to give cached segments back
    (retries, which cost time), or would fail. FITS otherwise. What is offloaded must fit below HBM.
    """
    for tier, needed, there in (
        ("host memory", memory.host_bytes, memory.host_capacity_bytes),
        ("NVMe", memory.nvme_bytes, memory.nvme_capacity_bytes),
    ):
        if there is not None and needed > there:
            return "OOM", f"{format_bytes(needed)} of {tier} needed on a node that has {format_bytes(there)}"
    capacity, outside = memory.capacity_bytes, memory.outside_torch_bytes
    margin = capacity - memory.used_bytes
    if memory.peak_allocated_bytes + outside > capacity:
        short = memory.peak_allocated_bytes + outside - capacity
        return "OOM", f"{format_bytes(short)} too much at {memory.peak_moment}: {_owner(memory)}"
    if memory.high_reserved_bytes + outside > capacity:
        return "TIGHT", (
            f"the allocator may hold up to {format_bytes(memory.high_reserved_bytes)} beside "
            f"{format_bytes(outside)} outside torch: expect retries at {memory.peak_moment}"
        )
    return "FITS", f"{format_bytes(margin)} free at the peak ({memory.peak_moment})"


def _owner(memory: MemoryUse) -> str:
    name, size = max(memory.by_category.items(), key=lambda item: item[1])
    return f"largest owner {name.replace('_', ' ')} with {format_bytes(size)}"


def suggest(lowering: Lowering, played: Played, memory: MemoryUse) -> str:
    """One change worth trying, from what dominates memory (if it does not fit) or time."""
    plan = lowering.plan
    if verdict_of(memory)[0] == "OOM":
        return _smaller(plan, memory)
    share = {name: seconds / played.step_s for name, seconds in played.breakdown.items()}
    exposed = sum(value for name, value in share.items() if name.startswith("exposed"))
    room = memory.capacity_bytes - memory.used_bytes
    if share.get("host", 0) > 0.1:
        return "the host launches kernels slower than the GPU runs them: compile the blocks or use larger micro-batches"
    if exposed > 0.1:
        return _less_communication(plan, exposed)
    if share.get("recompute", 0) > 0.05 and room > memory.peak_allocated_bytes // 2:
        return "memory is left over: recompute less (recompute = selective or every_k) to save its time"
    if room > memory.peak_allocated_bytes:
        return f"memory is left over: micro_batch_size = {2 * plan.micro_batch_size} makes larger, faster kernels"
    return "compute dominates: a faster attention kernel or compiled blocks (--stack) is what is left"


def _smaller(plan: Plan, memory: MemoryUse) -> str:
    if plan.recompute == "none" and memory.by_category.get("activations", 0) > memory.peak_allocated_bytes // 3:
        return "activations dominate: recompute = full"
    if plan.zero < 3 and plan.dp_shard * plan.dp_replicate > 1:
        return f"every rank holds what could be sharded: zero = 3, dp_shard = {plan.num_data_parallel}"
    if plan.micro_batch_size > 1:
        return f"micro_batch_size = {plan.micro_batch_size // 2}, num_micro_batches = {plan.num_micro_batches * 2}"
    return "more devices to shard over, or shorter sequences per rank (cp)"


def _less_communication(plan: Plan, exposed: float) -> str:
    percent = f"{100 * exposed:.0f} % of the step waits for communication"
    if plan.zero == 3 and plan.dp_replicate == 1:
        return (
            f"{percent}: shard inside the node only (dp_replicate = nodes), or accumulate fewer, larger micro-batches"
        )
    return f"{percent}: larger micro-batches give each collective more compute to hide behind"
