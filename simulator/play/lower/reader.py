"""StageReader: a StepScript read as time. Each instruction becomes ops on streams, with seconds and bytes on links.

The script says in which order; what an op costs, and whether the host waits for it, stands in the stage's units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from simulator.play.lower import offloading
from simulator.play.lower.builder import Builder
from simulator.play.lower.fabric import NORM
from simulator.play.lower.hops import Hopping
from simulator.play.lower.messages import receive, send
from simulator.play.lower.paired import paired
from simulator.play.lower.stage import ScheduledUnit, Stage, StageStep
from simulator.play.lower.traffic import all_gather, gather_updated, reduce_gradient
from simulator.play.lower.work import Clock, Phase, Work
from simulator.work.script.instructions import (
    Agree,
    Communicate,
    Evict,
    GatherUpdated,
    Gradient,
    Instruction,
    Issued,
    Launch,
    Pass,
    Receive,
    Reduce,
    Restore,
    Run,
    Send,
    Storage,
    Together,
    UnitInstruction,
    Unshard,
    Update,
)

_STORAGES = frozenset(get_args(Storage))


@dataclass(slots=True)
class _PassState:
    """What the ops of one pass wait for. Units by their number in the chunk.

    done: each unit's last compute op, in the order in which they ran; gathered, reduced: the last op of its all-gather
    and of its reduction. end: the op that another stage waits for.
    """

    one: Pass
    step: StageStep
    hopping: Hopping
    done: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, int | None] = field(default_factory=dict)
    reduced: dict[int, int | None] = field(default_factory=dict)
    last: list[int | None] = field(default_factory=list)
    computed: int = -1
    end: int = -1
    held: Sequence[int | None] = ()  # what the first compute waits for

    @property
    def backward(self) -> bool:
        return self.one.direction != "forward"

    def label(self, action: str, unit: ScheduledUnit) -> str:
        return f"{action} {unit.name} mb{self.one.micro_batch}{' backward' if self.backward else ''}"


class StageReader:
    """Appends the ops of one rank's script to a program under construction."""

    def __init__(self, build: Builder, stage: Stage, clock: Clock | None = None) -> None:
        self._build, self._stage, self._clock = build, stage, clock
        self._last: list[int | None] = []  # ops that the optimizer waits for
        self._early: list[int | None] = []
        self._updated = self._end = -1  # ops: the optimizer, and what the last pass sends
        self._labels: dict[str, int | None] = {}
        self._works: dict[object, tuple[object, Work]] = {}
        self._row: list[Launch] = []  # launches that nothing has come between
        self._awaited: set[str] = set()  # labels

    def read(self, script: Iterable[Instruction]) -> None:
        """All of a step. Storages are for memory to read."""
        if self._stage.chunks:
            self._early = offloading.delayed_updates(self._build, self._stage.chunks[0].moves)
        script = [one for one in script if type(one) not in _STORAGES]
        self._awaited = {label for one in script if isinstance(one, Issued) for label in one.after}
        for one in script:
            if type(one) is Launch or type(one) is Communicate:
                self._op(one)
            elif isinstance(one, Pass):
                self._pass(one)
            elif isinstance(one, Together):
                self._together(one.forward, one.backward)
            else:
                self._between(one)
        self._end_row()

    def _between(self, one: Instruction) -> None:
        """Instructions between passes, and after them."""
        match one:
            case Receive(action):
                receive(self._build, self._stage, action)
            case Send(action):
                send(self._build, self._stage, action, self._end)
            case Update():
                self._update()
            case GatherUpdated(unit, chunk):
                gather_updated(self._build, self._stage.chunks[chunk].units[unit], self._updated)
            case Agree():
                self._agree()
            case _:
                pass

    # -- passes

    def _pass(self, one: Pass) -> None:
        step = self._stage.chunks[one.chunk]
        if self._stage.folds_pass(one) or not step.units:  # a stage without layers hands on what it receives
            self._end = self._folded(one)
            return
        state = _PassState(one, step, Hopping(self._build))
        if one.direction == "forward" and not step.plan.acts_in_order:
            state.held = self._last
        for group in one.units:
            for instruction in group:
                self._unit(state, instruction)
        if one.direction in ("backward", "weights"):
            reductions = state.last + state.hopping.drain()
            # Backwards one behind the other: this one's forward has waited for the reductions of the one before
            self._last = self._last + reductions if step.plan.acts_in_order else reductions
        self._end = state.end

    def _folded(self, one: Pass) -> int:
        """A micro-batch through a chunk without data-parallel traffic: one op, the same in each but the first."""
        step, kind = self._stage.chunks[one.chunk], (one.chunk, one.direction, one.micro_batch == 0)

        def folded() -> Work:
            phases = (phase for unit in self._stage.phases(one) for phase in unit)
            return self._build.folded(*phases, synchronous=step.synchronous)

        work = self._build.once(kind, folded)
        reads = self._build.host.reads_loss and one.direction == "forward" and step.chunk.is_head(len(step.units) - 1)
        return self._build.compute(str(one.action), work, early=step.turns, waits=reads)

    def _together(self, forward: Pass, backward: Pass) -> None:
        """Both wait for each other's messages, and send at the end; one after another if they have traffic."""
        both = (forward, backward)
        actions = [one.action for one in both if one.action is not None]
        if not self._stage.folds or backward.last or forward.first or self._stage.plan.syncs_every_micro_batch:
            for one, action in zip(both, actions, strict=True):
                receive(self._build, self._stage, action)
                self._pass(one)
                send(self._build, self._stage, action, self._end)
            return
        for action in actions:
            receive(self._build, self._stage, action)
        kind = forward.chunk, backward.chunk, backward.direction, backward.micro_batch == 0

        def joined() -> Work:
            phases = ([sum(unit[1:], unit[0]) for unit in self._stage.phases(one)] for one in both)
            return paired(self._build, *phases)

        work = self._build.once(kind, joined)
        turns = self._stage.chunks[forward.chunk].turns
        self._end = self._build.compute(f"{forward.action} with {backward.action}", work, early=turns)
        for action in actions:
            send(self._build, self._stage, action, self._end)

    # -- units

    def _unit(self, state: _PassState, instruction: UnitInstruction) -> None:
        build, unit = self._build, state.step.units[instruction.unit]
        moves, index = state.step.moves, state.one.micro_batch
        match instruction:
            case Unshard():
                self._unshard(state, instruction, unit)
            case Run():
                self._run(state, instruction, unit)
            case Evict():
                offloading.after_forward(build, moves, unit.name, index, state.computed)
            case Restore(_, fetches):
                names = [(self._name(state, one), self._name(state, room)) for one, room in fetches]
                offloading.before_backward(build, moves, unit.name, index, names)
            case Gradient(number):
                state.computed = self._accumulated(unit, index, state.computed)
                state.done[number] = state.computed
                state.end = state.end if state.one.direction == "backward" else state.computed
            case Reduce(number):
                one = state.one
                reduced = reduce_gradient(build, state.step, unit, index, state.computed, state.hopping, final=one.last)
                state.reduced[number] = reduced
                state.last.append(offloading.send_gradient(build, moves, unit.name, index, reduced, final=one.last))
            case GatherUpdated():
                gather_updated(build, unit)
            case _:
                pass

    def _name(self, state: _PassState, unit: int | None) -> str:
        return "" if unit is None else state.step.units[unit].name

    def _unshard(self, state: _PassState, instruction: Unshard, unit: ScheduledUnit) -> None:
        for number, waits_for in instruction.gathers:
            if number not in state.gathered:
                gate = None if waits_for is None else state.done[waits_for]
                state.gathered[number] = self._gather(state, state.step.units[number], gate)
        gathered = state.gathered.get(instruction.unit)
        if gathered is not None:
            again = state.backward or self._near(state)
            passes = unit.gather_backward if again else unit.gather_forward
            self._build.compute(state.label("copy-out", unit), passes, gathered)

    def _near(self, state: _PassState) -> bool:
        """Parameters come from ZeRO++'s second copy."""
        return state.one.micro_batch > 0 and state.step.plan.deepspeed.zeropp.secondary_ranks > 1

    def _gather(self, state: _PassState, unit: ScheduledUnit, gate: int | None) -> int | None:
        """Fetched from a tier below, gathered, and its experts gathered in their own groups: the last op."""
        step, index, done = state.step, state.one.micro_batch, list(state.done.values())
        fetch = offloading.fetch_again if state.backward else offloading.fetch
        fetched = fetch(self._build, step.moves, unit.name, index, done, gate)
        again, label = state.backward or self._near(state), state.label("all-gather", unit)
        gathered = all_gather(self._build, step, unit, label, gate, fetched, again=again)
        experts = unit.comm.experts
        if experts is not None:  # on the same stream of the device
            size = experts.all_gather_backward_bytes if state.backward else experts.all_gather_forward_bytes
            ready = gate if gathered is None else gathered
            gathered = self._build.collective(f"{label} experts", "all_gather", "expert_shard", size, ready) or gathered
        return fetched if gathered is None else gathered

    def _run(self, state: _PassState, run: Run, unit: ScheduledUnit) -> None:
        build, step, index = self._build, state.step, state.one.micro_batch
        match run.phase:
            case "forward":
                if step.plan.offload.activations != "none":
                    offloading.before_forward(build, step.moves, unit.name, index)
                read = build.host.reads_loss and step.chunk.is_head(run.unit)
                label = f"forward {unit.name} mb{index}"
                state.computed = state.end = self._compute(step, label, unit.work.forward, *state.held, waits=read)
                state.held = ()
                state.done[run.unit] = state.computed
            case "backward":
                reduction = None if run.after is None else state.reduced.get(run.after)
                label = f"backward {unit.name} mb{index}"
                state.computed = state.end = self._compute(step, label, unit.backward, reduction)
                build.remember("backward", unit.name, index, state.computed)
            case "inputs":
                state.end = self._compute(step, f"backward of inputs {unit.name} mb{index}", unit.inputs)
            case "weights":
                label = f"backward of weights {unit.name} mb{index}"
                state.computed = state.end = self._compute(step, label, unit.weights)
            case "loss" | "loss_backward":
                pass  # with the head's own

    def _compute(self, step: StageStep, label: str, phase: Phase, *after: int | None, waits: bool = False) -> int:
        """Append a block's phase. The last op of it: a collective, where one ends the phase.

        waits: the host, for that compute.
        """
        build = self._build
        if step.synchronous:
            return build.compute(label, build.folded(phase, synchronous=True), *after)
        end, before = -1, list[int | None]()  # before: ops that this segment waits for
        for number, segment in enumerate(phase.segments):
            if segment.work.parts or number == 0:
                read = waits and number == len(phase.segments) - 1
                stops = read or (segment.waits and not segment.exchanges)
                end = build.compute(label, segment.work, *after, waits=stops, early=step.turns)
                after, before = (), [end]
            sent: list[int | None] = []
            for exchange in segment.exchanges:
                name = f"{exchange.kind.replace('_', '-')} in {label}"
                stops = segment.waits and exchange is segment.exchanges[-1]
                sent.append(build.exchange(name, exchange, *before, waits=stops))
                build.hold(sent[-1])
                end = end if sent[-1] is None else sent[-1]
            if segment.beside.parts:
                end = build.compute(f"{label} beside", segment.beside, *before, join=False, early=step.turns)
            before = [*sent, end]
        return end

    def _accumulated(self, unit: ScheduledUnit, index: int, after: int) -> int:
        """The unit's gradient beside those of the micro-batches before, where whole gradients add up."""
        work = unit.add if index else unit.keep
        return self._build.compute(f"copy-in {unit.name} mb{index} kept", work, after) if work.parts else after

    # -- the end of a step

    def _update(self) -> None:
        """In a pipeline, gradients of a tied matrix are summed and the gradients' norm is agreed upon first."""
        build, stage = self._build, self._stage
        plan, step = stage.plan, stage.chunks[0]
        if not plan.acts_in_order:
            ready = self._clipped(self._last)
            self._updated = offloading.update(build, step.moves, step.optimizer, *ready, delayed=self._early)
            return
        ready = [*self._last, build.last_compute]
        if stage.tied_bytes:
            ends = (0, plan.pp - 1)
            ready.append(build.all_reduce_stages("all-reduce tied embeddings", "tied", stage.tied_bytes, ends, *ready))
        ready = self._clipped(ready)
        if plan.pp > 1:
            ready = [build.all_reduce_stages("gradient norm", "norm", 4, tuple(range(plan.pp)), *ready)]
        self._updated = build.compute("optimizer", step.optimizer, *ready)

    def _clipped(self, ready: list[int | None]) -> list[int | None]:
        """The norm of all gradients that the group has is found, and they are scaled; ops that wait for it."""
        build, clip = self._build, self._stage.chunks[0].clip
        if not clip.parts:
            return ready
        done = build.compute("clip gradients", clip, *ready)
        return [done, build.collective("stage's gradient norm", "all_reduce", NORM, 4, done, waits=clip.level)]

    def _agree(self) -> None:
        """Replicas that took steps alone, after the optimizer's last op."""
        step = self._stage.chunks[0]
        if step.agreement and self._build.agrees:
            Hopping(self._build).begin("parameters of replicas", step.agreement, self._updated)

    # -- op by op

    def _op(self, one: Issued) -> None:
        """Launches that only the next launch waits for are played as one op (`Chain`)."""
        row = self._row
        if row and (isinstance(one, Communicate) or one.after or one.stream != row[0].stream):
            self._end_row()
        if isinstance(one, Communicate):
            self._labels[one.label] = self._build.communicate(one, *(self._labels[label] for label in one.after))
            return
        self._row.append(one)
        if one.waits or one.label in self._awaited or self._build.host.blocking:
            self._end_row()

    def _end_row(self) -> None:
        row, self._row = self._row, []
        if row:
            works, after = tuple(map(self._launched, row)), [self._labels[label] for label in row[0].after]
            more: dict[str, Any] = {"waits": row[-1].waits, "beside": row[-1].stream}
            if len(row) == 1:
                done = self._build.compute(row[0].label, works[0], *after, **more)
            else:
                done = self._build.chain([one.label for one in row], works, *after, **more)
            self._labels[row[-1].label] = done

    def _launched(self, one: Launch) -> Work:
        """Its work, made once for launches of the same kernels: a captured operator's are one object."""
        key = (id(one.kernels), one.category, one.handled)
        if key not in self._works:
            assert self._clock is not None
            work = self._clock.launched(one.category, one.kernels)
            if one.handled:
                work = replace(work, host_s=work.host_s + self._clock.handled_s(one.handled))
            self._works[key] = one.kernels, work  # kept with it, so that no other tuple gets its id
        return self._works[key][1]
