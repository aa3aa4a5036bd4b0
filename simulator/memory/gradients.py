"""Gradients with extra copies: those that DTensor redistributes, and Megatron's dummy gradients."""

from __future__ import annotations

from math import prod

from simulator.base.kernels import DTYPE_BYTES, Gemm
from simulator.memory.writer import Writer
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, ModelBlocks


def whole_table_numel(model: Model, blocks: ModelBlocks) -> int:
    """Elements of the embedding's gradient, where DTensor makes that of the whole table on every rank; else 0."""
    numel = blocks.embedding.ops[0].parameter_numel
    return numel if numel > model.vocab_size * model.d_model and not model.patch_numel else 0


def reentrant_input_bytes(blocks: ModelBlocks, plan: Plan, stack: Stack) -> int:
    """Bytes of a layer's input, where its checkpoint is re-entrant: a leaf of its own in the backward."""
    return blocks.layer.input_bytes if plan.recompute.mode == "full" and not stack.kernels.early_stop else 0


def redistributed_bytes(model: Model, blocks: ModelBlocks, plan: Plan, stack: Stack) -> int:
    """Bytes of gradients that DTensor brings into their parameters' layout when the optimizer asks for them.

    The rank's part of a whole table's gradient, and sums of what each rank has of parameters that all hold: norms and
    positions that see a part of the tokens, norms of a part of the heads. FSDP2 does it as it reduces; of a tied matrix
    it is done as the head's gradient is added.
    """
    if plan.tp == 1 or not stack.traits.dtensor or plan.traits.shards_rows:
        return 0
    numel = 0 if model.tied_embeddings else whole_table_numel(model, blocks) // plan.tp
    layers = tuple(p for kind in model.body for p in model.parameter_shapes(kind))
    parameters = (*model.parameter_shapes("embedding"), *layers, *model.parameter_shapes("head"))
    numel += sum(prod(shape) for name, shape in parameters if _is_summed(name, plan))
    return numel * DTYPE_BYTES[plan.precision.master]


def _is_summed(name: str, plan: Plan) -> bool:
    """A parameter that every rank of tp holds, and of whose gradient each has a part."""
    of_heads = "q_norm" in name or "k_norm" in name
    return of_heads or (plan.sequence_parallel and ("norm" in name or name.startswith("positions")))


class DummyGradients:
    """Where Megatron's buffer takes gradients, autograd gets a dummy for each shape of weights.

    transformer_engine/pytorch/module/base.py: get_dummy_wgrad.
    """

    def __init__(self, writer: Writer, blocks: ModelBlocks, plan: Plan, stack: Stack) -> None:
        taken = plan.traits.fuses_gradient_sums and stack.kernels.weight_gradients == "accumulated"
        self._writer, self._element_bytes = writer, DTYPE_BYTES[plan.compute_dtype]
        self._shapes = {one.name: _weights(one) for one in (blocks.head, *blocks.body)} if taken else {}
        self._made = set[tuple[int, int]]()

    def begin(self, block: str) -> None:
        """The first backward that meets a shape makes its dummy, which stays."""
        for n, k in self._shapes.pop(block, ()):
            if (n, k) not in self._made:
                self._made.add((n, k))
                self._writer.alloc(n * k * self._element_bytes, "buffers")


def _weights(block: Block) -> list[tuple[int, int]]:
    """(columns out, columns in) of the weights of the block's products."""
    return [
        (kernel.n, kernel.k)
        for op in block.ops
        if op.category == "gemm"
        for kernel in op.forward
        if isinstance(kernel, Gemm)
    ]
