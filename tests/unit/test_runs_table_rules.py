"""Rows of a table -> model, plan, cluster and stack, by written rules; expected values from the tables' own sources."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_table.frameworks import FRAMEWORKS, framework_rule
from runs_table.meaning import Run, resolve, variants_of

from simulator.base.errors import ClusterError, StackError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.parallel.model_shard import shard_of
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import resolve as by_columns
from simulator.studies.backtest.work import measured_step_s

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "experiments" / "measured" / "runs.csv.gz"

ROW = RunRow(
    line=2,
    id="row",
    framework="PyTorch",
    model_name="llama-like",
    n_layers=4,
    d_model=1024,
    n_heads=8,
    d_ff=4096,
    mlp_kind="swiglu",
    vocab=32000,
    seq_len=2048,
    gpu="A100-80GB",
    n_gpus=16,
    gpus_per_node=8,
    tp=1,
    pp=1,
    zero_or_fsdp="fsdp_full",
    micro_batch=2,
    global_batch=128,
    precision="bf16",
    act_ckpt="none",
    metric="step_time_s",
    value=1.0,
)


def plan_of(**changes: Any) -> dict[str, Any]:
    return resolve(replace(ROW, **changes)).plan.model_dump()


def kinds(**changes: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        resolve(replace(ROW, **changes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("framework", "notes", "compiled", "stack"),
    [
        ("llm-foundry/Composer (PyTorch FSDP1)", "", "n", "llm-foundry-2023"),
        (
            "llm-foundry/Composer (PyTorch FSDP1)",
            "composer precision=amp_bf16, FSDP mixed_precision=DEFAULT",
            "n",
            "llm-foundry-2023",
        ),
        (
            "llm-foundry/Composer (PyTorch FSDP1)",
            "grad_accum=4; composer precision=bf16, FSDP mixed_precision=PURE",
            "n",
            "llm-foundry-2023-04",
        ),
        ("torchtitan (2024-04, FSDP2)", "", None, "torchtitan-2024-04"),
        ("torchtitan (FSDP2, 2024-12)", "", "n", "torchtitan-2024-eager"),
        ("torchtitan (FSDP2, 2024-12)", "", "y", "torchtitan-2024-compiled"),
        ("torchtitan (2025-06)", "", "y", "torchtitan-2025-compiled"),
        ("NeMo 24.09-24.12 (Megatron-Core)", "", None, "nemo-24"),
        ("NeMo 25.04 (Megatron-Core)", "", None, "megatron-core-2025"),
        ("Megatron-Bridge 26.02 NeMo Container", "", None, "megatron-bridge-2025"),
        ("Megatron-LM 23e00ed + TE 2.11", "NO comm overlap (…)", "n", "megatron-core-2025-exposed"),
        ("Megatron-LM (Selene)", "", "n", "megatron-2021"),
        ("Megatron-LM (Selene)", "transcription of arXiv 2205.05198 Table 5", "n", "megatron-2022"),
        ("Megatron-style GPT (…)", "", "n", "megatron-deepspeed-2022"),
        ("Megatron-DeepSpeed", "", "n", "megatron-deepspeed-2022"),
        ("Megatron-DeepSpeed", "CUDA_LAUNCH_BLOCKING may be 1", "n", "megatron-deepspeed-2022-blocking"),
        ("InternEvo", "", None, "internevo-2023"),
        ("MaxText (JAX/XLA)", "", None, "maxtext-2024"),
        ("lit-gpt fork, PyTorch FSDP", "", None, "llm-lit"),
        ("DeepSpeed 0.14", "", None, "deepspeed-0.14"),
        ("nanotron", "", None, "nanotron-2025"),
        ("GPT-NeoX (DeeperSpeed)", "", None, "gpt-neox-2023"),
        ("Colossal-AI 0.3 (Gemini)", "", None, "colossalai-2024"),
        ("torchtune 0.4", "", None, "torchtune-2024"),
        ("IBM fms-fsdp", "", None, "fms-fsdp-2024"),
        ("OLMo", "", None, "olmo-2024"),
        ("OLMo-core", "", None, "torchtitan-2025-eager"),
        ("LitGPT (Lightning Fabric)", "", "n", "litgpt-2024"),
        ("ms-swift (DeepSpeed ZeRO-3)", "", None, "transformers-2024"),
        ("Megatron-SWIFT", "", None, "megatron-core-2025-exposed"),
        ("HF Trainer + accelerate", "", None, "transformers-2024"),
        ("Levanter (JAX)", "", None, "maxtext-2024"),
        ("Meta internal (PyTorch)", "", None, "torch-2.6-eager"),
        ("somebody's trainer", "", None, "torch-2.6-eager"),
        ("somebody's trainer", "", "y", "torch-2.11-compiled"),
    ],
)
def test_the_framework_and_the_compile_column_choose_the_stack(
    framework: str, notes: str, compiled: Any, stack: str
) -> None:
    row = replace(ROW, framework=framework, notes=notes, compile=compiled)
    assert framework_rule(row).stack(row) == stack


def test_runs_of_one_node_in_megatrons_style_are_timed_layer_by_layer_and_recompute_nothing() -> None:
    row = replace(ROW, framework="Megatron-style GPT (…)", zero_or_fsdp="ddp", act_ckpt="full", precision="fp16")
    one, several = resolve(replace(row, n_gpus=8)), resolve(row)
    assert (one.stack.name, one.plan.recompute.mode) == ("megatron-style-2023-by-layer", "none")
    assert (several.stack.name, several.plan.recompute.mode) == ("megatron-deepspeed-2022", "full")


def test_every_rule_names_stacks_that_ship_and_every_stack_sources_its_choices() -> None:
    named = {stack for rule in FRAMEWORKS for stack in (rule.eager, rule.compiled)}
    assert named <= set(Stack.names())
    for name in Stack.names():
        stack = Stack.load(name)
        assert stack.name == name
        assert "attention" in stack.sources


def test_an_unknown_stack_is_told_the_nearest_and_a_bad_file_all_its_faults(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"torch-2.6-eager"):
        Stack.load("torch-2.6-eagre")
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nframework = "x"\ndate = "2024"\nblocks = "fast"\nhost_launch_s = 3\n[attention]\nkernel = "flash9"\n'
    )
    with pytest.raises(StackError) as caught:
        Stack.load(file)
    assert {str(fault).split(": ")[1] for fault in caught.value.faults} == {
        "blocks",
        "host_launch_s",
        "attention.kernel",
    }


def test_a_coefficient_without_a_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nframework = "x"\ndate = "2024"\nblocks = "eager"\ngemm_factor = { ampere = 0.9 }\n'
        'calibration_runs = ["a", "b", "c", "d", "e", "f", "g"]\n[attention]\nkernel = "flash2"\n'
    )
    with pytest.raises(StackError, match=r"gemm_factor is set, and `sources`.*at most 6"):
        Stack.load(file)


@pytest.mark.parametrize(
    ("word", "zero", "shard", "replicate"),
    [
        ("fsdp_full", 3, 16, 1),
        ("zero3", 3, 16, 1),
        ("fsdp_grad_op", 2, 16, 1),
        ("zero2", 2, 16, 1),
        ("zero1", 1, 16, 1),
        ("zero1_intragroup4", 1, 4, 4),
        ("hsdp", 3, 8, 2),
        ("ddp", 0, 1, 16),
    ],
)
def test_sharding_words(word: str, zero: int, shard: int, replicate: int) -> None:
    plan = plan_of(zero_or_fsdp=word)
    assert (plan["zero"], plan["dp_shard"], plan["dp_replicate"]) == (zero, shard, replicate)


def test_the_framework_says_whose_implementation_runs() -> None:
    foundry = {"framework": "llm-foundry", "model_name": "mpt-x", "mlp_kind": "gelu"}
    assert plan_of(**foundry)["data_parallel"] == "fsdp1"
    assert plan_of(framework="torchtitan (2025)")["data_parallel"] == "fsdp2"
    assert plan_of(framework="NeMo 24.07", zero_or_fsdp="")["data_parallel"] == "megatron"
    assert plan_of(framework="Megatron-DeepSpeed", zero_or_fsdp="zero1")["data_parallel"] == "deepspeed"


def test_micro_batches_fill_the_global_batch() -> None:
    assert plan_of()["num_micro_batches"] == 4  # 128 sequences / 16 ranks / 2
    run = resolve(replace(ROW, global_batch=112))  # 7 sequences a rank: three full micro-batches and a half
    assert (run.plan.num_micro_batches, run.micro_batches, run.time_factor) == (4, 3.5, 3.5 / 4)
    run = resolve(replace(ROW, micro_batch=8, global_batch=64))  # 4 sequences a rank, fewer than a micro-batch
    assert (run.plan.micro_batch_size, run.plan.num_micro_batches, run.time_factor) == (4, 1, 1.0)


def test_context_parallel_ranks_share_sequences() -> None:
    plan = plan_of(cp=2, dp=8)
    assert (plan["cp"], plan["dp_shard"], plan["num_micro_batches"]) == (2, 8, 8)


def test_recompute_words() -> None:
    assert plan_of(act_ckpt="full")["recompute"] == "full"
    assert plan_of(act_ckpt="selective")["recompute"] == "selective"
    every = plan_of(act_ckpt="selective", notes="AC=selective layer; …")
    assert (every["recompute"], every["recompute_every"]) == ("every_k", 2)
    assert plan_of(framework="NeMo 24", act_ckpt="selective", flash_attn="y")["recompute"] == "none"


def test_reduce_dtype_follows_the_notes() -> None:
    assert plan_of(notes="FSDP mixed_precision=PURE; …")["reduce_dtype"] == "bf16"
    composer = "llm-foundry/Composer (PyTorch FSDP1)"
    later, earlier = (
        "composer precision=amp_bf16, FSDP mixed_precision=DEFAULT",
        "composer precision=bf16, FSDP mixed_precision=",
    )
    assert plan_of(framework=composer, notes=later)["reduce_dtype"] == "fp32"
    assert plan_of(framework=composer, notes=earlier + "PURE")["reduce_dtype"] == "bf16"
    assert plan_of(framework=composer, notes=earlier + "DEFAULT")["reduce_dtype"] == "bf16"
    assert plan_of()["reduce_dtype"] is None


def test_what_a_framework_documents_fills_a_blank() -> None:
    tune = resolve(replace(ROW, framework="torchtune", zero_or_fsdp="", act_ckpt="", micro_batch=None))
    assert (tune.plan.recompute.mode, tune.plan.zero, tune.plan.micro_batch_size) == ("full", 3, 2)
    assert (tune.plan.precision.master, tune.plan.optimizer.dtype, tune.plan.precision.reduce) == (
        "bf16",
        "bf16",
        "bf16",
    )
    ibm = plan_of(framework="fms-fsdp", zero_or_fsdp="", act_ckpt="")
    assert (ibm["data_parallel"], ibm["dp_shard"], ibm["dp_replicate"], ibm["recompute"]) == ("fsdp1", 8, 2, "none")
    swift = plan_of(framework="ms-swift", zero_or_fsdp="zero3", micro_batch=None, global_batch=None, n_gpus=8)
    assert (swift["data_parallel"], swift["micro_batch_size"], swift["num_micro_batches"]) == ("deepspeed", 1, 2)
    assert plan_of(framework="ms-swift", zero_or_fsdp="fsdp_full")["data_parallel"] == "fsdp1"


def test_attention_is_what_the_row_states() -> None:
    def kernel(framework: str, flash: Any) -> str:
        return resolve(replace(ROW, framework=framework, flash_attn=flash, zero_or_fsdp="zero1")).stack.attention.kernel

    assert [kernel("PyTorch", flash) for flash in (None, "y", "n")] == ["flash2", "flash2", "math"]
    assert [kernel("GPT-NeoX", flash) for flash in (None, "y", "n")] == ["math", "flash2", "math"]


def test_a_kernel_that_nobody_measured_there_is_flash_attention_2() -> None:
    """InternEvo's own speeds are of Ampere, the Triton kernel of 2022 has curves of some GPUs."""

    def kernel(**changes: Any) -> str:
        return resolve(replace(ROW, **changes)).stack.attention.kernel

    assert [kernel(framework="InternEvo", gpu=gpu) for gpu in ("A800", "H800", "L40S")] == [
        "flash1",
        "flash2",
        "flash2",
    ]
    mpt = {"framework": "llm-foundry", "model_name": "mpt-x", "mlp_kind": "gelu"}
    assert [kernel(**mpt, gpu=gpu) for gpu in ("A100-40GB", "V100")] == ["flash1_triton", "flash2"]


