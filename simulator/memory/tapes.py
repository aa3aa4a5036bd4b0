"""The tapes of a plan's blocks: each kind recorded once, plain and checkpointed."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.recording import record
from simulator.memory.tape import ParameterGradients, Tape
from simulator.parallel.schedule_traits import splits_backward
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, ModelBlocks, Op, cached_tensors, recompute_ops, uses_autocast


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
