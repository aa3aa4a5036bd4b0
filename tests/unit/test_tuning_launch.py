"""Launch lines of fine-tuning programs as plans: expected values are those that the commands and the files that they name state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.formats.readers.plans import Draft, plan_fields, read_plan
from simulator.parallel.legality import check
from simulator.spec.model import Model
from simulator.spec.plan import Plan

FILES = Path(__file__).resolve().parents[1] / "data" / "plans"
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SMALL = "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --bf16 True"
XTUNER = """
from xtuner.model import SupervisedFinetune
model = dict(type=SupervisedFinetune, llm=dict(pretrained_model_name_or_path="meta-llama/Llama-2-7b-hf"), lora=dict(r=64))
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(type=AdamW), accumulative_counts=16, dtype="float16")
"""


def launched(folder: Path, text: str, *, name: str = "train.sh", **define: str) -> Draft:
    """The script beside the files that the commands of these tests name."""
    for file in (
        *FILES.glob("*.y*ml"),
        FILES / "zero3-auto.json",
        EXAMPLES / "axolotl.yml",
        EXAMPLES / "llama3_lora_sft.yaml",
    ):
        shutil.copy(file, folder)
    (folder / "cfg.py").write_text(XTUNER)
    (folder / name).write_text(text)
    return read_plan(folder / name, define=define)


def plan_of(draft: Draft, **given: Any) -> Plan:
    model = Model.load(draft.model if isinstance(draft.model, str) else "llama3.1-8b")
    plan = Plan.model_validate(plan_fields(draft, draft.num_devices or 8, given, model))
    check(plan)
    return plan


def unknown(draft: Draft) -> list[str]:
    return [setting.name for setting in draft.named("unknown")]


def test_accelerate_s_configuration_lies_under_the_script_s_arguments(tmp_path: Path) -> None:
    line = f"accelerate launch --config_file fsdp1.yaml --num_processes 8 --num_machines 2 train.py {SMALL} --max_length 4096 --use_peft --lora_r 8"
    draft = launched(tmp_path, f"{line} --lora_target_modules q_proj v_proj --my_own 3 --my_pack_factor 2\n")
    plan = plan_of(draft)
    assert (draft.format, draft.model, draft.num_devices, draft.num_nodes) == ("launch", "llama3.1-8b", 8, 2)
    assert (plan.implementation, plan.dp_shard, plan.seq_len, plan.micro_batch_size) == ("fsdp1", 4, 4096, 2)
    assert (plan.peft.rank, plan.peft.targets, plan.peft.dropout) == (8, ("q", "v"), 0.05)
    assert unknown(draft) == ["--my_own", "--my_pack_factor"]
    notes = {setting.name: setting.note for setting in draft.named("unknown")}
    assert "may change what is trained" in notes["--my_pack_factor"]
    places = {setting.name: setting.place for setting in draft.settings}
    assert places["--lora_r"] == f"{tmp_path}/train.sh:1"
    assert places["fsdp_config.fsdp_sharding_strategy"].startswith(f"{tmp_path}/fsdp1.yaml")


def test_accelerate_s_options_are_plugins_and_precision(tmp_path: Path) -> None:
    told = "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --mixed_precision bf16 --num_machines 2 --num_processes 16"
    draft = launched(
        tmp_path,
        f"accelerate launch {told} --frobnicate 1 -m axolotl.cli.train axolotl.yml --micro-batch-size 1 --optimizer adamw_torch\n",
    )
    plan = plan_of(draft)
    assert (plan.implementation, plan.zero, plan.dp_shard, plan.micro_batch_size) == ("deepspeed", 3, 16, 1)
    assert plan.offload.optimizer == "host"
    assert unknown(draft) == ["--frobnicate"]
    plain = "accelerate launch --mixed_precision fp16 --multi_gpu --num_processes 2 a.py --per_device_train_batch_size 1 --num_train_epochs 1"
    assert plan_of(launched(tmp_path, plain)).precision.compute == "fp16"


def test_trl_s_commands_are_trainers_with_their_own_defaults(tmp_path: Path) -> None:
    """trl/trainer/base_config.py, dpo_config.py: bf16, checkpointing, 1,024 tokens; two sequences a pair."""
    draft = launched(
        tmp_path,
        "torchrun --nproc_per_node 4 -m trl dpo --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1\n",
    )
    plan = plan_of(draft)
    assert (draft.num_devices, plan.dp_replicate, plan.micro_batch_size, plan.seq_len) == (4, 4, 2, 1024)
    assert (plan.precision.compute, plan.recompute.mode) == ("bf16", "full")
    assert draft.reference_forwards == 1
    (tmp_path / "sft.yaml").write_text("packing: true\nmax_length: 2048\nper_device_train_batch_size: 2\n")
    line = "trl sft --config sft.yaml --accelerate_config zero3 --num_processes 8 --model_name_or_path Qwen/Qwen2.5-7B --max_length 512"
    plan = plan_of(launched(tmp_path, line))
    assert (plan.implementation, plan.zero, plan.dp_shard, plan.seq_len, plan.micro_batch_size) == (
        "deepspeed",
        3,
        8,
        512,
        2,
    )


def test_llama_factory_s_file_under_its_pairs_and_the_environment(tmp_path: Path) -> None:
    line = "FORCE_TORCHRUN=1 NPROC_PER_NODE=4 NNODES=2 llamafactory-cli train llama3_lora_sft.yaml lora_rank=64 cutoff_len=512"
    draft = launched(tmp_path, line)
    plan = plan_of(draft)
    assert (draft.num_devices, draft.num_nodes, plan.peft.rank, plan.seq_len) == (8, 2, 64, 512)
    flags = "CUDA_VISIBLE_DEVICES=0,1 accelerate launch src/train.py --finetuning_type lora --lora_target q_proj,v_proj --stage sft"
    draft = launched(tmp_path, f"{flags} {SMALL}")
    assert (draft.num_devices, plan_of(draft).peft.targets, draft.software) == (2, ("q", "v"), "LLaMA-Factory 0.9")


def test_axolotl_s_options_are_its_file_s_settings(tmp_path: Path) -> None:
    draft = launched(
        tmp_path, "axolotl train axolotl.yml --sequence-len 2048 --launcher torchrun -- --nproc-per-node 2\n"
    )
    plan = plan_of(draft)
    assert (draft.num_devices, plan.seq_len, plan.peft.rank, plan.micro_batch_size) == (2, 2048, 32, 2)
    assert not unknown(draft)


def test_ms_swift_s_options_are_a_trainer_s_under_its_own_names(tmp_path: Path) -> None:
    line = "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 --max_length 4096 --dataset a#5 b"
    draft = launched(tmp_path, f"{line} --deepspeed zero3 --attn_impl flash_attn --packing true --seed 1")
    plan = plan_of(draft)
    assert (draft.model, draft.num_devices, plan.implementation, plan.zero) == ("qwen2.5-7b", 4, "deepspeed", 3)
    assert (plan.peft.rank, plan.peft.dropout, plan.peft.targets) == (8, 0.05, ("all",))
    assert (plan.num_micro_batches, plan.recompute.mode, plan.seq_len) == (4, "full", 4096)  # 16 sequences of 4 GPUs
    assert not unknown(draft)
    whole = plan_of(
        launched(tmp_path, f"{line} --train_type full --sequence_parallel_size 2 --gradient_accumulation_steps 3")
    )
    assert (whole.peft.adds, whole.cp, whole.num_micro_batches, whole.precision.master) == (False, 2, 3, "bf16")
    low = plan_of(
        launched(tmp_path, f"{line} --quant_method bnb --quant_bits 4 --lora_rank 32 --target_modules q_proj")
    )
    assert (low.peft.stored, low.peft.rank, low.peft.targets) == ("nf4_double", 32, ("q",))
    assert plan_of(launched(tmp_path, f"{line} --fsdp fsdp2")).implementation == "fsdp2"
    assert "weird is unknown" in str(launched(tmp_path, f"{line} --torch_dtype weird").faults[0])
    assert len(launched(tmp_path, f"{line} --per_device_train_batch_size $N").faults) == 1
    pairs = launched(
        tmp_path, f"{line.replace('swift sft', 'swift rlhf')} --rlhf_type dpo --per_device_train_batch_size 2"
    )
    assert (pairs.reference_forwards, plan_of(pairs).micro_batch_size) == (1, 4)


def test_a_deepspeed_file_that_a_framework_ships_is_known_where_it_is_not_beside(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        (EXAMPLES / "llama3_lora_sft.yaml").read_text() + "deepspeed: examples/deepspeed/ds_z2_config.json\n"
    )
    draft = launched(tmp_path, "NPROC_PER_NODE=2 llamafactory-cli train a.yaml")
    assert (plan_of(draft).implementation, plan_of(draft).zero, plan_of(draft).deepspeed.reduce_bucket_numel) == (
        "deepspeed",
        2,
        5e8,
    )
    assert any("not here: LLaMA-Factory's own" in setting.place for setting in draft.settings)
    (tmp_path / "ds_z2_config.json").write_text('{"zero_optimization": {"stage": 1}}')  # one's own stands above it
    assert plan_of(launched(tmp_path, "NPROC_PER_NODE=2 llamafactory-cli train a.yaml")).zero == 1
    (tmp_path / "a.yaml").write_text("model_name_or_path: llama3.1-8b\ncutoff_len: 99\ndeepspeed: mine/zero9.json\n")
    assert "zero9.json: cannot be read" in str(launched(tmp_path, "llamafactory-cli train a.yaml").faults[0])


@pytest.mark.parametrize(
    ("name", "implementation", "zero"),
    [("deepspeed_zero2", "deepspeed", 2), ("deepspeed_zero3", "deepspeed", 3), ("fsdp1", "fsdp1", 3), ("fsdp2", "fsdp2", 3), ("multi_gpu", "ddp", 0)],
)  # fmt: skip
def test_accelerate_s_files_that_trl_ships_are_known(name: str, implementation: str, zero: int, tmp_path: Path) -> None:
    """The line of trl's own README, as it stands in the repository: 8 processes, bf16."""
    line = (
        f"accelerate launch --config_file examples/accelerate_configs/{name}.yaml trl/scripts/sft.py "
        "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --bf16 --max_length 2048"
    )
    file = tmp_path / "train.sh"
    file.write_text(line)
    draft = read_plan(file)
    plan = plan_of(draft)
    assert (plan.implementation, plan.zero, draft.num_devices, plan.compute_dtype) == (implementation, zero, 8, "bf16")
    assert name == "multi_gpu" or any("not here: TRL's own" in setting.place for setting in draft.settings)
    (tmp_path / f"{name}.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")  # one's own stands above
    assert read_plan(file).num_devices == 2
    file.write_text(line.replace(f"{name}.yaml", "mine.yaml"))
    assert "mine.yaml is not beside this file" in str(read_plan(file).faults[0])


