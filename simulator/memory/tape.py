"""Tapes: the allocations and frees of one block, recorded once and replayed for every equal block.

A slot is a storage. Slots of a tape are numbered from 0 and moved to where an instance begins; INPUT and GRADIENT
stand for the storages that the neighbours made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from simulator.work.ops import Block, Exchange, Op
from simulator.work.script.storage import COMPUTE

# (slot, bytes or FREE, stream, category)
Event = tuple[int, int, int, int]
FREE = -1
FREE_LATER = -2  # freed, but the allocator waits for the event whose number stands in the stream's place
DONE = -3  # that event has come
RECORDED = -4  # in the place of an event's number: of the pass that the tape is played for
INPUT = -1  # the block's input, made by the block before it
GRADIENT = -2  # the gradient of the block's output, made by the block after it

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buckets",
    "buffers",
    "inputs",
    "workspaces",
    "activations",
    "unsharded_parameters",
    "all_gather",
    "reduce_scatter",
    "loss",
    "temporaries",
)
TAG = {name: index for index, name in enumerate(CATEGORIES)}
# kept until somebody frees them; added to existing ones and freed; accumulated: like that, but products make none and
# add theirs into a buffer themselves
ParameterGradients = Literal["kept", "added", "accumulated"]


@dataclass(slots=True)
class Part:
    """One phase of a block: its events, and where each op begins."""

    events: list[Event] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """A block's phases on its own slots.

    output, gradient: slots of its result and of its input's gradient (may be INPUT or GRADIENT: the same storage).
    parameter_gradients: slots that its backward leaves. cut: index in `forward.events` where the model's own forward
    ends and the loss begins (the head), else its length. early: events of the forward that precede the block's hooks.
    result: slot of what the model's own forward returns, where the caller holds it and frees it, else INPUT.
    """

    forward: Part
    backward: Part
    num_slots: int
    output: int
    gradient: int
    parameter_gradients: tuple[tuple[int, int], ...]
    cut: int
    early: int
    result: int = INPUT


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
    """
    writer = _Writer(block, owns_input=owns_input, ends_forward=ends_forward, records=records)
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
    if again:
        ops = [op for op in again if not op.outputs or not tables.issuperset(t.name for t in op.outputs)]
        writer.forward(ops, saved | borders)
    writer.backward(parameter_bytes, borders, gradients, result)
    return Tape(
        forward=forward,
        backward=writer.take(),
        num_slots=writer.num_slots,
        output=output,
        gradient=writer.gradient,
        parameter_gradients=tuple(writer.parameter_gradients),
        cut=cut,
        early=sum(len(op.outputs) for op in constants),
        result=writer.result,
    )


