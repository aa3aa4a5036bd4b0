"""Uneven shards: what each kind of GPU holds of them, over an equal part."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.base.errors import PlanError
from simulator.base.units import format_bytes
from simulator.spec.cluster.gpu_kinds import GpuKind, GpuKinds
from simulator.spec.plan import Plan


def shard_shares(plan: Plan, kinds: GpuKinds | None) -> Mapping[str, float]:
    """By the holders of `kinds` (device, and what is free of it): parts in proportion to free memory, 1 on average.

    Empty where parts are equal. Raises PlanError where the reserve leaves a GPU nothing.
    """
    if plan.fsdp.shard_sizes == "equal" or kinds is None or not kinds.of_rank:
        return {}
    free = {kind.holder: _free(kinds, kind) - plan.fsdp.shard_reserve_bytes for kind in kinds.kinds}
    if short := [holder for holder, size in free.items() if size <= 0]:
        reserve = format_bytes(plan.fsdp.shard_reserve_bytes)
        problem = f"a reserve of {reserve} leaves {', '.join(short)} nothing to hold"
        raise PlanError.at("plan: shard_reserve_bytes", problem, "less than the smallest GPU")
    ranks = plan.num_devices
    counts = [ranks - len(kinds.of_rank), *(0 for _ in kinds.kinds[1:])]
    for number in kinds.of_rank.values():
        counts[number] += 1
    total = sum(count * free[kind.holder] for count, kind in zip(counts, kinds.kinds, strict=True))
    return {holder: size * ranks / total for holder, size in free.items()}


def largest_share(shares: Mapping[str, float], kinds: GpuKinds | None, device: str) -> float:
    """Of the GPUs of one device, the part that takes longest to step."""
    found = [shares[kind.holder] for kind in kinds.kinds if kind.device == device] if shares and kinds else []
    return max(found, default=1.0)


def _free(kinds: GpuKinds, kind: GpuKind) -> int:
    device = kinds.memory_of(kind)
    return device.usable_bytes - device.hypervisor_bytes
