"""StepWriter: a StepScript read as memory. One training step as allocations and frees in host order.

What a unit's compute allocates stands on its tape (`tapes`), what an implementation holds around it in its `Buffers`. The
order within is PyTorch's own, read from its sources and from recorded steps (experiments/measured).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.gradients import DummyGradients, redistributed_bytes, reentrant_input_bytes, whole_table_numel
from simulator.memory.in_flight import InFlight, outside, parts_of
from simulator.memory.messages import Messages
from simulator.memory.offloading import Evictor
from simulator.memory.outside import grouped_workspaces
from simulator.memory.policies.base import rounded
from simulator.memory.tape import CATEGORIES, Tape
from simulator.memory.tapes import gradient_dtype, layer_tape, record_tapes
from simulator.memory.writer import Writer
from simulator.parallel.model_shard import body_names
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks, uses_autocast
from simulator.work.script import resident_tensors, step_script
from simulator.work.script.buffers import Buffers
from simulator.work.script.instructions import (
    Agree,
    Evict,
    Gradient,
    Instruction,
    Pass,
    Reshard,
    Restore,
    Run,
    Together,
    UnitInstruction,
    Unshard,
    Update,
)
from simulator.work.script.storage import ROOT, Storages

_PARTS = 16  # blocks of a tensor that stands for many: one alone would find no room of its size between others'


class StepWriter:
    """Writes steps: `persistent` once, then `step` as often as one likes."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        stack: Stack,
        blocks: ModelBlocks,
        buffers: Callable[[Storages, Model, Plan], Buffers],
        stage: int = 0,
    ) -> None:
        self.writer = Writer()
        self.model, self.plan, self._stack, self.stage = model, plan, stack, stage
        self._parts = parts_of(model)
        self._names, self._kinds = body_names(model), model.body
        self._looks_up = self._names.index("joint") if "joint" in self._names else ROOT
        self._messages = Messages(self.writer, plan, blocks.layer.input_bytes, stage)
        self._resident, self._copies = resident_tensors(model, plan), int(plan.traits.master_copy)
        self.buffers = buffers(self.writer, model, plan)
        self._parameter_bytes = DTYPE_BYTES[gradient_dtype(plan, stack)]
        self.buffers.whole_table_numel = whole_table_numel(model, blocks)
        self.buffers.stream_bytes = reentrant_input_bytes(blocks, plan, stack)
        self.buffers.redistributed_bytes = redistributed_bytes(model, blocks, plan, stack)
        tapes = partial(record_tapes, blocks, plan, stack, known=blocks.made)
        self._tapes = tapes(keep_gradients=self.buffers.keeps_gradients)
        self._adding = tapes(keep_gradients=False) if plan.num_micro_batches > 1 else self._tapes
        self._sums_tied = not (uses_autocast(stack, plan) or stack.traits.gradient_buffer)
        self._pixels = blocks.embedding.input_bytes
        self._inputs, self._workspaces = 0, list[int]()
        self._dummies = DummyGradients(self.writer, blocks, plan, stack)
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._beyond, self._middle, self._held = 0, -1, dict[int, list[int]]()
        self._graded = set[int]()  # chunks that have gradients, to which a later micro-batch adds its own

    def persistent(self, workspaces: Sequence[int] = (), *, optimizer_state: bool) -> None:
        """What exists before a step: one storage a tensor. `optimizer_state`: not only after the first step; the fp32 copy does.

        workspaces: of the libraries' handles, taken by a thread's first product: the forward's, then the backward's.
        """
        self.writer.at("start", 0, "", "persistent state")
        for category, sizes in self._resident.items():
            later = category == "optimizer_state" and not optimizer_state
            self.writer.alloc_each(sizes[: self._copies] if later else sizes, category)
        tokens = self._messages.micro_batches_here * (self.plan.micro_batch_size * self.plan.seq_len // self.plan.cp)
        self._inputs = self.writer.alloc(tokens * 8, "inputs")
        self.writer.alloc(tokens * 8, "inputs")
        if self._looks_up != ROOT:
            self.writer.alloc(self._messages.micro_batches_here * self._pixels, "inputs")
        self._messages.make([part.chunk for part in self._parts])
        self._workspaces = list(workspaces)
        if self.model.experts is not None:
            for size in grouped_workspaces(self._stack, workspaces):
                self.writer.alloc(size, "workspaces")

    def script(self, num_micro_batches: int) -> list[Instruction]:
        """One optimizer step."""
        return list(step_script(self.plan, self._stack, [p.chunk for p in self._parts], num_micro_batches, self.stage))

    def step(
        self, script: Iterable[Instruction], num_micro_batches: int, *, first: bool = False, beyond: int = 0
    ) -> None:
        """An optimizer step of so many micro-batches. first: it creates the optimizer's state.

        beyond: micro-batches whose tensors live while those of the middle one do, and are written as a few of so many times its size.
        """
        chunks = [part.chunk for part in self._parts]
        self._messages.begin(chunks, self.plan.num_micro_batches - num_micro_batches - beyond)
        self._beyond, self._middle = beyond, num_micro_batches // 2 if beyond else -1
        self.read(script, num_micro_batches, first=first)

    def read(self, script: Iterable[Instruction], num_micro_batches: int = 1, *, first: bool = False) -> None:
        """A script's step. Collectives have buffers of their own, outside of it. first: it creates the optimizer's state."""
        self.buffers.begin()
        self._graded.clear()
        for one in script:
            match one:
                case Pass():
                    begin = len(self.writer.events)
                    deque(self._by_unit(one), maxlen=0)
                    if one.micro_batch == self._middle:
                        self._beside(one, begin)
                case Together():
                    self._together(one)
                case Update():
                    self._messages.end()
                    self.writer.at("optimizer", num_micro_batches - 1, "", self.plan.optimizer.kind)
                    self.buffers.optimizer(self._state if first else lambda: None)
                case Agree():
                    self.buffers.agree()
                case _:
                    pass
        self.writer.at("optimizer", num_micro_batches - 1, "", "zero_grad")
        self.buffers.zero_grad()
        self.writer.catch_up()

    def _beside(self, one: Pass, begin: int) -> None:
        """Behind the middle micro-batch's forward, of events from `begin` on, and its backward: the same of those beyond."""
        if one.direction == "forward":
            alive = self.writer.alive(begin, self._in_flight[one.micro_batch, one.chunk].slots())
            self.writer.at("forward", one.micro_batch, "", "micro-batches beside it")
            parts = [self._beyond * i // _PARTS for i in range(_PARTS + 1)]
            self._held[one.chunk] = [
                self.writer.alloc((end - start) * rounded(size), CATEGORIES[tag], stream)
                for start, end in pairwise(parts)
                if end > start
                for _, size, stream, tag in alive
            ]
        else:
            self.writer.free(*self._held.pop(one.chunk))
            self._messages.begin([self._parts[one.chunk].chunk], self._beyond)

    def _state(self) -> None:
        self.writer.alloc_each(self._resident["optimizer_state"][self._copies :], "optimizer_state")

    # -- passes

    def _together(self, both: Together) -> None:
        """Layer by layer, as one grows the other shrinks; or one after the other.

        In the order of Megatron-LM's TransformerModelChunkSchedulePlan.run: embedding, the other's head, a layer of each
        in turn, then the head.
        """
        forward, backward = self._by_unit(both.forward), self._by_unit(both.backward)
        for _ in range(len(self._parts[both.forward.chunk].layers) + 1 if both.by_layer else 0):
            next(forward)
            next(backward, None)
        for rest in (backward, forward) if both.by_layer else (forward, backward):
            deque(rest, maxlen=0)

    def _by_unit(self, one: Pass) -> Iterator[None]:
        """A pass, halting before each layer and before what comes last."""
        if one.direction == "forward":
            return self._forward(one)
        state = self._in_flight[one.micro_batch, one.chunk]
        if one.direction == "backward" or not all(tape.halves for tape, _, _ in state.saved.values()):
            return iter(()) if one.direction == "inputs" else self._backward(one)
        return self._of_inputs(one, state) if one.direction == "inputs" else self._of_weights(one, state)

    def _forward(self, one: Pass) -> Iterator[None]:
        """Up to the loss, or to what the next stage receives."""
        part, plan = self._parts[one.chunk], self.plan
        evicts = plan.offload.activations != "none"
        state = InFlight(
            index=one.micro_batch,
            part=part,
            tapes=self._tapes,
            evictor=Evictor(self.writer.events.append) if evicts else None,
        )
        self._in_flight[one.micro_batch, one.chunk] = state
        groups = list(one.units)
        state.value = self._inputs if part.chunk.embedding else self._messages.came("activations")
        if part.chunk.embedding:
            self._units(state, one, groups.pop(0))
        if len(self._workspaces) == 2:
            self._product()
        for _ in part.layers:
            yield
            self._units(state, one, groups.pop(0))
        yield
        if part.chunk.head:
            self._units(state, one, groups.pop(0))
        else:
            self.buffers.end_forward()
            state.sent = self._messages.went(state.value, one)

    def _backward(self, one: Pass) -> Iterator[None]:
        """From the loss, or from the gradient that the stage receives."""
        state = self._in_flight.pop((one.micro_batch, one.chunk))
        self._choose_tapes(one, state)
        chunk, groups, buffers = state.part.chunk, list(one.units), list[int]()
        if chunk.head:
            self._units(state, one, groups.pop(0))
        else:
            state.value = self._messages.came("temporaries")
            buffers += [state.value] if self._messages.buffered and state.part.layers else []
            if chunk.embedding:
                self.buffers.before_backward(ROOT, state.part.first_ahead(groups))
        for group in groups:
            yield
            self._units(state, one, group)
        sent = [] if chunk.embedding else [state.value]
        self._messages.over([] if state.sent is None else [state.sent], sent, one)
        self.writer.free(*buffers)
        if chunk.head:
            self.writer.free(state.ones, state.loss, *state.logits())
        self.buffers.end_backward()

    def _of_inputs(self, one: Pass, state: InFlight) -> Iterator[None]:
        """The gradients of a stage's inputs, and of nothing else."""
        yield
        if self._workspaces:
            self._product()
        head = state.part.chunk.head
        gradient = state.value = self.writer.alloc(4, "loss") if head else self._messages.came("temporaries")
        for number, (tape, base, given) in reversed(state.saved.items()):
            assert tape.halves is not None
            unit, name, _ = self._unit(state, number)
            self.writer.at("backward", state.index, name, "inputs")
            self.writer.play(tape.halves.inputs, base, given, gradient)
            if unit >= 0:
                self.buffers.after_inputs(unit)
            state.gradients[number] = gradient
            gradient = outside(tape.halves.gradient, base, given, gradient)
        self.buffers.after_inputs(self.buffers.head if head else ROOT)
        for number, (tape, base, given) in state.saved.items():
            assert tape.halves is not None
            self.writer.play(tape.halves.after_inputs, base, given, state.gradients[number])
        if head:
            self.writer.free(state.loss, *state.logits())
        self._messages.over([] if state.sent is None else [state.sent], [gradient], one)

    def _of_weights(self, one: Pass, state: InFlight) -> Iterator[None]:
        """The gradients of a stage's weights, from its first unit to its last."""
        yield
        del self._in_flight[one.micro_batch, one.chunk]
        self._choose_tapes(one, state)
        self.buffers.late = len(self._parts) == 1  # roots of several chunks have one number here
        for number, (_, base, given) in state.saved.items():
            unit, name, tape = self._unit(state, number)
            assert tape.halves is not None
            self.writer.at("backward", state.index, name, "weights")
            self.writer.play(tape.halves.weights, base, given, state.gradients[number])
            state.own = [(base + slot, numel) for slot, numel in tape.halves.parameter_gradients]
            self._gradient(state, one, unit, name)
        for number, (tape, base, given) in state.saved.items():
            assert tape.halves is not None
            self.writer.play(tape.halves.after_weights, base, given, state.gradients[number])
        self.buffers.late = False
        self.writer.free(state.value)
        self.buffers.end_backward()

    def _choose_tapes(self, one: Pass, state: InFlight) -> None:
        """A chunk's first gradients are kept, later ones added to them."""
        if one.chunk in self._graded and self.buffers.adds_in_place:
            state.units = {}
            state.tapes, state.adds = self._adding, self.model.tied_embeddings and state.part.chunk.embedding
            if state.adds:  # to a tied matrix's gradient when both ends have theirs
                state.tapes = self._adding.with_ends_of(self._tapes)
        self._graded.add(one.chunk)

    # -- units

    def _units(self, state: InFlight, one: Pass, group: Sequence[UnitInstruction]) -> None:
        for instruction in group:
            number = instruction.unit
            if number not in state.units:
                state.units[number] = self._unit(state, number)
            unit, name, tape = state.units[number]
            match instruction:
                case Unshard():
                    self._unshard(state, one, instruction, unit, name, tape)
                case Run(_, "forward"):
                    self._run_forward(state, number, tape)
                case Run(_, phase):
                    self._run(state, number, unit, phase, tape)
                case Evict():
                    assert state.evictor is not None
                    state.evictor.forward(number, tape, state.saved[number][1])
                case Restore(_, fetches):
                    state.restore(number, [one for one, _ in fetches])
                case Reshard():
                    self.writer.at("forward", state.index, name, "reshard")
                    self.buffers.after_forward(unit)
                case Gradient():
                    self._gradient(state, one, unit, name)
                case _:
                    pass

    def _unit(self, state: InFlight, number: int) -> tuple[int, str, Tape]:
        """A unit of the chunk as the buffers number it, its name, and its tape."""
        part, tapes = state.part, state.tapes
        if part.chunk.is_embedding(number):
            return ROOT, "embedding", tapes.embedding
        if part.chunk.is_head(number):
            return self.buffers.head, "head", tapes.head
        layer = part.unit(number)
        received = self._messages.buffered and not part.chunk.head and layer == part.layers[-1]
        return layer, self._names[layer], layer_tape(tapes, self.plan, self._kinds[layer], layer, received=received)

    def _unshard(self, state: InFlight, one: Pass, instruction: Unshard, unit: int, name: str, tape: Tape) -> None:
        """The hook before a unit; in the forward, behind what the unit makes before its hooks run."""
        part, head = state.part, self.buffers.head
        ahead = [part.unit(number, head) for number, _ in instruction.gathers if number != instruction.unit]
        if one.direction == "forward":
            base = self.writer.reserve(tape.num_slots)
            state.saved[instruction.unit] = tape, base, state.value
            self.writer.at("forward", state.index, name, "inputs")
            self.writer.play(tape.forward, base, state.value, 0, end=tape.early)
            self.writer.at("forward", state.index, name, "gather")
            self.buffers.before_forward(unit, ahead)
            return
        if state.part.chunk.is_head(instruction.unit):
            self.buffers.before_backward(unit, ahead)
            self._product()
            self._dummies.begin("head")
            return
        self.writer.at("backward", state.index, name, "gather")
        if unit != ROOT:
            self.buffers.before_backward(unit, ahead)
            self._dummies.begin(self._kinds[unit])

    def _run_forward(self, state: InFlight, number: int, tape: Tape) -> None:
        """Of the head up to its loss."""
        _, base, given = state.saved[number]
        head = state.part.chunk.is_head(number)
        self.writer.play(tape.forward, base, given, 0, start=tape.early, end=tape.cut if head else None)
        state.value = base + tape.output if tape.output >= 0 else given

    def _run(self, state: InFlight, number: int, unit: int, phase: str, tape: Tape) -> None:
        """The loss, or a unit's backward."""
        writer, (_, base, given) = self.writer, state.saved[number]
        if phase == "loss":
            state.loss = state.value
            writer.play(tape.forward, base, given, 0, start=tape.cut)
            return
        if phase == "loss_backward":
            writer.at("backward", state.index, "head", "loss")
            state.ones = writer.alloc(4, "loss")  # the loss's own gradient: held by the frame of `backward` to its end
            writer.play(tape.backward, base, given, state.ones, end=state.tapes.head_gemm)
            return
        state.own = [(base + slot, numel) for slot, numel in tape.parameter_gradients]
        if state.part.chunk.is_head(number):
            writer.play(tape.backward, base, given, state.ones, start=state.tapes.head_gemm)
            state.value = outside(tape.gradient, base, given, state.ones)
            return
        writer.play(tape.backward, base, given, state.value)
        state.value = outside(tape.gradient, base, given, state.value)
        if unit == self._looks_up and self.model.tied_embeddings:
            table = self.model.vocab_size * self.model.d_model
            state.add_to_head(self.writer, table, self.plan.tp, self._parameter_bytes, sums=self._sums_tied)

    def _gradient(self, state: InFlight, one: Pass, unit: int, name: str) -> None:
        """The root's gradients are reduced together, with the embedding's where that is here, and with the joint's."""
        if name == "head":
            state.head = state.own
            if not state.part.chunk.embedding:
                self.buffers.after_backward(unit, state.head, sync=one.syncs)
            return
        self.writer.at("backward", state.index, name, "reduce")
        if name == "joint":
            state.head, state.own = state.head + state.own, []
        own = state.head + state.own if unit == ROOT else state.own
        if unit == ROOT and state.adds:
            self.writer.free(*[slot for slot, _ in own])
            own = []
        self.buffers.after_backward(unit, own, sync=one.syncs)

    def _product(self) -> None:
        if self._workspaces:
            self.writer.alloc(self._workspaces.pop(0), "workspaces")
