"""The order in which one rank issues a training step: sharded parameters (FSDP, ZeRO-3) or replicated ones.

Sources for who waits for whom: torch 2.13 `_fully_shard/_fsdp_param_group.py` (FSDP2), `fsdp/_runtime_utils.py`
(FSDP1), `nn/parallel/distributed.py` (DDP), Megatron-Core's distributed optimizer; see docs/background/schedules.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.play.lower import offloading
from simulator.play.lower.builder import Builder
from simulator.play.lower.hops import Hopping, HopWork
from simulator.play.lower.work import BlockWork, Phase, Work
from simulator.spec.plan import Plan
from simulator.work.offload import Moves
from simulator.work.zero import UnitComm


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledUnit:
    """One communication unit with its work: a transformer block, or a piece of the root at either end.

    gather_forward, gather_backward, gradient, keep, add: the full-size passes over memory that the implementation adds around
    its collectives (copy-out, casts, pre-division), on the compute stream. hops: of its gradient, where it takes several.
    """

    name: str
    comm: UnitComm
    work: BlockWork
    checkpointed: bool
    flop: int
    gather_forward: Work
    gather_backward: Work
    gradient: Work
    keep: Work  # of a gradient to which others will be added, in the first micro-batch
    add: Work  # in later ones
    hops: tuple[HopWork, ...] = ()

    @property
    def inputs(self) -> Phase:
        """The backward without the weights' gradients."""
        return self.work.recompute + self.work.inputs if self.checkpointed else self.work.inputs

    @property
    def backward(self) -> Phase:
        return self.work.recompute + self.work.backward if self.checkpointed else self.work.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """Everything a schedule needs: units in forward order (embedding, blocks, head) and the work at the end."""

    plan: Plan
    units: tuple[ScheduledUnit, ...]
    optimizer: Work
    moves: Moves  # between HBM and the tiers below
    agreement: tuple[HopWork, ...] = ()  # after the optimizer, where replicas take steps alone
    synchronous: bool = False  # the host waits for the device between pieces of work
    turns: bool = False  # and inside of them, so that it has no lead which hides when a piece's kernels are launched


def sharded_step(build: Builder, step: StageStep, num_micro_batches: int) -> None:
    """FSDP1, FSDP2 and ZeRO-3: gather before use, reduce-scatter after the gradient."""
    last: list[int | None] = []
    early = offloading.delayed_updates(build, step.moves)
    for index in range(num_micro_batches):
        sync = step.plan.syncs_every_micro_batch or index == num_micro_batches - 1
        sharded_forward(build, step, index)
        last = sharded_backward(build, step, index, sync=sync, final=index == num_micro_batches - 1)
    done = offloading.update(build, step.moves, step.optimizer, *last, delayed=early)
    _agree(build, step, done)


def _agree(build: Builder, step: StageStep, done: int) -> None:
    """Replicas that took steps alone, after the optimizer's last op."""
    if step.agreement and build.agrees:
        Hopping(build).begin("parameters of replicas", step.agreement, done)


def sharded_forward(build: Builder, step: StageStep, index: int) -> int:
    """One micro-batch's forward: each unit is gathered before it is used."""
    done: list[int] = []
    window = _forward_window(step.plan)
    for position, unit in enumerate(step.units):
        gate = done[position - window] if position >= window else None
        fetched = offloading.fetch(build, step.moves, unit.name, index, done, gate)
        label, near = f"all-gather {unit.name} mb{index}", index > 0 and step.plan.zeropp.secondary_ranks > 1
        gather = _gather(build, step, unit, label, gate, fetched, again=near)
        if unit.comm.experts is not None:  # on the same stream of the device
            size, ready = unit.comm.experts.all_gather_forward_bytes, gate if gather is None else gather
            gather = build.collective(f"{label} experts", "all_gather", "expert_shard", size, ready) or gather
        gather = fetched if gather is None else gather
        if gather is not None:
            passes = unit.gather_backward if near else unit.gather_forward
            build.compute(f"copy-out {unit.name} mb{index}", passes, gather)
        done.append(_forward(build, step, unit, index))
    return done[-1]


