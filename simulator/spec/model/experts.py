"""Experts and latent attention: the blocks' parts in mixtures of experts and DeepSeek's models.

Legend: D d_model, F d_ff of one expert, E experts, H heads.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from simulator.base.schema import Strict

# How FSDP2 cuts routed experts; `Kernels.expert_shards` says which software does what.
ExpertShards = Literal["experts", "rows_with_ep", "rows_beyond", "rows"]


def cuts_rows(cut_by: ExpertShards, *, shards: int, experts: int, ep: int) -> bool:
    """Each of a rank's experts is cut into its shards; else whole experts are dealt to them, and shards without are padded."""
    if cut_by == "rows_with_ep" and ep == 1:
        return False
    return cut_by == "rows" or (cut_by != "experts" and shards > experts)


class Experts(Strict):
    """The routed experts of a layer, and those that every token passes (arXiv 2401.06066).

    num_experts: E, routed. top_k: experts that a token is sent to. d_ff: width of one routed expert (0: the model's
    d_ff). shared_d_ff: width of all shared experts together. first_dense_layers: layers before the first with experts;
    every: from there on each so many-th layer has them. score: how the router's logits become weights. bias: the
    experts' products have one; router_bias: the router's has. shared_gate: a token's weight of the shared experts is
    a product of its own (Qwen 1.5). latent_dim: channels that tokens are projected to before they travel to their experts,
    and back from behind them (Nemotron 3 Super; 0: they travel whole).
    """

    num_experts: int = Field(ge=1, le=2**16)
    top_k: int = Field(ge=1, le=2**16)
    d_ff: int = Field(ge=0, le=2**24, default=0)
    shared_d_ff: int = Field(ge=0, le=2**24, default=0)
    first_dense_layers: int = Field(ge=0, le=10_000, default=0)
    every: int = Field(ge=1, le=10_000, default=1)
    score: Literal["softmax", "sigmoid"] = "softmax"
    router_dtype: Literal["fp32", "bf16"] = "fp32"
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    latent_dim: int = Field(ge=0, le=2**20, default=0)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = []
        if self.top_k > self.num_experts:
            wrong.append(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        if self.shared_gate and not self.shared_d_ff:
            wrong.append("shared_gate needs shared_d_ff")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def num_local(self) -> int:
        """Experts whose parameters are here: all, or a rank's."""
        return self.num_experts

    @property
    def cut_by(self) -> ExpertShards:
        """How the software at hand cuts them into shards (`Stack.stored`)."""
        return "rows"

    def in_layer(self, layer: int) -> bool:
        """Layer number `layer` has experts."""
        return layer >= self.first_dense_layers and (layer - self.first_dense_layers) % self.every == 0


class StoredExperts(Experts):
    """Experts in the hands of software that has a way of its own to cut them."""

    software: ExpertShards = "rows"

    @property
    @override
    def cut_by(self) -> ExpertShards:
        return self.software


class Latent(Strict):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): queries, keys and values come out of low ranks.

    q_lora_rank: of the queries (0: they come straight from the stream). kv_lora_rank: of keys and values together.
    A head's query and key have qk_nope_head_dim channels without position and qk_rope_head_dim that rotate; the rotating
    part of the key is the same for all heads. A head's value has v_head_dim channels.

    index_heads, index_head_dim: of the indexer that chooses the keys of each query (DeepSeek-V3.2; 0: none). shared_kv: the low
    rank is key and value of all heads itself; o_lora_rank: attention's result leaves through low ranks, one for each of o_groups
    (DeepSeek-V4).
    """

    q_lora_rank: int = Field(ge=0, le=2**20, default=0)
    kv_lora_rank: int = Field(ge=1, le=2**20)
    qk_nope_head_dim: int = Field(ge=1, le=2**16)
    qk_rope_head_dim: int = Field(ge=1, le=2**16)
    v_head_dim: int = Field(ge=1, le=2**16)
    index_heads: int = Field(ge=0, le=2**16, default=0)
    index_head_dim: int = Field(ge=0, le=2**16, default=0)
    shared_kv: bool = False
    o_lora_rank: int = Field(ge=0, le=2**20, default=0)
    o_groups: int = Field(ge=1, le=2**16, default=1)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = []
        if (self.index_heads > 0) != (self.index_head_dim > 0):
            wrong.append("index_heads and index_head_dim belong together")
        if self.index_heads and not self.q_lora_rank:
            wrong.append("an indexer reads the queries' low rank: it needs q_lora_rank")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query, and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
