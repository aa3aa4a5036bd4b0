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

nanotron's linear layers do the same in Python, and multiply the rank's own tokens beside the gather that brings the others
(src/nanotron/parallel/tensor_parallel/functional.py, _ColumnLinearAsyncCommunication).

In pieces. A product whose input is gathered starts with the rank's own part of the tokens and goes on as copies bring the
others; one whose result is scattered sends each part as it is ready. n parts of g seconds beside copies of c seconds take
g + (n - 1) max(g, c). Two streams take turns, so that a part's last wave runs beside the next part's first one.

- userbuffers, Transformer Engine (module/base.py, initialize_ub; cpp_extensions, CommOverlapP2P): gathers of tp parts by copy
  engines; reduce-scatters by SMs in 4 parts, the last of them exposed; in the backward of a product with columns the whole
  collectives beside whole products ("bulk").
- symmetric_memory, torch 2.13 (_inductor/fx_passes/micro_pipeline_tp.py; distributed/_symmetric_memory): all-gathers with the
  products that read them, products with their reduce-scatter, tp parts each by copy engines. A reduce-scatter of the
  backward's sum of several data gradients has no one product behind it, and stays NCCL's; so does a gather whose tokens
  are cast to fp8 before the product reads them (scales by row).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from simulator.base.kernels import Kernel
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Split = Literal["columns", "rows", "none"]


# products that read what a region gathers as it enters
FED: Final = ("q", "k", "v", "qkv", "gate", "up", "gate_up", "in_proj")
# Parts of a product beside its reduce-scatter: num_splits of initialize_ub, and of the recipes' overlap configs
_SPLITS: Final = 4


def enter(g: Graph, s: OpContext, name: str, x: Value, feeds: tuple[str, ...] = (), *, products: int = 1) -> Value:
    """The region's input on whole tokens. Fused stacks: unchanged, their linear layers gather.

    feeds: names of the products it is for. products: how many there are, which the stack may gather for one by one.
    """
    if s.plan.tp == 1 or s.stack.traits.linears_communicate:
        return x
    if not s.sequence_parallel:
        return g.op(
            name,
            inputs=(x,),
            aliases=(x,),
            backward_temporary_bytes=x.num_bytes,
            backward_exchanges=(exchange("all_reduce", x.num_bytes),),
        )
    scattered = (exchange("reduce_scatter", x.num_bytes * s.plan.tp),)
    times = products if s.stack.kernels.gathers_each else 1
    return _gather(g, s, name, x, backward_exchanges=scattered, feeds=feeds, times=times)


def gather(g: Graph, s: OpContext, name: str, x: Value) -> Value:
    """Gather tokens for replicated computation; of their gradient, equal on all ranks, each keeps its part."""
    return _gather(g, s, name, x) if s.sequence_parallel else x


