"""The tapes of a plan's blocks: each kind recorded once, plain and checkpointed, by running its ops on a tape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.halves_writer import HalvesWriter
from simulator.memory.tape import INPUT, ParameterGradients, Tape
from simulator.memory.tape_writer import TapeWriter
from simulator.parallel.schedule_traits import splits_backward
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, ModelBlocks, Op, cached_tensors, recompute_ops, uses_autocast


def record(  # noqa: PLR0913  a block has that many habits
    block: Block,
    again: tuple[Op, ...] = (),
    *,
    cached: Collection[str] = (),
    keep_constants: bool = False,
    parameter_bytes: int = 2,
    gradients: ParameterGradients = "kept",
    owns_input: bool = True,
    ends_forward: bool = False,
    records: bool = False,
    keeps_result: bool = False,
    gradient_held: bool = False,
    splits: bool = False,
) -> Tape:
    """Record a block.

    again: ops run again before the backward. cached: tensors that are kept for that.
    keep_constants: what ops without inputs make (position tables) is made first and kept over a checkpoint: FSDP2 casts
    a block's inputs before it gathers, and before the checkpoint sees them. parameter_bytes: of an element of parameter gradients.
    gradients: what becomes of parameter gradients.
    records: what reduce-scatters read is recorded on their stream.
    gradient_held: the gradient of its output is the caller's, who frees it: nothing is added into it.
    keeps_result: somebody holds what the last product makes, and frees it (the head).
    ends_forward: the model's own forward, which holds the block's input, ends at the last product (the head); the
    gradient of its output is the caller's, who frees it.
    splits: a schedule may run the two halves of its backward apart.
    """
    writer = TapeWriter(block, owns_input=owns_input, ends_forward=ends_forward, records=records)
    writer.gradient_held = gradient_held or ends_forward
    saved = {name for op in block.ops for name in op.saved}
    constants = [op for op in block.ops if keep_constants and not op.inputs and not op.parameter_numel]
    tables = {t.name for op in constants if again for t in op.outputs}
    made = {t.name for op in again for t in op.outputs}
    borders = {block.input, *tables} if again else set()  # a checkpoint holds its inputs to the end of the backward
    products = [op for op in block.ops if op.category == "gemm"] if keeps_result else []
    result = {t.name for t in products[-1].outputs} if products else set()
    borders |= result
    others = [op for op in block.ops if op not in constants]
    writer.forward([*constants, *others], (saved - made) | set(cached) | borders)
    forward, cut = writer.take(), writer.cut
    output = writer.slots.pop(block.output, INPUT)
    ops = [op for op in again if not op.outputs or not tables.issuperset(t.name for t in op.outputs)]
    split = HalvesWriter(writer, result, ops, saved | borders) if splits else None
    halves = split.halves(parameter_bytes, kept=gradients == "kept") if split else None
    writer.forward(ops, saved | borders)
    writer.backward(parameter_bytes, borders, gradients, result)
    return Tape(
        forward=forward,
        backward=writer.take(),
        num_slots=max(writer.num_slots, split.num_slots if split else 0),
        output=output,
        gradient=writer.gradient,
        parameter_gradients=tuple(writer.parameter_gradients),
        cut=cut,
        early=sum(len(op.outputs) for op in constants),
        result=writer.result,
        halves=halves,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapes:
    """The tapes of a plan's blocks, by kind of layer: plain, and checkpointed.

    received: the same two of a layer whose output's gradient lies in a buffer of a pipeline's messages.
    """

    embedding: Tape
    plain: dict[str, Tape]
    checkpointed: dict[str, Tape]
    head: Tape
    received: tuple[dict[str, Tape], dict[str, Tape]]
    head_gemm: int  # index in head.backward.events where the model's own backward begins

    def with_ends_of(self, others: Tapes) -> Tapes:
        """These, but what may hold a tied matrix as others have it: embedding, what joins images to it, and head."""
        joined = {kind: tape for kind, tape in others.plain.items() if kind.startswith("joint")}
        return replace(self, head=others.head, embedding=others.embedding, plain=self.plain | joined)


def record_tapes(
    blocks: ModelBlocks, plan: Plan, stack: Stack, *, keep_gradients: bool, known: dict[object, Tape] | None = None
) -> Tapes:
    """Record every kind of block once. known: tapes of these very blocks, which gets the others."""
    known = {} if known is None else known
    gradients: ParameterGradients = "kept" if keep_gradients else "added"
    if plan.traits.fuses_gradient_sums and stack.kernels.weight_gradients == "accumulated":
        gradients = "accumulated"
    parameter_bytes, records = DTYPE_BYTES[gradient_dtype(plan, stack)], stack.overlap.records_streams

    def tape(block: Block, again: tuple[Op, ...] = (), cached: frozenset[str] = frozenset(), **habits: bool) -> Tape:
        key = (block.name, *map(id, again), cached, parameter_bytes, gradients, records, *habits.items())
        if key not in known:
            known[key] = record(
                block,
                again,
                cached=cached,
                parameter_bytes=parameter_bytes,
                gradients=gradients,
                records=records,
                **habits,
            )
        return known[key]

    again = {block.name: recompute_ops(block, plan, stack) for block in blocks.body}
    constant = plan.traits.shards_rows
    # torch's stage keeps what it has made to the end of its backward, and what it got in a buffer
    staged = plan.pp > 1 and plan.traits.uses_torch_pipelines
    splits = staged and splits_backward(plan.pipeline_schedule)
    head = tape(blocks.head, ends_forward=True, keeps_result=staged, splits=splits)
    gemms = [op.name for op in blocks.head.ops if op.category == "gemm"]
    begins = {name: index for index, name in head.backward.marks}

    def layer(block: Block, repeated: tuple[Op, ...] = (), cached: frozenset[str] = frozenset(), *, held: bool) -> Tape:
        return tape(block, repeated, cached, keep_constants=constant, gradient_held=held, splits=splits)

    def layers(*, held: bool) -> tuple[dict[str, Tape], dict[str, Tape]]:
        plain = {block.name: layer(block, held=held) for block in blocks.body}
        repeated = ((block, again[block.name]) for block in blocks.body)
        return plain, {
            block.name: layer(block, ops, cached_tensors(block, ops, plan, stack), held=held) for block, ops in repeated
        }

    plain, checkpointed = layers(held=False)
    return Tapes(
        embedding=tape(blocks.embedding, owns_input=False),
        plain=plain,
        checkpointed=checkpointed,
        received=layers(held=True) if staged else (plain, checkpointed),
        head=head,
        head_gemm=begins[gemms[-1]] if gemms else 0,
    )


def gradient_dtype(plan: Plan, stack: Stack) -> str:
    """Of the gradients that autograd makes of parameters."""
    return plan.precision.master if uses_autocast(stack, plan) else plan.compute_dtype


def layer_tape(tapes: Tapes, plan: Plan, kind: str, index: int, *, received: bool = False) -> Tape:
    """The tape of a layer of a kind: checkpointed or not."""
    every = plan.recompute.every if plan.recompute.mode == "every_k" else 1
    plain, checkpointed = tapes.received if received else (tapes.plain, tapes.checkpointed)
    return (checkpointed if plan.recompute.mode != "none" and index % every == 0 else plain)[kind]