def test_torchtune_s_recipe_is_the_command_s(tmp_path: Path) -> None:
    line = "tune run --nproc_per_node 4 lora_finetune_distributed --config torchtune-lora.yaml batch_size=4 model.lora_rank=32"
    plan = plan_of(launched(tmp_path, line))
    assert (plan.implementation, plan.dp_shard, plan.micro_batch_size, plan.peft.rank) == ("fsdp2", 4, 4, 32)
    alone = launched(tmp_path, "tune run lora_finetune_single_device --config torchtune-lora.yaml")
    assert (alone.num_devices, plan_of(alone).implementation) == (1, "ddp")


def test_litgpt_s_options_are_a_file_of_their_own(tmp_path: Path) -> None:
    line = "litgpt finetune_lora meta-llama/Llama-3.1-8B --precision bf16-true --train.micro_batch_size 4 --train.max_seq_length 1024"
    draft = launched(tmp_path, f"{line} --devices 2")
    plan = plan_of(draft)
    assert (draft.model, draft.num_devices, plan.implementation) == ("llama3.1-8b", 2, "fsdp2")
    assert (plan.micro_batch_size, plan.seq_len, plan.peft.rank, plan.peft.dropout) == (4, 1024, 8, 0.05)
    assert not plan_of(launched(tmp_path, line.replace("finetune_lora", "finetune_full"))).peft.adds


