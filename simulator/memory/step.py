"""One training step as allocations and frees in host order: persistent state, micro-batches, optimizer.

The order is PyTorch's own, read from its sources and from recorded steps (experiments/measured); what an
implementation adds around each block is its `Strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TypeVar, cast

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.gradients import dummy_gradients, redistributed_bytes, whole_table_numel
from simulator.memory.offloading import Evictor
from simulator.memory.outside import grouped_workspaces
from simulator.memory.tape import COMPUTE, FREE, GRADIENT, INPUT, TAG, Event, ParameterGradients, Part, Tape, record
from simulator.parallel.model_shard import ModelShard, body_names
from simulator.parallel.pipeline import order
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks, cached_tensors, recompute_ops, uses_autocast
from simulator.work.zero import resident_tensors

_T = TypeVar("_T")

ROOT = -1  # index of the root unit; layers count from 0
Mark = tuple[int, str, int, str, str]  # (event index, phase, micro-batch, unit, op)


class Writer:
    """Collects events and the moments at which ops begin."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.num_slots = 0
        self._phase = ("start", 0, "")

    def at(self, phase: str, micro_batch: int, unit: str, op: str) -> None:
        """What follows happens at this moment."""
        self._phase = (phase, micro_batch, unit)
        self.marks.append((len(self.events), phase, micro_batch, unit, op))

    def alloc(self, num_bytes: int, category: str, stream: int = COMPUTE) -> int:
        slot = self.num_slots
        self.num_slots += 1
        self.events.append((slot, num_bytes, stream, TAG[category]))
        return slot

    def free(self, *slots: int) -> None:
        self.events.extend([(slot, FREE, COMPUTE, 0) for slot in slots])

    def play(self, part: Part, base: int, given: int, gradient: int, start: int = 0, end: int | None = None) -> None:
        """Append events `start` to `end` of a tape's part whose slots begin at `base`."""
        outside = {INPUT: given, GRADIENT: gradient}
        shift = len(self.events) - start
        phase, micro_batch, unit = self._phase
        stop = len(part.events) if end is None else end
        self.marks.extend(
            [
                (i + shift, phase, micro_batch, unit, op)
                for i, op in part.marks
                if start <= i < stop or i == stop == start
            ]
        )
        self.events.extend(
            [(base + s if s >= 0 else outside[s], n, stream, tag) for s, n, stream, tag in part.events[start:end]]
        )


