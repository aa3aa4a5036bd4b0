"""InferencePlan: how a model is placed and served. It validates itself; `check` also needs model and cluster."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from simulator.base.errors import Fault, PlanError
from simulator.base.schema import Strict, read_toml
from simulator.base.units import Bytes, format_bytes
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack

Weights = Literal["bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4"]
KvDtype = Literal["auto", "bf16", "fp16", "fp8"]
Part = Literal["embedding", "head"]

_NO_GUESSES = {"speculative": "none", "draft_model": None}
_ONE_POOL = {
    "prefill_tp": 1,
    "prefill_pp": 1,
    "prefill_dp": 0,
    "window_cache": False,
}  # what is handed over is cached whole
MAX_COUNT = 2**20
DEFAULT_BATCHED_TOKENS = 8192


def _list(value: object) -> object:
    """A flag's text, "embedding,head", as the list that a file has."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


class InferencePlan(Strict):
    """One way to serve a model. An engine has tp × pp GPUs; dp engines share the requests.

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
    0: every engine does both. prefill_tp, prefill_pp: of these.
    speculative: what guesses tokens that a step verifies: none; draft, a small model (`draft_model`); eagle, a layer trained for
    the model, behind its last states and before its own head; mtp, the model's own module of multi-token prediction; ngram, a look-up that costs no device. draft_tokens: guesses of a sequence a step.
    acceptance: the share of guesses that are accepted, each alike.
    lora_rank, lora_adapters: of adapters served beside the model, each asked for as often; rank 0: none.
    prefix_caching: beginnings of prompts that are in the cache are not computed again, and shared ones held once.
    prefix_store: where beginnings lie that are found, but those that all share: in the GPUs' cache; in the host's memory; or in
    other machines'. From there they come over each GPU's link, or its part of the node's NICs, before a request is scheduled.
    window_cache: layers whose tokens see a window cache no more than that, where other layers see all (vLLM's hybrid cache
    manager; off where caches are handed over).
    cuda_graphs: steps that only decode are launched as one graph. replicate: parts that every GPU of a tp group holds whole.
    """

    tp: int = Field(ge=1, le=MAX_COUNT, default=1)
    pp: int = Field(ge=1, le=MAX_COUNT, default=1)
    dp: int = Field(ge=1, le=MAX_COUNT, default=1)

    prefill_tp: int = Field(ge=1, le=MAX_COUNT, default=1)
    prefill_pp: int = Field(ge=1, le=MAX_COUNT, default=1)
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
        return self.tp * self.pp

    @property
    def num_devices(self) -> int:
        return self.engine_devices * self.dp + self.prefill_tp * self.prefill_pp * self.prefill_dp

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
        degrees = {"tp": self.prefill_tp, "pp": self.prefill_pp, "dp": self.prefill_dp}
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


def check(plan: InferencePlan, model: Model, cluster: Cluster) -> None:
    """Raise PlanError with every way in which plan, model and cluster do not fit together."""
    split = _wide_faults(plan, model) if plan.attention_dp else _split_faults(plan, model)
    faults = [*split, *_mixer_faults(plan, model), *_place_faults(plan, cluster), *_length_faults(plan, model)]
    from simulator.studies.serving.lora import lora_faults
    from simulator.studies.serving.speculation import speculation_faults  # which know plans

    faults += [*_pool_faults(plan, model, cluster), *speculation_faults(plan, model), *lora_faults(plan)]
    if faults:
        raise PlanError(faults)