class _Writer:
    """Walks a block's ops and writes what they allocate and free."""

    def __init__(self, block: Block, *, owns_input: bool, ends_forward: bool, records: bool) -> None:
        self.block = block
        self._records = records
        self._recorded: set[int] = set()
        self.ends_forward = self.gradient_held = ends_forward
        self.owns_input = owns_input
        self.slots: dict[str, int] = {block.input: INPUT}  # live tensors of the forward
        self.num_slots = 0
        self.gradient = GRADIENT
        self.parameter_gradients: list[tuple[int, int]] = []
        self.cut = 0
        self.result = INPUT
        self._part = Part()
        self._grads: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        self._refs: dict[int, int] = {}
        self._products: set[int] = set()  # gradients that a matrix product made: views, so never added into

    def take(self) -> Part:
        """The events so far; a new part begins."""
        part, self._part = self._part, Part()
        return part

    # --- forward

    def forward(self, ops: Iterable[Op], saved: set[str]) -> None:
        """Tensors live to their last use, or longer if `saved`. The block's output is the next block's to free."""
        ops = list(ops)
        last = {name: index for index, op in enumerate(ops) for name in op.inputs}
        final = {name for op in self.block.ops for name in op.inputs}
        keep = saved | {self.block.output}
        products = [index for index, op in enumerate(ops) if op.category == "gemm"]
        leaves = products[-1] if products and self.ends_forward else len(ops) - 1
        unwound: list[str] = []  # still held by Python's frames where a recomputation stops early
        for index, op in enumerate(ops):
            self._forward_op(op)
            dead = [name for name in dict.fromkeys(op.inputs) if last[name] == index and name != self.block.input]
            unused = [tensor.name for tensor in op.outputs if tensor.name not in last]
            unwound += [name for name in unused if name in final]
            for name in (*dead, *(name for name in unused if name not in final)):
                if name not in keep:
                    self._drop(name)
            if op.category == "gemm":
                self.cut = len(self._part.events)
            if index == leaves and self.block.input not in keep:
                self._drop(self.block.input)
        for name in unwound:
            if name not in keep:
                self._drop(name)

    def _forward_op(self, op: Op) -> None:
        self._mark(op.name)
        tag = TAG["loss" if op.category == "loss" else "activations"]
        for tensor in op.outputs:
            self.slots[tensor.name] = self._alloc(tensor.num_bytes, tag)
        if self._records and _scatters(op.forward_exchanges):
            self._recorded.update(self.slots[name] for name in op.inputs)
        self._temporary(op.forward_temporary_bytes)

    def _drop(self, name: str) -> None:
        slot = self.slots.pop(name, None)
        if slot is not None and (slot != INPUT or self.owns_input):
            self._free(slot)

    # --- backward

    def backward(
        self, parameter_bytes: int, until_end: set[str], gradients: ParameterGradients, result: set[str]
    ) -> None:
        """Ops reversed: gradients appear, saved tensors go (those of `until_end` at the end), gradients of one tensor are summed.

        result: what stays behind it.
        """
        self._grads = {self.block.output: GRADIENT}
        self._refs, self._bytes = {GRADIENT: 2 if self.gradient_held else 1}, {GRADIENT: 0}
        savers: dict[str, int] = {}
        for op in self.block.ops:
            for name in op.saved:
                savers[name] = savers.get(name, 0) + 1
        for op in reversed(self.block.ops):
            self._mark(op.name)
            self._backward_op(op, parameter_bytes, gradients)
            for name in op.saved:
                savers[name] -= 1
                if savers[name] == 0 and name not in until_end:
                    self._drop(name)
        for name in result:
            self.result = self.slots.pop(name, INPUT)
        self._finish()

    def _backward_op(self, op: Op, parameter_bytes: int, gradients: ParameterGradients) -> None:
        ends = [*(t.name for t in op.outputs), *op.views] or [t.name for t in op.grad_inputs]
        incoming = [self._grads.pop(name) for name in dict.fromkeys(ends) if name in self._grads]
        if not incoming:
            return
        product = op.category == "gemm"
        if product and gradients != "accumulated":
            self._parameter_gradient(op, parameter_bytes, kept=gradients == "kept")
        tag = TAG["loss" if op.category == "loss" else "temporaries"]
        made = [(t.name, self._alloc(t.num_bytes, tag)) for t in op.grad_inputs]
        if not product:
            self._parameter_gradient(op, parameter_bytes, kept=gradients == "kept")
        self._temporary(op.backward_temporary_bytes, recorded=self._records and _scatters(op.backward_exchanges))
        for name in op.grad_aliases:
            self._refs[incoming[0]] += 1
            self._give(name, incoming[0])
        made += [(name, self.slots.pop(name)) for name in op.grad_overwrites]
        for slot in incoming:
            self._unref(slot)
        for name, slot in made:
            self._refs[slot] = 1
            if product:
                self._products.add(slot)
            self._give(name, slot)

    def _parameter_gradient(self, op: Op, parameter_bytes: int, *, kept: bool) -> None:
        if not op.parameter_numel:
            return
        slot = self._alloc(op.parameter_numel * parameter_bytes, TAG["gradients"])
        if kept:
            self.parameter_gradients.append((slot, op.parameter_numel))
        else:
            self._free(slot)

    def _give(self, name: str, slot: int) -> None:
        """A gradient of `name` arrives: the first stays, another is added into it or, if it cannot be, to a new one."""
        gradient = self._grads.get(name)
        if gradient is None:
            self._grads[name] = slot
        elif self._refs[gradient] == 1 and gradient not in self._products:
            self._unref(slot)
        elif self._refs[slot] == 1 and slot not in self._products:
            self._grads[name] = slot
            self._unref(gradient)
        else:
            total = self._alloc(max(self._bytes[gradient], self._bytes[slot]), TAG["temporaries"])
            self._refs[total] = 1
            self._grads[name] = total
            self._unref(gradient)
            self._unref(slot)

    def _finish(self) -> None:
        """Free what was never used: gradients of constants, cached outputs that no recomputation reached."""
        own = self._grads.pop(self.block.input, None)
        for slot in self._grads.values():
            self._unref(slot)
        self.gradient = GRADIENT if own is None else own
        if own is None and self._refs.get(GRADIENT, 0) > 0:
            self._unref(GRADIENT)
        for name in list(self.slots):
            self._drop(name)

    def _unref(self, slot: int) -> None:
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free(slot)

    # --- events

    def _mark(self, name: str) -> None:
        self._part.marks.append((len(self._part.events), name))

    def _alloc(self, num_bytes: int, tag: int) -> int:
        slot = self.num_slots
        self.num_slots += 1
        self._bytes[slot] = num_bytes
        self._part.events.append((slot, num_bytes, COMPUTE, tag))
        return slot

    def _free(self, slot: int) -> None:
        later = slot in self._recorded
        self._part.events.append((slot, FREE_LATER, RECORDED, 0) if later else (slot, FREE, COMPUTE, 0))

    def _temporary(self, num_bytes: int, *, recorded: bool = False) -> None:
        if num_bytes:
            slot = self._alloc(num_bytes, TAG["temporaries"])
            if recorded:
                self._recorded.add(slot)
            self._free(slot)


def _scatters(exchanges: Iterable[Exchange]) -> bool:
    return any(one.kind == "reduce_scatter" for one in exchanges)
