"""record: the tape of a block, written by walking its ops forward and back."""

from __future__ import annotations

from collections.abc import Collection

from simulator.memory.halves_writer import HalvesWriter
from simulator.memory.tape import INPUT, ParameterGradients, Tape
from simulator.memory.tape_writer import TapeWriter
from simulator.work.ops import Block, Op


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