def _forward_window(plan: Plan) -> int:
    """Unit i's all-gather may start once unit i - window has been computed.

    FSDP2: it waits for the copy-out of unit i-2, which follows unit i-3's kernels. FSDP1 with limit_all_gathers: for
    the buffer freed by unit i-2; without: the host's lead alone limits it.
    """
    if plan.implementation == "fsdp2":
        return max(3, plan.forward_prefetch + 2)
    return 2 + plan.forward_prefetch if plan.limit_all_gathers else 1_000_000


def _forward(build: Builder, step: StageStep, unit: ScheduledUnit, index: int) -> int:
    offloading.before_forward(build, step.moves, unit.name, index)
    # plain pipelines wait at each message; of interleaved ones that the last stage's host waits is left out
    read = build.reads_loss and step.plan.pp == 1 and unit is step.units[-1]
    computed = _compute(build, step, f"forward {unit.name} mb{index}", unit.work.forward, waits=read)
    offloading.after_forward(build, step.moves, unit.name, index, computed)
    return computed


def _backward(build: Builder, step: StageStep, unit: ScheduledUnit, index: int, *after: int | None) -> int:
    offloading.before_backward(build, step.moves, unit.name, index)
    computed = _compute(build, step, f"backward {unit.name} mb{index}", unit.backward, *after)
    build.remember("backward", unit.name, index, computed)
    return computed


def _compute(build: Builder, step: StageStep, label: str, phase: Phase, *after: int | None, waits: bool = False) -> int:
    """Append a block's phase. The last op of it: a collective, where one ends the phase. waits: the host, for that compute."""
    if step.synchronous:
        return build.compute(label, build.folded(phase, synchronous=True), *after)
    end, before = -1, list[int | None]()  # before: ops that this segment waits for
    for number, segment in enumerate(phase.segments):
        if segment.work.parts or number == 0:
            read = waits and number == len(phase.segments) - 1
            stops = read or (segment.waits and not segment.exchanges)
            end = build.compute(label, segment.work, *after, waits=stops, early=step.turns)
            after, before = (), [end]
        sent: list[int | None] = []
        for exchange in segment.exchanges:
            name = f"{exchange.kind.replace('_', '-')} in {label}"
            stops = segment.waits and exchange is segment.exchanges[-1]
            sent.append(build.exchange(name, exchange, *before, waits=stops))
            build.hold(sent[-1])
            end = end if sent[-1] is None else sent[-1]
        if segment.beside.parts:
            end = build.compute(f"{label} beside", segment.beside, *before, join=False, early=step.turns)
        before = [*sent, end]
    return end


def sharded_backward(build: Builder, step: StageStep, index: int, *, sync: bool, final: bool) -> list[int | None]:
    """One micro-batch's backward: units are gathered again, and their gradients reduced if `sync`."""
    units = tuple(reversed(step.units))
    gathers: dict[int, int | None] = {}
    done: list[int] = []
    reduces: list[int | None] = []
    last: list[int | None] = []
    depth, hopping = step.plan.backward_prefetch, Hopping(build)
    for position, unit in enumerate(units):
        for ahead in range(position, min(position + depth, len(units) - 1) + 1):
            if ahead not in gathers:
                gate = done[ahead - depth - 1] if ahead > depth else None
                fetched = offloading.fetch_again(build, step.moves, units[ahead].name, index, done, gate)
                label = f"all-gather {units[ahead].name} mb{index} backward"
                gather = _gather(build, step, units[ahead], label, gate, fetched, again=True)
                experts = units[ahead].comm.experts
                if experts is not None:
                    label, ready = (
                        f"all-gather {units[ahead].name} mb{index} backward experts",
                        gate if gather is None else gather,
                    )
                    size = experts.all_gather_backward_bytes
                    gather = build.collective(label, "all_gather", "expert_shard", size, ready) or gather
                gathers[ahead] = fetched if gather is None else gather
        if gathers[position] is not None:
            build.compute(f"copy-out {unit.name} mb{index} backward", unit.gather_backward, gathers[position])
        # the reduce-scatter's input buffer of the unit before last must be free again
        held = reduces[position - 2] if position >= 2 else None
        done.append(_accumulated(build, unit, index, _backward(build, step, unit, index, held)))
        reduces.append(_reduce(build, step, unit, index, done[-1], hopping, final=final) if sync else None)
        if sync:
            last.append(offloading.send_gradient(build, step.moves, unit.name, index, reduces[-1], final=final))
    return last + hopping.drain()


