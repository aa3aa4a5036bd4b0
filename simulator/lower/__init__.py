"""lower: (model, plan, cluster, stack, calibration) -> Program. The only place where all the nouns meet.

Equal ranks share a program. Under sharded data parallelism on equal nodes all ranks are equal: one class; a drawn
cluster with unequal links goes through `fold`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.calibration import Calibration
from simulator.collective_curves import LinkCurves
from simulator.device import Device
from simulator.errors import Fault, PlanError
from simulator.kernels import Stream
from simulator.lower.builder import Builder, Fabric
from simulator.lower.power import shared_clock
from simulator.lower.schedule import Step, Unit, replicated_step, sharded_step
from simulator.lower.stragglers import slowdown
from simulator.lower.work import NO_WORK, BlockWork, Clock, Work
from simulator.memory import activation_bytes
from simulator.mesh import Mesh, check
from simulator.model import Model
from simulator.offload import Transfers, moves
from simulator.ops import ModelBlocks, build_blocks, optimizer_kernels
from simulator.plan import Plan
from simulator.program import Program
from simulator.share import share_of
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.zero import UnitComm, communication, pieces, shard_ranks

__all__ = ["Lowering", "lower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """A plan made concrete: its nouns resolved, its mesh, its blocks; `program(n)` plays n micro-batches."""

    model: Model
    share: Model  # what one rank holds of it
    plan: Plan
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    device: Device
    curves: LinkCurves
    mesh: Mesh
    blocks: ModelBlocks
    step: Step
    clock: Clock

    @property
    def hardware_flop(self) -> int:
        """FLOP of a step on all devices, recomputation included."""
        per_micro_batch = sum(unit.flop for unit in self.step.units)
        return per_micro_batch * self.plan.num_micro_batches * self.plan.num_devices

    @property
    def fabric(self) -> Fabric:
        """What its collectives run on."""
        ideal = self.calibration.kind == "ideal"
        return Fabric(
            cluster=self.cluster,
            mesh=self.mesh,
            stack=self.stack,
            curves=self.curves,
            memory_weight=self.calibration.interference.hbm_weight,
            slowdown=0.0 if ideal else slowdown(self.plan.num_devices),
            transfers=self.transfers,
            nccl=self.stack.software(),
        )

    @property
    def transfers(self) -> Transfers | None:
        """What moves between tiers cost; None where the plan offloads nothing."""
        tier, plan = self.cluster.host_tier, self.plan
        if tier is None or not plan.offload.any:
            return None
        return Transfers(
            tier=tier,
            gpus_per_node=self.cluster.gpus_per_node,
            num_ranks=plan.num_devices,
            offload=plan.offload,
            lent_bytes_per_s=_lent_bytes_per_s(self.cluster, plan),
            **_switches(self.cluster),
            vectorised=plan.implementation == "deepspeed" or plan.optimizer_impl == "fused",
        )

    def program(self, num_micro_batches: int, rank: int | None = None) -> Program:
        """The step of the class of all ranks, or of one rank, with that many micro-batches instead of the plan's."""
        build = Builder(self.fabric, rank)
        gathers = self.plan.implementation in ("fsdp1", "fsdp2") or self.plan.zero == 3
        schedule = sharded_step if gathers else replicated_step
        schedule(build, self.step, num_micro_batches)
        return build.program()


def lower(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    calibration: Calibration,
    curves: LinkCurves,
) -> Lowering:
    """Check that the nouns fit together and price every phase.

    Raises PlanError with every fault: degrees, divisibilities, and what cannot be modelled yet.
    """
    plan.check()
    check(plan, model, cluster)
    _refuse_unmodelled(plan)
    _refuse_no_host(plan, cluster)
    _refuse_no_peer(plan, cluster)
    device = cluster.device
    share = share_of(model, plan)
    blocks = build_blocks(share, stack, plan)
    clock = shared_clock(Clock(device, calibration, stack), share, plan, stack, blocks)
    step = Step(
        plan=plan,
        units=_units(share, plan, blocks, clock),
        optimizer=_optimizer(share, plan, clock, stack),
        moves=moves(share, plan, activation_bytes(share, plan, stack, blocks)),
    )
    return Lowering(
        model=model,
        share=share,
        plan=plan,
        cluster=cluster,
        stack=stack,
        calibration=calibration,
        device=device,
        curves=curves,
        mesh=Mesh(plan, cluster),
        blocks=blocks,
        step=step,
        clock=clock,
    )


