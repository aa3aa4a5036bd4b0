"""Rows as sources would write them that the published table does not hold: frameworks, GPUs, models, blanks, oddities.

tests/data/unseen_runs.csv holds them; their times are made up and nothing is scored. Parameter counts are those that the
models' authors print, in billions; stacks and boards are what the row says in words.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from runs_table.meaning import Run, resolve, variants_of

from simulator.base.errors import InputError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.studies.backtest.outcome import RefusedError

TABLE = Path(__file__).parents[1] / "data" / "unseen_runs.csv"

# row -> parameters in billions as printed (None: of no published model), stack, device
EXPECTED: dict[str, tuple[float | None, str, str]] = {
    "foundry-a100-40": (6.66, "llm-foundry-2023-04", "a100-sxm4-40gb"),
    "foundry-grad-op": (None, "llm-foundry-2023", "a100-sxm4-40gb"),
    "titan-h200-tp-cp": (405.85, "torchtitan-2025-compiled", "h200-sxm"),
    "titan-h200-pp": (70.55, "torchtitan-2025-compiled", "h200-sxm"),
    "titan-async": (8.03, "torchtitan-2025-compiled", "h200-sxm"),
    "bridge-b300": (682.6, "megatron-bridge-2025", "b300-sxm"),  # 671 and the module of multi-token prediction
    "bridge-gb300": (116.8, "megatron-bridge-2025", "gb300"),
    "bridge-gb300-256": (235, "megatron-bridge-2025", "gb300"),
    "bridge-kimi-b300": (1026, "megatron-bridge-2025", "b300-sxm"),
    "bridge-70b-gb300": (70.55, "megatron-bridge-2025", "gb300"),
    "bridge-405b-gb300": (405.85, "megatron-bridge-2025", "gb300"),
    "dgxc-grok-gb200": (314, "megatron-core-2025", "gb200"),
    "dgxc-dsv3-gb200": (682.6, "megatron-core-2025", "gb200"),
    "dgxc-340b-gb200": (341, "megatron-core-2025", "gb200"),
    "dgxc-maxtext": (70.55, "maxtext-2024", "h100-sxm5-80gb"),
    "dgxc-maxtext-hsdp": (68.98, "maxtext-2024", "h100-sxm5-80gb"),
    "colossal-gemini": (68.98, "colossalai-2024", "h100-sxm5-80gb"),
    "colossal-3d": (None, "colossalai-2024", "h800-sxm5-80gb"),
    "swift-zero3": (7.62, "transformers-2024", "a100-sxm4-80gb"),
    "swift-megatron": (30.5, "megatron-core-2025-exposed", "a800-80gb"),
    "swift-ddp": (0.494, "transformers-2024", "rtx-4090"),
    "torchtune-8b": (8.03, "torchtune-2024", "a100-sxm4-80gb"),
    "torchtune-70b": (70.55, "torch-2.11-compiled", "h100-sxm5-80gb"),
    "llama3-8k": (405.85, "torch-2.6-eager", "h100-sxm5-80gb"),
    "llama3-131k": (405.85, "torch-2.6-eager", "h100-sxm5-80gb"),
    "moonlight-mem": (15.96, "megatron-core-2025", "h800-sxm5-80gb"),
    "internevo-mem": (7.32, "internevo-2023", "a800-80gb"),
    "internevo-20b": (20.1, "internevo-2023", "a800-80gb"),
    "aws-deepep": (682.6, "megatron-bridge-package-2025", "b300-sxm"),
    "nemo-long": (6.74, "nemo-24", "b200-sxm"),
    "simumax-moe": (None, "megatron-core-2025-exposed", "b200-sxm"),
    "nanotron-8b": (8.03, "nanotron-2025", "h100-sxm5-80gb"),
    "nanotron-ddp": (None, "nanotron-2025", "h100-sxm5-80gb"),
    "neox-20b": (20.55, "gpt-neox-2023", "a100-sxm4-40gb"),
    "neox-blank": (11.85, "gpt-neox-2023", "a100-sxm4-40gb"),
    "gptj": (6.05, "maxtext-2024", "v100-sxm2-32gb"),
    "accelerate-fsdp": (7.24, "transformers-2024", "a100-sxm4-80gb"),
    "axolotl-zero2": (34.39, "transformers-2024", "h100-sxm5-80gb"),
    "hf-trainer": (68.98, "transformers-2024", "a100-sxm4-80gb"),
    "deepspeed-opt": (65.7, "deepspeed-0.14", "a100-sxm4-80gb"),
    "deepspeed-blank": (12.85, "deepspeed-0.14", "v100-sxm2-32gb"),
    "fms-70b": (68.98, "fms-fsdp-2024", "h100-sxm5-80gb"),
    "fms-blank": (6.74, "fms-fsdp-2024", "a100-sxm4-80gb"),
    "olmo-7b": (6.89, "olmo-2024", "mi250x-gcd"),
    "olmo2-13b": (13.72, "torchtitan-2025-compiled", "h100-sxm5-80gb"),
    "litgpt": (6.86, "torchtitan-2024-compiled", "a100-sxm4-40gb"),
    "levanter": (6.74, "maxtext-2024", "a100-sxm4-80gb"),
    "axlearn": (68.98, "maxtext-2024", "h100-sxm5-80gb"),
    "megascale": (None, "megatron-core-2025", "a100-sxm4-80gb"),
    "megatron-2019": (8.3, "megatron-2021", "v100-sxm2-32gb"),  # arXiv 1909.08053
    "megatron-2023": (68.98, "nemo-24", "a100-sxm4-80gb"),
    "vescale": (46.7, "torch-2.6-eager", "h100-sxm5-80gb"),
    "megablocks": (None, "megatron-core-2025", "a100-sxm4-80gb"),
    "aws-fsdp": (7.24, "transformers-2024", "h100-sxm5-80gb"),
    "unknown": (None, "torch-2.6-eager", "l40s"),
    "minitron": (None, "megatron-core-2025", "l40s"),
    "model-falcon-40b": (41.3, "megatron-core-2025", "a100-sxm4-40gb"),
    "model-gemma-2-27b": (27.2, "megatron-core-2025", "h100-sxm5-80gb"),
    "model-gemma-3-27b": (27.0, "megatron-core-2025", "b200-sxm"),
    "model-phi-3-mini-4k": (3.82, "megatron-core-2025", "a6000"),
    "model-phi-4": (14.7, "megatron-core-2025", "h100-pcie"),
    "model-baichuan2-13b": (13.9, "megatron-core-2025", "h800-sxm5-80gb"),
    "model-chatglm3-6b": (6.24, "megatron-core-2025", "a800-80gb"),
    "model-glm-4.5-air": (109, "megatron-core-2025", "h20"),
    "model-glm-4.5": (357, "megatron-core-2025", "h200-sxm"),
    "model-minimax-m2": (229, "megatron-core-2025", "h800-sxm5-80gb"),
    "model-bloom-176b": (176.2, "megatron-core-2025", "a100-sxm4-80gb"),
    "model-opt-175b": (175, "megatron-core-2025", "a100-sxm4-80gb"),
    "model-deepseek-v2-lite": (15.7, "megatron-core-2025", "a100-sxm4-40gb"),
    "model-llama-4-scout": (108, "megatron-core-2025", "gb200"),
    "model-dbrx": (131.6, "megatron-core-2025", "h100-sxm5-80gb"),
    "model-qwen3-4b": (4.02, "megatron-core-2025", "h100-nvl"),
    "model-qwen3-32b": (32.8, "megatron-core-2025", "mi300x"),
    "model-internlm2-20b": (19.9, "megatron-core-2025", "a100-sxm4-80gb"),
    "model-starcoder2-15b": (16.0, "megatron-core-2025", "gh200"),
    "gpu-a10g": (1.24, "torch-2.6-eager", "a10g"),
    "gpu-l4": (1.24, "torch-2.6-eager", "l4"),
    "gpu-v100-16gb": (1.24, "torch-2.6-eager", "v100-sxm2-16gb"),
    "gpu-rtx-3090": (1.24, "torch-2.6-eager", "rtx-3090"),
    "gpu-rtx-5090": (1.24, "torch-2.6-eager", "rtx-5090"),
    "gpu-a40": (1.24, "torch-2.6-eager", "a40"),
    "gpu-a30": (1.24, "torch-2.6-eager", "a30"),
    "gpu-rtx-6000-ada": (1.24, "torch-2.6-eager", "rtx-6000-ada"),
    "gpu-a100-pcie-40gb": (1.24, "torch-2.6-eager", "a100-pcie-40gb"),
    "gpu-h200-nvl": (1.24, "torch-2.6-eager", "h200-nvl"),
    "gpu-h20-141gb": (1.24, "torch-2.6-eager", "h20-141gb"),
    "gpu-mi325x": (1.24, "torch-2.6-eager", "mi325x"),
    "gpu-rtx-pro-6000": (1.24, "torch-2.6-eager", "rtx-pro-6000-server"),
    "odd-dp-with-cp": (8.03, "megatron-bridge-2025", "h100-sxm5-80gb"),
    "odd-batch": (8.03, "megatron-core-2025", "h100-sxm5-80gb"),
    "odd-gpus": (3.21, "torch-2.6-eager", "h100-sxm5-80gb"),
    "mqa": (None, "megatron-core-2025", "h100-sxm5-80gb"),
    "ep-above-dp": (46.7, "megatron-core-2025", "h100-sxm5-80gb"),
    "offload": (68.98, "deepspeed-0.14", "a100-sxm4-80gb"),
    "no-precision": (8.03, "megatron-core-2025", "h100-sxm5-80gb"),
    "muon": (15.96, "megatron-core-2025", "h800-sxm5-80gb"),
}
REFUSED = {
    "plain-fsdp": "no decoder",
    "minimax-01": "lightning attention",
    "jamba": "state-space",
    "adapters": "adapters",
}


@cache
def rows() -> dict[str, RunRow]:
    return {row.id: row for row in read_runs(TABLE) if isinstance(row, RunRow)}


@cache
def run_of(name: str) -> Run:
    """In the last way to fill its blanks: sharded, recomputed."""
    return resolve(variants_of(rows()[name])[-1])


def test_every_row_is_read_and_expected() -> None:
    assert set(rows()) == {*EXPECTED, *REFUSED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_is_the_model_stack_and_machine_that_it_says(name: str) -> None:
    billions, stack, device = EXPECTED[name]
    run, row = run_of(name), rows()[name]
    assert (run.stack.name, run.cluster.device.name) == (stack, device)
    assert run.plan.num_devices == row.n_gpus
    assert run.cluster.num_nodes * run.cluster.gpus_per_node == row.n_gpus
    if billions is not None:
        assert run.model.num_parameters / 1e9 == pytest.approx(billions, rel=6e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_its_reason(name: str) -> None:
    ways = variants_of(rows()[name])
    with pytest.raises((RefusedError, InputError), match=REFUSED[name]):
        resolve(ways[-1])


def test_structures_that_no_column_shows() -> None:
    moonlight, falcon = run_of("moonlight-mem").model, run_of("model-falcon-40b").model
    assert moonlight.latent is not None
    assert moonlight.experts is not None
    assert (moonlight.experts.shared_d_ff, moonlight.experts.first_dense_layers) == (2816, 1)
    assert (falcon.parallel_residual, falcon.num_kv_heads) == (True, 8)
    assert run_of("model-bloom-176b").model.positions == "alibi"
    assert run_of("model-gemma-3-27b").model.sliding_window == 1024
    assert run_of("swift-ddp").model.tied_embeddings
    assert run_of("bridge-b300").model.mtp_layers == 1
    assert run_of("mqa").model.num_kv_heads == 1


def test_layouts() -> None:
    assert run_of("foundry-a100-40").plan.gradient_dtype == "bf16"  # PURE
    assert run_of("foundry-grad-op").plan.zero == 2
    assert run_of("bridge-gb300-256").cluster.nvlink_domain_size == 64
    assert run_of("dgxc-maxtext-hsdp").plan.dp_replicate == 32
    assert run_of("llama3-131k").plan.cp == 16
    assert run_of("odd-gpus").cluster.gpus_per_node == 6
    assert run_of("odd-batch").micro_batches == 126 / 12 / 4
    assert run_of("vescale").plan.experts.etp == 4
    assert run_of("ep-above-dp").plan.num_expert_ranks == 16
    assert run_of("offload").plan.offload.optimizer == "host"
    assert run_of("aws-deepep").plan.experts.dispatcher == "deep_ep"
    assert run_of("muon").plan.optimizer.kind == "sgd_momentum"
