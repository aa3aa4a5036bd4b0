"""vLLM's command (vllm/engine/arg_utils.py)."""

from __future__ import annotations

import json
from typing import Final

from simulator.formats.writers.serving_launch.launcher import Launcher, Pool, flags
from simulator.studies.serving import InferencePlan

_HANDED: Final = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})


def _command(pool: Pool, port: int) -> list[str]:
    plan = pool.plan
    keeps_windows = "window_cache" in plan.model_fields_set and not plan.window_cache
    values = {
        "host": "0.0.0.0",  # noqa: S104  a server is there to be reached
        "port": port,
        "tensor-parallel-size": plan.attention_tp,
        "data-parallel-size": plan.ranks if plan.attention_dp else None,
        "pipeline-parallel-size": plan.pp,
        "decode-context-parallel-size": plan.dcp if plan.dcp > 1 else None,
        "prefill-context-parallel-size": plan.pcp if plan.pcp > 1 else None,
        "enable-expert-parallel": plan.experts == "dealt",
        "dtype": "float16" if plan.compute_dtype == "fp16" else "bfloat16",
        "quantization": pool.casts,
        "kv-cache-dtype": "fp8" if plan.kv_dtype == "fp8" else None,
        "max-model-len": pool.longest,
        "max-num-batched-tokens": pool.tokens,
        "max-num-seqs": plan.max_sequences,
        "gpu-memory-utilization": plan.gpu_memory_utilization,
        "block-size": plan.block_size,
        "no-enable-chunked-prefill": not plan.chunked_prefill,
        "enforce-eager": not plan.cuda_graphs,
        "no-enable-prefix-caching": not plan.prefix_caching,
        "disable-hybrid-kv-cache-manager": keeps_windows and pool.role == "both",
        "enable-lora": plan.lora_rank > 0,
        "max-loras": plan.lora_adapters if plan.lora_rank else None,
        "max-lora-rank": plan.lora_rank or None,
        "speculative-config": _guesses(plan),
        "kv-transfer-config": None if pool.role == "both" else _HANDED,
    }
    return ["vllm", "serve", "$MODEL", *flags(values)]


def _guesses(plan: InferencePlan) -> str | None:
    if plan.speculative == "none":
        return None
    return json.dumps({"method": plan.speculative, "num_speculative_tokens": plan.draft_tokens})


VLLM: Final = Launcher(
    software="vLLM",
    image="vllm/vllm-openai",
    command=_command,
    mixing=(lambda plan: plan.mixed == plan.chunked_prefill, "it mixes steps where prompts are cut"),
    cache_of="budget",
    router="A proxy sends each request to a prefill engine, then to one that decodes.",
)