def _switches(cluster: Cluster) -> dict[str, Any]:
    """PCIe switches that several GPUs share. Copies reach of their uplinks what they reach of a GPU's own link."""
    link, tier = cluster.host_link, cluster.host_tier
    if cluster.pcie is None or not cluster.pcie.switches or link is None or tier is None:
        return {}
    reached = min(tier.h2d_bytes_per_s, tier.d2h_bytes_per_s) / link.bytes_per_s
    uplink = (cluster.pcie.switch_bytes_per_s or link.bytes_per_s) * reached
    return {"switches": cluster.pcie.switches, "uplink_bytes_per_s": uplink}


def _refuse_unmodelled(plan: Plan) -> None:
    faults = [
        Fault(place=f"plan: {axis}", problem=f"{axis} = {degree}: {word} parallelism is not modelled", remedy="use 1")
        for axis, degree, word in (
            ("pp", plan.pp, "pipeline"),
            ("ep", plan.ep, "expert"),
        )
        if degree > 1
    ]
    if faults:
        raise PlanError(faults)


def _lent_bytes_per_s(cluster: Cluster, plan: Plan) -> float:
    """A rank's part of the ports of its node's idle GPUs, one way."""
    return cluster.idle_gpus * cluster.intra.bytes_per_s / min(cluster.gpus_per_node, plan.num_devices)


def _refuse_no_peer(plan: Plan, cluster: Cluster) -> None:
    if plan.offload.activations == "peer" and cluster.lent_bytes == 0:
        problem = f"{cluster.name} has no idle GPUs"
        if cluster.idle_gpus:
            problem = (
                f"the {cluster.idle_gpus} idle GPUs of {cluster.name} are reached through the host, not over NVLink"
            )
        remedy = 'idle_gpus in the cluster file, or activations = "host"'
        raise PlanError(Fault(place="plan: offload.activations", problem=problem, remedy=remedy))


def _refuse_no_host(plan: Plan, cluster: Cluster) -> None:
    if plan.offload.any and cluster.host_tier is None:
        problem = f"{cluster.name} has no host memory that its GPUs reach"
        raise PlanError(Fault(place="plan: offload", problem=problem, remedy="a [host] link in the cluster file"))


def _units(model: Model, plan: Plan, blocks: ModelBlocks, clock: Clock) -> tuple[Unit, ...]:
    """Embedding, blocks and head in forward order, each with its communication."""
    comms = {comm.unit: comm for comm in communication(model, plan)}
    layer = clock.block(blocks.layer, plan)
    every = plan.recompute_every if plan.recompute == "every_k" else 1
    names = ["embedding", *(f"layer{i}" for i in range(model.num_layers)), "head"]
    works = {"embedding": clock.block(blocks.embedding, plan), "head": clock.block(blocks.head, plan)}
    return tuple(
        _unit(
            name,
            comms[name],
            works.get(name, layer),
            checkpointed=plan.recompute != "none" and name.startswith("layer") and (index - 1) % every == 0,
            clock=clock,
        )
        for index, name in enumerate(names)
    )


def _unit(name: str, comm: UnitComm, work: BlockWork, *, checkpointed: bool, clock: Clock) -> Unit:
    return Unit(
        name=name,
        comm=comm,
        work=work,
        checkpointed=checkpointed,
        flop=work.flop + (work.recompute_flop if checkpointed else 0),
        gather_forward=clock.work("copies", comm.gather_forward_kernels),
        gather_backward=clock.work("copies", comm.gather_backward_kernels),
        gradient=_copies(clock, comm.gradient_kernels),
        keep=_copies(clock, comm.keep_kernels),
        add=_copies(clock, comm.add_kernels),
    )


def _copies(clock: Clock, kernels: tuple[Stream, ...]) -> Work:
    return clock.work("copies", kernels) if kernels else NO_WORK


def _optimizer(model: Model, plan: Plan, clock: Clock, stack: Stack) -> Work:
    numel = -(-model.num_parameters // shard_ranks(plan))
    tensors = sum(len(shapes) for _, shapes in pieces(model))
    offloaded = plan.offload.optimizer != "none"
    work = clock.work("optimizer", () if offloaded else optimizer_kernels(numel, tensors, plan))
    return Work(parts=(*work.parts, ("overhead", stack.step_overhead_s)), host_s=work.host_s)