def test_xtuner_brings_deepspeed_s_files(tmp_path: Path) -> None:
    draft = launched(tmp_path, "NPROC_PER_NODE=8 xtuner train cfg.py --deepspeed deepspeed_zero2\n")
    plan = plan_of(draft)
    assert (draft.num_devices, plan.implementation, plan.zero, plan.num_micro_batches) == (8, "deepspeed", 2, 16)
    assert (plan.peft.stored, plan.peft.upcasts) == ("compute", False)  # the engine casts all to 16 bits
    alone = launched(tmp_path, "xtuner train cfg.py\n")
    assert alone.num_devices == 1
    assert (plan_of(alone).peft.stored, plan_of(alone).peft.upcasts) == (
        "fp32",
        True,
    )  # prepare_model_for_kbit_training


def test_xtuner_s_norm_is_one_kernel_where_the_environment_says_so(tmp_path: Path) -> None:
    changes = launched(tmp_path, "USE_TRITON_KERNEL=1 xtuner train cfg.py\n").stack_changes
    assert {key: value for key, (value, _) in changes.items()} == {"norm": "fused", "norm_dtype": "compute"}
    assert not launched(tmp_path, "xtuner train cfg.py\n").stack_changes


def test_a_script_s_own_words_for_adapters_leave_their_sizes_to_it(tmp_path: Path) -> None:
    line = f"python finetune.py {SMALL} --model_max_length 512 --use_lora --deepspeed zero3-auto.json --lazy_preprocess True"
    draft = launched(tmp_path, line)
    plan = plan_of(draft, reduce_bucket_numel=1)
    assert (draft.num_devices, plan.seq_len, plan.peft.method, plan.recompute.mode) == (1, 512, "lora", "none")
    assert {"lora_rank", "lora_targets"} <= draft.assumed.keys()
    assert unknown(draft) == ["--lazy_preprocess"]
    quantised = plan_of(
        launched(tmp_path, f"deepspeed --include localhost:0,1 train.py {SMALL} --q_lora True --num_train_epochs 3")
    )
    assert (quantised.peft.stored, quantised.dp_replicate) == ("nf4", 2)


