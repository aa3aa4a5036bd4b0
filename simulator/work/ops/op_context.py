"""Setting: what a (model, stack, plan) means for the shapes and dtypes of one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simulator.base.kernels import DTYPE_BYTES, Dtype
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.model.tower import Tower
from simulator.spec.plan import Fp8Recipe, Plan
from simulator.spec.software.stack import Stack
from simulator.work.parameters import mixed_with


def uses_autocast(stack: Stack, plan: Plan) -> bool:
    """Parameters reach the blocks wider than the compute dtype, so torch.autocast casts them at each use.

    Sharded implementations hand over parameters in the compute dtype; plain modules and DDP hold the master weights.
    """
    unsharded = plan.traits.whole_modules and plan.precision.master != plan.compute_dtype
    return unsharded or (stack.kernels.autocast and plan.traits.whole_modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """Shapes and dtypes of one micro-batch on one rank.

    tokens: sequences × seq_len / cp. seq_q queries against seq_kv keys: under cp each rank holds s/cp queries, half
    from either end of the sequence, so that all ranks do 1/cp of the causal work.
    tower: whose layers these are, if the language model's are not.
    dtype: of activations; stream_dtype: of the residual stream (fp32 under autocast); gemm_dtype: of layers' products.
    """

    model: Model
    stack: Stack
    plan: Plan
    autocast: bool
    tower: Tower | None = None

    @property
    def experts(self) -> Experts:
        """Those of the model, in a layer that has them."""
        assert self.model.experts is not None
        return self.model.experts

    @property
    def batch(self) -> int:
        return self.plan.micro_batch_size

    @property
    def seq_q(self) -> int:
        return self.plan.seq_len // self.plan.cp

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_q

    @property
    def sequence_parallel(self) -> bool:
        """Between its split regions, tensor parallelism splits the tokens."""
        return self.plan.tp > 1 and self.plan.sequence_parallel

    @property
    def symmetric_memory(self) -> bool:
        """Compiled products run in pieces that copies between the ranks of tp feed or drain (torch's async TP)."""
        cuts = self.stack.traits.symmetric_memory and self.stack.overlap.tp == "symmetric_memory"
        return self.sequence_parallel and cuts

    @property
    def gathers_in_pieces(self) -> bool:
        """Of those, gathers feed products too: not where tokens are cast to fp8 between the two, as for a scale a row.

        torch/_inductor/fx_passes/micro_pipeline_tp.py follows what was gathered to products through reshapes only.
        """
        return self.symmetric_memory and (not self.plan.narrow or self.casts_before_gathers)

    @property
    def userbuffers(self) -> bool:
        """The same of Transformer Engine's linear layers."""
        cuts = self.stack.traits.userbuffers and self.stack.overlap.tp == "userbuffers"
        return self.sequence_parallel and cuts

    @property
    def casts_before_gathers(self) -> bool:
        """The tensor-parallel styles of torchao cast tokens to fp8 before gathering them, if there is one scale per tensor."""
        by_tensor = self.gemm_dtype == "fp8" and self.recipe == "tensorwise"
        return by_tensor and self.sequence_parallel and self.stack.traits.dtensor

    @property
    def core_layers(self) -> bool:
        """Layers are Megatron-Core's."""
        return self.stack.traits.own_layers and self.plan.traits.core_layers and self.stack.engine is None

    @property
    def vocab_parallel(self) -> bool:
        """Each rank has its part of the vocabulary."""
        return self.plan.tp > 1 and self.plan.vocab_parallel

    @property
    def splits_loss(self) -> bool:
        """Each rank computes the loss of its part of the vocabulary."""
        return self.vocab_parallel and not self.stack.kernels.gathers_logits

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.plan.tp if self.sequence_parallel else self.tokens

    @property
    def swaps_heads(self) -> bool:
        """Around attention, context parallelism splits the heads instead of the sequence (Ulysses, arXiv 2309.14509)."""
        return self.plan.cp > 1 and self.plan.cp_exchange == "all_to_all"

    @property
    def attention_seq(self) -> int:
        """Queries of a sequence that the attention kernel of one rank sees."""
        return self.plan.seq_len if self.swaps_heads else self.seq_q

    @property
    def head_parts(self) -> int:
        """Ranks of cp that share the heads."""
        return self.plan.cp if self.swaps_heads else 1

    @property
    def seq_kv(self) -> int:
        """Keys a query sees, as the length of an equal causal triangle where windows cut some off.

        A causal kernel over (q, kv) does q kv / 2 pairs, so a window w < s is the triangle with kv = 2w - w²/s, and documents
        of d tokens are one with kv = d. Without a mask over all pairs the triangle is a rectangle.
        """
        model, s = self.model, self.plan.attended_len
        if self.tower is not None:
            return s
        halves = 1 if model.bidirectional else 2
        if self.plan.peft.method == "prefix":  # every query sees all of it: twice its part of a triangle
            return s + halves * self.plan.peft.prefix_tokens
        if model.sliding_window is None or model.sliding_window >= s:
            return s
        return halves * model.attention_pairs(s) // (model.num_attention_layers * s)

    @property
    def causal(self) -> bool:
        """Queries see the keys ahead of them alone."""
        return self.tower is None and not self.model.bidirectional

    @property
    def fuses_experts(self) -> bool:
        """The experts' products, the activation between them and its casts are Transformer Engine's fused grouped MLP.

        A graph of a whole step holds no row counts of the host, so only kernels that read them on the device can run the
        products of experts without capacity; Megatron-Bridge's recipes set both together (cutedsl_fused_grouped_mlp).
        """
        graphed = "full_iteration" in self.plan.cuda_graphs and self.plan.experts.capacity_factor is None
        return (
            graphed and self.stack.traits.fused_grouped_mlp and self.plan.narrow and self.recipe in ("mxfp8", "nvfp4")
        )

    @property
    def dtype(self) -> str:
        return self.plan.compute_dtype

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def trains(self, parameter: str) -> bool:
        """A parameter of the model has a gradient, and so is not stored as it computes."""
        if not self.plan.peft.any:
            return True
        tied = self.model.tied_embeddings and parameter == "lm_head.weight"
        name = "embedding.weight" if tied else parameter
        return self.plan.peft.trains(name) or mixed_with(self.model, name, self.plan)

    @property
    def stream_dtype(self) -> str:
        wide = self.autocast and (self.trains("embedding.weight") or self.plan.peft.upcasts)
        return self.plan.precision.master if wide else self.dtype

    @property
    def parameter_dtype(self) -> str:
        """Of the parameters as the block sees them."""
        return self.plan.precision.master if self.autocast else self.dtype

    @property
    def gemm_dtype(self) -> Dtype:
        return self.plan.product_dtype

    @property
    def recipe(self) -> Fp8Recipe | Literal["nvfp4"]:
        """How narrow products are scaled: as the plan says, else as the stack does."""
        if self.plan.precision.compute == "nvfp4":
            return "nvfp4"
        return self.plan.precision.fp8_recipe or self.stack.traits.fp8_recipe

    @property
    def wide_dtype(self) -> Dtype:
        """Of products that stay wide when the layers' are narrow: attention and the LM head."""
        return "bf16" if self.plan.narrow else self.plan.product_dtype

    @property
    def expand_kv(self) -> bool:
        """K and V are copied to all heads before the attention kernel."""
        model, backend = self.model, self.stack.attention
        native = not backend.expand_kv_heads and backend.kernel != "math" and self.dtype != "fp32"
        return model.num_kv_heads != model.num_heads and not native