def _gather(
    build: Builder, step: StageStep, unit: ScheduledUnit, label: str, *after: int | None, again: bool
) -> int | None:
    """A unit's parameters; again: from where they are after the first forward. In two stages if the plan says so."""
    plan, comm = step.plan, unit.comm
    size = comm.all_gather_backward_bytes if again else comm.all_gather_forward_bytes
    if plan.hierarchical_gather:
        far = build.collective(f"{label} between nodes", "all_gather", "shard_far", build.far_part(size), *after)
        return build.collective(label, "all_gather", "shard_near", size, *(after if far is None else (far,))) or far
    role = "reshard" if again and plan.reshard_ranks is not None else "shard"
    return build.collective(label, "all_gather", role, size, *after)


def _accumulated(build: Builder, unit: ScheduledUnit, index: int, after: int) -> int:
    """The unit's gradient beside those of the micro-batches before, where whole gradients add up."""
    work = unit.add if index else unit.keep
    return build.compute(f"copy-in {unit.name} mb{index} kept", work, after) if work.parts else after


def _reduce(
    build: Builder, step: StageStep, unit: ScheduledUnit, index: int, after: int, hopping: Hopping, *, final: bool
) -> int | None:
    copied = build.compute(f"copy-in {unit.name} mb{index}", unit.gradient, after) if unit.gradient.parts else after
    if unit.hops:
        return hopping.begin(f"{unit.name} mb{index}", unit.hops, copied)
    scatter = build.collective(
        f"reduce-scatter {unit.name} mb{index}", "reduce_scatter", "shard", unit.comm.reduce_scatter_bytes, copied
    )
    if unit.comm.late_all_reduce and not final:
        return scatter
    reduced = _all_reduce(build, step, unit, index, scatter if scatter is not None else copied) or scatter
    experts = unit.comm.experts
    if experts is None:
        return reduced
    label, ready = f"{unit.name} mb{index} experts", copied if reduced is None else reduced
    scatter = build.collective(
        f"reduce-scatter {label}", "reduce_scatter", "expert_shard", experts.reduce_scatter_bytes, ready
    )
    ready = ready if scatter is None else scatter
    size = experts.all_reduce_bytes
    return build.collective(f"all-reduce {label}", "all_reduce", "expert_replicate", size, ready) or scatter or reduced


def _all_reduce(build: Builder, step: StageStep, unit: ScheduledUnit, index: int, after: int) -> int | None:
    """Between replicas: at once, or joined with the units before it until they hold enough (the last unit has all)."""
    size = build.combined(unit.comm.all_reduce_bytes, last=unit is step.units[0])
    label, count = f"all-reduce {unit.name} mb{index}", unit.comm.num_buckets
    return build.collective(label, "all_reduce", "replicate", size, after, count=count)