def test_what_nobody_says_is_filled_in_every_way() -> None:
    """Data parallel or sharded, kept or recomputed; less first."""
    blank = replace(ROW, zero_or_fsdp="", act_ckpt="")
    assert [(way.zero_or_fsdp, way.act_ckpt) for way in variants_of(blank)] == [
        ("ddp", "none"), ("ddp", "full"), ("fsdp_full", "none"), ("fsdp_full", "full"),
    ]  # fmt: skip
    assert len(variants_of(ROW)) == 1
    assert [way.micro_batch for way in variants_of(replace(ROW, micro_batch=None))] == [1, 2, 4]  # a share of 8
    assert [way.micro_batch for way in variants_of(replace(ROW, micro_batch=None, global_batch=64))] == [4, 1]
    assert variants_of(replace(ROW, global_batch=None))[0].global_batch == 2 * 16
    assert variants_of(replace(ROW, n_gpus=None, dp=8, tp=2))[0].n_gpus == 16


def test_torchtitan_cuts_a_ranks_batch_for_its_pipeline() -> None:
    """Of 16 GPUs in 4 stages, four ranks have 32 sequences each."""
    row = replace(ROW, n_layers=16, pp=4, micro_batch=32, global_batch=128)

    def micro_batches(framework: str, **changes: Any) -> tuple[int, int, int]:
        plan = resolve(replace(row, framework=framework, **changes)).plan
        return plan.micro_batch_size, plan.num_micro_batches, plan.pipeline.virtual_stages

    assert micro_batches("torchtitan (FSDP2, 2024-12)") == (8, 4, 1)
    assert micro_batches("torchtitan (2025-06)", notes="Interleaved 1F1B") == (1, 32, 2)
    assert micro_batches("torchtitan (2025-06)", micro_batch=2, notes="1F1B non-interleaved") == (2, 16, 1)
    assert micro_batches("somebody's") == (32, 1, 1)


