"""Rows by their stated columns: any key of plan, stack and model; what nobody states; what nobody knows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simulator.base.errors import ClusterError, ModelError, PlanError, StackError, TableError
from simulator.base.presets import TOPOLOGIES
from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.run_settings import column_of
from simulator.formats.readers.runs_table import BadRow, RunRow
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies import backtest
from simulator.studies.backtest.blanks import filled_rows
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import Run, resolve

CELLS = {
    "id": "a",
    "framework": "somebody's trainer",
    "model_name": "ours",
    "n_layers": "4",
    "d_model": "1024",
    "n_heads": "8",
    "d_ff": "4096",
    "mlp_kind": "swiglu",
    "vocab": "32000",
    "seq_len": "2048",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "8",
    "zero_or_fsdp": "fsdp_full",
    "micro_batch": "1",
    "global_batch": "32",
    "precision": "bf16",
    "act_ckpt": "none",
    "metric": "step_time_s",
    "value": "1.5",
}


def table(tmp_path: Path, **cells: str) -> Path:
    row = CELLS | cells
    path = tmp_path / "runs.csv"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    return path


def read(tmp_path: Path, **cells: str) -> RunRow:
    (row,) = read_measured(table(tmp_path, **cells)).rows
    assert isinstance(row, RunRow), row
    return row


def run_of(tmp_path: Path, **cells: str) -> Run:
    return resolve(read(tmp_path, **cells))


def test_any_key_of_a_plan_is_a_column(tmp_path: Path) -> None:
    plan = run_of(
        tmp_path,
        **{
            "reduce_dtype": "fp32",
            "recompute": "selective",
            "recompute_modules": "layernorm moe_act",
            "forward_prefetch": "1",
            "limit_all_gathers": "false",
            "memory_fraction": "0.9",
            "offload.optimizer": "host",
            "data_parallel": "deepspeed",
        },
    ).plan
    assert (plan.precision.reduce, plan.recompute.mode, plan.recompute.modules) == (
        "fp32",
        "selective",
        ("layernorm", "moe_act"),
    )
    assert (plan.fsdp.limit_all_gathers, plan.memory_fraction, plan.offload.optimizer) == (False, 0.9, "host")


def test_so_are_keys_of_a_stack_and_a_model_behind_their_noun(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, **{"stack": "megatron-core-2025", "stack.attention.kernel": "math", "stack.dropout": "true",
                     "model.positions": "alibi", "model.norm_bias": "true", "model.norm": "layer"}
    )  # fmt: skip
    assert (run.stack.name, run.stack.attention.kernel, run.stack.kernels.dropout) == (
        "megatron-core-2025",
        "math",
        True,
    )
    assert (run.model.positions, run.model.norm, run.model.norm_bias) == ("alibi", "layer", True)


def test_a_stated_model_is_that_preset_in_the_columns_sizes(tmp_path: Path) -> None:
    blank = dict.fromkeys(("n_layers", "d_model", "n_heads", "d_ff", "mlp_kind", "vocab"), "")
    assert (
        run_of(tmp_path, model="qwen2.5-32b", **blank).model.num_parameters == Model.load("qwen2.5-32b").num_parameters
    )
    assert run_of(tmp_path, model="qwen2.5-32b", **{**blank, "n_layers": "2"}).model.num_layers == 2
    with pytest.raises(ModelError, match="did you mean"):
        run_of(tmp_path, model="qwen2.5-23b")


def test_stated_micro_batches_cut_a_ranks_share(tmp_path: Path) -> None:
    run = run_of(tmp_path, num_micro_batches="2", micro_batch="")
    assert (run.plan.micro_batch_size, run.plan.num_micro_batches, run.micro_batches) == (2, 2, 2)


def test_machine_and_domain(tmp_path: Path) -> None:
    assert run_of(tmp_path, machine="gcp-a3-high").cluster.name == "gcp-a3-high"
    assert (
        run_of(
            tmp_path, gpu="GB200", n_gpus="128", global_batch="128", nvlink_domain_size="64"
        ).cluster.nvlink_domain_size
        == 64
    )


def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="reduce_dtype"):
        run_of(tmp_path, reduce_dtype="fp31")
    with pytest.raises(StackError, match="loss"):
        run_of(tmp_path, **{"stack.loss": "none"})
    with pytest.raises(StackError, match=r"torch-2\.6-eager"):
        run_of(tmp_path, stack="torch-2.6-eagre")


def test_an_excluded_row_says_why(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="offload: of activations") as caught:
        run_of(tmp_path, excluded="offload: of activations")
    assert caught.value.kind == "offload"


def test_an_unknown_column_costs_that_column_and_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, inter_allreducs_gbps="92.2", n_layer="3", **{"stack.lose": "x", "model.": "y"})
    report = backtest.run(read_measured(path))
    assert isinstance(report, backtest.BacktestReport)
    assert [o.status for o in report.outcomes] == ["ok"]
    named = report.as_json()["unread_columns"]
    assert [column.split("'")[1] for column in named] == ["inter_allreducs_gbps", "n_layer", "stack.lose", "model."]
    assert "did you mean n_layers" in named[1]
    assert "Column not read: 'inter_allreducs_gbps'" in _text(report)


def test_a_jobs_own_fabric_is_that_of_its_cluster(tmp_path: Path) -> None:
    cells = {"n_gpus": "32", "inter_allreduce_gbps": "92.2", "intra_allgather_gbps": "330"}
    measured = run_of(tmp_path, **cells).cluster.fabric.measured
    found = {(one.collective, one.nodes, one.size_bytes): one.bus_bytes_per_s for one in measured}
    assert found == {("all_reduce", 4, 2**28): 92.2e9, ("all_gather", 1, 2**28): 330e9}
    sized = run_of(tmp_path, **cells, fabric_message_bytes="67108864").cluster.fabric.measured
    assert {one.size_bytes for one in sized} == {2**26}
    alone = run_of(tmp_path, **{**cells, "n_gpus": "8"}).cluster.fabric.measured
    assert [one.collective for one in alone] == ["all_gather"]  # no group between nodes
    assert run_of(tmp_path, inter_allreduce_gbps="", fabric_message_bytes="").cluster.fabric.measured == ()
    waits = [run_of(tmp_path, fabric_call_rank_s=cell).cluster.fabric.call_rank_s for cell in ("", "0", "0.0003")]
    assert waits == [None, 0.0, 0.0003]


def test_the_version_of_nccl_is_text_and_changes_what_it_chooses(tmp_path: Path) -> None:
    for column in ("nccl_version", "stack.nccl.version"):
        run = run_of(tmp_path, **{column: "2.18"})
        assert run.stack.nccl.version == "2.18"
        assert run.stack.software().release == (2, 18)
    with pytest.raises(StackError, match="nccl"):
        run_of(tmp_path, nccl_version="newest")


def test_a_slow_fabric_of_the_jobs_own_makes_its_step_slow(tmp_path: Path) -> None:
    def step_s(**cells: str) -> float:
        (row,) = backtest.run(read_measured(table(tmp_path, n_gpus="32", **cells))).as_json()["rows"]  # type: ignore[union-attr]
        assert row["status"] == "ok", row
        return float(row["predicted_step_s"])

    slow, slower = step_s(inter_allgather_gbps="90"), step_s(inter_allgather_gbps="45")
    assert step_s() < slow < slower


def test_a_fabric_above_the_links_or_below_zero_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="more than the links can give"):
        run_of(tmp_path, n_gpus="32", inter_allgather_gbps="3200")
    (row,) = read_measured(table(tmp_path, inter_allgather_gbps="-3")).rows
    assert isinstance(row, BadRow)
    assert "inter_allgather_gbps" in row.faults[0].place


def test_an_unknown_memory_metric_costs_its_cell_and_is_named(tmp_path: Path) -> None:
    report = backtest.run(read_measured(table(tmp_path, mem_metric="peak_guessed_gib", mem_value="30")))
    assert isinstance(report, backtest.BacktestReport)
    (row,) = report.as_json()["rows"]
    assert (row["status"], row["measured_step_s"], row["mem_metric"]) == ("ok", 1.5, None)
    assert "peak_guessed_gib" in row["unread"][0]
    assert "peak_guessed_gib" in _text(report)


def test_a_row_that_measured_nothing_else_says_which_word_is_unknown(tmp_path: Path) -> None:
    cells = {"metric": "", "value": "", "mem_metric": "peak_guessed_gib", "mem_value": "30"}
    (row,) = read_measured(table(tmp_path, **cells)).rows
    assert isinstance(row, BadRow)
    assert "peak_guessed_gib" in str(row.faults[0])


def _text(report: backtest.BacktestReport) -> str:
    wide = Console(width=200, no_color=True)
    with wide.capture() as text:
        wide.print(backtest.render(report))
    return text.get()


@pytest.mark.parametrize(
    ("framework", "compiled", "stack"),
    [
        ("torchtitan (2024-04, FSDP2)", None, "torchtitan-2024-04"),
        ("torchtitan (FSDP2, 2024-12)", "n", "torchtitan-2024-eager"),
        ("torchtitan (FSDP2, 2024-12)", "y", "torchtitan-2024-compiled"),
        ("torchtitan", "y", "torchtitan-2025-compiled"),  # no version: the newest
        ("llm-foundry/Composer (PyTorch FSDP1)", "n", "llm-foundry-2023"),
        ("llm-foundry 2023-04", "n", "llm-foundry-2023-04"),
        ("llm-foundry", "y", "torch-2.4-compiled"),  # nobody described it compiled
        ("NeMo 24.09-24.12 (Megatron-Core)", None, "nemo-24"),
        ("NeMo 25.04 (Megatron-Core)", None, "megatron-core-2025"),
        ("Megatron-Bridge 26.02 NeMo Container", None, "megatron-bridge-2025"),
        ("Megatron-Bridge 0.4.2 / Core 0.17.1 (NeMo 26.04.01)", None, "megatron-bridge-package-2025"),
        ("Megatron-LM 2021", None, "megatron-2021"),
        ("megatron lm 2023", None, "megatron-lm-2023"),  # its own layers until Transformer Engine's became the default
        ("Megatron-LM core_r0.5", None, "megatron-lm-2023"),
        ("Megatron-LM (2024-09)", None, "nemo-24"),
        ("Megatron-Core 0.8", None, "nemo-24"),
        ("Megatron-Core 0.12", None, "megatron-core-2025"),
        ("Megatron-LM v2.5", None, "megatron-2021"),
        ("Megatron-LM v3.0", None, "megatron-2022"),
        ("Megatron-LM 23.08", None, "megatron-lm-2023"),
        ("Megatron-LM + TE 1.7 (2024-06)", None, "nemo-24"),  # a date before a release of something else
        ("NeMo 2.0", None, "nemo-24"),
        ("NeMo 2.3", None, "megatron-core-2025"),
        ("NeMo (2024-10)", None, "nemo-24"),
        ("NeMo", None, "megatron-core-2025"),
        ("Meta Lingua", None, "torch-2.4-compiled"),
        ("Megatron-LM 2 nodes", None, "megatron-core-2025"),  # no release
        ("Megatron-DeepSpeed 2022-03", None, "megatron-deepspeed-2022"),
        ("Megatron-DeepSpeed 2024", None, "megatron-lm-2023"),
        ("GPT-NeoX 2.0", None, "gpt-neox-2023"),
        ("GPT-NeoX 2024", None, "megatron-lm-2023"),
        ("torchtitan v0.2", "y", "torchtitan-2025-compiled"),  # of 2025, as 0.1 is
        ("llm-foundry 0.2", None, "llm-foundry-2023-04"),
        ("Composer 0.17", None, "llm-foundry-2023"),
        ("transformers 4.30", None, "transformers-2023"),
        ("transformers 4.44", None, "transformers-2024"),
        ("HuggingFace Trainer", None, "transformers-2024"),
        ("DeepSpeed 0.9", None, "transformers-2023"),
        ("DeepSpeed ZeRO-3", None, "deepspeed-0.14"),
        ("verl (FSDP)", None, "transformers-2024"),
        ("OpenRLHF", None, "transformers-2024"),
        ("verl (Megatron backend)", None, "megatron-core-2025"),
        ("ms-swift (Megatron)", None, "megatron-core-2025-exposed"),
        ("Megatron-FSDP 0.1", None, "megatron-core-2025"),
        ("PyTorch Lightning 2.1", None, "torch-2.6-eager"),
        ("OLMo-core", None, "olmo-core-2025"),  # its recipes compile
        ("nanoGPT", None, "nanogpt-2023"),
        ("nanoGPT", "n", "torch-2.4-eager"),
        ("llm.c", None, "llm.c-2024"),
        ("BMTrain 0.2.3", None, "bmtrain-2023"),
        ("OPT (metaseq)", None, "metaseq-2022"),
        ("fairseq, FairScale FSDP", None, "metaseq-2022"),
        ("Alpa", None, "alpa-2022"),
        ("EasyLM", None, "jax-2023"),
        ("PaddleNLP 2.8", None, "paddlenlp-2024"),
        ("Primus (ROCm)", None, "megatron-core-2025"),
        ("LitGPT (Lightning Fabric)", None, "torchtitan-2024-compiled"),  # it compiles unless told otherwise
        ("LitGPT", "n", "litgpt-2024"),
        ("lit-gpt fork, PyTorch FSDP", None, "llm-lit"),
        ("Levanter (JAX)", None, "maxtext-2024"),
        ("somebody's trainer", None, "torch-2.4-eager"),
        ("somebody's trainer", "y", "torch-2.4-compiled"),
        ("somebody's trainer (torch 2.10)", None, "torch-2.11-eager"),
        ("somebody's trainer on PyTorch v2.9.1", "y", "torch-2.11-compiled"),
        ("somebody's trainer on PyTorch 1.13", None, "torch-2.4-eager"),
        ("somebody's trainer (JAX/XLA)", None, "xla-2024"),
        ("", None, "torch-2.4-eager"),
    ],
)
def test_a_stack_is_found_by_the_public_name_and_version_of_its_software(
    framework: str, compiled: Any, stack: str
) -> None:
    assert Stack.described_as(framework, compiled)[0] == stack


@pytest.mark.parametrize(
    ("columns", "stack"),
    [
        ({"precision": "fp8", "zero_or_fsdp": "zero1"}, "fused-2025"),  # Transformer Engine's products
        ({"precision": "fp8_mx", "zero_or_fsdp": "fsdp_full"}, "torch-2.4-compiled"),  # torchao's
        ({"tp": "2", "zero_or_fsdp": "zero1"}, "fused-2025"),
        ({"pp": "2", "zero_or_fsdp": "ddp"}, "fused-2025"),
        ({"cp": "2", "zero_or_fsdp": "zero1"}, "fused-2025"),
        ({"ep": "2", "n_experts": "4", "top_k": "2", "zero_or_fsdp": "zero1"}, "fused-2025"),
        ({"data_parallel": "megatron", "zero_or_fsdp": "ddp"}, "fused-2025"),
        ({"cp": "2", "zero_or_fsdp": "zero3"}, "torch-2.4-eager"),  # sequences split beside shards
        ({"tp": "2", "zero_or_fsdp": "fsdp_full"}, "torch-2.4-eager"),
        ({"tp": "2", "zero_or_fsdp": "zero3"}, "torch-2.4-eager"),
        ({"tp": "2", "zero_or_fsdp": "zero1", "compile": "y"}, "torch-2.4-compiled"),
        ({"framework": "somebody's under torch.compile"}, "torch-2.4-compiled"),
        ({"framework": "somebody's (compiled)"}, "torch-2.4-compiled"),
        ({"framework": "somebody's", "notes": "compile time 40 s"}, "torch-2.4-eager"),
        ({"framework": "somebody's", "notes": "no torch.compile"}, "torch-2.4-eager"),
        ({"framework": "somebody's with Transformer Engine 2.1"}, "fused-2025"),
        ({"tp": "2", "zero_or_fsdp": "zero1", "flash_attn": "n"}, "fused-2022"),  # before tiled kernels
        ({"tp": "2", "zero_or_fsdp": "zero1", "flash_attn": "", "precision": "fp16"}, "fused-2022"),
        ({"tp": "2", "zero_or_fsdp": "zero1", "flash_attn": "y", "precision": "fp16"}, "fused-2025"),
        ({"pp": "2", "zero_or_fsdp": "ddp", "flash_attn": "", "gpu": "V100-32GB"}, "fused-2022"),
        ({"precision": "fp8", "framework": "torchtitan 2025-06"}, "torchtitan-2025-eager"),  # a described one stays
    ],
)
def test_software_that_no_file_names_runs_on_the_generic_stack_of_what_its_runs_show(
    tmp_path: Path, columns: dict[str, str], stack: str
) -> None:
    run = run_of(tmp_path, **{"framework": "somebody's trainer", "stack": "", **columns})
    assert run.stack.name == stack


@pytest.mark.parametrize(
    ("framework", "known"),
    [("MaxText (JAX/XLA)", "described"), ("somebody's trainer on JAX", "unknown"), ("torchtitan", "described")],
)
def test_a_family_of_programs_is_no_description_of_one(tmp_path: Path, framework: str, known: str) -> None:
    assert run_of(tmp_path, framework=framework, stack="").stack.known == known


@pytest.mark.parametrize(
    ("framework", "columns", "kernel"),
    [
        ("somebody's trainer", {}, "flash2"),
        ("somebody's trainer on PyTorch 1.13", {}, "math"),  # no tiled kernel of its own before 2.0
        ("somebody's trainer on PyTorch 1.13 and FlashAttention", {}, "flash2"),
        ("somebody's trainer", {"notes": "without flash-attention"}, "math"),
        ("somebody's trainer without flash attention", {"flash_attn": "y"}, "flash2"),  # the column holds
    ],
)
def test_words_fill_a_blank_attention(tmp_path: Path, framework: str, columns: dict[str, str], kernel: str) -> None:
    run = run_of(tmp_path, **{"framework": framework, "stack": "", "flash_attn": "", **columns})
    assert run.stack.attention.kernel == kernel


def test_every_default_is_a_column_or_a_key_and_every_generic_stack_stands_once(tmp_path: Path) -> None:
    entries = [(name, entry) for name in Stack.names() for entry in Stack.load(name).describes]
    assert sorted(name for name, entry in entries if not entry.software) == [
        "fused-2022",
        "fused-2025",
        "torch-2.11-compiled",
        "torch-2.11-eager",
        "torch-2.4-compiled",
        "torch-2.4-eager",
    ]
    for name, entry in entries:
        columns = {
            column_of(key): (value[0] if isinstance(value, list) else str(value))
            for key, value in entry.defaults.items()
            if key != "mem_metric_detail"  # a table has it in parentheses behind mem_metric
        }
        assert read_measured(table(tmp_path, **columns)).unread == (), name
        assert run_of(tmp_path, stack=name, zero_or_fsdp="", act_ckpt="").stack.name == name


def test_defaults_that_are_no_column_and_no_key_are_named(tmp_path: Path) -> None:
    text, file = (TOPOLOGIES / "stacks" / "fms-fsdp-2024.toml").read_text(), tmp_path / "own.toml"
    wrong = '"offload.x" = 3, micro_batchs = 2, "stack.attention.kernal" = "math", "plan.offload.y" = 1'
    file.write_text(text.replace("micro_batch = 2", wrong))
    with pytest.raises(StackError) as caught:
        Stack.load(str(file))
    assert re.findall(r"defaults: (\S+) is no column", str(caught.value)) == [
        "offload.x", "micro_batchs", "stack.attention.kernal", "plan.offload.y",
    ]  # fmt: skip
    right = '"plan.offload.optimizer" = "cpu", "stack.attention.kernel" = "math", "model.norm" = "layernorm", tp = 2'
    file.write_text(text.replace("micro_batch = 2", right))
    assert Stack.load(str(file)).describes[0].defaults["tp"] == 2


def test_a_field_has_one_spelling_and_one_column(tmp_path: Path) -> None:
    nested, flat = (read(tmp_path, **{name: "1f1b"}).of("plan") for name in ("pipeline.schedule", "schedule"))
    assert nested == flat == {"schedule": "1f1b"}
    two = {"schedule": "1f1b", "pipeline.schedule": "gpipe", "reduce_dtype": "fp32", "precision.reduce": "fp32"}
    with pytest.raises(TableError, match=r"(?s)2 faults.*schedule and pipeline\.schedule are one field.*reduce_dtype"):
        read(tmp_path, **two)


def test_what_documents_leave_open_is_filled_in_every_way(tmp_path: Path) -> None:
    row = read(tmp_path, framework="MaxText", act_ckpt="")
    assert [way.act_ckpt for way in filled_rows(row)] == ["selective", "full"]
    blank = replace(row, framework="somebody's", zero_or_fsdp="")
    assert [(way.zero_or_fsdp, way.act_ckpt) for way in filled_rows(blank)] == [
        ("ddp", "none"), ("ddp", "full"), ("fsdp_full", "none"), ("fsdp_full", "full"),
    ]  # fmt: skip


def test_whose_implementation_plays_a_word(tmp_path: Path) -> None:
    def player(framework: str, word: str) -> str | None:
        return run_of(tmp_path, framework=framework, zero_or_fsdp=word).plan.data_parallel

    assert player("torchtitan 2025", "fsdp_full") == "fsdp2"
    assert player("PyTorch FSDP", "") == "fsdp1"
    assert player("NeMo 25.04", "") == "megatron"
    assert (player("accelerate", "zero3"), player("accelerate", "fsdp_full")) == ("deepspeed", "fsdp1")


def test_selective_recomputation_of_attention_is_what_a_tiled_kernel_does_anyway(tmp_path: Path) -> None:
    cells = {"framework": "NeMo 24.07", "act_ckpt": "selective"}
    assert run_of(tmp_path, **cells, flash_attn="y").plan.recompute.mode == "none"
    assert run_of(tmp_path, **cells, flash_attn="n").plan.recompute.mode == "selective"


@pytest.mark.parametrize(
    ("framework", "cells", "micro_batch", "count"),
    [
        ("torchtitan 2024-12", {"pp": "4", "micro_batch": "16"}, 4, 4),  # as many micro-batches as stages
        ("torchtitan 2024-12", {"pp": "4", "micro_batch": ""}, 4, 4),
        ("torchtitan 2025-06", {"pp": "4", "micro_batch": "16"}, 1, 16),  # one a sequence
        ("torchtitan 2024-12", {"pp": "4", "micro_batch": "2"}, 2, 8),  # stated: a rank's 16 sequences are cut already
        ("torchtitan 2024-12", {"pp": "4", "num_micro_batches": "8", "micro_batch": ""}, 2, 8),
        ("torchtitan 2024-12", {"pp": "1", "micro_batch": "4", "dp": "8"}, 4, 1),  # no pipeline cuts it
        ("Megatron-LM", {"pp": "4", "micro_batch": "16", "zero_or_fsdp": "zero1"}, 16, 1),
    ],
)
def test_pipelines_cut_a_ranks_batch_as_their_software_does(
    tmp_path: Path, framework: str, cells: dict[str, str], micro_batch: int, count: int
) -> None:
    """Eight GPUs read 32 sequences a step: 16 for each of the two replicas of four stages."""
    plan = run_of(tmp_path, framework=framework, **cells).plan
    assert (plan.micro_batch_size, plan.num_micro_batches) == (micro_batch, count)


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("Lightning (FSDP strategy)", {"fsdp_full"}),
        ("DeepSpeed ZeRO-2 on our models", {"zero2"}),
        ("ZeRO++", {"zero3"}),
        ("a loop with torch's DDP", {"ddp"}),
        ("a loop, DDP or ZeRO-2", {"ddp", "fsdp_full"}),  # which of the two is not said
        ("a loop", {"ddp", "fsdp_full"}),
    ],
)
def test_a_framework_names_its_data_parallelism(tmp_path: Path, framework: str, words: set[str]) -> None:
    silent = read(tmp_path, framework=f'"{framework}"', zero_or_fsdp="")
    assert {way.zero_or_fsdp for way in filled_rows(silent)} == words
    stated = read(tmp_path, framework=f'"{framework}"', zero_or_fsdp="hsdp")
    assert {way.zero_or_fsdp for way in filled_rows(stated)} == {"hsdp"}


def test_ranks_that_split_tokens_share_shards_too(tmp_path: Path) -> None:
    """All eight GPUs hold parts of the same sequences: there is one rank of data parallelism, and yet something to shard over."""
    row = read(tmp_path, cp="8", global_batch="4", zero_or_fsdp="", framework="PyTorch loop")
    assert [way.zero_or_fsdp for way in filled_rows(row)] == ["zero1", "fsdp_full"]
    assert len(filled_rows(replace(row, cp=1, n_gpus=1))) == 1


def test_experts_on_other_ranks_under_programs_whose_own_data_parallelism_has_none(tmp_path: Path) -> None:
    experts = {"n_experts": "8", "top_k": "2", "ep": "8", "zero_or_fsdp": "ddp"}
    run = run_of(tmp_path, framework="fairseq with Tutel", **experts)
    assert (run.plan.data_parallel, run.plan.zero, run.plan.ep) == ("deepspeed", 0, 8)
    assert run_of(tmp_path, framework="Megatron-LM", **experts).plan.data_parallel == "megatron"
    assert run_of(tmp_path, framework="fairseq", zero_or_fsdp="ddp").plan.data_parallel == "ddp"


@pytest.mark.parametrize(
    ("word", "recipe"), [("fp8_mx", "mxfp8"), ("FP8 blockwise", "blockwise"), ("float8 (rowwise)", "rowwise")]
)
def test_how_fp8_is_scaled_may_stand_in_the_precision(tmp_path: Path, word: str, recipe: str) -> None:
    plan = run_of(tmp_path, gpu="B200", precision=word, framework="torchtitan", compile="y").plan
    assert (plan.precision.compute, plan.precision.fp8_recipe) == ("fp8", recipe)


def test_where_nothing_fits_the_way_that_needs_least_is_predicted(tmp_path: Path) -> None:
    """Of 7B's 107 GB of states on one GPU of 80 GB: not four sequences at once; and recomputed or not, as nobody says."""
    big = {
        "n_layers": "32",
        "d_model": "4096",
        "n_heads": "32",
        "d_ff": "11008",
        "n_gpus": "1",
        "micro_batch": "",
        "value": "999",
    }
    outcome = evaluate_row(read(tmp_path, framework="Megatron-LM", act_ckpt="", **big))
    assert outcome.fits is False
    assert "micro_batch 1, which the row does not state" in outcome.open
    small = {
        **big,
        "n_layers": "12",
        "seq_len": "32768",
    }  # 45 GB of states; keeping all of one sequence takes more than the rest
    outcome = evaluate_row(read(tmp_path, framework="Megatron-LM", act_ckpt="", **small))
    assert outcome.fits is None
    assert outcome.open.endswith("too much with none, fits with full")
