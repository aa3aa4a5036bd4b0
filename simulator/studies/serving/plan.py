"""InferencePlan: how a model is placed and served. It validates itself; `legal.check` also needs model and cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from simulator.base.errors import PlanError
from simulator.base.schema import Strict, read_toml
from simulator.base.units import Bytes
from simulator.spec.model import Model

Weights = Literal["bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4"]
KvDtype = Literal["auto", "bf16", "fp16", "fp8"]
Part = Literal["embedding", "head"]

_NO_GUESSES = {"speculative": "none", "draft_model": None}
_ONE_POOL = {
    "prefill_tp": 1,
    "prefill_pp": 1,
    "prefill_pcp": 1,
    "prefill_dp": 0,
    "window_cache": False,
    "window_part": 1.0,
}  # what is handed over is cached whole
MAX_COUNT = 2**20
DEFAULT_BATCHED_TOKENS = 8192


def _list(value: object) -> object:
    """A flag's text, "embedding,head", as the list that a file has."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


class InferencePlan(Strict):
    """One way to serve a model. An engine has tp × pp × pcp GPUs; dp engines share the requests.

    dcp: of tp's GPUs that would cache the same keys and values, so many have a part of the tokens each (decode context parallelism).
    pcp: so many GPUs with the same part of the weights, but for experts, which lie over tp × pcp, part the new tokens of each prompt
    among them; all cache all of it, and decode alike (prefill context parallelism).
    weights: of the layers' matrices. bf16, fp16: as they are. fp8: both operands of the products, activations quantised on
    the fly; weights alone on GPUs that multiply no fp8. int8, int4: weights alone (a scale a row; groups of 128 with scale and zero), products in 16 bits. nvfp4: blocks
    of 16 with a scale; both operands where the GPU multiplies them, weights alone elsewhere. mxfp4: of experts alone, blocks of 32
    with a scale, products in 16 bits, all else as bf16 (gpt-oss). Embedding,
    norms and head stay in 16 bits, as in published checkpoints.
    dtype: of activations, and of what is not quantised; auto: fp16 with weights in it or on GPUs that multiply no bf16, else bf16.
    kv_cache: dtype of cached keys and values; auto: as activations. block_size: tokens of a cache block (PagedAttention).
    host_cache: host memory of each GPU for caches: what a preempted sequence had cached goes there and comes back, and is
    computed anew only where that is full; 0: always anew. gpu_memory_utilization: fraction of the GPU's memory for weights, activations and cache. max_model_len: tokens of prompt
    and answer together; None: the model's positions. max_batched_tokens: of one step; None: 8192, or max_model_len where
    that is longer and prompts are not cut. max_sequences: running at once in one engine.
    chunked_prefill: prompts are cut to fill what is left of a step (Sarathi); otherwise they are computed whole.
    mixed_steps: sequences decode in the steps that compute prompts; otherwise prompts come first, in steps of their own.
    None: where prompts are cut. cache_of: what gpu_memory_utilization is a fraction of: budget, the GPU's memory for all
    there is; free, what weights and the largest step leave, for the cache alone; static, what is free before the weights
    come, for them and the cache.
    experts: of a mixture, over tp: split, a slice of each on every GPU; dealt, whole ones (expert parallelism).
    attention_dp: with dealt experts, each GPU of an engine attends to sequences of its own, with all heads and all that is
    not expert whole, and tokens travel to the GPUs of their experts and back (wide expert parallelism).
    expert_imbalance: rows of the busiest GPU's experts over the mean's, where they are dealt.
    prefill_dp: engines that only compute prompts and hand their cache to the dp others, which only decode (disaggregation);
    0: every engine does both. prefill_tp, prefill_pp, prefill_pcp: of these.
    speculative: what guesses tokens that a step verifies: none; draft, a small model (`draft_model`); eagle, a layer trained for
    the model, behind its last states and before its own head; mtp, the model's own module of multi-token prediction; ngram, a look-up that costs no device. draft_tokens: guesses of a sequence a step.
    acceptance: the share of guesses that are accepted, each alike.
    lora_rank, lora_adapters: of adapters served beside the model, each asked for as often; rank 0: none.
    prefix_caching: beginnings of prompts that are in the cache are not computed again, and shared ones held once.
    prefix_store: where beginnings lie that are found, but those that all share: in the GPUs' cache; in the host's memory; or in
    other machines'. From there they come over each GPU's link, or its part of the node's NICs, before a request is scheduled.
    window_cache: layers whose tokens see a window cache no more than that, where other layers see all (vLLM's hybrid cache
    manager; off where caches are handed over). window_part: otherwise, tokens that these layers have room for over the others' (SGLang).
    state_part: of hybrids, memory of states over that of the cache, a sequence having room for three where prefix_caching (SGLang);
    0: states lie in blocks of the cache.
    cuda_graphs: steps that only decode are launched as one graph. replicate: parts that every GPU of a tp group holds whole.
    """

    tp: int = Field(ge=1, le=MAX_COUNT, default=1)
    pp: int = Field(ge=1, le=MAX_COUNT, default=1)
    dp: int = Field(ge=1, le=MAX_COUNT, default=1)
    dcp: int = Field(ge=1, le=MAX_COUNT, default=1)
    pcp: int = Field(ge=1, le=MAX_COUNT, default=1)

    prefill_tp: int = Field(ge=1, le=MAX_COUNT, default=1)
    prefill_pp: int = Field(ge=1, le=MAX_COUNT, default=1)
    prefill_pcp: int = Field(ge=1, le=MAX_COUNT, default=1)
    prefill_dp: int = Field(ge=0, le=MAX_COUNT, default=0)

    weights: Weights = "bf16"
    dtype: Literal["auto", "bf16", "fp16"] = "auto"
    kv_cache: KvDtype = "auto"
    host_cache: Bytes = Field(ge=0, default=0)
    block_size: int = Field(ge=1, le=MAX_COUNT, default=16)
    gpu_memory_utilization: float = Field(gt=0, le=1, default=0.9)
    max_model_len: int | None = Field(ge=1, le=2**31, default=None)
    max_batched_tokens: int | None = Field(ge=1, le=2**31, default=None)
    max_sequences: int = Field(ge=1, le=MAX_COUNT, default=256)
    chunked_prefill: bool = True
    mixed_steps: bool | None = None
    cache_of: Literal["budget", "free", "static"] = "budget"
    speculative: Literal["none", "draft", "eagle", "mtp", "ngram"] = "none"
    draft_tokens: int = Field(ge=1, le=64, default=3)
    acceptance: float | None = Field(ge=0, le=1, default=None)
    draft_model: str | None = None
    lora_rank: int = Field(ge=0, le=4096, default=0)
    lora_adapters: int = Field(ge=1, le=MAX_COUNT, default=1)
    prefix_caching: bool = True
    prefix_store: Literal["gpu", "host", "network"] = "gpu"
    window_cache: bool = False
    window_part: float = Field(gt=0, le=1, default=1.0)
    state_part: float = Field(ge=0, le=1000, default=0.0)
    cuda_graphs: bool = True
    experts: Literal["split", "dealt"] = "split"
    attention_dp: bool = False
    expert_imbalance: float = Field(ge=1, le=1000, default=1.0)
    replicate: Annotated[tuple[Part, ...], Field(strict=False), BeforeValidator(_list)] = ()

    stack: str = "vllm-2025"

    @property
    def guesses_by_a_layer(self) -> bool:
        """What guesses is one more layer, with a product that joins last states and new tokens."""
        return self.speculative in ("eagle", "mtp")

    @property
    def engine_devices(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp * self.pcp

    @property
    def num_devices(self) -> int:
        prompts = self.prefill_tp * self.prefill_pp * self.prefill_pcp * self.prefill_dp
        return self.engine_devices * self.dp + prompts

    @property
    def num_engines(self) -> int:
        return self.dp + self.prefill_dp

    @property
    def decode_pool(self) -> Self:
        """The engines of dp alone."""
        return self.model_copy(update=_ONE_POOL) if self.prefill_dp else self

    @property
    def prefill_pool(self) -> Self | None:
        """The engines that only compute prompts, as a plan of their own."""
        if not self.prefill_dp:
            return None
        degrees = {"tp": self.prefill_tp, "pp": self.prefill_pp, "pcp": self.prefill_pcp, "dp": self.prefill_dp}
        return self.model_copy(update=degrees | _ONE_POOL | _NO_GUESSES)

    @property
    def attention_tp(self) -> int:
        """GPUs that split what is not an expert."""
        return 1 if self.attention_dp else self.tp

    @property
    def ranks(self) -> int:
        """GPUs of an engine that have sequences, and a cache, of their own."""
        return self.tp if self.attention_dp else 1

    @property
    def mixed(self) -> bool:
        """Prompts and decoding share steps."""
        return self.chunked_prefill if self.mixed_steps is None else self.mixed_steps

    @property
    def compute_dtype(self) -> Literal["bf16", "fp16"]:
        """Of activations, and of products whose weights alone are quantised."""
        return "fp16" if "fp16" in (self.weights, self.dtype) else "bf16"

    @property
    def kv_dtype(self) -> Literal["bf16", "fp16", "fp8"]:
        return self.compute_dtype if self.kv_cache == "auto" else self.kv_cache

    def model_len(self, model: Model) -> int:
        """Tokens that one sequence may reach."""
        return self.max_model_len or model.max_positions

    def batched_tokens(self, model: Model) -> int:
        """Tokens that one step may compute."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        return DEFAULT_BATCHED_TOKENS if self.chunked_prefill else max(DEFAULT_BATCHED_TOKENS, self.model_len(model))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A plan from a TOML file. Raises PlanError with every fault."""
        file = Path(path)
        return cls.parse(read_toml(file, PlanError), str(file), PlanError, from_file=True)
