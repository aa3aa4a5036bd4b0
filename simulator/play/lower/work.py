"""Work: the cost of a block's phases on one rank, in seconds by category. Kernels become time here, once per block.

A phase is a sequence of segments: compute up to a collective inside the block (tensor or context parallelism), that
collective, and the compute that runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Literal

from simulator.base.kernels import Attention, Gemm, Kernel, Stated, Stream, launches
from simulator.base.sums import summed
from simulator.parallel.pipeline import splits_backward
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.plan import Plan
from simulator.spec.software.stack import NARROW_MODULE, Stack
from simulator.work.ops import Block, Exchange, Op, recompute_ops

Direction = Literal["forward", "backward", "inputs", "weights"]
_MODULES = ("gemm", "attention")  # categories of ops that frameworks write as modules of their own
# How often Python handles each expert's weight by product: (layout, narrow) -> times. Transformer Engine 2.9,
# pytorch/module/grouped_linear.py: weights in prepare_for_saving and save_for_backward, get_weight_workspace of narrow ones;
# handle_custom_ddp_from_mcore, AccumulateGrad and the data-parallel hook of gradients.
_TIMES_HANDLED = {("tn", False): 1, ("tn", True): 2, ("nt", False): 1, ("nt", True): 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of device time by category, and the host's time to launch it. level: at its end the host waits for the device."""

    parts: tuple[tuple[str, float], ...]
    host_s: float
    level: bool = False

    @property
    def duration_s(self) -> float:
        return summed(seconds for _, seconds in self.parts)

    def __add__(self, other: Work) -> Work:
        return added((self, other))

    def scaled(self, factor: float) -> Work:
        """A part of it."""
        parts = tuple((category, factor * seconds) for category, seconds in self.parts)
        return Work(parts=parts, host_s=factor * self.host_s)

    def booked_as(self, category: str) -> Work:
        """The same under one category."""
        parts = ((category, self.duration_s),) if self.parts else ()
        return Work(parts=parts, host_s=self.host_s)


NO_WORK = Work(parts=(), host_s=0.0)


def added(works: Iterable[Work]) -> Work:
    """One after another."""
    totals: dict[str, float] = {}
    host_s, level = 0.0, False
    for work in works:
        for category, seconds in work.parts:
            totals[category] = totals.get(category, 0.0) + seconds
        host_s += work.host_s
        level = level or work.level
    return Work(parts=tuple(totals.items()), host_s=host_s, level=level)