def test_maxtexts_policies_are_in_the_notes() -> None:
    row = replace(ROW, framework="MaxText (JAX/XLA)", act_ckpt="")

    def ways(**changes: Any) -> list[str]:
        return [resolve(way).plan.recompute.mode for way in variants_of(replace(row, **changes))]

    assert ways(notes="attention cudnn_flash_te, remat_policy minimal_with_context") == ["selective"]
    assert ways(notes="remat_policy=save_qkv_proj") == ["full"]
    assert ways() == ways(act_ckpt="selective") == ["selective", "full"]
    assert ways(act_ckpt="full") == ["full"]


def test_networks() -> None:
    def network(**changes: Any) -> float:
        return resolve(replace(ROW, **changes)).cluster.node_bytes_per_s

    assert network(inter_link_gbps_per_node=400.0) == pytest.approx(50e9)
    assert network(gpu="H100-80GB-SXM", notes='results" A3 VMs (h100-80gb-8)') == pytest.approx(100e9)
    assert network(gpu="A100-80GB-SXM", notes="Jean Zay A100 nodes") == pytest.approx(50e9)


def test_links_and_machines_that_a_row_names() -> None:
    def cluster(**changes: Any) -> Any:
        return resolve(replace(ROW, **changes)).cluster

    assert cluster(notes="forced balanced routing; EFA; mock data").name == "aws-p4de"
    assert cluster(gpu="H100", notes="p5.48xlarge 32x EFA/node").inter.kind == "efa"
    assert cluster(intra_link="PCIe 4.0").intra.kind == "pcie4"
    assert cluster(gpu="H100", intra_link="PCIe").intra.kind == "pcie5"
    assert cluster(intra_link="NVLink, host PCIe").intra.kind == "nvlink3"


