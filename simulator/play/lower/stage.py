"""Inputs of reading a rank's script: the units of its chunks, each with its work and communication."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.parallel.pipeline import Action, micro_batches, order
from simulator.play.lower.hops import HopWork
from simulator.play.lower.work import NO_PHASE, BlockWork, Phase, Segment, Work
from simulator.spec.plan import Plan
from simulator.work.offload import Moves
from simulator.work.script import UnitComm
from simulator.work.script.instructions import Pass
from simulator.work.script.order import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledUnit:
    """One communication unit with its work: a transformer block, or a piece of the root at either end.

    gather_forward, gather_backward, gradient, keep, add: the full-size passes over memory that the implementation adds around
    its collectives (copy-out, casts, pre-division), on the compute stream. hops: of its gradient, where it takes several.
    """

    name: str
    comm: UnitComm
    work: BlockWork
    checkpointed: bool
    flop: int
    gather_forward: Work
    gather_backward: Work
    gradient: Work
    keep: Work  # of a gradient to which others will be added, in the first micro-batch
    add: Work  # in later ones
    hops: tuple[HopWork, ...] = ()

    @property
    def inputs(self) -> Phase:
        """The backward without the weights' gradients."""
        return self.work.recompute + self.work.inputs if self.checkpointed else self.work.inputs

    @property
    def backward(self) -> Phase:
        return self.work.recompute + self.work.backward if self.checkpointed else self.work.backward

    @property
    def weights(self) -> Phase:
        """The weights' gradients alone, each with its own run of a checkpoint."""
        return sum([self.work.recompute] * self.runs_again, NO_PHASE) + self.work.weights

    @property
    def runs_again(self) -> int:
        return self.work.runs_again if self.checkpointed else 0

    def kept(self, micro_batch: int) -> Phase:
        """The work of keeping its gradient for later micro-batches."""
        return Phase(segments=(Segment(work=self.add if micro_batch else self.keep),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """Everything a schedule needs: units in forward order (embedding, blocks, head) and the work at the end."""

    plan: Plan
    chunk: Chunk
    units: tuple[ScheduledUnit, ...]
    clip: Work  # the gradients' norm and their scale
    optimizer: Work
    moves: Moves  # between HBM and the tiers below
    agreement: tuple[HopWork, ...] = ()  # after the optimizer, where replicas take steps alone
    synchronous: bool = False  # the host waits for the device between pieces of work
    turns: bool = False  # and inside of them, so that it has no lead which hides when a piece's kernels are launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline rank: its chunks in their order, each with its units.

    message_bytes: activations of a micro-batch, or their gradients, that pass between chunks. tied_bytes: gradients of
    the matrix that the first and the last stage both hold. activation_tensors: in which activations travel. folds: what no data-parallel traffic touches is one op.
    """

    index: int
    plan: Plan
    chunks: tuple[StageStep, ...]
    message_bytes: int
    tied_bytes: int = 0
    folds: bool = True
    activation_tensors: int = 1

    def tensors(self, action: Action) -> int:
        """Tensors of the message that an action needs."""
        return self.activation_tensors if action.kind == "F" else 1

    @property
    def flop(self) -> int:
        """FLOP of its step, recomputation included."""
        plan, schedule, count = self.plan, self.plan.pipeline_schedule, self.plan.num_micro_batches
        total = 0
        for number, chunk in enumerate(self.chunks):
            total += len(micro_batches(schedule, count, number)) * sum(unit.flop for unit in chunk.units)
            again = (
                0 if chunk.chunk.embedding else sum(unit.runs_again * unit.work.recompute_flop for unit in chunk.units)
            )
            if again:
                actions = order(schedule, plan.pp, count, self.index, len(self.chunks))
                total += again * sum(action.kind == "W" and action.chunk == number for action in actions)
        return total

    @property
    def script_chunks(self) -> tuple[Chunk, ...]:
        """Its chunks as a script knows them."""
        return tuple(step.chunk for step in self.chunks)

    def folds_pass(self, one: Pass) -> bool:
        """No data-parallel traffic touches the pass, so that it is one op."""
        plain = self.plan.acts_in_order and self.folds and not self.plan.gathers and not one.first
        return plain and (one.direction == "forward" or not one.syncs)

    def phases(self, one: Pass) -> list[list[Phase]]:
        """The phases of a pass, by unit in its order; a kept gradient belongs to its unit's backward."""
        units = self.chunks[one.chunk].units
        match one.direction:
            case "forward":
                return [[unit.work.forward] for unit in units]
            case "weights":
                return [[unit.weights, unit.kept(one.micro_batch)] for unit in reversed(units)]
            case "backward":
                return [[unit.backward, unit.kept(one.micro_batch)] for unit in reversed(units)]
            case "inputs":
                return [[unit.inputs] for unit in reversed(units)]


def waits_for_messages(plan: Plan) -> bool:
    """The plan's stages exchange synchronously: compute, and the host, stand still while messages travel."""
    plain = plan.pp > 1 and plan.pipeline_schedule in ("gpipe", "1f1b")
    return plain and plan.traits.own_model_code
