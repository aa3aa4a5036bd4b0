"""Every metric becomes step seconds; expected values are derived here, or published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.spec.model import Model
from simulator.studies.backtest.measured import NoStepTimeError, memory_bytes, step_seconds
from simulator.studies.backtest.rows import RunRow

MODEL = Model.load("llama2-7b")

LLAMA2_7B = RunRow(
    line=2,
    id="row",
    framework="somebody",
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=32,
    d_ff=11008,
    mlp_kind="swiglu",
    vocab=32000,
    seq_len=8192,
    n_gpus=8,
    global_batch=32,
    metric="model_tflops_per_gpu",
    value=1721.22,
)


def test_step_time_is_itself() -> None:
    assert step_seconds(replace(LLAMA2_7B, metric="step_time_s", value=1.5), 8, "full_attention", MODEL) == 1.5


def test_no_metric_no_time() -> None:
    assert step_seconds(replace(LLAMA2_7B, metric=None, value=None), 8, "full_attention", MODEL) is None


def test_throughputs() -> None:
    tokens = 32 * 8192
    assert (
        step_seconds(replace(LLAMA2_7B, metric="tokens_per_s", value=4096), 8, "full_attention", MODEL) == tokens / 4096
    )
    assert (
        step_seconds(replace(LLAMA2_7B, metric="tokens_per_s_per_gpu", value=512), 8, "full_attention", MODEL)
        == tokens / 4096
    )
    assert step_seconds(replace(LLAMA2_7B, metric="samples_per_s", value=16), 8, "full_attention", MODEL) == 2.0


def test_full_attention_counts_as_maxtext_published() -> None:
    """github.com/AI-Hypercomputer/maxtext/pull/1988 (before): llama2-7b, s = 8192, 4 sequences a device: 1721.22 TFLOP."""
    assert step_seconds(LLAMA2_7B, 8, "full_attention", MODEL) == pytest.approx(1.0, rel=1e-5)


def test_hardware_flop_of_2021_are_four_forward_passes_and_three_of_the_head() -> None:
    """arXiv 2104.04473 section 5.1, from its parts: a layer's forward is 24 B s h² + 4 B s² h, run twice and backward
    costs two more; the head is 2 B s h V, three times."""
    layers, h, s, v, batch, gpus = 24, 2304, 2048, 51200, 512, 32
    flop = 4 * layers * (24 * batch * s * h * h + 4 * batch * s * s * h) + 3 * 2 * batch * s * h * v
    row = replace(LLAMA2_7B, seq_len=s, global_batch=batch, value=137.0)
    gpt = Model(name="gpt", num_layers=layers, d_model=h, num_heads=24, d_ff=4 * h, vocab_size=v)
    assert step_seconds(row, gpus, "hardware_2021", gpt) == pytest.approx(flop / (137e12 * gpus), rel=1e-12)


def test_tflops_of_a_mixture_count_the_experts_that_a_token_passes() -> None:
    """arXiv 2204.02311, appendix B, with Mixtral's 12.9 billion active parameters, less the embedding's lookup."""
    mixtral = Model.load("mixtral-8x7b")
    tokens, s = 32 * 8192, 8192
    weights = mixtral.num_active_parameters - 32_000 * 4096 - 65 * 4096  # norms multiply nothing
    flop = tokens * (6 * weights + 12 * 32 * 4096 * s)
    assert step_seconds(LLAMA2_7B, 8, "full_attention", mixtral) == pytest.approx(flop / (1721.22e12 * 8), rel=1e-12)


def test_what_a_metric_needs_is_named() -> None:
    with pytest.raises(NoStepTimeError, match="global_batch"):
        step_seconds(replace(LLAMA2_7B, global_batch=None), 8, "full_attention", MODEL)
    with pytest.raises(NoStepTimeError, match="seq_len"):
        step_seconds(replace(LLAMA2_7B, seq_len=None), 8, "full_attention", MODEL)


def test_memory_units() -> None:
    assert memory_bytes(replace(LLAMA2_7B, mem_metric="peak_reserved_gib", mem_value=1.5)) == 3 * 2**29
    assert memory_bytes(replace(LLAMA2_7B, mem_metric="nvidia_smi_used_gb", mem_value=79.0)) == 79 * 10**9
    assert memory_bytes(replace(LLAMA2_7B, mem_metric="oom")) is None
    assert memory_bytes(LLAMA2_7B) is None
