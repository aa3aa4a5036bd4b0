"""What published launchers of NeMo and Megatron-Bridge say of fp8 and vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runs_table.meaning import resolve

from simulator.studies.backtest.rows import RunRow

LLAMA_405B = RunRow(
    line=2,
    id="row",
    framework="NeMo 24.09-24.12 (Megatron-Core)",
    model_name="llama3.1-405b",
    n_layers=126,
    d_model=16384,
    n_heads=128,
    n_kv_heads=8,
    d_ff=53248,
    mlp_kind="swiglu",
    vocab=128256,
    seq_len=8192,
    gpu="H100-80GB-SXM",
    n_gpus=576,
    gpus_per_node=8,
    tp=8,
    pp=9,
    vpp=7,
    cp=2,
    dp=4,
    zero_or_fsdp="zero1",
    micro_batch=1,
    global_batch=252,
    precision="fp8",
    act_ckpt="none",
    metric="step_time_s",
    value=11.0,
)
LLAMA_70B = replace(
    LLAMA_405B, model_name="llama3.1-70b", n_layers=80, d_model=8192, n_heads=64, d_ff=28672, tp=4, pp=4, vpp=5, n_gpus=64, dp=2
)  # fmt: skip


def test_dgxc_trains_405b_on_gpt2s_tokens() -> None:
    """llama3.1/configure.sh of v24.11.1 and v25.03: 50,257 words, padded to a multiple of 128 × tp. NeMo 2 reads Llama's."""
    assert resolve(LLAMA_405B).model.vocab_size == 51_200
    assert resolve(LLAMA_70B).model.vocab_size == 128_256
    assert resolve(replace(LLAMA_405B, framework="NeMo 25.04.01")).model.vocab_size == 128_256


@pytest.mark.parametrize(
    ("framework", "changes", "kept"),
    [
        ("NeMo 24.09-24.12 (Megatron-Core)", {}, True),
        ("NeMo 24.09-24.12 (Megatron-Core)", {"precision": "bf16"}, False),
        ("NeMo 24.07 (Megatron-Core)", {}, False),
        ("Megatron-Bridge 25.11 NeMo Container", {}, True),
        ("Megatron-Bridge 25.11 NeMo Container", {"zero_or_fsdp": "fsdp_full"}, False),
        ("Megatron-Bridge 25.11 NeMo Container", {"notes": "precision label FP8-SC"}, False),
    ],
)
def test_who_keeps_weights_in_fp8(framework: str, changes: dict[str, Any], kept: bool) -> None:  # noqa: FBT001  a table's column
    """dgxc's launchers set fp8_params, Megatron-Bridge's recipes fp8_param_gather; blocks' scales serve one side only."""
    assert resolve(replace(LLAMA_70B, framework=framework, **changes)).plan.precision.fp8_all_gather is kept
