"""Checkpoint saving: gathered to one rank, or sharded over all; what it needs beside a step, and how long it takes.

gather: as FSDP's FULL_STATE_DICT with `offload_to_cpu` and `rank0_only`: unit by unit, parameters and then each moment
are all-gathered, rank 0 copies them to its host, and writes one file. sharded: as torch.distributed.checkpoint: every
rank copies its share to its host and writes it; what several ranks hold is written once. asynchronous: the step goes on
once the state is in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from simulator.base.errors import PlanError
from simulator.base.kernels import DTYPE_BYTES
from simulator.base.schema import Strict
from simulator.base.sums import summed
from simulator.base.units import BytesPerS
from simulator.parallel.mesh import Mesh
from simulator.parallel.model_shard import shard_of
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import HostTier
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS
from simulator.work.collectives import collective_s
from simulator.work.parameters import trained_numel
from simulator.work.script import units


class Checkpoint(Strict):
    """`[checkpoint]`: how a state is saved."""

    mode: Literal["gather", "sharded"] = Field(
        default="sharded", description="to rank 0 as one file, or every rank its own share"
    )
    optimizer_state: bool = Field(default=True, description="moments are saved too")
    asynchronous: bool = Field(default=False, description="training goes on once the state is in host memory")
    storage_bytes_per_s: BytesPerS | None = Field(
        gt=0, default=None, description="what one node writes; not set: the node's drives"
    )
    process_bytes_per_s: BytesPerS | None = Field(
        gt=0, default=None, description="what one process writes (`torch.save`); not set: the tier's, 0.65 GB/s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One checkpoint: bytes of the whole state, memory beside a step's resident state, and seconds.

    extra_hbm_bytes: of the fullest rank; host_bytes: of the fullest node. blocking_s: what a training step waits.
    """

    mode: str
    state_bytes: int
    extra_hbm_bytes: int
    host_bytes: int
    gather_s: float
    copy_s: float
    write_s: float
    blocking_s: float

    @property
    def total_s(self) -> float:
        return self.gather_s + self.copy_s + self.write_s


def saving(
    model: Model, plan: Plan, cluster: Cluster, checkpoint: Checkpoint, curves: LinkCurves | None = None
) -> Saving:
    """What one checkpoint costs. Gathering, copying and writing follow one another.

    Raises PlanError where the cluster has no host.
    """
    _host_tier(cluster, "save")
    state, on_host = _state_bytes(model, plan, checkpoint)
    gathered = _gathering(model, plan, cluster, checkpoint, curves) if checkpoint.mode == "gather" else None
    return saved_state(state, plan.num_devices, cluster, checkpoint, on_host=on_host, gathered=gathered)


def saved_state(
    state: int,
    num_devices: int,
    cluster: Cluster,
    checkpoint: Checkpoint,
    *,
    on_host: int = 0,
    gathered: tuple[float, int] | None = None,
) -> Saving:
    """What it costs to save so many bytes of state. on_host: of them below HBM already.

    gathered: (seconds, bytes of HBM) of gathering them to rank 0; None: every rank saves its own share. Raises PlanError
    where the cluster has no host.
    """
    tier = _host_tier(cluster, "save")
    storage = checkpoint.storage_bytes_per_s or tier.nvme_write_bytes_per_s
    process = checkpoint.process_bytes_per_s or tier.process_write_bytes_per_s
    if gathered is not None:
        host, copied, writers = state, state - on_host, 1
        rate = min(tier.d2h_bytes_per_s, tier.memory_bytes_per_s)
    else:
        writers = min(cluster.gpus_per_node, num_devices)
        share = -(-state // num_devices)
        host = writers * share
        copied = host - on_host * host // max(1, state)  # a program without parameters saves nothing
        rate = min(writers * tier.d2h_bytes_per_s, tier.memory_bytes_per_s)
    gather_s, extra = gathered or (0.0, 0)
    copy_s, write_s = copied / rate, host / min(writers * process, storage)
    return Saving(
        mode=checkpoint.mode,
        state_bytes=state,
        extra_hbm_bytes=extra,
        host_bytes=host,
        gather_s=gather_s,
        copy_s=copy_s,
        write_s=write_s,
        blocking_s=gather_s + copy_s + (0.0 if checkpoint.asynchronous else write_s),
    )


def loading_s(model: Model, plan: Plan, cluster: Cluster, checkpoint: Checkpoint) -> float:
    """Seconds until the saved state is back on the devices: each reads its share, and copies it up.

    Raises PlanError where the cluster has no host.
    """
    state, _ = _state_bytes(model, plan, checkpoint)
    return loaded_state_s(state, plan.num_devices, cluster, checkpoint)


def loaded_state_s(state: int, num_devices: int, cluster: Cluster, checkpoint: Checkpoint) -> float:
    """The same of so many bytes.

    Storage is taken to read as fast as it is stated to write, else as the host's drives read. Raises PlanError where the
    cluster has no host.
    """
    tier = _host_tier(cluster, "load")
    readers = min(cluster.gpus_per_node, num_devices)
    of_node = readers * -(-state // num_devices)
    read = checkpoint.storage_bytes_per_s or tier.nvme_read_bytes_per_s
    return of_node / read + of_node / min(readers * tier.h2d_bytes_per_s, tier.memory_bytes_per_s)


def _host_tier(cluster: Cluster, does: str) -> HostTier:
    tier = cluster.host_tier
    if tier is None:
        problem = f"{cluster.name} has no host to {does} through"
        raise PlanError.at("checkpoint", problem, "a [host] link in the cluster file")
    return tier


def _numel_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes a parameter: of weights (16-bit copies beside master weights included), of moments."""
    copies = plan.traits.master_copy and plan.compute_dtype != plan.precision.master
    weights = DTYPE_BYTES[plan.precision.master] + (DTYPE_BYTES[plan.compute_dtype] if copies else 0)
    found = OPTIMIZERS[plan.optimizer.kind]
    size = -(-found.bits // 8) or DTYPE_BYTES[plan.optimizer.dtype]
    return weights, found.moments * size


def _state_bytes(model: Model, plan: Plan, checkpoint: Checkpoint) -> tuple[int, int]:
    """(bytes of the whole state, of which are below HBM already)."""
    weights, moments = _numel_bytes(plan)
    moments = moments if checkpoint.optimizer_state else 0
    size = trained_numel(model, plan, stored=True) * (weights + moments)
    if plan.offload.optimizer == "none":
        return size, 0
    stays = DTYPE_BYTES[plan.compute_dtype] if plan.offload.parameters == "none" else 0
    return size, size - trained_numel(model, plan) * stays


def _gathering(
    model: Model, plan: Plan, cluster: Cluster, checkpoint: Checkpoint, curves: LinkCurves | None
) -> tuple[float, int]:
    """(seconds, extra bytes of HBM): one tensor of one unit is whole at a time; replicated states need no gather."""
    weights, moments = _numel_bytes(plan)
    per_numel = ([weights] if plan.zero == 3 else []) + ([moments] if checkpoint.optimizer_state and plan.zero else [])
    shape = Mesh(plan, cluster).group_shape("dp_shard_cp")
    if shape.num_ranks == 1 or not any(per_numel):
        return 0.0, 0
    sizes = [unit.padded_numel for unit in units(shard_of(model, plan), plan) if unit.padded_numel]
    seconds = summed(
        float(collective_s("all_gather", numel * size, shape, cluster, curves)) for numel in sizes for size in per_numel
    )
    return seconds, max(sizes) * max(DTYPE_BYTES[plan.precision.master], DTYPE_BYTES[plan.optimizer.dtype])
