"""Casts to fp8 and fp4 around linear layers, by recipe: how scales are found, and which copies are written.

Transformer Engine 2 (pytorch/tensor/float8_tensor.py, float8_blockwise_tensor.py, mxfp8_tensor.py, nvfp4_tensor.py; common/recipe),
torchao (float8/float8_linear.py, mx_formats/mx_linear.py), OCP Microscaling Formats 1.0 (one 8-bit scale for 32 elements along
the product's inner dimension).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.base.kernels import Kernel, fp4_bytes
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext

MX_BLOCK: Final = 32  # elements that share a scale of one byte
SQUARE: Final = 128  # elements, and of weights rows too, that share a scale of fp32 (arXiv 2412.19437, section 3.3.2)
# products in one module with the norm they read
BEHIND_NORMS: Final = ("qkv", "gate_up", "up", "in_proj", "q_up", "kv_up")
BY_TENSOR: Final = ("delayed", "tensorwise")  # one scale, so that a copy can be turned instead of cast again
# Without a compiler, bytes an element read and written, and kernels: |x|, its maximum, x in fp32, times the scale, clamped, cast, and
# four of the scale alone (torchao, float8/float8_utils.py, float8_tensor.py)
_OPERATORS: Final = (2 + 2 + 2 + 4 + 4 + 4, 2 + 4 + 4 + 4 + 1, 10)
_BY_BLOCKS: Final = ("mxfp8", "blockwise", "nvfp4")  # copies along rows and columns differ in their scales


def mx_bytes(numel: int) -> int:
    """Bytes of one MXFP8 copy: the elements, and their scales."""
    return numel + -(-numel // MX_BLOCK)


def copy_bytes(recipe: str, numel: int, *, square: bool = False) -> int:
    """Bytes of one narrow copy with its scales; square: of weights, whose blocks are as high as wide where the recipe has it so.

    A square block's scale is written once for a copy of NVFP4 by rows of 16, and 128 times rarer than a row's of fp8.
    """
    match recipe:
        case "mxfp8":
            return mx_bytes(numel)
        case "nvfp4":
            return fp4_bytes(numel)
        case "blockwise":
            return numel + 4 * -(-numel // (SQUARE * SQUARE if square else SQUARE))
        case _:
            return numel


class Quantiser:
    """Casts to fp8 or fp4 around one linear layer.

    delayed: scales are of the last steps' maxima, so one read of 16 bits does; hand-fused norms write fp8 themselves. tensorwise: the
    maximum is found first, one more read; hand-fused norms find that of their result (Transformer Engine 2.7, pull request 2013).
    rowwise: the same for each row; a gradient is cast along rows and along columns. mxfp8: a block's maximum is found as the block is
    cast; copies along rows and columns differ in their scales, so both are written at once. blockwise: the same by 128 elements, of
    weights 128 × 128. nvfp4: blocks of 16 under a scale of the tensor, whose maximum is found first, one more read; what the weight's
    gradient reads (input and gradient along columns) passes a random Hadamard transform of 16 elements as it is cast, in a kernel
    of its own that reads 16 bits again (release 2.14 joins the two; the time of both stays, docs/background/ops.md); gradients are
    rounded stochastically, in the same kernels. Weights are cast by squares of 16 × 16 and not transformed.

    Hand-fused stacks write both copies in one kernel, keep the fp8 input, and cast weights once a step. What is gathered under one
    scale is cast by parts, along rows only, and turned when it is whole; so is what a norm has cast. Others cast for one product at a
    time, keep the 16-bit input and cast it, and the weight, again backward; a compiler joins equal casts of what several products
    read (PyTorch, torch/_functorch/compile_utils.py, fx_graph_cse).
    """

    def __init__(
        self,
        g: Graph,
        s: OpContext,
        name: str,
        numels: tuple[int, int, int],
        launches: int = 1,
        *,
        parts: tuple[int, int] = (1, 1),
        shared: bool = False,
    ) -> None:
        """numels: of what the products read, of their weights, and of their result; launches: casts of rows, an expert each.

        parts: ranks that cast a part each of what is read, and of the gradient of the result, before the others' comes.
        shared: another product has cast what is read.
        """
        self._found = name in BEHIND_NORMS
        self._read, self._weight, self._written = numels
        self._g, self._name, self._launches = g, name, launches
        self._in_module = s.stack.traits.casts_in_modules
        self._micro_batches, self._recipe = s.plan.num_micro_batches, s.recipe
        self._by_operators = s.stack.traits.runs_operators and s.recipe in ("tensorwise", "rowwise")
        self._gathered = s.plan.precision.fp8_all_gather  # weights come in fp8 already
        self._turns_often = s.stack.kernels.fp8_transposes == "each_use"
        self._by_tensor = s.recipe in BY_TENSOR
        self._parts = parts
        self._shared = shared
        self._cast = casts_in_norms(s) and self._found
        self._late = self._by_tensor and (parts[0] > 1 or self._cast)

    def input(self, x: Value) -> Value:
        """What the product reads and saves."""
        if not self._in_module:
            return x
        numel = copy_bytes(self._recipe, x.numel)
        quantised = self._g.value(f"{self._name}.fp8", numel, "fp8")
        return self._g.op(
            f"{self._name}.fp8",
            inputs=(x,),
            outputs=(quantised,),
            forward=self._of_input(x),
            aliases=(x,),
        )

    def _of_input(self, x: Value) -> tuple[Kernel, ...]:
        if self._cast:
            return ()
        if self._late:
            return self._rows(x.numel, found=self._found)
        return self._both(x.numel, x.num_bytes, self._launches, found=self._found)

    def forward(self) -> tuple[Kernel, ...]:
        if self._in_module:  # once a step: Transformer Engine keeps the weight's copies over the micro-batches
            numel = self._weight // self._micro_batches
            if self._gathered:
                return () if self._turns_often else (_turned(numel),)
            return self._both(numel, 2 * numel, square=True)
        return (*self._of_read(), *self._of_weight())

    def backward(self) -> tuple[Kernel, ...]:
        if self._in_module:
            weight = (_turned(self._weight),) if self._gathered and self._turns_often else ()
            return (*self._of_gradient(), *weight, *((_turned(self._read),) if self._late else ()))
        # along rows and columns
        gradients = (self._one(self._written),) * (2 if self._recipe in (*_BY_BLOCKS, "rowwise") else 1)
        return (*gradients, *self._of_weight(), *self._of_read())

    def _of_gradient(self) -> tuple[Kernel, ...]:
        part = self._written // self._parts[1]
        if self._by_tensor and self._parts[1] > 1:
            return (*self._rows(part), _turned(self._written))
        return self._both(part, 2 * part, self._launches)

    def after_gathers(self, *, input_came: bool, gradient_parts: int) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
        """(forward, backward) where tokens were cast before they were gathered (torchao, float8_tensor_parallel.py).

        input_came: in fp8, of which the backward turns a copy. gradient_parts: ranks that cast a part of the gradient each.
        """
        turned = stream("copy", self._read, self._read)
        read = self._of_read(turned if input_came else None)
        forward = (*(() if input_came else read), *self._of_weight())
        return forward, (self._one(self._written // gradient_parts), *self._of_weight(), *read)

    def _of_read(self, kernel: Kernel | None = None) -> tuple[Kernel, ...]:
        return () if self._shared else (kernel or self._one(self._read),)

    def _of_weight(self) -> tuple[Kernel, ...]:
        return () if self._gathered else (self._one(self._weight),)

    def _rows(self, numel: int, *, found: bool = False) -> tuple[Kernel, ...]:
        """Hand-written: one copy, under one scale."""
        cast = stream("quantise", 2 * numel, numel)
        if self._recipe == "delayed" or found:
            return (cast,)
        return stream("reduce", 2 * numel, 4), cast

    def _both(
        self, numel: int, read_bytes: int, launches: int = 1, *, square: bool = False, found: bool = False
    ) -> tuple[Kernel, ...]:
        """Hand-written: the tensor and its transpose, or the copies along rows and columns. found: with its maximum."""
        written = 2 * copy_bytes(self._recipe, numel, square=square)
        maximum = stream("reduce", read_bytes, 4 * launches, launches)
        if self._recipe == "nvfp4" and not square:
            half = stream("quantise", read_bytes, written // 2, launches)
            return maximum, half, half
        cast = stream("quantise", read_bytes, written, launches)
        if self._by_tensor:
            cast = replace(cast, transposed_bytes=numel)
        if self._recipe in ("delayed", "mxfp8", "blockwise") or (found and self._recipe == "tensorwise"):
            return (cast,)
        return maximum, cast

    def _one(self, numel: int) -> Kernel:
        """The framework's own: one copy."""
        if self._recipe in _BY_BLOCKS:
            return stream("quantise", 2 * numel, copy_bytes(self._recipe, numel))
        passes = (2, 1, 1) if self._recipe == "delayed" else _OPERATORS if self._by_operators else (4, 1, 2)
        return stream("cast", passes[0] * numel, passes[1] * numel, passes[2])


def casts_in_norms(s: OpContext) -> bool:
    """Hand-fused norms write what the product behind them reads in fp8 (Transformer Engine: past maxima, no others)."""
    return s.stack.traits.casts_in_norms and s.gemm_dtype == "fp8" and s.recipe == "delayed"


def reduces_maxima(plan: Plan, stack: Stack) -> bool:
    """Scales of fp8 follow past maxima that modules keep, and that all ranks of a stage agree on."""
    recipe = plan.precision.fp8_recipe or stack.traits.fp8_recipe
    return plan.precision.compute == "fp8" and recipe == "delayed" and stack.traits.casts_in_modules


def _turned(numel: int) -> Kernel:
    """The transpose of an fp8 copy, for tensor cores that take one layout only."""
    return replace(stream("quantise", numel, numel), transposed_bytes=numel)
