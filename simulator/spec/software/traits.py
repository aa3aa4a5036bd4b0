"""Traits of a stack: what its software does with a layer, for those who count kernels, bytes and messages.

A stack's file says in one word who makes the kernels of a block (`Stack.blocks`). Nobody else compares that word: each trait
is one thing that follows from it, with a name. Where a second field of the stack has a say too (`tp_overlap`, `loss`,
`weight_gradients`), the trait says what the software can do, and the field whether it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from simulator.base.presets import facts

Blocks = Literal["eager", "compiled", "fused", "own_eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTraits:
    """What software does, as facts that others may ask for."""

    # -- who brings what a layer is made of

    # layers are the framework's own modules (Megatron's and its forks', Transformer Engine's), and not torch's
    own_layers: bool = False
    # each block runs under torch.compile, or XLA compiles it
    compiles_blocks: bool = False
    # Python calls each operator of a block, which is at least one kernel: nothing joins several
    runs_operators: bool = False

    # -- kernels

    # a compiler joins elementwise operators, casts, residuals and sums of gradients with what stands before or behind them
    fuses_elementwise: bool = False
    # joins, copies of strided tensors and sums of different dtypes are torch's kernels for any shape, slower than
    # those that were generated or written for one
    generic_copies: bool = False
    # Q, K and V come from one product, gate and up from another, whatever the model's own code does
    joins_projections: bool = False
    # Q, K and V are copied out of their joint product, keys and values twice more on their way into one tensor
    copies_heads: bool = False
    # Q and K are rotated by one kernel each, written by hand; else `Stack.rope` says how
    rotates_by_hand: bool = False
    # unfused attention: the kernel of scale, mask and softmax takes four matrices a thread block, operators do the rest
    softmax_in_fours: bool = False
    # attention's module takes Q, K and V as parts of one tensor or as three tensors, never mixed (cuDNN's kernels)
    one_qkv_layout: bool = False
    # Mamba's gate is applied inside the scan, and the norm outside; else norm and product belong to the same function
    gates_in_scan: bool = False
    # `loss = "fused"` is a cross-entropy of operators that torch's jit fuses (Megatron's); else one kernel
    jit_loss: bool = False
    # the bias's gradient comes out of the weight gradient's product; else a reduction makes it
    bias_gradient_in_product: bool = False
    # weights' gradients end up in a buffer, and none of their own is left: products add to it, or with
    # `weight_gradients = "added"` a kernel behind each
    gradient_buffer: bool = False

    # -- narrow precision

    # linear modules cast what they read to fp8 or fp4 themselves: rows and columns in one kernel, kept narrow for the
    # backward, weights once a step. Else it is cast before each product, and again backward
    casts_in_modules: bool = False
    # norms write what the product behind them reads in fp8, where past maxima give the scale
    casts_in_norms: bool = False
    # how fp8 is scaled where the plan names no recipe
    fp8_recipe: Literal["delayed", "tensorwise"] = "tensorwise"
    # products of operands scaled by blocks of 128 (fp8), and of nvfp4
    narrow_by_blocks: bool = False
    # products of experts, the activation between them and its casts run as one kernel (cuteDSL grouped MLP)
    fused_grouped_mlp: bool = False

    # -- tensor and context parallelism

    # torch's DTensor splits modules: a whole table's gradient on every rank, gradients laid out anew for the optimizer,
    # collectives that return new tensors, loss_parallel, torchao's casts before gathers
    dtensor: bool = False
    # linear layers gather their tokens and reduce their input's gradient themselves; else a step around the region does
    linears_communicate: bool = False
    # of a product whose input is gathered, the rank's own tokens are multiplied while the others come
    own_tokens_first: bool = False
    # gathered tokens stand in two buffers that stay: for products, and for gradients of results
    gathers_in_buffers: bool = False
    # a layer's activations are [tokens, sequences, channels]
    tokens_first: bool = False
    # `tp_overlap = "userbuffers"`: linear modules cut their products in pieces beside copies
    userbuffers: bool = False
    # `tp_overlap = "symmetric_memory"`: the compiler does
    symmetric_memory: bool = False
    # under cp attention's module sends keys and values, or heads, itself; else torch's context parallelism does
    attention_communicates: bool = False

    # -- experts

    # without a capacity, ranks tell each other how many rows each expert gets, and the host reads it
    counts_rows: bool = False
    # each row's weight follows the row to its expert, in an all-to-all of its own
    sends_row_weights: bool = False
    # rows are weighted inside the activation; else once they are back, or where they were sent once a rank
    weights_in_activation: bool = False
    # `grouped_gemm = "one_each"`: on streams that have workspaces of their own
    grouped_streams: bool = False

    # -- recompute, lifetimes, graphs

    # the selective policy runs the plan's modules again; else operators, by what it keeps of them
    recomputes_modules: bool = False
    # one who sees both passes decides what the selective policy keeps; else it keeps all that it names
    plans_saved: bool = False
    # Python's locals of attention's, the MLP's and Mamba's forward hold their tensors until it returns
    holds_locals: bool = False
    # so do those of the experts' dispatcher
    holds_dispatched: bool = False
    # modules can run as CUDA graphs
    graphs_modules: bool = False


def _of(has: Sequence[str], **others: Any) -> StackTraits:  # noqa: ANN401  of any trait
    return StackTraits(**dict.fromkeys(has, True) | others)


TRAITS: Final[Mapping[Blocks, StackTraits]] = {
    name: _of(**facts(__file__, "traits")[name]) for name in get_args(Blocks)
}
