"""The data of ops: a block is a list of them in forward order; the backward runs them reversed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from simulator.base.kernels import Kernel, Stream, launches

Category = Literal["gemm", "attention", "scan", "elementwise", "norm", "loss", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A storage made in a forward or backward pass. `num_bytes` is exact, before any allocator rounding."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective inside one phase of an op, among the ranks of a mesh axis.

    num_bytes: of the full tensor. at: it starts when the op's first `at` kernels have run. beside: of the kernels from
    there on, those that run while it does; whatever comes after them waits for it. copies: rows of one token that a
    dispatcher sends once to each node, or rank inside a node, instead of each to its own expert.
    pieces: what runs beside it is cut into so many, and one of them runs alone: the first that is sent, or the last that
    comes. feeds: ops behind this one whose kernels run beside it too. copied: by copy engines, part by part.
    captured: in a CUDA graph.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    axis: Literal["tp", "cp", "ep", "etp", "stage"]
    num_bytes: int
    at: int = 0
    beside: int = 0
    copies: int = 1
    pieces: int = 1
    feeds: tuple[str, ...] = ()
    copied: bool = False
    captured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One autograd node, or one fused kernel where a stack fuses.

    inputs:  names of the tensors it reads (views carry their base's name; parameters and buffers are not listed).
             An op without kernels and outputs only holds its inputs alive: the end of a Python scope.
    outputs: storages it makes (empty for a view), the block's own result first.
    saved:   names of the tensors kept until this op's backward has run (parameters and buffers are not listed).
    grad_inputs: storages that its backward makes, named after the differentiable input whose gradient they are.
             An input with several consumers gets its gradients summed: the first to arrive is kept, the others are
             temporary; the kernels of the sums are in `backward` of the consumers that come later in the backward.
    views: results that are views of its first input: no storage, but gradients of their own, which its backward reads.
    grad_aliases: inputs whose gradient is the output's own gradient, no new storage (residual additions, views).
    grad_overwrites: inputs whose gradient stands where they stood themselves (saved, and written over).
    forward_temporary_bytes, backward_temporary_bytes: storages made and freed inside, largest moment.
    parameter_numel: elements of the parameters whose gradients its backward makes, in the parameters' dtype.
    category: what its time is reported as.
    forward_exchanges, backward_exchanges: collectives among its kernels, in order of `at`.
    selective_save: the selective checkpointing policy keeps its outputs instead of running it again.
    captured: in a CUDA graph, which the host launches whole.
    by_torch: its elementwise kernels are torch's own, one an operator, also where the stack's are written by hand.
    dispatched: DTensor runs it, whose Python takes the host.
    is_unit: FSDP1 gathers its parameters by themselves.
    hooked: DeepSpeed's stage 3 finds and frees its parameters in Python.
    waits: the host waits for its forward's end, for it needs a number that the forward makes.
    """

    name: str
    category: Category
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    saved: tuple[str, ...] = ()
    grad_inputs: tuple[Tensor, ...] = ()
    grad_aliases: tuple[str, ...] = ()
    grad_overwrites: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    parameter_numel: int = 0
    forward_exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    selective_save: bool = False
    captured: bool = False
    by_torch: bool = False
    waits: bool = False
    dispatched: bool = False
    is_unit: bool = False
    hooked: bool = False

    @property
    def saves_only_inputs(self) -> bool:
        """All it saves exists before it runs, so a recomputation that only needs its saved tensors may skip it."""
        made = {tensor.name for tensor in self.outputs}
        return not made.intersection(self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated piece of a model: its ops in forward order. `input` and `output` name the tensors at its borders."""

    name: str
    ops: tuple[Op, ...]
    input: str
    output: str
    num_parameters: int
    input_bytes: int = 0

    @property
    def forward_flop(self) -> int:
        return sum(kernel.flop for op in self.ops for kernel in op.forward)

    @property
    def backward_flop(self) -> int:
        return sum(kernel.flop for op in self.ops for kernel in op.backward)

    @property
    def casts(self) -> dict[str, Op]:
        """Casts of weights under autocast, by the tensor that each makes."""
        return {t.name: op for op in self.ops if op.parameter_numel and not op.inputs for t in op.outputs}

    @property
    def trained(self) -> tuple[Op, ...]:
        """Ops whose backward makes gradients of weights, or of casts of weights."""
        casts, inner = self.casts, (op for op in self.ops if op.inputs)
        return tuple(op for op in inner if op.parameter_numel or any(t.name in casts for t in op.grad_inputs))

    def saved_tensors(self) -> Iterator[Tensor]:
        """What the block keeps between its forward and its backward, each storage once, its input included."""
        sizes = {self.input: self.input_bytes} | {t.name: t.num_bytes for op in self.ops for t in op.outputs}
        names = dict.fromkeys(name for op in self.ops for name in op.saved)
        return (Tensor(name=name, num_bytes=sizes[name]) for name in names)

    @property
    def saved_bytes(self) -> int:
        """Sum of `saved_tensors`, before any allocator rounding."""
        return sum(tensor.num_bytes for tensor in self.saved_tensors())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlocks:
    """A model on one rank and one micro-batch: the embedding, a block of each kind of the body, the head with the loss.

    made: what somebody has made of the blocks and would make again, by a key of theirs.
    """

    embedding: Block
    body: tuple[Block, ...]
    head: Block
    made: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def layer(self) -> Block:
        """The most usual layer: with experts, where the model has some; a hybrid's first."""
        return self.body[0]

    @property
    def kinds(self) -> tuple[Block, ...]:
        """All blocks, one of a kind."""
        return self.embedding, *self.body, self.head

    @property
    def untimed(self) -> bool:
        """Some kernels are of a kind that no calibration has timed."""
        ops = (op for block in self.kinds for op in block.ops)
        return any(isinstance(k, Stream) and k.untimed for op in ops for k in (*op.forward, *op.backward))


def num_launches(block: Block, phase: Literal["forward", "backward"]) -> int:
    """Kernel launches that the host pays for in one phase of `block`."""
    return sum(launches(k) for op in block.ops for k in (op.forward if phase == "forward" else op.backward))
