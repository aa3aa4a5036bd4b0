"""What one rank keeps below HBM: exact bytes by tier and category."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.parameters import trained_numel
from simulator.work.script import pieces, shard_ranks, units
from simulator.work.script.sharding import frozen_pieces

_STATES = {"master_weights": 1, "moments": 2, "gradients": 1}  # tensors of CPU Adam, in fp32
_BUFFER_SETS = 3  # one is read, one updated, one written


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """Bytes of one rank in host memory, on NVMe and in idle GPUs, by category."""

    host: dict[str, int]
    nvme: dict[str, int]
    peer: dict[str, int] = field(default_factory=dict)

    @property
    def peer_bytes(self) -> int:
        return sum(self.peer.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme.values())


def shard_numel(model: Model, plan: Plan) -> int:
    """S: elements of the fullest rank's shard."""
    if plan.traits.offloads_units:
        return sum(sum(unit.local_numels) for unit in units(model, plan))
    return -(-trained_numel(model, plan) // shard_ranks(plan))


def num_groups(model: Model, plan: Plan) -> int:
    """Rounds of the optimizer: stage 3 updates sub-groups, the others all at once."""
    if not plan.traits.zero_engine or plan.zero < 3:
        return 1
    return -(-shard_numel(model, plan) // plan.offload.sub_group_numel)


def tier_usage(model: Model, plan: Plan, activation_bytes: int = 0) -> TierUsage:
    """What a rank keeps below HBM. activation_bytes: of a micro-batch's offloaded activations.

    Optimizer: 16 S (fp32 gradients, weights, two moments). DeepSpeed's stage 3 adds the 16-bit gradients it accumulates,
    2 S, and with offloaded parameters their 16-bit shards, 2 S: ZeRO-Infinity's 20 bytes a parameter. FSDP2's weights
    are the parameters. A delayed update doubles the fp32 gradients. States on NVMe pass through the host in `buffer_count` fp32 buffers of a sub-group a set.
    """
    states: dict[str, int] = {}
    host: dict[str, int] = {}
    nvme: dict[str, int] = {}
    offload, numel = plan.offload, shard_numel(model, plan)
    compute = DTYPE_BYTES[plan.compute_dtype]
    if offload.optimizer != "none":
        states = {name: count * numel * 4 for name, count in _STATES.items()}
        if offload.delayed:  # the CPU reads one step's gradients while the next step's come down
            states["gradients"] *= 2
        if plan.traits.zero_engine:
            host["gradients_16bit"] = _accumulated(model, plan, numel) * compute
    if offload.optimizer == "nvme":
        group = min(numel, offload.sub_group_numel)
        host["swap_buffers"] = (_BUFFER_SETS if offload.overlap else 1) * offload.buffer_count * group * 4
    (nvme if offload.optimizer == "nvme" else host).update(states)
    if offload.parameters != "none" and (still := _frozen_bytes(model, plan)):
        (nvme if offload.parameters == "nvme" else host)["frozen_weights"] = still
    if offload.parameters != "none" and plan.traits.zero_engine:
        (nvme if offload.parameters == "nvme" else host)["parameters_16bit"] = numel * compute
        if offload.parameters == "nvme":
            largest = max(unit.shard_numel for unit in units(model, plan))
            host["parameter_buffers"] = (2 + offload.prefetch) * largest * compute
    peer: dict[str, int] = {}
    if activation_bytes:
        (peer if offload.activations == "peer" else host)["activations"] = activation_bytes
    return TierUsage(host={k: v for k, v in host.items() if v}, nvme=nvme, peer=peer)


def _frozen_bytes(model: Model, plan: Plan) -> int:
    """This rank's part of weights that are not trained."""
    ranks = shard_ranks(plan)
    return sum(-(-one.size // ranks) for piece in frozen_pieces(model, plan) for one in piece)


def _accumulated(model: Model, plan: Plan, numel: int) -> int:
    """Elements of DeepSpeed's 16-bit gradients on the host.

    Stage 3: its partition. Below it: a buffer of one parameter, and where micro-batches are accumulated, this rank's part.
    """
    if plan.zero == 3:
        return numel
    largest = max(prod(shape) for _, shapes in pieces(model, plan) for shape in shapes)
    added = numel if plan.num_micro_batches > 1 and plan.syncs_every_micro_batch else 0
    return largest + added