def test_how_experts_are_reached_and_what_is_offloaded_are_in_the_notes() -> None:
    mixture = {"framework": "Megatron-Bridge", "n_experts": 8, "top_k": 2, "ep": 2, "zero_or_fsdp": "", "tp": 2}
    assert plan_of(**mixture, notes="dispatcher=DeepEP(UCCL); ETP=2")["dispatcher"] == "deep_ep"
    assert plan_of(**mixture, notes="dispatcher=alltoall; ETP2")["etp"] == 2
    deepspeed = {"framework": "DeepSpeed", "zero_or_fsdp": "zero3"}
    assert plan_of(**deepspeed, notes="ZeRO-Offload")["offload"]["optimizer"] == "host"
    assert plan_of(**deepspeed, notes="offload_optimizer and offload_param")["offload"]["parameters"] == "host"
    assert plan_of(**deepspeed, notes="no offload; cpu_offload=false")["offload"]["optimizer"] == "none"
    assert "offload" in kinds(framework="torchtitan", notes="CPU offload")


def test_what_a_plan_cannot_say_is_refused_with_every_reason() -> None:
    text = kinds(ep=4, dp=4, notes="offload_activations=1")
    for reason in ("without experts", "offload"):
        assert reason in text


@pytest.mark.parametrize(
    ("precision", "notes", "expected"),
    [
        ("fp8", "precision label FP8-CS", ("fp8", "tensorwise")),
        ("fp8", "precision label FP8-SC", ("fp8", "blockwise")),
        ("fp8", "FP8 blockwise", ("fp8", "blockwise")),
        ("fp8", "FP8_DS", ("fp8", "delayed")),
        ("fp8", "", ("fp8", None)),
        ("fp8_mx", "", ("fp8", "mxfp8")),
        ("nvfp4", "", ("nvfp4", None)),
        ("bf16", "blockwise", ("bf16", None)),
    ],
)
def test_the_notes_say_how_narrow_products_are_scaled(
    precision: str, notes: str, expected: tuple[str, str | None]
) -> None:
    plan = plan_of(precision=precision, notes=notes, gpu="B200", framework="Megatron-Core")
    assert (plan["precision"], plan["fp8_recipe"]) == expected