def _gather(
    g: Graph,
    s: OpContext,
    name: str,
    x: Value,
    backward_exchanges: tuple[Exchange, ...] = (),
    feeds: tuple[str, ...] = (),
    times: int = 1,
) -> Value:
    narrow = bool(feeds) and s.casts_before_gathers
    full = g.value(name, x.numel * s.plan.tp, "fp8" if narrow else x.dtype)
    in_pieces = bool(feeds) and s.gathers_in_pieces
    copied = 0 if in_pieces else _copied_bytes(s, full)
    scattered = x.num_bytes * s.plan.tp if backward_exchanges else 0
    # for the weights' gradients, whose other factor is in order
    late = _copies(_copied_bytes(s, full) if in_pieces else 0)
    before = (stream("cast", 2 * x.num_bytes, x.numel, 2),) if narrow else ()
    staged = _copies(full.num_bytes // s.plan.tp if in_pieces else 0)  # where the others read it
    gathered = exchange("all_gather", full.num_bytes, len(before) + len(staged))
    if in_pieces:
        gathered = replace(gathered, pieces=s.plan.tp, feeds=feeds, copied=True)
    summed = (stream("elementwise", 2 * x.num_bytes, x.num_bytes),) * (times - 1)
    return g.op(
        name,
        inputs=(x,),
        outputs=(full,),
        forward=(*before, *staged, *_copies(copied) * times),
        backward=(*late, *_copies(scattered or x.num_bytes) * times, *summed),
        forward_temporary_bytes=copied,
        backward_temporary_bytes=scattered,
        forward_exchanges=(gathered,) * times,
        backward_exchanges=backward_exchanges * times,
    )


def part(g: Graph, s: OpContext, name: str, x: Value) -> Value:
    """This rank's part of tokens that every rank has whole; backward, the parts' gradients are gathered."""
    if not s.sequence_parallel:
        return x
    out = g.value(name, x.numel // s.plan.tp, x.dtype)
    copied = _copied_bytes(s, x)
    return g.op(
        name,
        inputs=(x,),
        outputs=(out,),
        forward=_copies(out.num_bytes),
        backward=_copies(copied),
        backward_temporary_bytes=copied,
        backward_exchanges=(exchange("all_gather", x.num_bytes),),
    )


def _copied_bytes(s: OpContext, gathered: Value) -> int:
    """What puts gathered parts in order: the ranks' parts of one sequence lie right as they come."""
    return gathered.num_bytes if s.batch > 1 else 0


def _copies(num_bytes: int) -> tuple[Kernel, ...]:
    return (stream("copy", num_bytes, num_bytes),) if num_bytes else ()


def leave(g: Graph, s: OpContext, name: str, x: Value) -> Value:
    """The region's result, partial sums before, as the residual stream has it."""
    if s.plan.tp == 1 or (x.numel < s.tokens * s.model.d_model):  # its linear layer has scattered it already
        return x
    temporary = x.num_bytes if s.stack.traits.dtensor else 0  # functional collectives return a new tensor
    if not s.sequence_parallel:
        summed = (exchange("all_reduce", x.num_bytes),)
        return g.op(name, inputs=(x,), aliases=(x,), forward_exchanges=summed, forward_temporary_bytes=temporary)
    out = g.value(name, x.numel // s.plan.tp, x.dtype)
    copied = 0 if s.stack.traits.tokens_first else _copied_bytes(s, x)
    return g.op(
        name,
        inputs=(x,),
        outputs=(out,),
        forward=_copies(temporary),
        backward=_copies(copied),
        forward_temporary_bytes=temporary,
        backward_temporary_bytes=copied,
        forward_exchanges=(exchange("reduce_scatter", x.num_bytes),),
        backward_exchanges=(exchange("all_gather", x.num_bytes),),
        selective_save=True,
    )


def whole_columns(g: Graph, s: OpContext, name: str, x: Value, *, alike: bool = False) -> Value:
    """All columns of a product that was split by columns: gathered, and put side by side; backward, the way back.

    alike: every rank computes the same from there on, so that each has the whole gradient and keeps its columns of it.
    """
    gathered = g.value(name, x.numel * s.plan.tp, x.dtype)
    copied = stream("join", gathered.num_bytes, gathered.num_bytes, numel=gathered.numel)
    own = (stream("strided", x.num_bytes, x.num_bytes, numel=x.numel),)
    return g.op(
        name,
        inputs=(x,),
        outputs=(gathered,),
        forward=(copied,),
        backward=own
        if alike
        else (stream("memset", 0, gathered.num_bytes), copied),  # of the gradient it has its own columns
        forward_temporary_bytes=gathered.num_bytes,
        backward_temporary_bytes=0 if alike else 2 * gathered.num_bytes,
        forward_exchanges=(exchange("all_gather", gathered.num_bytes),),
        backward_exchanges=() if alike else (exchange("reduce_scatter", gathered.num_bytes, 2),),
    )


class LayerCommunication:
    """What a linear layer itself sends, and when: a hand-fused one, or one cut in pieces. Elsewhere nothing.

    gathers_input: it reads its part of the tokens and gathers the rest; scatters_output: it writes a part. casts_gradient: the gradient
    of its result comes narrow.
    """

    def __init__(self, s: OpContext, split: Split, name: str = "") -> None:
        self._columns = s.plan.tp > 1 and s.stack.traits.linears_communicate and split == "columns"
        self._hides = s.stack.overlap.tp != "none"
        self._tp, self._ub, self._symmetric = s.plan.tp, s.userbuffers, s.symmetric_memory
        self._cuts_gathers = s.gathers_in_pieces or (s.userbuffers and "all_gather" not in s.stack.overlap.tp_whole)
        self._cuts_scatters = "reduce_scatter" not in s.stack.overlap.tp_whole
        self.gathers_input = self._columns and s.sequence_parallel
        self.own_first = self.gathers_input and s.stack.traits.own_tokens_first and self._hides
        self._stays = s.stack.traits.gathers_in_buffers
        self._fed = s.gathers_in_pieces and split == "columns" and name.rpartition(".")[2] in FED
        self.scatters_output = (s.userbuffers or s.symmetric_memory) and split == "rows"
        self.casts_gradient = (
            name != "" and self.scatters_output and (s.casts_before_gathers or (self._ub and s.plan.narrow))
        )
        # Bytes of 16-bit gradients over what is gathered of them: one copy, or one along rows and one along columns
        self._narrow = 2 if self.casts_gradient and s.recipe in ("delayed", "tensorwise") else 1

    @property
    def pieces(self) -> int:
        """Parts that the forward's product is cut into."""
        if self.scatters_output:
            return self._tp if self._symmetric else _SPLITS if self._cuts_scatters else 1
        return self._tp if self._fed or (self.gathers_input and self._cuts_gathers) else 1

    @property
    def backward_pieces(self) -> int:
        """The same of the data gradient's."""
        return self._tp if self.scatters_output and self._cuts_gathers else 1

    @property
    def gradient_parts(self) -> int:
        """Of the gradient of its result the rank casts one such part, before the rest comes."""
        return self._tp if self.casts_gradient else 1

    def sums(self, whole_output: int) -> tuple[Kernel, ...]:
        """What adds the parts that copies brought."""
        if not (self.scatters_output and self._symmetric):
            return ()
        return (stream("elementwise", whole_output, whole_output // self._tp),)

    def ordered(self, num_sequences: int, whole_output: int) -> tuple[Kernel, ...]:
        """What puts the gathered gradient of several sequences in order, for the weights' gradient."""
        fetched = self.scatters_output and self._symmetric and num_sequences > 1
        return _copies(whole_output // self._narrow) if fetched else ()

    def forward(self, whole_input: int, whole_output: int, product: int) -> tuple[Exchange, ...]:
        """Bytes of the whole input and output; `product` is the index of the matrix product among the kernels."""
        if self.gathers_input:
            if not self._cuts_gathers:
                return (exchange("all_gather", whole_input, product, int(self.own_first)),)
            return (self._copied("all_gather", whole_input, product),)
        if not self.scatters_output:
            return ()
        if self._symmetric:
            return (self._copied("reduce_scatter", whole_output, product),)
        if not self._cuts_scatters:
            return (exchange("reduce_scatter", whole_output, product + 1),)
        last = whole_output // _SPLITS
        early = replace(exchange("reduce_scatter", whole_output - last, product, 1), pieces=_SPLITS)
        return early, exchange("reduce_scatter", last, product + 1)

    def backward(self, whole_input: int, gradient: int, whole_output: int, product: int) -> tuple[Exchange, ...]:
        """`gradient`: bytes of the whole input's gradient; `product`: index of the data gradient's product."""
        hidden = 1 if self._hides else 0
        if self.gathers_input:
            again = exchange("all_gather", whole_input, product, hidden)
            return again, exchange("reduce_scatter", gradient, product + 1, hidden)
        if self._columns:
            return (exchange("all_reduce", gradient, product + 1, hidden),)
        if not self.scatters_output:
            return ()
        gathered = whole_output // self._narrow
        if self._cuts_gathers:
            return (self._copied("all_gather", gathered, product),)
        return (exchange("all_gather", gathered, product),)

    def _copied(self, kind: Kind, num_bytes: int, at: int) -> Exchange:
        return replace(exchange(kind, num_bytes, at, 1), pieces=self._tp, copied=True)

    def forward_temporary_bytes(self, whole_input: int, whole_output: int) -> int:
        """The gathered input, or the output before it is scattered."""
        if self.gathers_input:
            return 0 if self._stays else whole_input
        return whole_output if self.scatters_output else 0

    def backward_temporary_bytes(self, whole_input: int, gradient: int, whole_output: int) -> int:
        """The input gathered again and its whole gradient, or the output's gathered gradient."""
        if self.gathers_input:
            return gradient + (0 if self._stays else whole_input)
        return whole_output // self._narrow if self.scatters_output else 0


def exchange(kind: Kind, num_bytes: int, at: int = 0, beside: int = 0) -> Exchange:
    """Between the ranks of tp, of `num_bytes` of the full tensor."""
    return Exchange(kind=kind, axis="tp", num_bytes=num_bytes, at=at, beside=beside)
