"""TensorRT-LLM's command and its options file (tensorrt_llm/commands/serve.py, llmapi/llm_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simulator.formats.writers.serving_launch.launcher import Launcher, Pool, flags


def _command(pool: Pool, port: int) -> list[str]:
    plan = pool.plan
    values = {
        "backend": "pytorch",
        "host": "0.0.0.0",  # noqa: S104  a server is there to be reached
        "port": port,
        "tp_size": plan.tp,
        "pp_size": plan.pp,
        "ep_size": plan.tp if plan.experts == "dealt" else None,
        "max_batch_size": plan.max_sequences,
        "max_num_tokens": pool.tokens,
        "max_seq_len": pool.longest,
        "kv_cache_free_gpu_memory_fraction": plan.gpu_memory_utilization,
        "extra_llm_api_options": _file(pool),
    }
    return ["trtllm-serve", "serve", "$MODEL", *flags(values)]


def _file(pool: Pool) -> str:
    return f"{pool.name}.yaml"


def _options(pool: Pool) -> Mapping[str, str]:
    """What the command has no flags for."""
    import yaml

    plan = pool.plan
    options: dict[str, object] = {
        "enable_attention_dp": plan.attention_dp,
        "enable_chunked_prefill": plan.chunked_prefill,
        "kv_cache_config": {
            "enable_block_reuse": plan.prefix_caching,
            "tokens_per_block": plan.block_size,
            "dtype": "fp8" if plan.kv_dtype == "fp8" else "auto",
        },
        "cuda_graph_config": {"enable_padding": True} if plan.cuda_graphs else None,
    }
    if plan.lora_rank:
        options["lora_config"] = {"max_lora_rank": plan.lora_rank, "max_loras": plan.lora_adapters}
    if plan.speculative == "mtp":
        options["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": plan.draft_tokens}
    elif plan.speculative == "ngram":
        options["speculative_config"] = {"decoding_type": "NGram", "max_draft_len": plan.draft_tokens}
    if pool.role != "both":
        options["cache_transceiver_config"] = {"backend": "DEFAULT"}
    return {_file(pool): str(yaml.safe_dump(options, sort_keys=False))}


TENSORRT_LLM: Final = Launcher(
    software="TensorRT-LLM",
    image="nvcr.io/nvidia/tensorrt-llm/release",
    command=_command,
    files=_options,
    mixing=(lambda plan: plan.mixed, "prompts and answers share its steps"),
    cache_of="free",
    quantises=(),
    reads=" by ModelOpt, or as DeepSeek's fp8 and gpt-oss are",
    router="trtllm-serve disaggregated stands before both pools.",
)
