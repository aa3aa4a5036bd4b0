"""TapeWriter: what the ops of a block allocate and free, forward and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from simulator.memory.tape import FREE, FREE_LATER, GRADIENT, INPUT, RECORDED, TAG, ParameterGradients, Part
from simulator.work.ops import Block, Exchange, Op
from simulator.work.script.storage import COMPUTE


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
        if self.records and op.forward_exchanges:
            ends = op.inputs if op.category == "gemm" else (*op.inputs, *(tensor.name for tensor in op.outputs))
            self._recorded.update(self.slots[name] for name in ends)
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
        scattered = self.records and scatters(op.backward_exchanges)
        if self.records and op.backward_exchanges:
            self._recorded.update([slot for _, slot in made] if scattered else incoming)
        self._temporary(op.backward_temporary_bytes, recorded=scattered)
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


def scatters(exchanges: Iterable[Exchange]) -> bool:
    """Whether one of them is a reduce-scatter."""
    return any(one.kind == "reduce_scatter" for one in exchanges)