def _mixer_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Of hybrids, whose mixers keep states."""
    if model.mamba is None:
        return []
    if not model.num_attention_layers:
        return [Fault("model", f"{model.name} has no attention: there is no cache to serve it from", "a hybrid")]
    given = {
        "prefill_dp": plan.prefill_dp > 0,
        "speculative": plan.speculative != "none",
        "lora_rank": plan.lora_rank > 0,
    }
    problem = f"together with the states of {model.name}'s mixers is not modelled"
    return [Fault(f"inference: {key}", problem, f"leave {key} out") for key, there in given.items() if there]


def _pool_faults(plan: InferencePlan, model: Model, cluster: Cluster) -> list[Fault]:
    """Of the engines that only compute prompts."""
    pool = plan.prefill_pool
    if pool is None:
        degrees = [name for name in ("prefill_tp", "prefill_pp") if getattr(plan, name) > 1]
        problem, remedy = "there are no engines for prompts alone", "prefill_dp = 1 or more, or leave it out"
        return [Fault(f"inference: {name}", problem, remedy) for name in degrees]
    alone = pool.model_copy(update={"dp": 1, "expert_imbalance": 1.0, "replicate": ()})
    found = [*_split_faults(alone, model), *_group_faults(alone, cluster)]
    return [
        replace(fault, place=fault.place.replace(": ", ": prefill_"), remedy=f"prefill_{fault.remedy}")
        for fault in found
        if fault.place in ("inference: tp", "inference: pp")
    ]


def legal_tp(model: Model, *, dealt: bool = False) -> tuple[int, ...]:
    """Degrees that split heads and MLP; key-value heads divide, or each is held by several GPUs."""
    most = gcd(model.num_heads, *(n for n, _ in _widths(model, dealt=dealt)))
    return tuple(
        tp
        for tp in range(1, min(most, 1024) + 1)
        if most % tp == 0 and all(n % tp == 0 or tp % n == 0 for n, _ in _repeated(model))
    )


def _repeated(model: Model) -> list[tuple[int, str]]:
    """What tp splits, or several GPUs hold alike."""
    groups = [(model.mamba.num_groups, "groups of mixers")] if model.mamba else []
    return [(model.num_kv_heads, "key-value heads"), *groups]


def _widths(model: Model, *, dealt: bool) -> list[tuple[int, str]]:
    """What tp splits besides heads: columns, or whole experts."""
    experts = model.experts
    mixer = [(model.mamba.num_heads, "heads of mixers")] if model.mamba else []
    if experts is None:
        return [*mixer, (model.d_ff, "columns of the MLP")]
    routed = (experts.num_experts, "experts") if dealt else (experts.d_ff, "columns of an expert")
    found = [*mixer, routed, (experts.shared_d_ff, "columns of the shared experts")]
    if {"dense_layer", "mlp"} & set(model.layer_kinds):
        found.append((model.d_ff, "columns of the MLP"))
    return [(n, noun) for n, noun in found if n]


def _wide_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Of attention over each GPU's own sequences, with experts dealt over all GPUs."""
    place, faults = "inference: attention_dp", []
    if model.experts is None or plan.experts != "dealt":
        problem = "parts sequences among GPUs that share nothing but experts, and none are dealt"
        faults.append(Fault(place, problem, 'experts = "dealt" of a mixture, or dp for engines'))
    elif model.experts.num_experts % plan.tp:
        problem = f"tp = {plan.tp} does not divide the model's {model.experts.num_experts} experts"
        faults.append(Fault("inference: tp", problem, "a divisor of them"))
    if plan.tp == 1:
        faults.append(Fault(place, "tp = 1: one GPU has all sequences", "tp = 2 or more"))
    for key, given in (
        ("pp", plan.pp > 1),
        ("prefill_dp", plan.prefill_dp > 0),
        ("speculative", plan.speculative != "none"),
    ):
        if given:
            faults.append(Fault(place, f"together with {key} is not modelled", f"leave {key} out"))
    if plan.replicate:
        faults.append(Fault("inference: replicate", "every GPU holds all but experts whole anyway", "leave it out"))
    return faults


def _split_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    tp = plan.tp
    faults: list[Fault] = []
    dealt = plan.experts == "dealt"
    legal = legal_tp(model, dealt=dealt)
    nearest = " or ".join(map(str, sorted(sorted(legal, key=lambda n: (abs(n - tp), n))[:2])))
    wrong = [f"{n} {noun}" for n, noun in ((model.num_heads, "heads"), *_widths(model, dealt=dealt)) if n % tp]
    wrong += [f"{n} {noun} (nor is it a multiple of them)" for n, noun in _repeated(model) if n % tp and tp % n]
    if wrong:
        problem = f"tp = {tp} does not divide the model's {', '.join(wrong)}"
        faults.append(Fault("inference: tp", problem, f"tp = {nearest}"))
    if dealt and model.experts is None:
        faults.append(Fault("inference: experts", f"{model.name} has no experts to deal", 'experts = "split"'))
    if plan.expert_imbalance > 1 and not dealt:
        problem = "slices of experts are as busy on every GPU"
        faults.append(Fault("inference: expert_imbalance", problem, '1, or experts = "dealt"'))
    if {plan.weights, plan.dtype} == {"bf16", "fp16"}:
        faults.append(Fault("inference: dtype", f"{plan.dtype}, and weights = {plan.weights}", "leave it out"))
    if plan.weights == "mxfp4" and model.experts is None:
        problem = f"mxfp4 is of experts alone, and {model.name} has none"
        faults.append(Fault("inference: weights", problem, 'weights = "nvfp4" or "int4"'))
    if plan.pp > model.num_layers:
        problem = f"pp = {plan.pp} stages for {model.num_layers} layers"
        faults.append(Fault("inference: pp", problem, f"pp = {model.num_layers} at most"))
    if plan.tp == 1 and plan.replicate:
        problem = "replicates what tp = 1 does not split"
        faults.append(Fault("inference: replicate", problem, "tp = 2 or more, or nothing"))
    return faults