def test_exchanges_beside_another_micro_batch_and_asynchronous_tensor_parallelism_are_in_the_notes() -> None:
    mixture = {"framework": "Megatron-Bridge", "n_experts": 8, "top_k": 2, "ep": 4, "zero_or_fsdp": "", "pp": 2}
    overlapped = plan_of(**mixture, notes="dispatcher=alltoall; MoE A2A overlap=on")
    assert (overlapped["expert_overlap"], overlapped["virtual_stages"]) == (True, 2)
    assert plan_of(**mixture, notes="MoE A2A overlap=off")["expert_overlap"] is False
    titan = replace(ROW, framework="torchtitan (2025-06)", compile="y", tp=4, seq_parallel="y", precision="fp8")
    plain, pieces = (resolve(replace(titan, notes=notes)) for notes in ("", "async TP; quant=fp8-rowwise"))
    assert (plain.stack.overlap.tp, pieces.stack.overlap.tp) == ("none", "symmetric_memory")
    assert (plain.plan.precision.fp8_recipe, pieces.plan.precision.fp8_recipe) == (None, "rowwise")


def test_blanks_without_a_rule_are_refused_together() -> None:
    assert "vocab, seq_len, global_batch blank" in kinds(vocab=None, seq_len=None, global_batch=None, pp=2)


