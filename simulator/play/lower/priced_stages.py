"""A plan's stages with the time of their work: the units of each pipeline rank, their communication and their optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from simulator.base.kernels import DTYPE_BYTES, Gemm, Kernel
from simulator.memory import activation_bytes
from simulator.parallel.model_shard import ModelShard, body_names, shard_of
from simulator.play.lower.hops import HopWork
from simulator.play.lower.power import around_kernels, block_kernels, clock_of
from simulator.play.lower.stage import ScheduledUnit, Stage, StageStep, waits_for_messages
from simulator.play.lower.work import NO_WORK, BlockWork, Clock, Phase, Segment, Work, levelled
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS, WAITED_LAUNCHES
from simulator.spec.software.stack import Stack
from simulator.work.offload import Moves, UnitMoves, moves
from simulator.work.ops import Exchange, ModelBlocks, clip_kernels, optimizer_kernels, reduces_maxima
from simulator.work.ops.graph import stream
from simulator.work.script import (
    Hop,
    UnitComm,
    agreement,
    communication,
    last_of,
    pieces,
    shard_ranks,
    stepped_numel,
    update_kernels,
)
from simulator.work.script.order import Chunk

_MOST: Final = 64  # works that are kept
# Of a linear layer: input, weight and result; the result's gradient and the input's. Of each as many past ones are kept, unless told
# otherwise (Transformer Engine, pytorch/fp8.py, FP8FwdTensors, FP8BwdTensors; common/recipe, DelayedScaling)
_MAXIMA: Final = 3, 2
_PAST: Final = 1024


@dataclass(frozen=True, slots=True)
class PricedBlocks:
    """Blocks, and the time of their work by the kernels around them, for plans that differ in nothing else on a machine."""

    blocks: ModelBlocks
    _found: dict[object, tuple[Clock, dict[str, BlockWork]]] = field(default_factory=dict)

    def priced(self, clock: Clock, model: Model, plan: Plan) -> tuple[Clock, dict[str, BlockWork]]:
        """The clock under which all kernels of a step share the power cap, and each block's work under it.

        Communication and waiting are left out. clock: of a step of products alone.
        """
        around = tuple(around_kernels(model, plan)) if clock.depends_on_use else ()
        found = self._found.get(around)
        if found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            if clock.depends_on_use:
                kernels = *block_kernels(model, plan, clock.stack, self.blocks), *around
                clock = clock_of(clock, ((kernel, times) for _, kernel, times in kernels))
            works = {block.name: clock.block(block, plan) for block in self.blocks.kinds}
            found = self._found[around] = clock, works
        return found


def priced_stages(
    model: Model, plan: Plan, stack: Stack, priced: PricedBlocks, device: Device, calibration: Calibration, near: int
) -> tuple[Clock, tuple[Stage, ...]]:
    """The pipeline ranks on one device, and the clock that priced them. near: ranks of a shard group on one node."""
    blocks = priced.blocks
    clock, works = priced.priced(Clock(device, calibration, stack), shard_of(model, plan), plan)
    return clock, tuple(_stage(model, plan, stack, blocks, works, clock, near, index) for index in range(plan.pp))


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
    (clip, optimizer), synchronous = (
        _optimizer(shard, plan, clock, stack),
        waits_for_messages(plan) or stack.host.waits_for_blocks,
    )
    if synchronous:  # the host comes to it with the last message
        optimizer = levelled(optimizer, max(optimizer.duration_s, optimizer.host_s))
    units, maxima = _units(shard, plan, works, clock, node_ranks), _maxima(shard, blocks, clock, plan)
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
                clip=clip,
                optimizer=optimizer,
                moves=moved,
                synchronous=synchronous,
                turns=any(segment.waits for unit in units for segment in unit.work.forward.segments),
                agreement=_hops(clock, agreement(shard, plan)),
            )
            for chunk in (_with_maxima(units, maxima) for units in _chunks(shard, units))
        ),
        message_bytes=_message_bytes(model, plan),
        activation_tensors=stack.host.activation_tensors,
        tied_bytes=shard.vocab_size * wide if tied and plan.pp > 1 else 0,
    )


def _chunks(shard: Model, units: tuple[ScheduledUnit, ...]) -> tuple[tuple[ScheduledUnit, ...], ...]:
    """A rank's units by the pipeline chunks it holds, its layers numbered as the model's."""
    if not isinstance(shard, ModelShard):
        return (units,)
    embedding, *layers, head = units
    chunks: list[tuple[ScheduledUnit, ...]] = []
    for index, chunk_layers in enumerate(shard.body_chunks):
        mine, layers = layers[: len(chunk_layers)], layers[len(chunk_layers) :]
        first = [embedding] if index == shard.embedding_chunk else []
        chunks.append((*first, *mine, *([head] if index == shard.head_chunk else [])))
    return tuple(chunks)


def _with_maxima(units: tuple[ScheduledUnit, ...], maxima: tuple[Phase, Phase] | None) -> tuple[ScheduledUnit, ...]:
    """A chunk's units, with the agreement on fp8's maxima behind its last layer forward and behind its first backward."""
    layers = [at for at, unit in enumerate(units) if unit.name not in ("embedding", "head")]
    if maxima is None or not layers:
        return units
    found, (forward, backward) = list(units), maxima
    work = found[layers[-1]].work
    found[layers[-1]] = replace(found[layers[-1]], work=replace(work, forward=work.forward + forward))
    work = found[layers[0]].work
    work = replace(work, backward=work.backward + backward, inputs=work.inputs + backward)
    found[layers[0]] = replace(found[layers[0]], work=work)
    return tuple(found)


def _maxima(shard: Model, blocks: ModelBlocks, clock: Clock, plan: Plan) -> tuple[Phase, Phase] | None:
    """Behind a chunk's forward, and behind its backward, a stage's ranks agree on the maxima of all their layers (docs/background/ops.md)."""
    if not reduces_maxima(plan, clock.stack):
        return None
    narrow = {
        block.name: sum(any(isinstance(k, Gemm) and k.dtype == "fp8" for k in op.forward) for op in block.ops)
        for block in blocks.body
    }
    modules = sum(narrow[kind] for kind in shard.body)
    return _agreed(clock, modules * _MAXIMA[0]), _agreed(clock, modules * _MAXIMA[1])


def _agreed(clock: Clock, count: int) -> Phase:
    """So many maxima joined, the largest of each found among the ranks, and scales made of them and those before."""
    joined = clock.work("elementwise", (stream("copy", 4 * count, 4 * count),))
    scaled = clock.work("elementwise", (stream("reduce", 4 * _PAST * count, 4 * _PAST * count),))
    reduced = Exchange(kind="all_reduce", axis="stage", num_bytes=4 * count)
    return Phase(segments=(Segment(work=joined, exchanges=(reduced,)), Segment(work=scaled)))


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


def _units(
    shard: Model, plan: Plan, works: dict[str, BlockWork], clock: Clock, node_ranks: int
) -> tuple[ScheduledUnit, ...]:
    """Embedding, blocks and head of a rank's share in forward order, each with its communication."""
    comms = {comm.unit: comm for comm in communication(shard, plan, node_ranks)}
    if isinstance(shard, ModelShard) and shard.holds_head and not shard.holds_embedding:
        comms["head"] = last_of(comms["embedding"], comms["head"])
    every = plan.recompute.every if plan.recompute.mode == "every_k" else 1
    layers = [
        _unit(
            name,
            comms[name],
            works[kind],
            checkpointed=plan.recompute.mode != "none" and index % every == 0,
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


def _optimizer(model: Model, plan: Plan, clock: Clock, stack: Stack) -> tuple[Work, Work]:
    """(the norm of gradients and their scale, the update)."""
    numel, parts = stepped_numel(model, plan), pieces(model, plan)
    tensors = sum(len(shapes) for _, shapes in parts)
    offloaded = plan.offload.optimizer != "none"
    kernels = () if offloaded else (*update_kernels(model, plan), *optimizer_kernels(numel, tensors, plan, parts))
    own = offloaded or plan.optimizer.in_backward or (plan.traits.zero_engine and plan.zero)
    clips = "" if own else stack.kernels.clips
    clip = (
        replace(clock.work("optimizer", clip_kernels(numel, tensors, plan)), level=clips == "read")
        if clips
        else NO_WORK
    )
    work = clock.work("optimizer", kernels)
    calls = -(-tensors // shard_ranks(plan)) * stack.host.parameter_calls + stack.host.step_calls
    waits = OPTIMIZERS[plan.optimizer.kind].waits and not offloaded
    waited_s = WAITED_LAUNCHES * stack.host.launch_s * tensors if waits else 0.0  # the device, for its next tensor
    host_s = max(work.host_s, waited_s) + tensors * stack.host.parameter_s + calls * stack.host.launch_s
    waited = (("host", waited_s),) if waits else ()
    return clip, Work(parts=(*work.parts, *waited, ("overhead", stack.fitted.step_overhead_s)), host_s=host_s)