class Strategy:
    """What an implementation of data parallelism allocates around the blocks. This one: nothing (a single device)."""

    keeps_gradients = True  # parameter gradients stay after the block's backward

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        self.writer, self.model, self.plan = writer, model, plan
        self.gradients: list[int] = []
        self.whole_table_numel = 0  # of the embedding, where DTensor makes its gradient whole on every rank
        self.redistributed_bytes = 0  # gradients that the optimizer first brings into their parameters' layout

    def begin(self) -> None:
        """Before the first micro-batch."""

    def before_forward(self, unit: int) -> None:
        """Parameters of the unit must be there."""

    def after_forward(self, unit: int) -> None:
        """They may go."""

    def before_backward(self, unit: int) -> None:
        """They must be there again."""

    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:  # noqa: ARG002
        """Parameter gradients of the unit exist: (slot, elements) in the order of the backward."""
        self.gradients.extend(slot for slot, _ in gradients)

    def end_backward(self) -> None:
        """A micro-batch's backward is over."""

    def optimizer(self, state: Callable[[], None]) -> None:
        """The optimizer's step: `state` creates its state the first time."""
        state()
        if self.redistributed_bytes:
            self.writer.free(self.writer.alloc(self.redistributed_bytes, "temporaries"))
        self.temporaries([numel for tensor in self.stepped() for numel in tensor])

    def agree(self) -> None:
        """Replicas that took steps alone reduce one flat copy of their parameters."""
        if self.plan.sync_every_steps > 1:
            size = sum(resident_tensors(self.model, self.plan)["parameters"])
            self.writer.free(self.writer.alloc(size, "temporaries"))

    def stepped(self) -> list[tuple[int, ...]]:
        """Elements of the tensors that the optimizer steps on this rank."""
        size = DTYPE_BYTES[self.plan.master_dtype]
        return [(num_bytes // size,) for num_bytes in resident_tensors(self.model, self.plan)["parameters"]]

    def temporaries(self, numels: Sequence[int]) -> None:
        """Square roots of the second momenta: all at once (foreach), two of one parameter (loop), none (fused)."""
        on_host = self.plan.offload.optimizer != "none"
        if on_host or self.plan.optimizer not in ("adam", "adamw") or self.plan.optimizer_impl == "fused":
            return
        size = DTYPE_BYTES[self.plan.optimizer_dtype]
        if self.plan.optimizer_impl == "foreach":
            self.writer.free(*[self.writer.alloc(numel * size, "temporaries") for numel in numels])
            return
        denominator: list[int] = []  # Python's variable holds the last parameter's until it is bound anew
        for numel in numels:
            root, quotient = (self.writer.alloc(numel * size, "temporaries") for _ in range(2))
            self.writer.free(root, *denominator)
            denominator = [quotient]
        self.writer.free(*denominator)

    def zero_grad(self) -> None:
        self.writer.free(*self.gradients)
        self.gradients = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapes:
    """The tapes of a plan's blocks, by kind of layer: plain, and checkpointed."""

    embedding: Tape
    plain: dict[str, Tape]
    checkpointed: dict[str, Tape]
    head: Tape
    head_gemm: int  # index in head.backward.events where the model's own backward begins


def record_tapes(blocks: ModelBlocks, plan: Plan, stack: Stack, *, keep_gradients: bool) -> Tapes:
    """Record every kind of block once."""
    gradients: ParameterGradients = "kept" if keep_gradients else "added"
    if plan.implementation == "megatron" and stack.weight_gradients == "accumulated":
        gradients = "accumulated"
    tape = partial(record, parameter_bytes=DTYPE_BYTES[gradient_dtype(plan, stack)], gradients=gradients)
    again = {block.name: recompute_ops(block, plan, stack) for block in blocks.body}
    constant = plan.implementation == "fsdp2"
    head = tape(blocks.head, ends_forward=True)
    gemms = [op.name for op in blocks.head.ops if op.category == "gemm"]
    begins = {name: index for index, name in head.backward.marks}
    return Tapes(
        embedding=tape(blocks.embedding, owns_input=False),
        plain={block.name: tape(block, keep_constants=constant) for block in blocks.body},
        checkpointed={
            block.name: tape(
                block,
                again[block.name],
                cached=cached_tensors(block, again[block.name], plan, stack),
                keep_constants=constant,
            )
            for block in blocks.body
        },
        head=head,
        head_gemm=begins[gemms[-1]] if gemms else 0,
    )


def gradient_dtype(plan: Plan, stack: Stack) -> str:
    """Of the gradients that autograd makes of parameters."""
    return plan.master_dtype if uses_autocast(stack, plan) else plan.compute_dtype


def layer_tape(tapes: Tapes, plan: Plan, kind: str, index: int) -> Tape:
    """The tape of a layer of a kind: checkpointed or not."""
    every = plan.recompute_every if plan.recompute == "every_k" else 1
    return (tapes.checkpointed if plan.recompute != "none" and index % every == 0 else tapes.plain)[kind]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a micro-batch passes at once: layers of the rank's share, and the ends where they are here."""

    layers: range
    embedding: bool = True
    head: bool = True


def _parts(model: Model) -> tuple[_Part, ...]:
    """The whole model, or a pipeline stage's chunks."""
    if not isinstance(model, ModelShard):
        return (_Part(range(len(model.body))),)
    parts, begin = [], 0
    for chunk, held in enumerate(model.body_chunks):
        layers = range(begin, begin + len(held))
        parts.append(_Part(layers, model.embedding_chunk == chunk, model.head_chunk == chunk))
        begin = layers.stop
    return tuple(parts)


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A micro-batch between its forward and its backward.

    stack: (unit, tape, base, input slot) of each unit that it passed; head: the same of the head, whose loss is `loss`.
    """

    index: int
    part: _Part
    tapes: Tapes
    evictor: Evictor | None
    stack: list[tuple[int, Tape, int, int]] = field(default_factory=list)
    head: tuple[int, Tape, int, int] | None = None
    loss: int = 0


class StepWriter:
    """Writes steps: `persistent` once, then `step` as often as one likes."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        stack: Stack,
        blocks: ModelBlocks,
        strategy: Callable[[Writer, Model, Plan], Strategy],
        stage: int = 0,
    ) -> None:
        self.writer = Writer()
        self.model, self.plan, self._stack, self.stage = model, plan, stack, stage
        self._parts = _parts(model)
        self._names, self._kinds = body_names(model), model.body
        self._message_bytes = blocks.layer.input_bytes
        self.strategy = strategy(self.writer, model, plan)
        self._parameter_bytes = DTYPE_BYTES[gradient_dtype(plan, stack)]
        self.strategy.whole_table_numel = whole_table_numel(model, blocks)
        self.strategy.redistributed_bytes = redistributed_bytes(model, blocks, plan, stack)
        self._tapes = record_tapes(blocks, plan, stack, keep_gradients=self.strategy.keeps_gradients)
        self._adding = (
            record_tapes(blocks, plan, stack, keep_gradients=False) if plan.num_micro_batches > 1 else self._tapes
        )
        self._inputs = 0
        self._workspaces: list[int] = []
        self._made: set[tuple[int, int]] = set()
        self._dummies = dummy_gradients(blocks, plan) if stack.weight_gradients == "accumulated" else {}

    def persistent(self, workspaces: Sequence[int] = (), *, optimizer_state: bool) -> None:
        """What exists before a step: one storage a tensor. `optimizer_state`: not only after the first step.

        workspaces: of the libraries' handles, taken by a thread's first product: the forward's, then the backward's.
        """
        self.writer.at("start", 0, "", "persistent state")
        for category, sizes in resident_tensors(self.model, self.plan).items():
            if category != "optimizer_state" or optimizer_state:
                for size in sizes:
                    self.writer.alloc(size, category)
        tokens = self.plan.micro_batch_size * self.plan.seq_len // self.plan.cp
        self._inputs = self.writer.alloc(tokens * 8, "inputs")
        self.writer.alloc(tokens * 8, "inputs")
        self._workspaces = list(workspaces)
        if self.model.experts is not None:
            for size in grouped_workspaces(self._stack, workspaces):
                self.writer.alloc(size, "workspaces")

    def _backward_begins(self, block: str) -> None:
        """The first backward that meets a shape makes the dummy of its weights' gradients, which stays."""
        for n, k in self._dummies.pop(block, ()):
            if (n, k) not in self._made:
                self._made.add((n, k))
                self.writer.alloc(n * k * DTYPE_BYTES[self.plan.compute_dtype], "buffers")

    def _product(self) -> None:
        if self._workspaces:
            self.writer.alloc(self._workspaces.pop(0), "workspaces")

    def step(self, num_micro_batches: int, *, first: bool = False) -> None:
        """One optimizer step. `first`: it creates the optimizer's state."""
        self.strategy.begin()
        if self.plan.acts_in_order:
            self._pipeline(num_micro_batches)
        else:
            for index in range(num_micro_batches):
                going = _drained(self._forward_by_layers(index, self._parts[0]))
                _drained(self._backward_by_layers(going, sync=self._syncs(index, num_micro_batches)))
        self.writer.at("optimizer", num_micro_batches - 1, "", self.plan.optimizer)
        self.strategy.optimizer(self._state if first else lambda: None)
        self.strategy.agree()
        self.writer.at("optimizer", num_micro_batches - 1, "", "zero_grad")
        self.strategy.zero_grad()

    def _pipeline(self, num_micro_batches: int) -> None:
        """A stage's actions in its schedule's order. Activations live to the end of the weights' gradients."""
        plan, going = self.plan, dict[tuple[int, int], _InFlight]()
        actions = order(
            plan.pipeline_schedule,
            plan.pp,
            num_micro_batches,
            self.stage,
            plan.virtual_stages,
            paired=plan.expert_overlap,
        )
        last = {action.chunk: action for action in actions if action.kind != "F"}
        ahead: tuple[tuple[int, int], Generator[None, None, _InFlight]] | None = None
        for action, then in zip_longest(actions, actions[1:]):
            key = action.micro_batch, action.chunk
            if action.kind == "F":
                forward = self._forward_by_layers(action.micro_batch, self._parts[action.chunk])
                if then is not None and then.beside and plan.pipeline_schedule not in ("dualpipe", "dualpipe_v"):
                    ahead = key, forward
                else:
                    going[key] = _drained(forward)
            elif action.kind == "W" or action.whole:
                sync = plan.syncs_every_micro_batch or action == last[action.chunk]
                backward = self._backward_by_layers(going.pop(key), sync=sync)
                if ahead is None:
                    _drained(backward)
                else:
                    (index, chunk), forward = ahead
                    layers = self._parts[chunk].layers
                    going[index, chunk], ahead = _together(len(layers), forward, backward), None

    def _syncs(self, index: int, count: int) -> bool:
        return self.plan.syncs_every_micro_batch or index == count - 1

    def _state(self) -> None:
        for size in resident_tensors(self.model, self.plan)["optimizer_state"]:
            self.writer.alloc(size, "optimizer_state")

    def _base(self, tape: Tape) -> int:
        base = self.writer.num_slots
        self.writer.num_slots += tape.num_slots
        return base

    def _forward_by_layers(self, index: int, part: _Part) -> Generator[None, None, _InFlight]:
        """A micro-batch through a part of the model, up to the loss or to what the next stage receives.

        It halts before each layer, and once after the last.
        """
        writer, strategy, offload = self.writer, self.strategy, self.plan.offload
        adds = index > 0 and strategy.keeps_gradients and strategy.gradients
        tapes = self._adding if adds else self._tapes
        evictor = Evictor(writer.events.append, offload.prefetch) if offload.activations != "none" else None
        going = _InFlight(index=index, part=part, tapes=tapes, evictor=evictor)
        given = self._inputs if part.embedding else writer.alloc(self._message_bytes, "activations")
        if part.embedding:
            given = self._unit_forward(going, ROOT, "embedding", tapes.embedding, given)
        if len(self._workspaces) == 2:
            self._product()
        for layer in part.layers:
            yield
            name = self._names[layer]
            given = self._unit_forward(
                going, layer, name, layer_tape(tapes, self.plan, self._kinds[layer], layer), given
            )
            writer.at("forward", index, name, "reshard")
            strategy.after_forward(layer)
        yield
        if not part.head:
            writer.free(given)  # once it is sent
            return going
        head = tapes.head
        going.loss = self._unit_forward(going, ROOT, "head", head, given, end=head.cut)
        going.head = going.stack.pop()
        writer.at("forward", index, "head", "reshard")
        strategy.after_forward(ROOT)
        _, _, base, given = going.head
        writer.play(head.forward, base, given, 0, start=head.cut)
        return going

    def _unit_forward(
        self, going: _InFlight, unit: int, name: str, tape: Tape, given: int, end: int | None = None
    ) -> int:
        """One unit's forward: the slot of its result."""
        writer, base = self.writer, self._base(tape)
        writer.at("forward", going.index, name, "inputs")
        writer.play(tape.forward, base, given, 0, end=tape.early)
        writer.at("forward", going.index, name, "gather")
        self.strategy.before_forward(unit)
        writer.play(tape.forward, base, given, 0, start=tape.early, end=end)
        going.stack.append((unit, tape, base, given))
        if going.evictor is not None and name != "head":
            going.evictor.forward(tape, base)
        return base + tape.output if tape.output >= 0 else given

    def _backward_by_layers(self, going: _InFlight, *, sync: bool) -> Generator[None, None, None]:
        """A micro-batch back through its part of the model, from the loss or from the gradient it receives.

        It halts before each layer and before the embedding.
        """
        writer, head = self.writer, going.tapes.head
        if going.head is None:
            gradient = writer.alloc(self._message_bytes, "temporaries")
            if going.part.embedding:
                self.strategy.before_backward(ROOT)
            yield from self._units_backward(going, gradient, [], sync=sync)
            self.strategy.end_backward()
            return
        writer.at("backward", going.index, "head", "loss")
        ones = writer.alloc(4, "loss")  # the loss's own gradient: held by the frame of `backward` until it returns
        _, _, base, given = going.head
        gradient = self._head_backward(going.tapes, base, given, ones)
        own = [(base + s, n) for s, n in head.parameter_gradients]
        yield from self._units_backward(going, gradient, own, sync=sync)
        writer.free(ones, going.loss)
        self.strategy.end_backward()

    def _head_backward(self, tapes: Tapes, base: int, given: int, ones: int) -> int:
        writer, head = self.writer, tapes.head
        writer.play(head.backward, base, given, ones, end=tapes.head_gemm)
        self.strategy.before_backward(ROOT)
        self._product()
        self._backward_begins("head")
        writer.play(head.backward, base, given, ones, start=tapes.head_gemm)
        return _outside(head.gradient, base, given, ones)

    def _units_backward(
        self, going: _InFlight, gradient: int, head: list[tuple[int, int]], *, sync: bool
    ) -> Generator[None, None, None]:
        """The units' backwards. `head`: gradients that the head left, reduced with the embedding's where that is here."""
        writer, strategy, part = self.writer, self.strategy, going.part
        if part.head and not part.embedding:
            strategy.after_backward(ROOT, head, sync=sync)
        for unit, tape, base, given in reversed(going.stack):
            yield
            name = "embedding" if unit == ROOT else self._names[unit]
            writer.at("backward", going.index, name, "gather")
            if unit != ROOT:
                strategy.before_backward(unit)
                self._backward_begins(self._kinds[unit])
            if going.evictor is not None:
                going.evictor.backward()
            writer.play(tape.backward, base, given, gradient)
            gradient = _outside(tape.gradient, base, given, gradient)
            own = [(base + slot, numel) for slot, numel in tape.parameter_gradients]
            if unit == ROOT and self.model.tied_embeddings:
                own = self._added_to_head(own)
            writer.at("backward", going.index, name, "reduce")
            strategy.after_backward(unit, head + own if unit == ROOT else own, sync=sync)
        if not part.embedding:
            writer.free(gradient)  # once it is sent

    def _added_to_head(self, gradients: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """A tied matrix has one gradient: the embedding's is added to the head's, and goes.

        DTensor's is the whole table's: the rank's part of it and the sum are tensors of their own.
        """
        table = self.model.vocab_size * self.model.d_model
        tied = (table, table * self.plan.tp)
        for slot, numel in gradients:
            if numel > table and numel == tied[1]:
                size = table * self._parameter_bytes
                self.writer.free(*[self.writer.alloc(size, "temporaries") for _ in range(2)])
            if numel in tied:
                self.writer.free(slot)
        return [(slot, numel) for slot, numel in gradients if numel not in tied]


def _together(
    num_layers: int, forward: Generator[None, None, _InFlight], backward: Generator[None, None, None]
) -> _InFlight:
    """A forward and another micro-batch's backward, layer by layer: as one grows the other shrinks.

    In the order of Megatron-LM's TransformerModelChunkSchedulePlan.run: embedding, the other's head, a layer of each in
    turn, then the head.
    """
    next(forward)
    next(backward, None)
    for _ in range(num_layers):
        next(forward)
        next(backward, None)
    _drained(backward)
    return _drained(forward)


def _drained(steps: Generator[None, None, _T]) -> _T:
    """What a generator returns, after all its halts."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("_T", end.value)


def _outside(slot: int, base: int, given: int, gradient: int) -> int:
    """A tape's slot as a slot of the step."""
    return base + slot if slot >= 0 else {INPUT: given, GRADIENT: gradient}[slot]