def _place_faults(plan: InferencePlan, cluster: Cluster) -> list[Fault]:
    faults: list[Fault] = []
    gpus = cluster.gpus_per_node
    if plan.num_devices > cluster.num_devices:
        more = plan.num_devices - plan.engine_devices * plan.dp
        prompts = f" and {plan.prefill_tp} × {plan.prefill_pp} × {plan.prefill_dp} for prompts" if more else ""
        need = f"tp {plan.tp} × pp {plan.pp} × dp {plan.dp}{prompts} = {plan.num_devices}"
        fits = max(0, cluster.num_devices - more) // plan.engine_devices
        remedy = f"dp = {fits}, or " if fits else ""
        faults.append(
            Fault(
                "inference: degrees",
                f"{need}, the cluster has {cluster.num_devices} devices ({cluster.num_nodes} × {gpus})",
                f"{remedy}nodes = {-(-plan.num_devices // gpus)}",
            )
        )
    device = cluster.device
    if plan.weights == "fp8" and not device.peak("fp8") and not device.peak("bf16"):
        problem = f"engines have no kernel for weights in fp8 on {device.name}: it takes Ampere or later"
        faults.append(Fault("inference: weights", problem, 'weights = "int4", "int8" or "fp16"'))
    tier = cluster.host_tier
    if plan.host_cache and tier is None:
        problem = f"{cluster.name} states no link between GPUs and host memory"
        faults.append(Fault("inference: host_cache", problem, "a cluster with [host], or 0"))
    elif tier is not None and plan.host_cache * min(gpus, plan.num_devices) > tier.memory_bytes:
        problem = (
            f"{format_bytes(plan.host_cache)} for each GPU of a node, whose memory is {format_bytes(tier.memory_bytes)}"
        )
        faults.append(Fault("inference: host_cache", problem, "less"))
    return [*faults, *_store_faults(plan, cluster), *_group_faults(plan, cluster)]


def _store_faults(plan: InferencePlan, cluster: Cluster) -> list[Fault]:
    place, store = "inference: prefix_store", plan.prefix_store
    faults = []
    if store != "gpu" and not plan.prefix_caching:
        problem = f"{store}, and prefix_caching = false: nothing is reused"
        faults.append(Fault(place, problem, 'prefix_caching = true, or prefix_store = "gpu"'))
    if store != "gpu" and not store_bytes_per_s(plan, cluster):
        missing, table = (
            ("no link between GPUs and host memory", "host") if store == "host" else ("no network", "inter")
        )
        problem = f"{store}, and {cluster.name} states {missing}"
        faults.append(Fault(place, problem, f'a cluster with [{table}], or "gpu"'))
    return faults


def store_bytes_per_s(plan: InferencePlan, cluster: Cluster) -> float:
    """At which a GPU reads beginnings of prompts from where they lie; 0: nothing has to be read, or there is no way."""
    if plan.prefix_store == "network":
        return cluster.node_bytes_per_s / cluster.gpus_per_node
    tier = cluster.host_tier if plan.prefix_store == "host" else None
    return tier.h2d_bytes_per_s if tier else 0.0


def _group_faults(plan: InferencePlan, cluster: Cluster) -> list[Fault]:
    gpus = cluster.gpus_per_node
    if not ((plan.tp <= gpus and gpus % plan.tp) or (plan.tp > gpus and plan.tp % gpus)):
        return []
    near = max(n for n in range(1, min(plan.tp, gpus) + 1) if gpus % n == 0)
    return [Fault("inference: tp", f"groups of tp = {plan.tp} do not fill nodes of {gpus} GPUs evenly", f"tp = {near}")]


def _refuses_prompts(plan: InferencePlan) -> bool:
    """The engine starts with steps shorter than its sequences, which it never pre-empts, and refuses single prompts instead."""
    engine = Stack.of(plan).engine
    return engine is not None and engine.reserved == 1.0


def _length_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    faults: list[Fault] = []
    longest, batched = plan.model_len(model), plan.batched_tokens(model)
    if longest > model.max_positions:
        problem = f"{longest} tokens, and {model.name} was made for {model.max_positions} positions"
        faults.append(Fault("inference: max_model_len", problem, f"max_model_len = {model.max_positions}"))
    if plan.block_size > longest:
        problem = f"blocks of {plan.block_size} tokens, and no sequence has more than {longest}"
        faults.append(Fault("inference: block_size", problem, "block_size = 16, or its like"))
    stated = plan.max_model_len is not None or not _refuses_prompts(plan)
    if not plan.chunked_prefill and batched < longest and stated:
        problem = f"{batched} tokens a step, and a whole prompt may have max_model_len = {longest}"
        remedy = f"max_batched_tokens = {longest}, or chunked_prefill = true"
        faults.append(Fault("inference: max_batched_tokens", problem, remedy))
    if batched < plan.max_sequences:
        problem = f"{batched} tokens a step for max_sequences = {plan.max_sequences}, one token each"
        remedy = f"max_batched_tokens = {plan.max_sequences} or more, or max_sequences = {batched}"
        faults.append(Fault("inference: max_batched_tokens", problem, remedy))
    return faults
