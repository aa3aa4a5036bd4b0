"""record: the tape of a block, written by walking its ops forward and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from simulator.memory.tape import (
    FREE,
    FREE_LATER,
    GRADIENT,
    INPUT,
    RECORDED,
    TAG,
    Halves,
    ParameterGradients,
    Part,
    Tape,
)
from simulator.work.ops import Block, Exchange, Op
from simulator.work.script.storage import COMPUTE


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


class TapeWriter:
    """Walks a block's ops and writes what they allocate and free."""

    def __init__(self, block: Block, *, owns_input: bool, ends_forward: bool, records: bool) -> None:
        self.block = block
        self.records = records
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
        if self.records and _scatters(op.forward_exchanges):
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
        self._begin_backward()
        savers = self._savers()
        for op in reversed(self.block.ops):
            self._mark(op.name)
            self._backward_op(op, parameter_bytes, gradients)
            for name in op.saved:
                savers[name] -= 1
                if savers[name] == 0 and name not in until_end:
                    self._drop(name)
        for name in result:
            self.result = self.slots.pop(name, INPUT)
        self._settle()
        self._finish()

    def _begin_backward(self) -> None:
        self._grads = {self.block.output: GRADIENT}
        self._refs = {GRADIENT: 2 if self.gradient_held else 1}
        self._bytes[GRADIENT] = 0

    def _savers(self) -> Counter[str]:
        """How many ops save a tensor."""
        return Counter(name for op in self.block.ops for name in op.saved)

    def _backward_op(self, op: Op, parameter_bytes: int, gradients: ParameterGradients) -> None:
        incoming = self._incoming(op)
        if not incoming:
            return
        kept, product = gradients == "kept", op.category == "gemm"
        added = (
            self._parameter_gradients(op, parameter_bytes, kept=kept) if product and gradients != "accumulated" else []
        )
        made = self._input_gradients(op)
        if not product:
            added = self._parameter_gradients(op, parameter_bytes, kept=kept)
        for slot in added:  # one node of the graph made both
            self._free(slot)
        self._temporary(op.backward_temporary_bytes, recorded=self.records and _scatters(op.backward_exchanges))
        self._hand_on(op, incoming, made)

    def _incoming(self, op: Op) -> list[int]:
        ends = [*(t.name for t in op.outputs), *op.views] or [t.name for t in op.grad_inputs]
        return [self._grads.pop(name) for name in dict.fromkeys(ends) if name in self._grads]

    def _input_gradients(self, op: Op, but: Collection[str] = ()) -> list[tuple[str, int]]:
        tag = TAG["loss" if op.category == "loss" else "temporaries"]
        return [(t.name, self._alloc(t.num_bytes, tag)) for t in op.grad_inputs if t.name not in but]

    def _hand_on(self, op: Op, incoming: list[int], made: list[tuple[str, int]]) -> None:
        """What came goes, or is handed on with what was made."""
        for name in op.grad_aliases:
            self._refs[incoming[0]] += 1
            self._give(name, incoming[0])
        made += [(name, self.slots.pop(name)) for name in op.grad_overwrites]
        for slot in incoming:
            self._unref(slot)
        for name, slot in made:
            self._refs[slot] = 1
            if op.category == "gemm":
                self._products.add(slot)
            self._give(name, slot)

    def _parameter_gradients(self, op: Op, parameter_bytes: int, *, kept: bool) -> list[int]:
        """Slots of those that are added to others, and go then."""
        if not op.parameter_numel:
            return []
        slot = self._alloc(op.parameter_numel * parameter_bytes, TAG["gradients"])
        if not kept:
            return [slot]
        self.parameter_gradients.append((slot, op.parameter_numel))
        return []

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

    def _settle(self) -> None:
        """Gradients that nobody asked for are freed: those of constants."""
        own = self._grads.pop(self.block.input, None)
        for slot in self._grads.values():
            self._unref(slot)
        self.gradient = GRADIENT if own is None else own
        if own is None and self._refs.get(GRADIENT, 0) > 0:
            self._unref(GRADIENT)

    def _finish(self) -> None:
        """What the forward made, and nobody has let go of: cached outputs that a recomputation never reached."""
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


