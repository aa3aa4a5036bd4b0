"""lower: (model, plan, cluster, stack, calibration) -> Program. The only place where all the inputs meet.

Equal ranks share a program. Under sharded data parallelism on equal nodes all ranks are equal: one class; a drawn
cluster with unequal links goes through `fold`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from simulator.base import progress
from simulator.base.errors import PlanError
from simulator.base.kernels import DTYPE_BYTES
from simulator.parallel.legal import legal
from simulator.parallel.mesh import Mesh
from simulator.parallel.model_shard import largest_share, shard_shares
from simulator.play.lower.builder import Builder, Exchanges, RecordingBuilder
from simulator.play.lower.fabric import EXPERT_ROLES, NORM, ROLES, MeshFabric
from simulator.play.lower.pool_tiers import PoolTiers
from simulator.play.lower.priced_stages import PricedBlocks, priced_stages
from simulator.play.lower.rank_classes import RankClasses, slowdown
from simulator.play.lower.reader import StageReader
from simulator.play.lower.stage import Stage, StageStep
from simulator.play.lower.work import Clock
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.learned import longer
from simulator.spec.calibration.likeness import point_of
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.exceptions import Deviation
from simulator.spec.cluster.gpu_kinds import GpuKinds
from simulator.spec.cluster.tiers import HostTier
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.software.stack import Stack
from simulator.work.offload import Transfers
from simulator.work.ops import ModelBlocks, build_blocks, reduces_maxima
from simulator.work.program import Program
from simulator.work.script.step import step_script

__all__ = ["Lowering", "lower"]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A plan made concrete: its inputs resolved, its mesh, its blocks; `program(n)` plays n micro-batches.

    stack: at the pace of the cluster's hosts; `given_stack` is the one to lower again with.
    cluster: without its exceptions, if any; `full_cluster` has them. kinds: of its GPUs, where they differ. others: stages on other devices.
    """

    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    given_stack: Stack
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
        return sum(stage.flop for stage in self.stages) * (self.plan.num_devices // self.plan.pp)

    @property
    def step(self) -> StageStep:
        """The first chunk of the first stage: everything, without pipeline parallelism."""
        return self.stages[0].chunks[0]

    @cached_property
    def fabric(self) -> MeshFabric:
        """The links and groups of its collectives."""
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
    def full_cluster(self) -> Cluster:
        """The cluster with its exceptions."""
        return self.cluster.model_copy(update={"exceptions": self.exceptions}) if self.exceptions else self.cluster

    @property
    def over_nodes(self) -> bool:
        """A network joins the plan's devices."""
        cluster = self.full_cluster
        several = cluster.num_nodes > 1 and cluster.num_devices > cluster.nvlink_domain_size
        return several and not self.curves.ideal_links

    @property
    def network_by_sheet(self) -> bool:
        """The plan spans a network that is known only by its data sheet: neither it nor a similar one was measured."""
        fabric = self.cluster.fabric
        return self.over_nodes and not (fabric.confirmed or any(one.nodes > 1 for one in fabric.measured))

    @property
    def may_wait_s(self) -> float:
        """What hosts may wait for each rank of another node before a collective, where nothing says whether they do."""
        fabric = self.cluster.fabric
        known = fabric.call_rank_s is not None or any(one.nodes > 1 for one in fabric.measured)
        return 0.0 if known or not self.over_nodes else self.stack.fitted.rank_wait_s

    def on_network(self, speed: float, wait: float = 1.0) -> Lowering:
        """The same where bytes between nodes flow `speed` times as fast, and calls wait `wait` times as long beside."""
        fabric = self.cluster.fabric
        return self._on_fabric(speed=fabric.speed * speed, wait=fabric.wait * wait)

    def waiting(self) -> Lowering:
        """The same where hosts wait for every rank."""
        return self._on_fabric(call_rank_s=self.may_wait_s)

    def _on_fabric(self, **changes: float) -> Lowering:
        other = self.cluster.fabric.model_copy(update=changes)
        cluster = self.full_cluster.model_copy(update={"fabric": other})
        kinds = GpuKinds.of(cluster) if self.kinds is not None else None
        return replace(self, cluster=cluster.usual, kinds=kinds)

    @property
    def _roles(self) -> tuple[str, ...]:
        """The roles of the plan's collectives, without pipelines."""
        units = (unit for stage in self.stages for chunk in stage.chunks for unit in chunk.units)
        hops = tuple(hop.role for unit in units for hop in unit.hops)
        staged = ("shard_near", "shard_far") if self.plan.deepspeed.hierarchical_gather else ()
        further: tuple[str, ...] = ("stage",) if reduces_maxima(self.plan, self.stack) else ()
        further += (NORM,) if self.stack.kernels.clips else ()
        return (*ROLES, *(EXPERT_ROLES if self.model.experts else ()), *staged, *further, *hops)

    @cached_property
    def rank_classes(self) -> RankClasses | None:
        """The classes of ranks if GPUs differ; None if all are equal."""
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
            raise PlanError.at("cluster: exceptions", problem, "groups of one GPU, or pp = 1")
        return rank_classes

    @property
    def transfers(self) -> Transfers | None:
        """The cost of transfers between tiers; None without offload."""
        tier, plan = self.cluster.host_tier, self.plan
        if self.pool_tiers is not None:
            return self.pool_tiers.transfers if self.pool_tiers.spills else None
        if tier is None or not plan.offload.any:
            return None
        cluster = self.cluster  # whose nodes' idle GPUs lend each rank a part of their ports, one way
        lent_bytes_per_s = cluster.idle_gpus * cluster.intra.bytes_per_s / min(cluster.gpus_per_node, plan.num_devices)
        return self.transfers_under(plan.offload, tier, lent_bytes_per_s)

    def transfers_under(self, offload: Offload, tier: HostTier, lent_bytes_per_s: float) -> Transfers:
        """The cost of transfers under this offload. lent_bytes_per_s: a rank's part of the ports of idle GPUs."""
        plan = self.plan
        return Transfers(
            tier=tier,
            gpus_per_node=self.cluster.gpus_per_node,
            rank_mapping=self.cluster.seats,
            num_ranks=plan.num_devices,
            offload=offload,
            lent_bytes_per_s=lent_bytes_per_s,
            **_switches(self.cluster),
            vectorised=plan.traits.zero_engine or plan.optimizer.impl == "fused",
            state_bytes=DTYPE_BYTES[plan.precision.master],
        )

    @cached_property
    def pool_tiers(self) -> PoolTiers | None:
        """The memory pool, if it has tiers below HBM."""
        return PoolTiers.of(self) if self.plan.memory.tiered else None

    @property
    def untiered(self) -> Lowering:
        """The same where HBM has no end and nothing moves."""
        return replace(self, plan=self.plan.copy_with(memory_policy="expandable"))

    def program(self, num_micro_batches: int, rank: int | None = None, *, stage: int = 0) -> Program:
        """The step of the class of a stage's ranks, or of one rank, with that many micro-batches instead of the plan's."""
        if rank is not None:
            stage = self.mesh.coordinates(rank)["pp"]
        return self._played(Builder(self.fabric, rank, self._stage(stage)), num_micro_batches, stage, rank)

    def programs(self, num_micro_batches: int) -> tuple[Program, ...]:
        """One program a class of equal ranks: a pipeline stage is one, and more where GPUs differ."""
        if self.rank_classes is None:
            return tuple(self._stage_program(num_micro_batches, stage) for stage in range(self.plan.pp))
        return tuple(
            self._played(
                Builder(self.fabric, None, self._stage(rank_class.stage), rank_class),
                num_micro_batches,
                rank_class.stage,
                rank_class.rank,
            )
            for rank_class in self.rank_classes.classes
        )

    def _stage_program(self, num_micro_batches: int, stage: int) -> Program:
        found = self.program(num_micro_batches, stage=stage)
        progress.report(0.5 / self.plan.pp)  # playing it is the other half
        return found

    def exchanges_inside(self, num_micro_batches: int) -> tuple[Mapping[int, Exchanges], ...]:
        """Of each stage's program, the collectives inside its compute ops, by their ids; where all GPUs are equal."""
        builders = [RecordingBuilder(self.fabric, None, self._stage(stage)) for stage in range(self.plan.pp)]
        for stage, build in enumerate(builders):
            self._played(build, num_micro_batches, stage, None)
        return tuple(build.inside for build in builders)

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
        program = build.program()
        return program if self.pool_tiers is None else self.pool_tiers.moved(program, rank)


def lowered(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> Lowering:
    """The same with what `predict` takes where calibration or stack are not given."""
    calibration = calibration or Calibration.for_device(cluster.device)
    return lower(model, plan, cluster, stack or Stack.of(plan), calibration, calibration.links or default_curves())


def lower(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    calibration: Calibration,
    curves: LinkCurves,
    known: PricedBlocks | None = None,
) -> Lowering:
    """Check that the inputs fit together and price every phase. known: the plan's blocks, where they have been made.

    Raises PlanError with every fault: degrees, divisibilities, and what cannot be modelled yet.
    """
    legal(model, plan, cluster, stack)
    calibration = calibration.at(point_of(model, plan, cluster)) if calibration.learned is not None else calibration
    if (learned := calibration.learned) is not None:
        stack, curves = learned.of(stack), longer(curves, learned.here)
    model, given, stack = stack.stored(model), stack, _as_hosted(stack, plan, cluster)
    stack = stack.without_interpreter() if calibration.kind == "ideal" else stack
    exceptions, kinds = cluster.exceptions, GpuKinds.of(cluster) if cluster.exceptions else None
    mesh, cluster = Mesh(plan, cluster), cluster.usual
    blocks, shares = known.blocks if known else build_blocks(model, stack, plan), shard_shares(plan, kinds)
    priced = known if known and calibration.learned is None else PricedBlocks(blocks)
    near = mesh.group_shape("dp_shard_cp").ranks_per_node

    def plan_on(device: Device) -> Plan:
        if not shares:
            return plan.with_equal_shards
        return plan.copy_with(shard_share=largest_share(shares, kinds, device.name))

    clock, stages = priced_stages(model, plan_on(cluster.device), stack, priced, cluster.device, calibration, near)
    others = {name: device for name, device in kinds.devices.items() if device != cluster.device} if kinds else {}
    theirs = {name: _of_its_kind(calibration, device) for name, device in others.items()}
    return Lowering(
        model=model,
        plan=plan,
        cluster=cluster,
        stack=stack,
        given_stack=given,
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
            name: priced_stages(model, plan_on(device), stack, PricedBlocks(blocks), device, theirs[name], near)[1]
            for name, device in others.items()
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
    """Another device's calibration: ideal or from its data sheet if the first one's is, else its own."""
    if calibration.kind == "ideal":
        return calibration
    return Calibration.datasheet(device) if calibration.kind == "datasheet" else Calibration.for_device(device)


def _switches(cluster: Cluster) -> dict[str, Any]:
    """PCIe switches that several GPUs share. Copies reach of their uplinks what they reach of a GPU's own link."""
    link, tier = cluster.host_link, cluster.host_tier
    if cluster.pcie is None or not cluster.pcie.switches or link is None or tier is None:
        return {}
    reached = min(tier.h2d_bytes_per_s, tier.d2h_bytes_per_s) / link.bytes_per_s
    uplink = (cluster.pcie.switch_bytes_per_s or link.bytes_per_s) * reached
    return {"switches": cluster.pcie.switches, "uplink_bytes_per_s": uplink}
