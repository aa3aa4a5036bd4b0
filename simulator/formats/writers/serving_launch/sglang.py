"""SGLang's command (python/sglang/srt/server_args.py)."""

from __future__ import annotations

from typing import Final

from simulator.formats.writers.serving_launch.launcher import Launcher, Pool, flags
from simulator.studies.serving import InferencePlan


def _command(pool: Pool, port: int) -> list[str]:
    plan = pool.plan
    values = {
        "model-path": "$MODEL",
        "host": "0.0.0.0",  # noqa: S104  a server is there to be reached
        "port": port,
        "tp-size": plan.tp,
        "pp-size": plan.pp,
        "dp-size": plan.ranks if plan.attention_dp else None,
        "enable-dp-attention": plan.attention_dp,
        "moe-a2a-backend": "deepep" if plan.attention_dp else None,
        "ep-size": plan.tp if plan.experts == "dealt" else None,
        "dtype": "float16" if plan.compute_dtype == "fp16" else "bfloat16",
        "quantization": pool.casts,
        "kv-cache-dtype": "fp8_e4m3" if plan.kv_dtype == "fp8" else None,
        "context-length": pool.longest,
        "max-prefill-tokens": pool.tokens,
        "chunked-prefill-size": pool.tokens if plan.chunked_prefill else -1,
        "enable-mixed-chunk": plan.chunked_prefill and plan.mixed,
        "max-running-requests": plan.max_sequences,
        "mem-fraction-static": plan.gpu_memory_utilization,
        "page-size": plan.block_size,
        "swa-full-tokens-ratio": plan.window_part if "window_part" in plan.model_fields_set else None,
        "mamba-full-memory-ratio": plan.state_part if plan.state_part not in (0, 0.9) else None,  # its default
        "disable-cuda-graph": not plan.cuda_graphs,
        "disable-radix-cache": not plan.prefix_caching,
        "enable-lora": plan.lora_rank > 0,
        "max-loras-per-batch": plan.lora_adapters if plan.lora_rank else None,
        "max-lora-rank": plan.lora_rank or None,
        **_guesses(plan),
        "disaggregation-mode": None if pool.role == "both" else pool.role,
    }
    return ["python", "-m", "sglang.launch_server", *flags(values)]


def _guesses(plan: InferencePlan) -> dict[str, object]:
    if plan.speculative == "none":
        return {}
    steps = {"speculative-num-steps": plan.draft_tokens, "speculative-eagle-topk": 1}
    kind = {"mtp": {"speculative-algorithm": "NEXTN", **steps}}.get(
        plan.speculative, {"speculative-algorithm": "NGRAM"}
    )
    return {**kind, "speculative-num-draft-tokens": plan.draft_tokens + 1}


SGLANG: Final = Launcher(
    software="SGLang",
    image="lmsysorg/sglang",
    command=_command,
    mixing=(lambda plan: plan.chunked_prefill or not plan.mixed, "it mixes steps only where prompts are cut"),
    cache_of="static",
    router="sglang_router --pd-disaggregation stands before both pools.",
)
