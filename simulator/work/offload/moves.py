"""What travels between the tiers in a step: bytes of one rank, by unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.base.errors import PlanError
from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.offload.tier_usage import num_groups, shard_numel
from simulator.work.script import keeps_layers, keeps_root, pieces, shard_ranks, units
from simulator.work.script.sharding import ParameterUnit, frozen_pieces, numel_of

_MOST_GROUPS = 20_000  # of the optimizer's: a step in which each is moved and updated takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMoves:
    """Bytes of one rank for one piece of the model (embedding, layer0.., head) in a micro-batch.

    fetch_forward, fetch_backward: parameters to HBM. gradient: reduced gradients from HBM; accumulated: those of
    earlier micro-batches, which come back to be added. added_numel: gradients that the CPU adds instead. swapped: the
    last micro-batch's, in fp32, on to NVMe.
    activation: what the block saves, out after its forward, back before its backward.
    """

    fetch_forward_bytes: int = 0
    fetch_backward_bytes: int = 0
    gradient_bytes: int = 0
    accumulated_bytes: int = 0
    added_numel: int = 0
    swapped_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One round of the CPU optimizer: elements it updates, bytes it reads from and writes to NVMe, bytes it sends up."""

    numel: int
    read_bytes: int = 0
    write_bytes: int = 0
    upload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A step's transfers. `order`: the pieces in forward order."""

    plan: Plan
    order: tuple[str, ...] = ()
    units: Mapping[str, UnitMoves] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()


def moves(model: Model, plan: Plan, activation_bytes: Mapping[str, int]) -> Moves:
    """What the plan moves. activation_bytes: by piece, of one micro-batch."""
    order = tuple(name for name, _ in pieces(model, plan))
    states = _fsdp(model, plan) if plan.traits.offloads_units else _deepspeed(model, plan)
    found = {name: UnitMoves(**states.get(name, {}), activation_bytes=activation_bytes.get(name, 0)) for name in order}
    return Moves(plan=plan, order=order, units=found, groups=_groups(model, plan))


def _fsdp(model: Model, plan: Plan) -> dict[str, dict[str, int]]:
    """CPU offload of FSDP: the fp32 shard goes up before each all-gather, the fp32 gradient down after each reduction.

    The CPU adds it to those of earlier micro-batches. The root is fetched with the embedding and reduced after it. Frozen
    weights go up as they are stored, and have no gradients.
    """
    if plan.offload.parameters == "none":
        return {}
    master = DTYPE_BYTES[plan.precision.master]
    root, *layers = units(model, plan)

    def of(unit: ParameterUnit, *, keeps_gathered: bool) -> dict[str, int]:
        numel = sum(unit.local_numels)
        fetched = numel * master + unit.frozen_shard_bytes
        return {
            "fetch_forward_bytes": fetched,
            "fetch_backward_bytes": 0 if keeps_gathered else fetched,
            "gradient_bytes": numel * master,
            "added_numel": numel,
        }

    found = {unit.name: of(unit, keeps_gathered=keeps_layers(plan)) for unit in layers}
    root_bytes = of(root, keeps_gathered=keeps_root(plan))
    return {
        **found,
        "embedding": {**root_bytes, "fetch_backward_bytes": 0},
        "head": {"fetch_backward_bytes": root_bytes["fetch_backward_bytes"]},
    }


def _deepspeed(model: Model, plan: Plan) -> dict[str, dict[str, int]]:
    """16-bit gradients go down as they are reduced; added to earlier micro-batches' in HBM, so those come up first."""
    compute, ranks = DTYPE_BYTES[plan.compute_dtype], shard_ranks(plan)
    found: dict[str, dict[str, int]] = {}
    for (name, shapes), frozen in zip(pieces(model, plan), frozen_pieces(model, plan), strict=True):
        numel = -(-numel_of(shapes) // ranks)
        size = numel * compute
        still = sum(-(-one.size // ranks) for one in frozen)
        fetched = size + still if plan.offload.parameters != "none" else 0
        down = size if plan.offload.optimizer != "none" else 0
        found[name] = {
            "fetch_forward_bytes": fetched,
            "fetch_backward_bytes": fetched,
            "gradient_bytes": down,
            "accumulated_bytes": down,
            "swapped_bytes": 4 * numel if plan.offload.optimizer == "nvme" else 0,
        }
    return found


def _groups(model: Model, plan: Plan) -> tuple[Group, ...]:
    """Sub-groups of the optimizer. On NVMe: gradients, weights and moments are read, weights and moments written back.

    Where parameters stay in HBM their 16-bit copies go up; on NVMe they are written there.
    """
    offload, numel = plan.offload, shard_numel(model, plan)
    if offload.optimizer == "none":
        return ()
    compute = DTYPE_BYTES[plan.compute_dtype]
    count, found = num_groups(model, plan), []
    if count > _MOST_GROUPS:
        problem = f"{offload.sub_group_numel:,} are {count:,} groups of a rank's parameters; at most {_MOST_GROUPS:,} are played"
        raise PlanError.at("plan: offload.sub_group_numel", problem, f"{-(-numel // _MOST_GROUPS):,} or more")
    for index in range(count):
        size = min(offload.sub_group_numel, numel - index * offload.sub_group_numel) if count > 1 else numel
        swapped = offload.optimizer == "nvme"
        copies = size * compute if offload.parameters == "nvme" else 0
        found.append(
            Group(
                numel=size,
                read_bytes=16 * size if swapped else 0,
                write_bytes=(12 * size if swapped else 0) + copies,
                upload_bytes=size * compute if offload.parameters == "none" else 0,
            )
        )
    return tuple(found)