def levelled(work: Work, end_s: float) -> Work:
    """Work that ends at end_s with the host at its heels, because it had to wait for the host."""
    spare_s = end_s - work.duration_s
    parts = (*work.parts, ("host", spare_s)) if spare_s > 0 else work.parts
    return Work(parts=parts, host_s=0.0, level=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Compute, then collectives, and concurrent work: the next segment waits for all of it; waits: so does the host."""

    work: Work
    exchanges: tuple[Exchange, ...] = ()
    beside: Work = NO_WORK
    waits: bool = False

    @property
    def in_pieces(self) -> Segment:
        """Where pieces of what runs beside wait for the collective, or it for them, one of them runs alone."""
        pieces = max((exchange.pieces for exchange in self.exchanges), default=1)
        if pieces == 1 or not self.beside.parts:
            return self
        lead, rest = self.beside.scaled(1 / pieces), self.beside.scaled(1 - 1 / pieces)
        return replace(self, work=self.work + lead, beside=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One direction of a block, in order."""

    segments: tuple[Segment, ...]

    @property
    def work(self) -> Work:
        """All its compute."""
        return added(part for s in self.segments for part in (s.work, s.beside))

    def __add__(self, other: Phase) -> Phase:
        """One after the other; compute that meets at the seam is one op."""
        if not self.segments or not other.segments or self.segments[-1].exchanges or self.segments[-1].waits:
            return Phase(segments=self.segments + other.segments)
        first, *rest = other.segments
        seam = replace(first, work=self.segments[-1].work + first.work)
        return Phase(segments=(*self.segments[:-1], seam, *rest))

    def booked_as(self, category: str) -> Phase:
        """All its compute under one category."""
        return Phase(
            segments=tuple(
                replace(s, work=s.work.booked_as(category), beside=s.beside.booked_as(category)) for s in self.segments
            )
        )


NO_PHASE = Phase(segments=())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """The phases of a block. `recompute` runs just before `backward` where the block is checkpointed.

    inputs, weights: the backward in two, where the plan's schedule leaves the weights' gradients for later. runs_again: of
    a checkpoint, for `weights`: torch asks its graph for each weight's by itself (distributed/pipelining/_backward.py,
    stage_backward_weight), and a checkpoint runs once for every such call (utils/checkpoint.py, unpack_hook).
    """

    forward: Phase
    backward: Phase
    recompute: Phase
    inputs: Phase
    weights: Phase
    flop: int  # forward and backward
    recompute_flop: int
    runs_again: int = 0


def _makes_weights(op: Op, kernel: Kernel) -> bool:
    """The kernel makes the gradient of a linear layer's weight."""
    return op.category == "gemm" and isinstance(kernel, Gemm) and kernel.layout == "nt"


def without_weights(ops: Iterable[Op]) -> Iterator[Op]:
    """Backwards without the products of the weights' gradients; their collectives keep their places."""
    for op in ops:
        kernels = tuple(kernel for kernel in op.backward if not _makes_weights(op, kernel))
        last = len(kernels)
        moved = tuple(
            replace(e, at=min(e.at, last), beside=min(e.beside, last - min(e.at, last))) for e in op.backward_exchanges
        )
        yield replace(op, backward=kernels, backward_exchanges=moved)


def only_weights(ops: Iterable[Op]) -> Iterator[Op]:
    """Backwards with nothing but the products of the weights' gradients."""
    for op in ops:
        yield replace(op, backward=tuple(k for k in op.backward if _makes_weights(op, k)), backward_exchanges=())


class Clock:
    """Turns kernels into Work: calibration's kernel times under a stack's factors and launch costs.

    use: mean use of the tensor cores over the step (`simulator.play.lower.power`).
    """

    def __init__(self, device: Device, calibration: Calibration, stack: Stack, use: float = 1.0) -> None:
        self._device, self._calibration, self._stack = device, calibration, stack
        self._architecture, self._ideal = device.architecture, calibration.kind == "ideal"
        self._attention_factor = stack.attention.speed_factor.get(device.architecture, 1.0)
        self._timer = calibration.timer(device, stack.attention, use)

    @property
    def depends_on_use(self) -> bool:
        """Whether a kernel's time depends on the step's other kernels, through the device's power cap."""
        power = self._calibration.power
        return power is not None and power.memory_draw < 1

    def under(self, use: float) -> Clock:
        """The clock of a step with this mean use of the tensor cores."""
        return Clock(self._device, self._calibration, self._stack, use)

    def tensor_use(self, kernel: Kernel) -> float:
        """Use of the tensor cores while a kernel runs, from 0 to 1."""
        return self._timer.tensor_use(kernel)

    def seconds(self, kernel: Kernel) -> float:
        """Seconds of one kernel in this stack. An ideal calibration has no losses, so no stack's losses either."""
        time_s = self._timer.kernel_s(kernel)
        if self._ideal:
            return time_s
        if isinstance(kernel, Gemm):
            factor = self._stack.gemm_factor_on(self._architecture, kernel.dtype)
            return time_s / (factor * self._stack.fitted.grouped_factor if kernel.grouped else factor)
        return time_s / self._attention_factor if isinstance(kernel, Attention) else time_s

    def work(self, category: str, kernels: Iterable[Kernel]) -> Work:
        """All `kernels` under one category."""
        kernels = tuple(kernels)
        return Work(parts=((category, summed(map(self.seconds, kernels))),), host_s=self._host_s(kernels))

    def launched(self, category: str, kernels: Sequence[Kernel]) -> Work:
        """The same launched one by one: between two kernels of a stream the device stands still (`Overheads.launch_s`)."""
        work, gaps_s = (
            self.work(category, kernels),
            self._calibration.overheads.launch_s * summed(map(launches, kernels)),
        )
        return replace(work, parts=(*work.parts, ("launch gaps", gaps_s)) if gaps_s else work.parts)

    def handled_s(self, counts: Sequence[float]) -> float:
        """The host's time for views, autograd's nodes and DTensor's operators of a captured program."""
        host = self._stack.host
        each = (host.view_s, host.node_s, host.dispatch_s, host.wrap_s, host.layout_s)
        return summed(count * seconds for count, seconds in zip(counts, each, strict=True)) if counts else 0.0

    @property
    def stack(self) -> Stack:
        """The stack of these factors and launch costs."""
        return self._stack

    def direction(self, block: Block, name: Direction) -> Phase:
        """One phase of a block."""
        match name:
            case "forward":
                return self._in_layer(block, self.phase(block.ops, forward=True))
            case "backward":
                return self._in_layer(block, self.phase(block.ops[::-1], forward=False))
            case "inputs":
                return self._in_layer(block, self.phase(without_weights(block.ops[::-1]), forward=False))
            case "weights":
                return self.phase(only_weights(block.ops[::-1]), forward=False)

    def _in_layer(self, block: Block, phase: Phase, further_s: float = 0.0) -> Phase:
        """A layer's phase with the host's further time at its begin."""
        spent_s = 0.0 if block.name in ("embedding", "head") else self._stack.host.layer_s + further_s
        return Phase(segments=(Segment(work=Work(parts=(), host_s=spent_s)),)) + phase if spent_s else phase

    def block(self, block: Block, plan: Plan) -> BlockWork:
        """Forward, backward and recomputation of one block."""
        repeated = recompute_ops(block, plan, self._stack)
        backward, splits = self.direction(block, "backward"), splits_backward(plan.pipeline_schedule)
        again, further_s = self.phase(repeated, forward=True), self._stack.host.checkpoint_s if repeated else 0.0
        return BlockWork(
            forward=self.direction(block, "forward"),
            backward=backward,
            inputs=self.direction(block, "inputs") if splits else backward,
            weights=self.direction(block, "weights") if splits else NO_PHASE,
            recompute=self._in_layer(block, again, further_s).booked_as("recompute"),
            flop=summed(kernel.flop for op in block.ops for kernel in (*op.forward, *op.backward)),
            recompute_flop=summed(kernel.flop for op in repeated for kernel in op.forward),
            runs_again=sum(bool(op.saved) for op in block.trained)
            if splits and plan.traits.uses_torch_pipelines
            else 0,
        )

    def phase(self, ops: Iterable[Op], *, forward: bool) -> Phase:
        """Ops one after another, their collectives between them."""
        segments: list[Segment] = []
        works, fed, graph = list[Work](), frozenset[str](), False  # works: since the last segment
        for op in ops:
            kernels, exchanges = (op.forward, op.forward_exchanges) if forward else (op.backward, op.backward_exchanges)
            done, of = 0, len(kernels)
            if kernels:
                works += [self._graph_call] if op.captured and not graph else []
                graph = op.captured
            if op.name in fed and not exchanges:
                segments[-1] = replace(segments[-1], beside=segments[-1].beside + self._op(op, kernels, of))
                continue
            for at, group in groupby(exchanges, key=attrgetter("at")):
                together = tuple(group)
                until = at + max(exchange.beside for exchange in together)
                work = added((*works, self._op(op, kernels[done:at], of)))
                segments.append(Segment(work=work, exchanges=together, beside=self._op(op, kernels[at:until], of)))
                works, done = [], until
                fed = frozenset(name for exchange in together for name in exchange.feeds)
            works.append(self._op(op, kernels[done:], of))
            if forward and op.waits:
                work, works = added(works), []
                if work.parts or not segments:
                    segments.append(Segment(work=work))
                else:
                    works.append(work)
                segments[-1], fed = replace(segments[-1], waits=True), frozenset()
        work = added(works)
        last = (Segment(work=work),) if work.parts or not segments else ()
        return Phase(segments=(*(segment.in_pieces for segment in segments), *last))

    def _op(self, op: Op, kernels: tuple[Kernel, ...], of: int) -> Work:
        """Some of an op's `of` kernels, with their share of the host's time around all of them."""
        if not kernels:
            return NO_WORK
        plain = op.category in ("gemm", "attention", "scan") or op.by_torch or self._ideal
        seconds = summed(self.seconds(kernel) * (1 if plain else self._stream_factor(kernel)) for kernel in kernels)
        if op.captured:
            return Work(parts=((op.category, seconds),), host_s=0.0)
        module_s = self._module_s(op, kernels) * len(kernels) / of if op.category in _MODULES else 0.0
        module_s += self._stack.host.dtensor_s * len(kernels) / of if op.dispatched else 0.0
        module_s += self._stack.host.adapter_s * len(kernels) / of if op.is_unit else 0.0
        module_s += self._stack.host.hook_s * len(kernels) / of if op.hooked else 0.0
        if self._stack.kernels.fills_outputs and (op.category in _MODULES or op.category == "norm"):
            module_s += self._stack.further_kernel_s() * summed(map(launches, kernels))
        host_s = self._host_s(kernels) + module_s + self._experts_s(kernels)
        return Work(parts=((op.category, seconds),), host_s=host_s)

    def _stream_factor(self, kernel: Kernel) -> float:
        """The stack's time over a stream's; casts to fp8 were measured as they are written by hand."""
        by_hand = isinstance(kernel, Stream) and kernel.op == "quantise"
        return 1.0 if by_hand else self._stack.elementwise_factor_on(self._architecture)

    @property
    def _graph_call(self) -> Work:
        """The host's call of a captured graph: a module (Transformer Engine's graphed callables are), and its launch."""
        return Work(parts=(), host_s=self._stack.host.module_s + self._stack.host.launch_s)

    def _module_s(self, op: Op, kernels: tuple[Kernel, ...]) -> float:
        """Host time of an op's module around its kernels; of one an expert, where they are modules of their own."""
        narrow, experts = 1.0, 1
        for kernel in op.forward:
            if isinstance(kernel, Gemm) and not kernel.grouped and kernel.dtype in ("fp8", "fp4"):
                narrow = NARROW_MODULE
        if self._stack.kernels.grouped_gemm == "modules":
            experts = max((k.launches for k in kernels if isinstance(k, Gemm) and k.grouped), default=1)
        return self._stack.host.module_s * narrow * experts

    def _experts_s(self, kernels: tuple[Kernel, ...]) -> float:
        """Host time of a grouped linear layer on each expert's weight: Python handles it as it would an operator.

        Forward it is looked up and saved for the backward, narrow ones with their copy; backward its gradient's hook runs.
        """
        if self._stack.kernels.grouped_gemm != "one_each":
            return 0.0
        grouped = [k for k in kernels if isinstance(k, Gemm) and k.grouped and k.launches > 1]
        handled = summed(k.launches * _TIMES_HANDLED.get((k.layout, k.dtype in ("fp8", "fp4")), 0) for k in grouped)
        return self._stack.host.launch_s * handled

    def _host_s(self, kernels: tuple[Kernel, ...]) -> float:
        """Host time to launch kernels: a call each, and in C++ the further ones of a call."""
        together = self._stack.kernels.grouped_gemm != "modules"
        calls = further = 0  # products that one call launches behind its first, for several experts or pieces
        for kernel in kernels:  # a cast makes a tensor of each
            count = 1 if isinstance(kernel, Stated) and kernel.together else launches(kernel)
            behind = max(0, count - 1) if together and isinstance(kernel, Gemm) else 0
            calls, further = calls + count - behind, further + behind
        return self._stack.host.launch_s * calls + self._stack.further_kernel_s() * further