@pytest.mark.parametrize(
    ("model_name", "notes", "vocab"),
    [
        ("gpt3-175b", "", 50_257),  # GPT-2's byte pairs
        ("gpt3-175b", "vocab ~250k multilingual", 250_000),  # the notes know better
        ("nemotron-340b", "", 256_000),  # arXiv 2402.16819
        ("llama3.1-8b", "", 128_256),
    ],
)
def test_a_blank_vocabulary_is_the_notes_or_the_familys(model_name: str, notes: str, vocab: int) -> None:
    changes: dict[str, Any] = {"model_name": model_name, "notes": notes, "mlp_kind": "gelu"}
    assert resolve(replace(ROW, vocab=None, **changes)).model.vocab_size == vocab
    assert resolve(replace(ROW, **changes)).model.vocab_size == ROW.vocab  # a stated one stays


def test_blank_sizes_are_the_published_models_where_its_width_agrees() -> None:
    blank: dict[str, Any] = {
        "n_layers": None,
        "d_model": None,
        "n_heads": None,
        "d_ff": None,
        "mlp_kind": "",
        "vocab": None,
    }
    llama = resolve(replace(ROW, model_name="meta-llama/Meta-Llama-3-70B", **blank)).model
    assert llama.num_parameters == Model.load("llama3-70b").num_parameters
    short = resolve(replace(ROW, model_name="llama3-70b-4layers", **{**blank, "n_layers": 4})).model
    assert (short.num_layers, short.num_kv_heads, short.vocab_size) == (4, 8, 128_256)
    other = replace(ROW, model_name="llama3-70b", n_kv_heads=None)  # as wide as something else
    assert resolve(other).model.num_kv_heads == ROW.n_heads
    assert "n_layers, d_model, n_heads, d_ff, mlp_kind, vocab blank" in kinds(model_name="our-70b", **blank)


def test_a_published_models_structure_is_its_own() -> None:
    """GPT-NeoX-20B is no GPT-3: rotary positions, two branches, an untied head."""
    sizes: dict[str, Any] = {"n_layers": 44, "d_model": 6144, "n_heads": 64, "d_ff": 24576, "vocab": 50_432}
    neox = resolve(replace(ROW, model_name="gpt-neox-20b", mlp_kind="gelu", **sizes)).model
    assert neox.num_parameters == Model.load("gpt-neox-20b").num_parameters
    assert (neox.parallel_residual, neox.positions, neox.tied_embeddings) == (True, "rope", False)
    small = resolve(replace(ROW, model_name="llama3.2-1b", d_model=2048, n_heads=32, vocab=None)).model
    assert small.tied_embeddings


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [
        # layers, width, heads, MLP, activation, vocabulary; None: the family's. Counts of the models' pages
        ("HuggingFaceTB/SmolLM-1.7B", (24, 2048, 32, 8192, "swiglu", None), 1_711_376_384),
        ("EleutherAI/pythia-70m", (6, 512, 8, 2048, "", 50_304), 70_426_624),
        ("bigscience/bloom-1b1", (24, 1536, 16, 6144, "", None), 1_065_314_304),
    ],
)
def test_a_family_without_a_preset_of_that_size(name: str, sizes: tuple[Any, ...], published: int) -> None:
    columns = dict(zip(("n_layers", "d_model", "n_heads", "d_ff", "mlp_kind", "vocab"), sizes, strict=True))
    model = resolve(replace(ROW, model_name=name, **columns)).model
    assert model.num_parameters == published


def test_owners_and_dashes_do_not_hide_a_family() -> None:
    assert resolve(replace(ROW, model_name="Qwen/Qwen-3-9B")).model.qk_norm
    assert resolve(replace(ROW, model_name="internlm2_5-7b-ours")).model.qkv_bias is False
    assert resolve(replace(ROW, model_name="google/gemma-3-9b", vocab=None)).model.vocab_size == 262_144


