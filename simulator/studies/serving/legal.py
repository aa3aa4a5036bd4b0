"""Which serving plans are legal: every way in which plan, model and cluster do not fit together."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from simulator.base.errors import Fault, PlanError
from simulator.base.units import format_bytes
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.lora import lora_faults
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.speculation import speculation_faults


def check(plan: InferencePlan, model: Model, cluster: Cluster) -> None:
    """Raise PlanError with every way in which plan, model and cluster do not fit together."""
    if model.bidirectional or model.num_classes:
        why = f"{model.name} generates no tokens: it attends both ways, or tells classes apart"
        raise PlanError.at("model", why, "a model with a causal mask; `shardwise predict` has its training")
    split = _wide_faults(plan, model) if plan.attention_dp else _split_faults(plan, model)
    faults = [*split, *_mixer_faults(plan, model), *_context_faults(plan, model), *_prompt_context_faults(plan, model)]
    faults += [*_place_faults(plan, cluster), *_length_faults(plan, model)]
    faults += [*_pool_faults(plan, model, cluster), *speculation_faults(plan, model), *lora_faults(plan)]
    PlanError.raise_for(faults)


def _mixer_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Of hybrids, whose mixers keep states."""
    if model.mamba is None:
        return []
    if not model.num_attention_layers:
        return [Fault("model", f"{model.name} has no attention: there is no cache to serve it from", "a hybrid")]
    problem = f"together with the states of {model.name}'s mixers is not modelled"
    given = _given(plan, "prefill_dp", "speculative", "lora_rank", "pcp")
    return [Fault(f"inference: {key}", problem, f"leave {key} out") for key in given]


def _given(plan: InferencePlan, *keys: str) -> list[str]:
    """Those that are not at their defaults."""
    return [key for key in keys if getattr(plan, key) != InferencePlan.model_fields[key].default]


def _apart(plan: InferencePlan, key: str, *others: str) -> list[Fault]:
    """Of keys that are not modelled together with this one."""
    place, given = f"inference: {key}", _given(plan, *others)
    return [Fault(place, f"together with {other} is not modelled", f"leave {other} out") for other in given]


def _context_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Of GPUs that have a part of the cached tokens each."""
    place = "inference: dcp"
    if plan.dcp == 1:
        return []
    alike = plan.tp if model.latent else max(1, plan.tp // model.num_kv_heads)
    faults = []
    if alike % plan.dcp:
        problem = (
            f"{alike} of tp = {plan.tp} GPUs have the same keys and values, which dcp = {plan.dcp} does not divide"
        )
        more = f"dcp = {alike}" if alike > 1 else f"tp above the model's {model.num_kv_heads} key-value heads"
        faults.append(Fault(place, problem, f"{more}, or 1"))
    if model.sliding_window is not None:
        faults.append(Fault(place, "together with a sliding window is not modelled", "dcp = 1"))
    return faults + _apart(plan, "dcp", "attention_dp", "prefill_dp", "speculative")


def _prompt_context_faults(plan: InferencePlan, model: Model) -> list[Fault]:
    """Of GPUs that part prompts, and experts, among them."""
    place, faults, experts, ranks = "inference: pcp", [], model.experts, plan.tp * plan.pcp
    if plan.pcp == 1:
        return []
    if experts is not None:
        dealt = plan.experts == "dealt"
        count, noun = (experts.num_experts, "experts") if dealt else (experts.d_ff, "columns of an expert")
        if count % ranks:
            problem = f"tp {plan.tp} × pcp {plan.pcp} = {ranks} GPUs do not divide the model's {count} {noun}"
            faults.append(Fault(place, problem, "pcp = 1, or less of either"))
    return faults + _apart(plan, "pcp", "dcp", "attention_dp", "speculative", "lora_rank")


def _pool_faults(plan: InferencePlan, model: Model, cluster: Cluster) -> list[Fault]:
    """Of the engines that only compute prompts."""
    pool = plan.prefill_pool
    if pool is None:
        degrees = [name for name in ("prefill_tp", "prefill_pp", "prefill_pcp") if getattr(plan, name) > 1]
        problem, remedy = "there are no engines for prompts alone", "prefill_dp = 1 or more, or leave it out"
        return [Fault(f"inference: {name}", problem, remedy) for name in degrees]
    alone = pool.model_copy(update={"dp": 1, "expert_imbalance": 1.0, "replicate": ()})
    found = [*_split_faults(alone, model), *_prompt_context_faults(alone, model), *_group_faults(alone, cluster)]
    return [
        replace(fault, place=fault.place.replace(": ", ": prefill_"), remedy=f"prefill_{fault.remedy}")
        for fault in found
        if fault.place in ("inference: tp", "inference: pp", "inference: pcp")
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
    faults += _apart(plan, "attention_dp", "pp", "prefill_dp", "speculative")
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
        prompts = f" and {more // plan.prefill_dp} × {plan.prefill_dp} for prompts" if more else ""
        parted = f" × pcp {plan.pcp}" if plan.pcp > 1 else ""
        need = f"tp {plan.tp} × pp {plan.pp}{parted} × dp {plan.dp}{prompts} = {plan.num_devices}"
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
    gpus, ranks = cluster.gpus_per_node, plan.tp * plan.pcp
    if not (gpus % plan.tp and plan.tp % gpus):
        if gpus % ranks and ranks % gpus:
            problem = f"tp {plan.tp} × pcp {plan.pcp} = {ranks} GPUs do not fill nodes of {gpus} evenly"
            return [Fault("inference: pcp", problem, "pcp = 1, or a power of two")]
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
