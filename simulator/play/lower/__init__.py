"""lower: (model, plan, cluster, stack, calibration) -> Program. The only place where all the inputs meet.

Equal ranks share a program. Under sharded data parallelism on equal nodes all ranks are equal: one class; a drawn
cluster with unequal links goes through `fold`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from simulator.base.errors import Fault, PlanError
from simulator.base.kernels import DTYPE_BYTES, Kernel
from simulator.memory import activation_bytes
from simulator.parallel.legal import legal
from simulator.parallel.mesh import Mesh
from simulator.parallel.model_shard import ModelShard, body_names, shard_of
from simulator.parallel.pipeline import micro_batches
from simulator.play.lower.builder import Builder
from simulator.play.lower.fabric import EXPERT_ROLES, ROLES, MeshFabric
from simulator.play.lower.hops import HopWork
from simulator.play.lower.power import shared_clock
from simulator.play.lower.rank_classes import RankClasses
from simulator.play.lower.reader import StageReader
from simulator.play.lower.stage import ScheduledUnit, Stage, StageStep, waits_for_messages
from simulator.play.lower.stragglers import slowdown
from simulator.play.lower.work import NO_WORK, BlockWork, Clock, Work
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.exceptions import Deviation, GpuKinds
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.offload import Moves, Transfers, UnitMoves, moves
from simulator.work.ops import ModelBlocks, build_blocks, optimizer_kernels
from simulator.work.program import Program
from simulator.work.script import Hop, UnitComm, agreement, communication, pieces, stepped_numel
from simulator.work.script.order import Chunk
from simulator.work.script.step import step_script

__all__ = ["Lowering", "lower"]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A plan made concrete: its inputs resolved, its mesh, its blocks; `program(n)` plays n micro-batches.

    cluster: without its exceptions, if any; `whole` has them. kinds: of its GPUs, where they differ. others: stages on other devices.
    """

    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    device: Device
    curves: LinkCurves
    mesh: Mesh
    blocks: ModelBlocks
    stages: tuple[Stage, ...]
    clock: Clock
    exceptions: tuple[Deviation, ...] = ()
    kinds: GpuKinds | None = None
    agrees: bool = True  # the step ends with replicas agreeing, where they take steps alone
    others: Mapping[str, tuple[Stage, ...]] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)  # by device, where they differ

    @property
    def hardware_flop(self) -> int:
        """FLOP of a step on all devices, recomputation included."""
        plan = self.plan
        per_rank = sum(
            unit.flop * len(micro_batches(plan.pipeline_schedule, plan.num_micro_batches, chunk))
            for stage in self.stages
            for chunk, step in enumerate(stage.chunks)
            for unit in step.units
        )
        return per_rank * (plan.num_devices // plan.pp)

    @property
    def step(self) -> StageStep:
        """The first chunk of the first stage: everything, without pipeline parallelism."""
        return self.stages[0].chunks[0]

    @cached_property
    def fabric(self) -> MeshFabric:
        """What its collectives run on."""
        ideal = self.calibration.kind == "ideal"
        return MeshFabric(
            cluster=self.cluster,
            mesh=self.mesh,
            stack=self.stack,
            curves=self.curves,
            memory_weight=self.calibration.interference.hbm_weight,
            slowdown=0.0 if ideal else slowdown(self.plan.num_devices),
            transfers=self.transfers,
            nccl=self.stack.software(),
            rank_classes=self.rank_classes,
            agrees=self.agrees,
        )

    @property
    def whole(self) -> Cluster:
        """The cluster with its exceptions."""
        return self.cluster.model_copy(update={"exceptions": self.exceptions}) if self.exceptions else self.cluster

    @property
    def _roles(self) -> tuple[str, ...]:
        """What ranks meet for, pipelines aside."""
        units = (unit for stage in self.stages for chunk in stage.chunks for unit in chunk.units)
        hops = tuple(hop.role for unit in units for hop in unit.hops)
        staged = ("shard_near", "shard_far") if self.plan.hierarchical_gather else ()
        return (*ROLES, *(EXPERT_ROLES if self.model.experts else ()), *staged, *hops)

    @cached_property
    def rank_classes(self) -> RankClasses | None:
        """Who plays what where GPUs differ; None where all are equal."""
        if self.kinds is None:
            return None
        even = MeshFabric(
            cluster=self.cluster, mesh=self.mesh, stack=self.stack, curves=self.curves, memory_weight=0.0, slowdown=0.0
        )
        rank_classes = RankClasses(
            cluster=self.cluster,
            kinds=self.kinds,
            mesh=self.mesh,
            axes=tuple(dict.fromkeys(map(even.axis, self._roles))),
            memory_weights={name: one.interference.hbm_weight for name, one in self.calibrations.items()},
            ideal=self.calibration.kind == "ideal",
        )
        if self.plan.pp > 1 and rank_classes.mixed_devices:
            problem = "different GPUs inside the tensor- or context-parallel groups of a pipeline are not modelled"
            raise PlanError(Fault(place="cluster: exceptions", problem=problem, remedy="groups of one GPU, or pp = 1"))
        return rank_classes

    @property
    def transfers(self) -> Transfers | None:
        """What moves between tiers cost; None where the plan offloads nothing."""
        tier, plan = self.cluster.host_tier, self.plan
        if tier is None or not plan.offload.any:
            return None
        return Transfers(
            tier=tier,
            gpus_per_node=self.cluster.gpus_per_node,
            rank_mapping=self.cluster.seats,
            num_ranks=plan.num_devices,
            offload=plan.offload,
            lent_bytes_per_s=_lent_bytes_per_s(self.cluster, plan),
            **_switches(self.cluster),
            vectorised=plan.traits.zero_engine or plan.optimizer_impl == "fused",
        )

    def program(self, num_micro_batches: int, rank: int | None = None, *, stage: int = 0) -> Program:
        """The step of the class of a stage's ranks, or of one rank, with that many micro-batches instead of the plan's."""
        if rank is not None:
            stage = self.mesh.coordinates(rank)["pp"]
        return self._played(Builder(self.fabric, rank, self._stage(stage)), num_micro_batches, stage, rank)

    def programs(self, num_micro_batches: int) -> tuple[Program, ...]:
        """One program a class of equal ranks: a pipeline stage is one, and more where GPUs differ."""
        if self.rank_classes is None:
            return tuple(self.program(num_micro_batches, stage=stage) for stage in range(self.plan.pp))
        return tuple(
            self._played(
                Builder(self.fabric, None, self._stage(rank_class.stage), rank_class),
                num_micro_batches,
                rank_class.stage,
                rank_class.rank,
            )
            for rank_class in self.rank_classes.classes
        )

    def _stage(self, stage: int) -> int | None:
        return stage if self.plan.pp > 1 else None

    def _played(self, build: Builder, num_micro_batches: int, stage: int, rank: int | None) -> Program:
        """A stage's step on the device of `rank` (None: the cluster's own)."""
        stages = self.stages
        if self.rank_classes is not None and rank is not None:
            stages = self.others.get(self.rank_classes.kind(rank).device, stages)
        one = stages[stage if self.plan.acts_in_order else 0]
        reader = StageReader(build, one, self.clock)
        reader.read(step_script(self.plan, self.stack, one.script_chunks, num_micro_batches, stage))
        return build.program()


def lower(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    calibration: Calibration,
    curves: LinkCurves,
) -> Lowering:
    """Check that the inputs fit together and price every phase.

    Raises PlanError with every fault: degrees, divisibilities, and what cannot be modelled yet.
    """
    legal(model, plan, cluster, stack)
    stack = _as_hosted(stack, plan, cluster)
    exceptions, kinds = cluster.exceptions, GpuKinds.of(cluster) if cluster.exceptions else None
    mesh, cluster = Mesh(plan, cluster), cluster.usual
    blocks = build_blocks(model, stack, plan)
    near = mesh.group_shape("dp_shard_cp").ranks_per_node
    clock, stages = _stages(model, plan, stack, blocks, cluster.device, calibration, near)
    others = {name: device for name, device in kinds.devices.items() if device != cluster.device} if kinds else {}
    theirs = {name: _of_its_kind(calibration, device) for name, device in others.items()}
    return Lowering(
        model=model,
        plan=plan,
        cluster=cluster,
        stack=stack,
        calibration=calibration,
        device=cluster.device,
        curves=curves,
        mesh=mesh,
        blocks=blocks,
        stages=stages,
        clock=clock,
        exceptions=exceptions,
        kinds=kinds if kinds and kinds.of_rank else None,
        others={
            name: _stages(model, plan, stack, blocks, device, theirs[name], near)[1] for name, device in others.items()
        },
        calibrations={cluster.device.name: calibration, **theirs},
    )


def unpriced_blocks(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> ModelBlocks:
    """The blocks that `lower` prices: all that memory needs to know of a plan. Raises PlanError as `lower` does."""
    legal(model, plan, cluster, stack)
    return build_blocks(model, _as_hosted(stack, plan, cluster), plan)


def _as_hosted(stack: Stack, plan: Plan, cluster: Cluster) -> Stack:
    """The software at the pace of the cluster's hosts; a graph of the whole step leaves them nothing to do."""
    stack = stack.on_host_of(cluster.device)
    return stack.without_host() if "full_iteration" in plan.cuda_graphs else stack


def _of_its_kind(calibration: Calibration, device: Device) -> Calibration:
    """Another device's calibration: ideal or of its data sheet where that was asked for, else its own."""
    if calibration.kind == "ideal":
        return calibration
    return Calibration.datasheet(device) if calibration.kind == "datasheet" else Calibration.for_device(device)


def _stages(
    model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks, device: Device, calibration: Calibration, near: int
) -> tuple[Clock, tuple[Stage, ...]]:
    """The pipeline ranks on one device, and the clock that priced them. near: ranks of a shard group on one node."""
    clock = shared_clock(Clock(device, calibration, stack), shard_of(model, plan), plan, stack, blocks)
    works = {block.name: clock.block(block, plan) for block in blocks.kinds}
    return clock, tuple(_stage(model, plan, stack, blocks, works, clock, near, index) for index in range(plan.pp))


def _switches(cluster: Cluster) -> dict[str, Any]:
    """PCIe switches that several GPUs share. Copies reach of their uplinks what they reach of a GPU's own link."""
    link, tier = cluster.host_link, cluster.host_tier
    if cluster.pcie is None or not cluster.pcie.switches or link is None or tier is None:
        return {}
    reached = min(tier.h2d_bytes_per_s, tier.d2h_bytes_per_s) / link.bytes_per_s
    uplink = (cluster.pcie.switch_bytes_per_s or link.bytes_per_s) * reached
    return {"switches": cluster.pcie.switches, "uplink_bytes_per_s": uplink}


def _stage(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    works: dict[str, BlockWork],
    clock: Clock,
    node_ranks: int,
    index: int,
) -> Stage:
    """A pipeline rank's chunks; without pipeline parallelism, the one stage there is."""
    shard = shard_of(model, plan, index)
    optimizer = _optimizer(shard, plan, clock, stack)
    units = _units(shard, plan, works, clock, node_ranks)
    if plan.pp == 1:
        moved = moves(shard, plan, activation_bytes(shard, plan, stack, blocks))
    else:
        names = tuple(unit.name for unit in units)
        moved = Moves(plan=plan, order=names, units=dict.fromkeys(names, UnitMoves()))
    wide = model.d_model * DTYPE_BYTES[plan.gradient_dtype]
    tied = model.tied_embeddings and isinstance(shard, ModelShard) and shard.holds_embedding != shard.holds_head
    return Stage(
        index=index,
        plan=plan,
        chunks=tuple(
            StageStep(
                plan=plan,
                chunk=_shape(chunk),
                units=chunk,
                optimizer=optimizer,
                moves=moved,
                synchronous=waits_for_messages(plan) or stack.host_waits_for_blocks,
                turns=any(segment.waits for unit in units for segment in unit.work.forward.segments),
                agreement=_hops(clock, agreement(shard, plan)),
            )
            for chunk in _chunks(shard, units)
        ),
        message_bytes=_message_bytes(model, plan),
        tied_bytes=shard.vocab_size * wide if tied and plan.pp > 1 else 0,
    )


def _chunks(shard: Model, units: tuple[ScheduledUnit, ...]) -> tuple[tuple[ScheduledUnit, ...], ...]:
    """A rank's units by the pipeline chunks it holds, its layers numbered as the model's."""
    if not isinstance(shard, ModelShard):
        return (units,)
    embedding, *layers, head = units
    chunks: list[tuple[ScheduledUnit, ...]] = []
    for index, held in enumerate(shard.body_chunks):
        mine, layers = layers[: len(held)], layers[len(held) :]
        first = [embedding] if index == shard.embedding_chunk else []
        chunks.append((*first, *mine, *([head] if index == shard.head_chunk else [])))
    return tuple(chunks)


def _shape(units: tuple[ScheduledUnit, ...]) -> Chunk:
    """Which units are the ends of the model."""
    ends = sum(unit.name in ("embedding", "head") for unit in units)
    return Chunk(
        num_layers=len(units) - ends,
        embedding=any(unit.name == "embedding" for unit in units),
        head=any(unit.name == "head" for unit in units),
    )


def _message_bytes(model: Model, plan: Plan) -> int:
    """Activations of a micro-batch, or their gradients, between stages.

    Sequence parallelism leaves each rank its tokens; Megatron and DeepSpeed send a part each without it too (arXiv
    2104.04473, section 4.1). That the receivers then gather the parts inside their node is left out.
    """
    parts = plan.tp if plan.sequence_parallel or plan.traits.own_model_code else 1
    return plan.micro_batch_size * plan.seq_len // plan.cp * model.d_model * DTYPE_BYTES[plan.compute_dtype] // parts


def _lent_bytes_per_s(cluster: Cluster, plan: Plan) -> float:
    """A rank's part of the ports of its node's idle GPUs, one way."""
    return cluster.idle_gpus * cluster.intra.bytes_per_s / min(cluster.gpus_per_node, plan.num_devices)


def _units(
    shard: Model, plan: Plan, works: dict[str, BlockWork], clock: Clock, node_ranks: int
) -> tuple[ScheduledUnit, ...]:
    """Embedding, blocks and head of a rank's share in forward order, each with its communication."""
    comms = {comm.unit: comm for comm in communication(shard, plan, node_ranks)}
    if isinstance(shard, ModelShard) and shard.holds_head and not shard.holds_embedding:
        comms["head"] = replace(comms["embedding"], unit="head")  # FSDP's root, without the embedding
    every = plan.recompute_every if plan.recompute == "every_k" else 1
    layers = [
        _unit(
            name,
            comms[name],
            works[kind],
            checkpointed=plan.recompute != "none" and index % every == 0,
            clock=clock,
        )
        for index, (name, kind) in enumerate(zip(body_names(shard), shard.body, strict=True))
    ]
    embedding, head = (_unit(n, comms[n], works[n], checkpointed=False, clock=clock) for n in ("embedding", "head"))
    return embedding, *layers, head


def _unit(name: str, comm: UnitComm, work: BlockWork, *, checkpointed: bool, clock: Clock) -> ScheduledUnit:
    return ScheduledUnit(
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
        hops=_hops(clock, comm.hops),
    )


def _hops(clock: Clock, hops: tuple[Hop, ...]) -> tuple[HopWork, ...]:
    return tuple(
        HopWork(
            work=_copies(clock, hop.kernels),
            kind=hop.kind,
            role=hop.role,
            size_bytes=hop.size_bytes,
            count=hop.count,
            blocking=hop.blocking,
        )
        for hop in hops
    )


def _copies(clock: Clock, kernels: tuple[Kernel, ...]) -> Work:
    return clock.work("copies", kernels) if kernels else NO_WORK


def _optimizer(model: Model, plan: Plan, clock: Clock, stack: Stack) -> Work:
    numel = stepped_numel(model, plan)
    tensors = sum(len(shapes) for _, shapes in pieces(model))
    offloaded = plan.offload.optimizer != "none"
    work = clock.work("optimizer", () if offloaded else optimizer_kernels(numel, tensors, plan))
    return Work(parts=(*work.parts, ("overhead", stack.step_overhead_s)), host_s=work.host_s)