class HalvesWriter(TapeWriter):
    """A backward that a schedule splits, as torch does it (distributed/pipelining/_backward.py).

    The gradients of inputs are found with `retain_graph`: nothing that the forward saved goes, and what comes to an op with
    parameters is held for them. Behind it goes what the graph above the last such op saved. Each op's gradients of weights then
    free what it saved and what was held for it; those that were added to others go behind the next op's. The rest of
    the graph goes with its last op.

    Each op's gradients of weights are asked of the graph by themselves, and each time a checkpoint runs its layer again
    (utils/checkpoint.py, unpack_hook: once for each call's graph); what others of its ops saved stays until they let go.
    """

    def __init__(self, whole: TapeWriter, result: set[str], again: Sequence[Op], kept: set[str]) -> None:
        super().__init__(
            whole.block, owns_input=whole.owns_input, ends_forward=whole.ends_forward, records=whole.records
        )
        self.gradient_held, self.num_slots = whole.gradient_held, whole.num_slots
        self.slots = {name: slot for name, slot in whole.slots.items() if name not in result}
        casts = [op for op in self.block.ops if op.parameter_numel and not op.inputs]  # of weights, under autocast
        self._casts = {tensor.name: op for op in casts for tensor in op.outputs}
        self._trained = {
            op.name: op for op in self.block.ops if op.inputs and (op.parameter_numel or self._weights(op))
        }
        self._waiting: dict[str, list[int]] = {}
        self._left = self._savers()
        self._again, self._kept, self._more = again, kept, list[dict[str, int]]()

    def _weights(self, op: Op) -> list[Op]:
        return [self._casts[t.name] for t in op.grad_inputs if t.name in self._casts]

    def halves(self, parameter_bytes: int, *, kept: bool) -> Halves:
        """All of it."""
        stays = set(self.slots)
        self.forward(self._again, self._kept)
        self._begin_backward()
        savers = self._savers()
        for op in reversed(self.block.ops):
            self._mark(op.name)
            self._inputs_of(op)
            savers.subtract(op.saved)
            for name in [one for one in op.saved if self._again and not savers[one] and one not in stays]:
                self._drop(name)
        for name in set(self.slots) - stays if self._again else ():
            self._drop(name)
        self._settle()
        inputs = self.take()
        for op in self._above() if self.ends_forward else ():
            self._release(op)
        after = self.take()
        self._weight_gradients(parameter_bytes, kept=kept)
        weights = self.take()
        self._finish()
        for slot in [slot for made in self._more for slot in made.values()]:
            self._free(slot)
        return Halves(
            inputs=inputs,
            after_inputs=after,
            weights=weights,
            after_weights=self.take(),
            gradient=self.gradient,
            parameter_gradients=tuple(self.parameter_gradients),
        )

    def _above(self) -> Iterable[Op]:
        """Ops behind the last that has parameters."""
        return takewhile(lambda op: op.name not in self._trained, reversed(self.block.ops))

    def _inputs_of(self, op: Op) -> None:
        incoming = self._incoming(op)
        if not incoming:
            return
        if op.name in self._trained:
            self._waiting[op.name] = incoming
            for slot in incoming:
                self._refs[slot] += 1
        made = self._input_gradients(op, self._casts)
        if op.name not in self._trained or op.category == "gemm":
            self._temporary(op.backward_temporary_bytes, recorded=self.records and _scatters(op.backward_exchanges))
        self._hand_on(op, incoming, made)

    def _weight_gradients(self, parameter_bytes: int, *, kept: bool) -> None:
        """In the order of a module's parameters: those of norms come last."""
        held: list[int] = []  # for the op before, with its gradients where these were added to others
        added: list[int] = []
        for op in sorted(self._trained.values(), key=lambda op: op.category == "norm"):
            self._mark(op.name)
            self._run_again()
            for slot in held:
                self._unref(slot)
            held, before, added = self._waiting.get(op.name, []), added, list[int]()
            for of in (op, *self._weights(op)):
                added += self._parameter_gradients(of, parameter_bytes, kept=kept)
            narrow = sum(t.num_bytes for t in op.grad_inputs if t.name in self._casts)
            self._temporary(narrow or op.backward_temporary_bytes)
            for slot in before:
                self._free(slot)
            self._release(op)
        for slot in added:
            self._free(slot)
        for slot in held:
            self._unref(slot)

    def _run_again(self) -> None:
        """A checkpoint's layer, whose tensors are others each time."""
        if self._again:
            stays = dict(self.slots)
            self.forward(self._again, {name for name in self._kept if self._left.get(name, 1)})
            self._more.append({name: slot for name, slot in self.slots.items() if name not in stays})
            self.slots = stays

    def _release(self, op: Op) -> None:
        """It has let go of what it saved."""
        for name in op.saved:
            self._left[name] -= 1
            if not self._left[name]:
                self._drop(name)
                for slot in [made.pop(name) for made in self._more if name in made]:
                    self._free(slot)


def _scatters(exchanges: Iterable[Exchange]) -> bool:
    return any(one.kind == "reduce_scatter" for one in exchanges)