def replicated_step(build: Builder, step: StageStep, num_micro_batches: int) -> None:
    """DDP and ZeRO-1/2: every rank holds the parameters; gradients are reduced as they appear.

    Parameters that the optimizer updates in shards travel back: Megatron gathers each before its next use, so the step
    shown begins with those gathers, as in a steady run; DeepSpeed and torch's ZeRO-1 gather them inside optimizer.step().
    """
    last: list[int | None] = []
    early = offloading.delayed_updates(build, step.moves)
    for index in range(num_micro_batches):
        final = index == num_micro_batches - 1
        replicated_forward(build, step, index, first=index == 0)
        last += replicated_backward(build, step, index, sync=step.plan.syncs_every_micro_batch or final, final=final)
    done = offloading.update(build, step.moves, step.optimizer, *last, delayed=early)
    gather_late(build, step, done)
    _agree(build, step, done)


def replicated_forward(build: Builder, step: StageStep, index: int, *, first: bool) -> int:
    """One micro-batch's forward; `first` in a step: Megatron gathers each unit's new parameters before it, or all of them."""
    end, gathers = -1, first and step.plan.implementation == "megatron"
    for unit in step.units if gathers and build.gathers_late else ():
        _gather_updated(build, unit)
    for unit in step.units:
        if gathers and not build.gathers_late:
            _gather_updated(build, unit)
        end = _forward(build, step, unit, index)
    return end


def replicated_backward(build: Builder, step: StageStep, index: int, *, sync: bool, final: bool) -> list[int | None]:
    """One micro-batch's backward; `sync`: gradients are reduced as they appear, or all of them behind it."""
    last: list[int | None] = []
    hopping, late = Hopping(build), build.reduces_late

    def reduce(unit: ScheduledUnit, computed: int) -> None:
        reduced = _reduce(build, step, unit, index, computed, hopping, final=final)
        last.append(offloading.send_gradient(build, step.moves, unit.name, index, reduced, final=final))

    computed = -1
    for unit in reversed(step.units):
        computed = _accumulated(build, unit, index, _backward(build, step, unit, index))
        if sync and not late:
            reduce(unit, computed)
    for unit in reversed(step.units) if sync and late else ():
        reduce(unit, computed)
    return last + hopping.drain()


def inputs_backward(build: Builder, step: StageStep, index: int) -> int:
    """One micro-batch's backward without the weights' gradients."""
    end = -1
    for unit in reversed(step.units):
        end = _compute(build, step, f"backward of inputs {unit.name} mb{index}", unit.inputs)
    return end


def weights_backward(build: Builder, step: StageStep, index: int, *, sync: bool) -> tuple[int, list[int | None]]:
    """The weights' gradients of one micro-batch, and their reduction: (last op, reductions)."""
    end, reductions, hopping = -1, [], Hopping(build)
    for unit in reversed(step.units):
        end = _compute(build, step, f"backward of weights {unit.name} mb{index}", unit.work.weights)
        end = _accumulated(build, unit, index, end)
        reductions += [_reduce(build, step, unit, index, end, hopping, final=sync)] if sync else []
    return end, reductions + hopping.drain()


def gather_late(build: Builder, step: StageStep, after: int) -> None:
    """Parameters that shards updated, where the implementation gathers them inside optimizer.step()."""
    if step.plan.implementation != "megatron":
        for unit in step.units:
            _gather_updated(build, unit, after)


def _gather_updated(build: Builder, unit: ScheduledUnit, *after: int) -> None:
    size, count = unit.comm.parameter_gather_bytes, unit.comm.num_broadcasts
    if count:
        build.collective(f"broadcast {unit.name}", "broadcast", "shard", size, *after, count=count)
        return
    gather = build.collective(f"all-gather {unit.name}", "all_gather", "shard", size, *after)
    if unit.comm.experts is not None:
        size = unit.comm.experts.parameter_gather_bytes
        ready = after if gather is None else (gather,)
        gather = (
            build.collective(f"all-gather {unit.name} experts", "all_gather", "expert_shard", size, *ready) or gather
        )
    if gather is not None:
        build.compute(f"copy-out {unit.name}", unit.gather_forward, gather)