def test_megatron_pads_it_as_its_papers_say() -> None:
    """arXiv 2104.04473 and 2205.05198: 51,200 rows, where GPT-2's tokenizer has 50,257 and tp is 8."""
    row = replace(ROW, framework="Megatron-LM (Selene)", model_name="gpt3-22b", vocab=None, mlp_kind="gelu", tp=8)
    run = resolve(replace(row, zero_or_fsdp="ddp"))
    assert shard_of(run.model, run.plan).vocab_size * 8 == 51_200


def test_an_activation_is_the_familys_where_it_is_blank() -> None:
    assert resolve(replace(ROW, model_name="nemotron-8b", mlp_kind="")).model.mlp == "squared_relu"
    assert "mlp_kind blank" in kinds(model_name="ours", mlp_kind="")


def test_a_time_that_no_device_could_reach_is_refused() -> None:
    """A dense model needs at least 6 FLOP a matrix parameter and token; here the step would take a microsecond."""
    run = by_columns(replace(ROW, value=1e-6))
    with pytest.raises(RefusedError, match="faster than the peak"):
        measured_step_s(run)
    assert measured_step_s(by_columns(ROW)) == ROW.value


def test_gpus_that_fill_no_nodes_are_spread_evenly() -> None:
    def nodes(**changes: Any) -> tuple[int, int]:
        cluster = resolve(replace(ROW, global_batch=240, **changes)).cluster
        return cluster.num_nodes, cluster.gpus_per_node

    assert nodes(n_gpus=12) == (2, 6)
    assert nodes(n_gpus=5) == (1, 5)
    assert nodes(n_gpus=20, gpus_per_node=None) == (4, 5)


def test_data_parallel_ranks_may_be_counted_otherwise() -> None:
    """With cp's ranks among them, or beside those of ep: 16 GPUs all the same."""
    assert (plan_of(cp=2, tp=2, dp=8)["cp"], plan_of(cp=2, tp=2, dp=8)["dp_shard"]) == (2, 4)
    mixture = {"framework": "Megatron-Bridge", "n_experts": 8, "top_k": 2, "ep": 4, "zero_or_fsdp": ""}
    assert plan_of(**mixture, tp=2, dp=2)["dp_shard"] == 8


def test_a_blank_precision_is_16_bits_that_the_gpu_has() -> None:
    assert plan_of(precision="")["precision"] == "bf16"
    assert plan_of(precision="", gpu="V100")["precision"] == "fp16"


def test_layers_that_make_the_size_in_a_name() -> None:
    """195 billion less 250,000 × d, over 12 d² a layer: 76.9, and 77 is what 11 stages share evenly."""
    wide: dict[str, Any] = {"d_model": 14_400, "n_heads": 120, "d_ff": 57_600, "mlp_kind": "gelu", "vocab": 250_000}
    row = replace(ROW, model_name="gpt-195B", framework="Megatron-DeepSpeed", zero_or_fsdp="zero1", **wide)
    assert resolve(replace(row, n_layers=None, tp=8, pp=11, n_gpus=352)).model.num_layers == 77
    assert "n_layers blank" in kinds(model_name="ours", n_layers=None)


def test_llama_3s_own_stages_hold_a_layer_each() -> None:
    """arXiv 2407.21783: 126 layers in 16 stages, one less in the first and the last."""
    plan = plan_of(framework="Meta (internal)", model_name="Llama 3 405B", n_layers=126, n_gpus=256, tp=8, pp=16)
    assert (plan["virtual_stages"], plan["embedding_as_layer"], plan["head_as_layer"]) == (8, True, True)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model_name": "MiniMax-Text-01"}, "layers without attention"),
        ({"model_name": "Qwen3-Next-80B-A3B"}, "layers without attention"),
        ({"model_name": "rwkv-7b"}, "layers without attention"),
        ({"model_name": "bert-large"}, "no decoder"),
        ({"model_name": "llama3-8b-adapter"}, "adapters"),
        ({"notes": "peft: IA3"}, "adapters"),
    ],
)
def test_what_no_model_has_a_word_for_is_refused(changes: dict[str, Any], kind: str) -> None:
    assert kind in kinds(**changes)


