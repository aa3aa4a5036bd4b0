"""Questions to a plan's implementation: its units, what they send, and what stays on a GPU, in exact bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from simulator.base.kernels import Stream
from simulator.base.registry import IMPLEMENTATIONS
from simulator.parallel.model_shard import whole_body
from simulator.spec.model import FORWARD_SUFFIX, Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS
from simulator.work.script.sharding import ParameterUnit, frozen_pieces, pieces, shard_ranks
from simulator.work.script.unit_comm import UnitComm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What an implementation of data parallelism gathers, sends and keeps. Functions take the rank's part of the model, and the plan.

    units: what it gathers and reduces together. communication: what each piece of the model sends (ranks of a shard group
    on one node, or None). resident: bytes of every tensor between steps by category, before offload. gradients: bytes of
    every tensor that the backward leaves for the optimizer and that did not exist before. update: passes over gradients
    before the optimizer's own kernels.
    """

    units: Callable[[Model, Plan], tuple[ParameterUnit, ...]]
    communication: Callable[[Model, Plan, int | None], tuple[UnitComm, ...]]
    resident: Callable[[Model, Plan], dict[str, list[int]]]
    gradients: Callable[[Model, Plan], list[int]]
    update: Callable[[Model, Plan], tuple[Stream, ...]] = lambda model, plan: ()  # noqa: ARG005


def _sizes_of(plan: Plan) -> Sizes:
    return cast("Sizes", IMPLEMENTATIONS[plan.implementation])


def units(model: Model, plan: Plan) -> tuple[ParameterUnit, ...]:
    """The plan's units in the order in which the forward pass needs them (DDP: in which the backward fills them)."""
    return _sizes_of(plan).units(model, plan)


def communication(model: Model, plan: Plan, node_ranks: int | None = None) -> tuple[UnitComm, ...]:
    """What each piece of the model sends, in forward order: embedding, layer0.., head.

    node_ranks: ranks of a shard group on one node; None: all of them.
    """
    comms = _sizes_of(plan).communication(model, plan, node_ranks)
    if plan.peft.any and not plan.traits.hooks_modules:
        comms = _with_frozen(comms, model, plan)
    if plan.peft.any:  # hooks of a backward that there is not never run
        kinds = ("embedding", *whole_body(model, plan), "head")
        comms = tuple(
            _forward_only(one) if FORWARD_SUFFIX in kind else one for one, kind in zip(comms, kinds, strict=True)
        )
    if not plan.agrees_apart:
        return comms
    return tuple(replace(comm, all_reduce_bytes=0) for comm in comms)  # replicas agree apart: `agreement`


def _forward_only(comm: UnitComm) -> UnitComm:
    return replace(comm, all_gather_backward_bytes=0, gather_backward_kernels=())


def _with_frozen(comms: tuple[UnitComm, ...], model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    """Frozen weights are gathered as they are stored; a piece without trained ones reduces nothing."""
    found = []
    for comm, (_, shapes), frozen in zip(comms, pieces(model, plan), frozen_pieces(model, plan), strict=True):
        ranks = max(comm.backward_gather_ranks, 1)
        more = sum(-(-one.size // ranks) * ranks for one in frozen) if plan.gathers and shard_ranks(plan) > 1 else 0
        idle = replace(comm, gradient_kernels=(), keep_kernels=(), add_kernels=(), num_buckets=1)
        forward, backward = comm.all_gather_forward_bytes + more, comm.all_gather_backward_bytes + more
        one = comm if shapes else idle
        found.append(replace(one, all_gather_forward_bytes=forward, all_gather_backward_bytes=backward))
    return tuple(found)


def resident_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Bytes of every tensor that lives on the fullest GPU between steps, by category.

    parameters: as the implementation stores them. gradients: only where their buffer outlives the step.
    optimizer_state: momenta, and the fp32 master copy if it is one more. buckets: communication buffers that stay.
    buffers: the model's own (position tables).
    """
    tensors = _sizes_of(plan).resident(model, plan)
    if plan.peft.any:
        tensors = {**tensors, "parameters": [*tensors["parameters"], *_frozen_tensors(model, plan)]}
    if plan.offload.optimizer != "none":
        tensors = {**tensors, "gradients": [], "optimizer_state": []}
    if plan.offload.parameters != "none":  # without their scales, which are no parameters (bitsandbytes: quant_state)
        tensors = {
            **tensors,
            "parameters": [size for piece in frozen_pieces(model, plan) for one in piece for size in one.beside],
        }
    return {**tensors, "buffers": buffer_tensors(model, plan)}


def paged_bytes(model: Model, plan: Plan) -> int:
    """States in unified memory, which the caching allocator does not see: what the same optimizer holds more without pages."""
    kind = plan.optimizer.kind
    if not OPTIMIZERS[kind].paged:
        return 0
    plans = (plan.copy_with(optimizer=kind.removeprefix("paged_"), optimizer_impl="foreach"), plan)
    unpaged, paged = (sum(_sizes_of(one).resident(model, one)["optimizer_state"]) for one in plans)
    return unpaged - paged


def trained_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of the parameters on the fullest GPU that are trained, as the implementation stores them."""
    return [] if plan.offload.parameters != "none" else _sizes_of(plan).resident(model, plan)["parameters"]


def _frozen_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of weights that are not trained: this rank's part where they are gathered, and all of their scales."""
    ranks = shard_ranks(plan) if plan.gathers else 1
    frozen = [one for piece in frozen_pieces(model, plan) for one in piece]
    return [size for one in frozen for size in (-(-one.size // ranks), *one.beside)]


def buffer_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of the model's own buffers: fp32 tables of the rotary cosines and sines, of each module that a rank has.

    The chunks of a stage of torch's pipelines are models of their own; Megatron's share one (it keeps what it has computed).
    """
    if model.positions != "rope":
        return []
    modules = plan.pipeline.virtual_stages if plan.traits.uses_torch_pipelines else 1
    return [plan.seq_len * int(model.head_dim * model.rotary_fraction) * 4] * 2 * modules


def resident_bytes(model: Model, plan: Plan, *, granularity_bytes: int = 1) -> dict[str, int]:
    """Category -> bytes between steps on the fullest GPU; each tensor rounded up to `granularity_bytes` (CUDA: 512)."""
    return {
        category: sum(-(-size // granularity_bytes) * granularity_bytes for size in sizes)
        for category, sizes in resident_tensors(model, plan).items()
    }


def gradient_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of every tensor that the backward leaves for the optimizer and that did not exist before the step."""
    none = plan.offload.optimizer != "none" or plan.optimizer.in_backward
    return [] if none else _sizes_of(plan).gradients(model, plan)


def update_kernels(model: Model, plan: Plan) -> tuple[Stream, ...]:
    """What a step's end makes of the gradients before the optimizer's own kernels."""
    return _sizes_of(plan).update(model, plan)


def model_state_bytes(model: Model, plan: Plan) -> int:
    """Parameters, gradients and optimizer state on one GPU: the figure of ZeRO's table."""
    resident = resident_tensors(model, plan)
    kinds = ("parameters", "gradients", "optimizer_state")
    return sum(sum(resident[kind]) for kind in kinds) + sum(gradient_tensors(model, plan))
