"""Text Generation Inference's command (launcher/src/main.rs)."""

from __future__ import annotations

from typing import Final

from simulator.base.errors import Fault
from simulator.formats.writers.serving_launch.launcher import Launcher, Pool, flags
from simulator.studies.serving import InferencePlan

_GRAPHS: Final = "1,2,4,8,16,32"


def _command(pool: Pool, port: int) -> list[str]:
    plan = pool.plan
    values = {
        "hostname": "0.0.0.0",  # noqa: S104  a server is there to be reached
        "port": port,
        "model-id": "$MODEL",
        "num-shard": plan.tp,
        "dtype": None if plan.weights == "fp8" else "float16" if plan.compute_dtype == "fp16" else "bfloat16",
        "quantize": pool.casts,
        "kv-cache-dtype": "fp8_e4m3fn" if plan.kv_dtype == "fp8" else None,
        "max-input-tokens": pool.longest - 1,
        "max-total-tokens": pool.longest,
        "max-batch-prefill-tokens": pool.tokens,
        "max-concurrent-requests": plan.max_sequences,
        "cuda-graphs": _GRAPHS if plan.cuda_graphs else "0",
        "speculate": plan.draft_tokens if plan.speculative == "ngram" else None,
    }
    return ["text-generation-launcher", *flags(values)]


def _no_option(plan: InferencePlan) -> list[Fault]:
    absent: tuple[tuple[str, bool, str], ...] = (
        ("pp", plan.pp > 1, "1"),
        ("prefill_dp", plan.prefill_dp > 0, "0"),
        ("experts", plan.experts == "dealt", "split"),
        ("speculative", plan.speculative == "mtp", "ngram"),
        ("lora_rank", plan.lora_rank > 0, "0, and the launcher's own --lora-adapters"),
    )
    return [
        Fault(place=f"inference: {name}", problem="the launcher has nothing of the kind", remedy=remedy)
        for name, given, remedy in absent
        if given
    ]


TGI: Final = Launcher(
    software="TGI", image="ghcr.io/huggingface/text-generation-inference", command=_command, no_option=_no_option
)
