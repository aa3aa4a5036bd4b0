"""Hybrids: patterns and their faults, files that state them, splits that are illegal, what serving refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_table.meaning import resolve

from simulator.base.errors import InputError, ModelError, PlanError
from simulator.formats.exchange import Job, export_plan
from simulator.formats.readers.plans.megatron import read_megatron
from simulator.parallel.legality import check_split
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import RunRow
from tests.configured import configured

PRESETS = ("nemotron-h-8b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b")
FIELDS: dict[str, Any] = {
    "name": "small",
    "pattern": "M-M*",
    "d_model": 256,
    "num_heads": 8,
    "d_ff": 1024,
    "vocab_size": 1024,
    "positions": "none",
    "mamba": {"num_heads": 16, "head_dim": 32, "num_groups": 4, "state_dim": 64},
}
NANO = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mlp_hidden_act": "relu2",
}


def megatron(**fields: object) -> Plan:
    return Plan.model_validate({"zero": 1, "data_parallel": "megatron", "stack": "megatron-core-2025", **fields})


def test_layers_are_counted_in_the_pattern() -> None:
    model = Model.parse(FIELDS, "test", ModelError)
    assert model.num_layers == 4
    assert model.layer_kinds == ("mamba", "mlp", "mamba", "attention")
    assert model.num_attention_layers == 1


def test_every_fault_of_a_pattern_is_told() -> None:
    wrong = {**FIELDS, "pattern": "MXE", "num_layers": 4, "mamba": None, "parallel_residual": True}
    with pytest.raises(ModelError) as caught:
        Model.parse(wrong, "test", ModelError)
    text = str(caught.value)
    for part in ("'X' at 1", "3 letters for 4 layers", "no mamba", "no experts", "no parallel_residual"):
        assert part in text


def test_mixers_need_a_pattern_and_groups_that_divide() -> None:
    with pytest.raises(ModelError, match="mamba needs a pattern"):
        Model.parse({**FIELDS, "pattern": None, "num_layers": 4}, "test", ModelError)
    with pytest.raises(ModelError, match="not a multiple of num_groups 3"):
        Model.parse({**FIELDS, "mamba": {"num_heads": 16, "num_groups": 3}}, "test", ModelError)


def test_a_config_json_is_the_preset() -> None:
    model, preset = configured(NANO, "config.json", "nemotron"), Model.load("nemotron-3-nano-30b-a3b")
    ignored = {"name", "sources"}
    assert model.model_dump(exclude=ignored) == preset.model_dump(exclude=ignored)


def test_a_config_json_may_list_words() -> None:
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    letters = NANO["hybrid_override_pattern"]
    listed = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"}
    listed["layers_block_type"] = [words[letter] for letter in str(letters)]
    assert configured(listed, "config.json", "n").pattern == letters


def test_a_config_json_without_a_pattern_is_refused_with_all_it_lacks() -> None:
    bare = {"model_type": "nemotron_h", "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}
    with pytest.raises(ModelError) as caught:
        configured(bare, "config.json", "n")
    for key in ("hybrid_override_pattern", "mamba_num_heads", "intermediate_size", "vocab_size"):
        assert key in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("fields", [{}, {"pp": 2, "num_micro_batches": 4}, {"pp": 3, "num_micro_batches": 4}])
def test_megatrons_arguments_keep_a_hybrid(name: str, fields: dict[str, int]) -> None:
    """export_plan reads back what it has written, and refuses where anything of plan or model is lost."""
    model = Model.load(name)
    plan = megatron(dp_shard=4, seq_len=4096, **fields)
    job = Job(model=model, plan=plan, stack=Stack.load(plan.stack), gpus_per_node=8)
    text = export_plan(job, "megatron").text
    assert "pretrain_mamba.py" in text
    assert 'pattern="M' in text


def test_megatrons_unified_pattern_counts_layers_and_parts_stages() -> None:
    text = """pretrain_mamba.py --hidden-size 256 --num-attention-heads 8 --hybrid-layer-pattern="M-M|*E/*E" --num-experts 4
    --mamba-num-heads 16 --mamba-head-dim 32 --mamba-num-groups 4 --mamba-state-dim 64 --vocab-size 1024
    --micro-batch-size 1 --seq-length 128 --pipeline-model-parallel-size 2 --global-batch-size 8 --bf16"""
    draft = read_megatron(" ".join(text.split()), "run.sh")
    assert not draft.faults
    assert isinstance(draft.model, Model)
    assert (draft.model.pattern, draft.model.num_layers, draft.model.mtp_layers) == ("M-M*E", 5, 1)
    assert draft.fields["stage_layers"] == (3, 2)


def test_a_ratio_does_not_say_which_layer_is_what() -> None:
    text = "pretrain_mamba.py --num-layers 8 --hidden-size 256 --num-attention-heads 8 --hybrid-attention-ratio 0.1"
    draft = read_megatron(f"{text} --vocab-size 1024 --micro-batch-size 1 --seq-length 128 --bf16", "run.sh")
    assert any("--hybrid-override-pattern" in fault.remedy for fault in draft.faults)


def test_illegal_splits_are_told_at_once() -> None:
    cluster = Cluster.load("dgx-h100-8").with_nodes(12)
    plan = megatron(tp=16, cp=6, seq_len=4096 * 6)
    with pytest.raises(PlanError) as caught:
        check_split(plan, Model.load("nemotron-h-8b"), cluster)
    text = str(caught.value)
    assert "8 Mamba groups" in text
    with pytest.raises(PlanError, match="cp = 6 is neither a divisor nor a multiple of a rank's 8 Mamba groups"):
        check_split(megatron(cp=6, dp_shard=16, seq_len=4096 * 6), Model.load("nemotron-h-8b"), cluster)
    with pytest.raises(PlanError, match="fsdp2 splits no Mamba mixers"):
        check_split(Plan(tp=2, dp_shard=48), Model.load("nemotron-h-8b"), cluster)


def test_a_hybrids_step_names_its_scan_and_how_unsure_it_is() -> None:
    plan = megatron(tp=2, sequence_parallel=True, dp_shard=4, seq_len=4096, num_micro_batches=2)
    found = predict(Model.load("nemotron-h-8b"), plan, Cluster.load("dgx-h100-8"))
    assert found.breakdown["scan"] > 0
    assert "scan: borrowed" in found.extrapolated


def test_a_preset_may_be_cut_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text('like = "nemotron-h-8b"\npattern = "M-*-"\nnum_layers = 4\n')
    assert Model.load(file).layer_kinds == ("mamba", "mlp", "attention", "mlp")
    file.write_text('like = "nemotron-h-8b"\nnum_layers = 4\n')
    with pytest.raises(InputError, match="52 letters for 4 layers"):
        Model.load(file)


HYBRID_ROW = RunRow(
    line=2,
    id="row",
    framework="NeMo 25.04 (Megatron-Core)",
    model_name="nemotron-h-56b",
    n_layers=118,
    seq_len=8192,
    gpu="H100-80GB-SXM",
    n_gpus=32,
    gpus_per_node=8,
    tp=8,
    pp=1,
    micro_batch=1,
    global_batch=96,
    precision="fp8",
    metric="step_time_s",
    value=1.0,
)


@pytest.mark.parametrize(
    ("name", "layers", "preset"),
    [
        ("nemotron-h-56b", 118, "nemotron-h-56b"),
        ("NemotronH_8B", 52, "nemotron-h-8b"),
        ("Nemotron 3 Nano", 52, "nemotron-3-nano-30b-a3b"),
        ("nemotron-3-super-120b-a12b", 88, "nemotron-3-super-120b-a12b"),
    ],
)
def test_a_row_of_a_published_hybrid_is_its_preset(name: str, layers: int, preset: str) -> None:
    run = resolve(replace(HYBRID_ROW, model_name=name, n_layers=layers, tp=2, dp=16))
    ignored = {"name", "sources", "max_positions", "head_dim"}
    assert run.model.model_dump(exclude=ignored) == Model.load(preset).model_dump(exclude=ignored)


@pytest.mark.parametrize(
    ("framework", "recipe", "overlap", "late", "gradients", "relu", "kernel"),
    [
        ("NeMo 25.04 (Megatron-Core)", "delayed", "backward", True, "added", "operators", "flash2"),
        ("NeMo 25.07 (Megatron-Core)", "delayed", "userbuffers", False, "added", "operators", "flash2"),
        ("NeMo 25.09 (Megatron-Core)", "tensorwise", "userbuffers", False, "added", "operators", "cudnn"),
        ("Megatron-Bridge 26.02 NeMo Container", "tensorwise", "userbuffers", False, "added", "fused", "flash2"),
        ("Megatron-Bridge 26.04 NeMo Container", "tensorwise", "userbuffers", False, "accumulated", "fused", "cudnn"),
    ],
)
def test_a_row_runs_what_its_release_ran(
    framework: str, recipe: str, overlap: str, late: object, gradients: str, relu: str, kernel: str
) -> None:
    run = resolve(replace(HYBRID_ROW, framework=framework))
    stack = run.stack
    assert (run.plan.precision.fp8_recipe, stack.overlap.tp, stack.overlap.late_parameters) == (recipe, overlap, late)
    assert (stack.kernels.weight_gradients, stack.kernels.squared_relu, stack.attention.kernel) == (
        gradients,
        relu,
        kernel,
    )


def test_experts_between_mixers_accumulate_in_their_products() -> None:
    row = replace(
        HYBRID_ROW, framework="Megatron-Bridge 26.02 NeMo Container", model_name="Nemotron 3 Nano", n_layers=52
    )
    assert resolve(replace(row, tp=2, dp=16)).stack.kernels.weight_gradients == "accumulated"


def test_nemotron_3_of_megatron_bridge_takes_its_recipe() -> None:
    """scripts/performance/configs/nemotronh of v0.4.0: HybridEP, four scopes of graphs; NVFP4 leaves the last 14 layers wide."""
    row = replace(
        HYBRID_ROW, framework="Megatron-Bridge 26.04 NeMo Container", model_name="Nemotron 3 Super", n_layers=88,
        gpu="GB300", n_gpus=64, gpus_per_node=4, tp=1, dp=None, ep=64, micro_batch=1, global_batch=512, precision="nvfp4",
        notes="act_ckpt/overlap/cuda-graph not in table (see recipe)",
    )  # fmt: skip
    plan = resolve(row).plan
    assert (plan.experts.dispatcher, plan.recompute.mode, plan.precision.last_layers_bf16) == ("deep_ep", "none", 14)
    assert plan.cuda_graphs == ("attn", "mamba", "moe_router", "moe_preprocess")
    assert resolve(replace(row, precision="bf16")).plan.precision.last_layers_bf16 == 0


def test_nemotron_4_of_nemo_2_has_its_activation_in_two_operators() -> None:
    row = replace(
        HYBRID_ROW, model_name="nemotron4-15b", n_layers=32, d_model=6144, n_heads=48, n_kv_heads=8, d_ff=24576,
        vocab=256_000, mlp_kind="squared_relu", framework="NeMo 25.04 (Megatron-Core)",
    )  # fmt: skip
    new, old = resolve(row).stack, resolve(replace(row, framework="NeMo 24.09-24.12 (Megatron-Core)")).stack
    assert (new.kernels.squared_relu, old.kernels.squared_relu) == ("operators", "fused")
    assert (new.overlap.tp, new.kernels.weight_gradients) == ("userbuffers", "accumulated")


def test_a_row_of_another_depth_is_refused() -> None:
    with pytest.raises(ModelError, match="118 letters for 64 layers"):
        resolve(replace(HYBRID_ROW, n_layers=64))


def test_notes_of_a_state_space_model_without_a_published_pattern_refuse_a_row() -> None:
    with pytest.raises(RefusedError, match="no published pattern"):
        resolve(replace(HYBRID_ROW, model_name="other", notes="Mamba-2 hybrid"))


def test_narrow_products_of_mixers_come_in_sixteens() -> None:
    """Megatron-LM, mamba_mixer.py: 2 I + 2 G N + H columns; here 2 * 8040 + 2 * 1024 + 120 = 18,248."""
    model = Model.load("nemotron-h-8b")
    assert model.mamba is not None
    odd = model.model_copy(update={"mamba": model.mamba.model_copy(update={"num_heads": 120, "head_dim": 67})})
    cluster = Cluster.load("dgx-h100-8")
    with pytest.raises(PlanError, match="not a multiple of 16"):
        check_split(megatron(dp_shard=8, precision="fp8"), odd, cluster)
    check_split(megatron(dp_shard=8, precision="fp8"), model, cluster)
    with pytest.raises(PlanError, match="50 \\+ 3 layers in bf16, and the model has 52"):
        check_split(megatron(dp_shard=8, precision="fp8", first_layers_bf16=50, last_layers_bf16=3), model, cluster)


def test_a_repeated_module_of_megatrons() -> None:
    text = """pretrain_mamba.py --hidden-size 256 --num-attention-heads 8 --hybrid-layer-pattern="M-*E/*E/*E" --num-experts 4
    --mamba-num-heads 16 --vocab-size 1024 --micro-batch-size 1 --seq-length 128 --mtp-use-repeated-layer --bf16 --mtp-num-layers 2"""
    draft = read_megatron(" ".join(text.split()), "run.sh")
    assert isinstance(draft.model, Model)
    assert (draft.model.mtp_layers, draft.model.mtp_passes) == (1, 2)
