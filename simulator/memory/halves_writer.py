"""HalvesWriter: a backward in two halves, for gradients of inputs and of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.memory.tape import Halves
from simulator.memory.tape_writer import TapeWriter, scatters
from simulator.work.ops import Op


class HalvesWriter(TapeWriter):
    """A backward that a schedule splits, as torch does it (distributed/pipelining/_backward.py).

    The gradients of inputs are found with `retain_graph`: nothing that the forward saved goes, and what comes to an op with
    parameters is held for them. Each op's gradients of weights then free what it saved and what was held for it; those that
    were added to others go behind the next op's. The rest goes with the last op, or where no weight's graph reaches it.

    Each op's gradients of weights are asked of the graph by themselves, and each time a checkpoint runs its layer again
    (utils/checkpoint.py, unpack_hook: once for each call's graph); what others of its ops saved stays until they let go.
    """

    def __init__(self, whole: TapeWriter, result: set[str], again: Sequence[Op], kept: set[str]) -> None:
        super().__init__(
            whole.block, owns_input=whole.owns_input, ends_forward=whole.ends_forward, records=whole.records
        )
        self.gradient_held, self.num_slots = whole.gradient_held, whole.num_slots
        self.slots = {name: slot for name, slot in whole.slots.items() if name not in result}
        self._casts = self.block.casts
        self._trained = {op.name: op for op in self.block.trained}
        self._waiting: dict[str, list[int]] = {}
        self._left, self._gone = self._savers(), set[str]()
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
        self._let_go(self._trained.values())
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

    def _let_go(self, left: Iterable[Op]) -> None:
        """Of a stage's last unit goes what the graph below `left` does not reach: nobody holds what is above."""
        read = {name for op in left for name in op.inputs}
        names = {op.name for op in left} | self._gone
        for op in reversed(self.block.ops) if self.gradient_held else ():
            if read.intersection(t.name for t in op.outputs) or read.intersection(op.views):
                read.update(op.inputs)
            elif op.name not in names:
                self._release(op)

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
            self._temporary(op.backward_temporary_bytes, recorded=self.records and scatters(op.backward_exchanges))
        self._hand_on(op, incoming, made)

    def _weight_gradients(self, parameter_bytes: int, *, kept: bool) -> None:
        """In the order of a module's parameters: those of norms come last."""
        held: list[int] = []  # for the op before, with its gradients where these were added to others
        added: list[int] = []
        asked = sorted(self._trained.values(), key=lambda op: op.category == "norm")
        for number, op in enumerate(asked):
            self._mark(op.name)
            for slot in held:
                self._unref(slot)
            self._let_go(asked[number:])
            self._run_again()
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
        """A checkpoint's layer, whose tensors are others each time. Its own graph holds all it saved until it is over."""
        if self._again:
            stays = dict(self.slots)
            self.forward(self._again, self._kept)
            for name in [name for name in self.slots if name not in stays and not self._left.get(name, 1)]:
                self._drop(name)
            self._more.append({name: slot for name, slot in self.slots.items() if name not in stays})
            self.slots = stays

    def _release(self, op: Op) -> None:
        """It has let go of what it saved."""
        self._gone.add(op.name)
        for name in op.saved:
            self._left[name] -= 1
            if not self._left[name]:
                self._drop(name)
                for slot in [made.pop(name) for made in self._more if name in made]:
                    self._free(slot)