def test_a_variable_that_nobody_sets_is_a_fault_that_names_it(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path $MODEL --per_device_train_batch_size 1 --learning_rate $LR\n"
    draft = launched(tmp_path, line)
    assert [fault.problem for fault in draft.faults] == ["hangs on $MODEL, which this file does not settle"]
    assert "--define MODEL=" in draft.faults[0].remedy
    assert launched(tmp_path, line, MODEL="Qwen/Qwen2.5-7B").model == "qwen2.5-7b"
    other = launched(tmp_path, line, **{"--model_name_or_path": "Qwen/Qwen2.5-7B", "--max_length": "99"})
    assert (other.model, other.fields["seq_len"]) == ("qwen2.5-7b", 99)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tune run lora_finetune_single_device --config llama3_1/8B_lora", "`tune cp llama3_1/8B_lora .` writes it"),
        ("xtuner train llama2_7b_qlora_e3", "`xtuner copy-cfg llama2_7b_qlora_e3 .` writes it"),
        ("axolotl train none.yml", "none.yml is not beside this file"),
        ("axolotl train $FILE", "hangs on what only a run knows"),
        ("litgpt finetune_adapter x", "litgpt finetune_adapter is not modelled"),
        ("trl reward --model_name_or_path x", "reward: its rewards or losses are not modelled"),
        (
            "accelerate launch --use_megatron_lm a.py --num_train_epochs 1",
            "use_megatron_lm: a Trainer on it is not read",
        ),
        ("tune run --nproc_per_node 2", "names no recipe"),
        ("#!/bin/bash\necho hi\npython a.py --x 1\n", "no command here fine-tunes"),
        ("llamafactory-cli train a.yaml\nllamafactory-cli train b.yaml\n", "2 commands train, at lines 1, 2"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_to_write(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(launched(tmp_path, text))
    assert words in str(caught.value)


def test_of_several_commands_one_is_picked(tmp_path: Path) -> None:
    text = "axolotl train axolotl.yml --lora-r 4\naxolotl train axolotl.yml --lora-r 8\n"
    assert plan_of(launched(tmp_path, text, command="2")).peft.rank == 8


def test_slurm_s_tasks_are_the_gpus(tmp_path: Path) -> None:
    line = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun python train.py {SMALL} --fsdp 'full_shard auto_wrap'"
    draft = launched(
        tmp_path, f"""{line} --fsdp_config '{{"version": 2}}' --no_gradient_checkpointing --block_size 4096\n"""
    )
    plan = plan_of(draft)
    assert (draft.num_devices, plan.implementation, plan.dp_shard, plan.seq_len) == (16, "fsdp2", 16, 4096)


def test_a_library_s_own_script_is_told_by_its_path(tmp_path: Path) -> None:
    draft = launched(
        tmp_path, f"accelerate launch --num_processes 2 examples/scripts/sft.py {SMALL} --load_in_4bit --use_peft"
    )
    plan = plan_of(draft)
    assert (draft.software, plan.peft.stored, plan.recompute.mode, plan.peft.rank) == ("trl's sft", "nf4", "full", 16)


def test_all_gpus_of_a_node_where_the_launcher_does_not_count_them(tmp_path: Path) -> None:
    draft = launched(tmp_path, f"torchrun --nproc_per_node=$N train.py {SMALL}\n")
    assert (draft.num_devices, draft.num_nodes, draft.devices_fault) == (None, 1, None)


RUNNER = "torchrun --nproc-per-node=8 scripts/training/run_recipe.py"


def test_megatron_bridge_s_recipe_under_its_options(tmp_path: Path) -> None:
    """recipes/llama/h100/llama3.py: llama3_8b_peft_1gpu_h100_bf16_config; mixed_precision.py: bf16_mixed sums gradients in fp32."""
    line = f"{RUNNER} --recipe llama3_8b_peft_config -mb 2 -tp 2 train.global_batch_size=32 peft.dim=16 checkpoint.save=/x model.odd=3"
    draft = launched(tmp_path, line)
    plan = plan_of(draft)
    assert (draft.model, draft.stack, draft.num_devices) == ("llama3-8b", "megatron-bridge-package-2025", 8)
    assert (plan.tp, plan.micro_batch_size, plan.num_micro_batches, plan.seq_len, plan.zero) == (2, 2, 4, 4096, 0)
    assert (plan.peft.method, plan.peft.rank, plan.peft.targets) == ("lora", 16, ("qkv", "out", "gate_up", "down"))
    assert (plan.precision.compute, plan.gradient_dtype) == ("bf16", "fp32")
    assert unknown(draft) == ["model.odd"]
    assert draft.stack_changes["loss"][0] == "fp32_in_place"  # cross_entropy_loss_fusion is off in it
    plain = launched(tmp_path, line.replace(RUNNER, "python scripts/training/run_recipe.py"))
    assert plain.num_devices == 1


def test_megatron_bridge_s_models_and_modes_name_recipes(tmp_path: Path) -> None:
    draft = launched(
        tmp_path, "srun --nodes=4 --ntasks-per-node=8 python run_recipe.py --model qwen25_32b --mode sft\n"
    )
    plan = plan_of(draft)
    assert (draft.model, draft.num_devices, plan.tp, plan.pp, plan.zero, plan.dp_shard) == (
        "qwen2.5-32b",
        32,
        8,
        2,
        1,
        2,
    )
    assert not plan.peft.adds
    dora = launched(
        tmp_path, f"{RUNNER} --model llama31_8b --mode dora peft.target_modules='[\"*.layers.0.*.linear_qkv\"]'"
    )
    assert (plan_of(dora).peft.method, plan_of(dora).peft.targets) == ("dora", ("layers.0.qkv",))


def test_megatron_bridge_s_yaml_stands_over_a_recipe_or_states_a_run(tmp_path: Path) -> None:
    file = tmp_path / "override.yaml"
    file.write_text(
        "train:\n  global_batch_size: 64\n  micro_batch_size: 2\nmixed_precision: bf16_with_fp8_current_scaling_mixed\nlogger:\n  log_interval: 3\n"
    )
    with pytest.raises(PlanError, match="over which recipe"):
        read_plan(file)
    draft = read_plan(file, define={"recipe": "llama31_8b_sft_config"})
    plan = plan_of(draft)
    assert (draft.format, draft.num_devices, plan.micro_batch_size, plan.precision.compute) == (
        "megatron-bridge",
        2,
        2,
        "fp8",
    )
    assert (plan.precision.fp8_recipe, plan.zero) == ("tensorwise", 1)
    assert not unknown(draft)
    file.write_text("train:\n  global_batchsize: 64\n  manual_gc: true\n  train_iters: 9\n  frobnicate: 1\n")
    assert unknown(read_plan(file, define={"recipe": "llama31_8b_sft_config"})) == [
        "train.global_batchsize",
        "train.frobnicate",
    ]
    file.write_text(
        "model:\n  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider\n  num_layers: 4\n  hidden_size: 512\n  num_attention_heads: 8\n"
        "  ffn_hidden_size: 1024\n  vocab_size: 32000\n  gated_linear_unit: true\n  tensor_model_parallel_size: 2\n  seq_length: 1024\n"
        "train:\n  global_batch_size: 8\n  micro_batch_size: 1\nmixed_precision:\n  bf16: true\n  fp8: null\n  grad_reduce_in_fp32: false\n"
        "ddp:\n  use_distributed_optimizer: true\npeft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 4\n"
    )
    draft = read_plan(file)
    assert isinstance(draft.model, Model)
    assert (draft.model.num_layers, draft.model.d_model, draft.model.d_ff) == (4, 512, 1024)
    assert (draft.fields["reduce_dtype"], draft.fields["zero"], draft.fields["lora_rank"]) == ("bf16", 1, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{RUNNER} --recipe llama3_8b_pfet_config", "llama3_8b_peft_config"),
        (f"{RUNNER} --recipe llama3_8b_peft_config mixed_precision=odd_mixed", "odd_mixed is not read"),
        (f"{RUNNER} --recipe llama3_8b_peft_config peft.target_modules=linear_odd", "linear_odd is not read"),
        (f"{RUNNER} --recipe llama3_8b_peft_config train.micro_batch_size=$M", "hangs on $M"),
    ],
)
def test_what_megatron_bridge_cannot_be_read_of_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(launched(tmp_path, text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 4000 + "echo a",
        "train:\n" + " \n" * 60_000,
        "train:\n" + "  # x\n" * 60_000,
        "#!/bin/bash\npython " + "-a " * 20_000,
    ],
)
def test_long_blanks_and_comments_are_passed_over_once(text: str, tmp_path: Path) -> None:
    """Patterns whose parts can match the same characters would try every way to part them."""
    for name in ("train.sh", "train.yaml"):
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(PlanError):
            read_plan(file)


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=512 \\
    data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.logger='["console"]' {} $@
"""


def test_verl_s_line_is_one_update_of_the_policy(tmp_path: Path) -> None:
    more = (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.fsdp_config.param_offload=True"
    )
    draft = launched(tmp_path, VERL.format(more))
    plan = plan_of(draft)
    assert (draft.model, draft.num_devices, draft.num_nodes) == ("qwen3-8b", 16, 2)
    assert (plan.implementation, plan.dp_shard, plan.seq_len, plan.recompute.mode) == ("fsdp1", 16, 512 + 1024, "full")
    assert (plan.micro_batch_size, plan.num_micro_batches) == (16, 256 * 5 // 16 // 16)
    assert (plan.precision.compute, plan.precision.reduce, plan.syncs_every_micro_batch) == ("bf16", "fp32", True)
    assert unknown(draft) == ["$@"]
    assert "actor_rollout_ref.actor.fsdp_config.param_offload" in [one.name for one in draft.named("not modelled")]


def test_verl_counts_a_micro_batch_by_tokens_and_swaps_heads(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    more = f"{actor}.use_dynamic_bsz=True {actor}.ppo_max_token_len_per_gpu=9216 {actor}.strategy=fsdp2 {actor}.ulysses_sequence_parallel_size=2"
    plan = plan_of(launched(tmp_path, VERL.format(f"{more} actor_rollout_ref.model.lora_rank=32")))
    # 2 × 9216 tokens hold 12 sequences of 1536; a pair of ranks has 1280 / 8 = 160, of which 10 divide
    assert (plan.implementation, plan.cp, plan.cp_exchange, plan.micro_batch_size) == ("fsdp2", 2, "all_to_all", 10)
    assert (plan.peft.method, plan.peft.rank, plan.peft.targets, plan.peft.base) == ("lora", 32, ("all",), "fp32")


def test_verl_under_megatron_or_without_a_batch_is_a_fault(tmp_path: Path) -> None:
    line = VERL.format("").replace("main_ppo ", "main_ppo --config-name=ppo_megatron_trainer.yaml ")
    first, second = launched(tmp_path, line).faults
    assert (first.problem, second.problem) == ("megatron is unknown", "is not stated")
    assert first.place.endswith("train.sh:1: --config-name")
    assert second.place.endswith("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
