"""The collectives of tensor parallelism inside a block, and who runs beside them.

A region computes on whole tokens and a slice of the columns: attention, the MLP, the LM head with the loss. Entering it,
activations are the same on all ranks (their gradients are summed backward) or, with sequence parallelism, each rank's
part of the tokens (gathered forward, gradients reduce-scattered backward); leaving it, partial sums are all-reduced, or
reduce-scattered (arXiv 1909.08053 section 3; arXiv 2205.05198 section 4.2.2).

torch's own tensor parallelism (DTensor) sums into a new tensor, and splits tokens that are not the first dim by copies: an
all-gather of several sequences is put in order by one, and a reduce-scatter's input always is (torch 2.13,
distributed/_functional_collectives.py, _utils.py).

Hand-fused stacks do both inside their linear layers: they save the part of the tokens and gather it once more beside
the data gradient, and send that gradient beside the weight's (Megatron-LM, core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from typing import Literal

from simulator.kernels import Kernel
from simulator.ops.core import Exchange
from simulator.ops.graph import Graph, Value, stream
from simulator.ops.setting import Setting

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Split = Literal["columns", "rows", "none"]


def enter(g: Graph, s: Setting, name: str, x: Value) -> Value:
    """The region's input on whole tokens. Fused stacks: unchanged, their linear layers gather."""
    if s.plan.tp == 1 or s.stack.blocks == "fused":
        return x
    if not s.sequence_parallel:
        g.op(
            name,
            "elementwise",
            inputs=(x,),
            aliases=(x,),
            backward_temporary_bytes=x.num_bytes,
            backward_exchanges=(exchange("all_reduce", x.num_bytes),),
        )
        return x
    return _gather(g, s, name, x, backward_exchanges=(exchange("reduce_scatter", x.num_bytes * s.plan.tp),))


def gather(g: Graph, s: Setting, name: str, x: Value) -> Value:
    """Whole tokens for what every rank computes alike: of their gradient, the same everywhere, each keeps its part."""
    return _gather(g, s, name, x) if s.sequence_parallel else x


def _gather(g: Graph, s: Setting, name: str, x: Value, backward_exchanges: tuple[Exchange, ...] = ()) -> Value:
    whole = g.value(name, x.numel * s.plan.tp, x.dtype)
    copied = _copied_bytes(s, whole)
    scattered = whole.num_bytes if backward_exchanges else 0
    g.op(
        name,
        "elementwise",
        inputs=(x,),
        outputs=(whole,),
        forward=_copies(copied),
        backward=_copies(scattered or x.num_bytes),
        grads=(x,),
        forward_temporary_bytes=copied,
        backward_temporary_bytes=scattered,
        forward_exchanges=(exchange("all_gather", whole.num_bytes),),
        backward_exchanges=backward_exchanges,
    )
    return whole


def part(g: Graph, s: Setting, name: str, x: Value) -> Value:
    """This rank's part of tokens that every rank has whole; backward, the parts' gradients are gathered."""
    if not s.sequence_parallel:
        return x
    out = g.value(name, x.numel // s.plan.tp, x.dtype)
    copied = _copied_bytes(s, x)
    g.op(
        name,
        "elementwise",
        inputs=(x,),
        outputs=(out,),
        forward=_copies(out.num_bytes),
        backward=_copies(copied),
        grads=(x,),
        backward_temporary_bytes=copied,
        backward_exchanges=(exchange("all_gather", x.num_bytes),),
    )
    return out


def _copied_bytes(s: Setting, whole: Value) -> int:
    """What puts gathered parts in order: the ranks' parts of one sequence lie right as they come."""
    return whole.num_bytes if s.batch > 1 else 0


def _copies(num_bytes: int) -> tuple[Kernel, ...]:
    return (stream("copy", num_bytes, num_bytes),) if num_bytes else ()


def leave(g: Graph, s: Setting, name: str, x: Value) -> Value:
    """The region's result, partial sums before, as the residual stream has it."""
    if s.plan.tp == 1 or (x.numel < s.tokens * s.model.d_model):  # its linear layer has scattered it already
        return x
    ordered = s.stack.blocks == "fused"  # tokens come first, and the sum is taken in place
    temporary = 0 if ordered else x.num_bytes
    if not s.sequence_parallel:
        summed = (exchange("all_reduce", x.num_bytes),)
        g.op(
            name,
            "elementwise",
            inputs=(x,),
            aliases=(x,),
            forward_exchanges=summed,
            forward_temporary_bytes=temporary,
        )
        return x
    out = g.value(name, x.numel // s.plan.tp, x.dtype)
    copied = 0 if ordered else _copied_bytes(s, x)
    g.op(
        name,
        "elementwise",
        inputs=(x,),
        outputs=(out,),
        forward=_copies(temporary),
        backward=_copies(copied),
        grads=(x,),
        forward_temporary_bytes=temporary,
        backward_temporary_bytes=copied,
        forward_exchanges=(exchange("reduce_scatter", x.num_bytes),),
        backward_exchanges=(exchange("all_gather", x.num_bytes),),
        selective_save=True,
    )
    return out


class Course:
    """What a hand-fused linear layer sends, and when. Elsewhere, and without tensor parallelism, nothing.

    gathers_input: it reads its part of the tokens and gathers the rest; scatters_output: it writes a part.
    """

    def __init__(self, s: Setting, split: Split) -> None:
        fused = s.plan.tp > 1 and s.stack.blocks == "fused" and split != "none"
        self._columns = fused and split == "columns"
        self._in_pieces = fused and s.sequence_parallel and s.stack.tp_overlap == "userbuffers"
        self._hides = s.stack.tp_overlap != "none"
        self.gathers_input = self._columns and s.sequence_parallel
        self.scatters_output = self._in_pieces and split == "rows"

    def forward(self, whole_input: int, whole_output: int, product: int) -> tuple[Exchange, ...]:
        """Bytes of the whole input and output; `product` is the index of the matrix product among the kernels."""
        beside = 1 if self._in_pieces else 0
        if self.gathers_input:
            return (exchange("all_gather", whole_input, product, beside),)
        return (exchange("reduce_scatter", whole_output, product, beside),) if self.scatters_output else ()

    def backward(self, whole_input: int, gradient: int, whole_output: int, product: int) -> tuple[Exchange, ...]:
        """`gradient`: bytes of the whole input's gradient; `product`: index of the data gradient's product."""
        hidden = 1 if self._hides else 0
        if self.gathers_input:
            again = exchange("all_gather", whole_input, product, hidden)
            return again, exchange("reduce_scatter", gradient, product + 1, hidden)
        if self._columns:
            return (exchange("all_reduce", gradient, product + 1, hidden),)
        return (exchange("all_gather", whole_output, product, 1),) if self.scatters_output else ()

    def forward_temporary_bytes(self, whole_input: int, whole_output: int) -> int:
        """The gathered input, or the output before it is scattered."""
        return whole_input if self.gathers_input else whole_output if self.scatters_output else 0

    def backward_temporary_bytes(self, whole_input: int, gradient: int, whole_output: int) -> int:
        """The input gathered again and its whole gradient, or the output's gathered gradient."""
        return whole_input + gradient if self.gathers_input else whole_output if self.scatters_output else 0


def exchange(kind: Kind, num_bytes: int, at: int = 0, beside: int = 0) -> Exchange:
    """Between the ranks of tp, of `num_bytes` of the full tensor."""
    return Exchange(kind=kind, axis="tp", num_bytes=num_bytes, at=at, beside=beside)