def test_ranks_of_latent_attention_are_no_adapters() -> None:
    assert resolve(replace(ROW, notes="MLA (q_lora 1536, kv_lora 512); --kv-lora-rank 512"))


def test_degrees_must_multiply_to_the_gpus() -> None:
    assert "tp 1 × pp 1 × cp 1 × dp 3, not 16" in kinds(dp=3)
    assert "not 16" in kinds(cp=3)


def test_an_unknown_gpu_is_told_the_nearest_names() -> None:
    with pytest.raises(ClusterError, match="did you mean"):
        resolve(replace(ROW, gpu="H100-80GB-SMX"))


def test_families_are_built_as_their_parameter_counts_say() -> None:
    """llm-foundry published NumParams with each run: the exact count is only reached with the right structure."""
    checked = 0
    for row in read_runs(PUBLISHED):
        stated = re.search(r"NumParams=([0-9]+)", row.notes) if isinstance(row, RunRow) else None
        if stated and isinstance(row, RunRow):
            assert resolve(row).model.num_parameters == int(stated[1]), row.id
            checked += 1
    assert checked == 87


def mixture(**changes: Any) -> Run:
    columns = {
        "n_experts": 256,
        "top_k": 8,
        "d_model": 7168,
        "n_heads": 128,
        "d_ff": 2048,
        "n_layers": 61,
        "vocab": 129280,
    }
    wide = {
        "model_name": "DeepSeekV3",
        "framework": "Megatron-Bridge 25.11",
        "n_gpus": 256,
        "ep": 64,
        "zero_or_fsdp": "zero1",
    }
    return resolve(
        replace(ROW, **{**columns, **wide, "seq_len": 4096, "global_batch": 4096, "micro_batch": 1, **changes})
    )


def test_a_published_mixture_brings_what_its_columns_leave_open() -> None:
    run = mixture(gpu="GB200", gpus_per_node=None, pp=4, vpp=4, dp=64)
    model = run.model
    assert model.num_parameters == Model.load("deepseek-v3").num_parameters
    assert model.experts is not None
    assert (model.experts.d_ff, model.experts.shared_d_ff, model.experts.first_dense_layers) == (2048, 2048, 3)
    assert (run.plan.ep, run.plan.experts.etp, run.cluster.nvlink_domain_size) == (64, 1, 64)
    assert run.plan.pipeline.stage_layers == (4,) * 15 + (1,)  # "Et*4|(t*4|)*14tmL"
    assert mixture(gpu="H100-80GB-SXM", n_gpus=1024, tp=2, pp=8, vpp=4, dp=64).plan.pipeline.stage_layers == (
        1,
        *(2,) * 30,
        0,
    )


def test_an_unknown_mixture_replaces_the_mlp_of_every_layer() -> None:
    run = mixture(model_name="my-moe", n_gpus=8, ep=8, n_heads=64, n_kv_heads=8, notes="expert capacity 1.5 padded")
    assert run.model.experts is not None
    assert run.model.latent is None
    assert set(run.model.layer_kinds) == {"layer"}
    assert (run.model.experts.num_experts, run.plan.experts.capacity_factor) == (256, 1.5)


def test_nemo_24_splits_experts_over_tensor_parallel_ranks() -> None:
    grok = {"model_name": "grok1-314b", "n_experts": 8, "top_k": 2, "d_model": 6144, "n_heads": 48, "n_kv_heads": 8,
            "d_ff": 32768, "n_layers": 4, "vocab": None, "n_gpus": 16, "tp": 4, "pp": 1, "ep": 4, "dp": 4}  # fmt: skip
    old, new = (mixture(framework=name, **grok).plan for name in ("NeMo 24.09", "Megatron-Bridge 25.11"))
    assert (old.experts.etp, new.experts.etp) == (4, 1)
