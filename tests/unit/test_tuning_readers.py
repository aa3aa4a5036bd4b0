"""Files of fine-tuning frameworks as plans: what their settings become, by the frameworks' public code, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.formats.readers.plans import Draft, detect, plan_fields, read_plan
from simulator.parallel.legality import check
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan

FILES = Path(__file__).resolve().parents[1] / "data" / "plans"


def plan_of(draft: Draft, num_devices: int = 8, **given: Any) -> Plan:
    model = Model.load(draft.model if isinstance(draft.model, str) else "llama3.1-8b")
    plan = Plan.model_validate(plan_fields(draft, num_devices, given, model))
    check(plan)
    return plan


def read(folder: Path, name: str, **settings: object) -> Draft:
    file = folder / name
    file.write_text(json.dumps(settings))
    return read_plan(file)


def told(draft: Draft) -> str:
    with pytest.raises(PlanError) as caught:
        plan_of(draft)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("axolotl-qlora.yml", "axolotl"),
        ("axolotl-fsdp.yml", "axolotl"),
        ("axolotl-unfrozen.yml", "axolotl"),
        ("trl-grpo.yaml", "transformers"),
        ("llama-factory-full.yaml", "llama-factory"),
        ("training-arguments.json", "transformers"),
        ("torchtune-lora.yaml", "torchtune"),
        ("zero3-auto.json", "deepspeed"),
    ],
)
def test_a_format_is_told_by_its_content(name: str, form: str) -> None:
    draft = read_plan(FILES / name)
    assert detect((FILES / name).read_text(), name) == draft.format == form
    assert not draft.named("unknown")


def test_axolotl_s_qlora() -> None:
    draft = read_plan(FILES / "axolotl-qlora.yml")
    plan = plan_of(draft, 4)
    assert (draft.model, plan.seq_len, plan.micro_batch_size, plan.num_micro_batches) == ("llama3-8b", 4096, 2, 4)
    assert (plan.peft.method, plan.peft.rank, plan.peft.dropout, plan.peft.targets) == ("lora", 32, 0.05, ("all",))
    assert plan.peft.stored == "nf4_double"  # loaders/model.py: bnb_4bit_use_double_quant
    assert (plan.implementation, plan.zero, plan.dp_replicate) == ("ddp", 0, 4)
    assert (plan.optimizer.kind, plan.recompute.mode, plan.precision.compute) == ("paged_adam8bit", "full", "bf16")
    assert plan.precision.master == "fp32"  # peft's adapters
    changes = {name: value for name, (value, _) in draft.stack_changes.items()}
    assert changes == {"adapters": "fused", "loss": "fused_linear"}  # kernels of LoRA are on unless they are named


def test_axolotl_s_fsdp2_keeps_fp32_beside_mixed_precision() -> None:
    draft = read_plan(FILES / "axolotl-fsdp.yml")
    plan = plan_of(draft)
    assert (plan.implementation, plan.zero, plan.dp_shard) == ("fsdp2", 3, 8)
    assert (plan.num_micro_batches, plan.precision.master, plan.optimizer.dtype) == (16, "fp32", "fp32")
    assert draft.stack_changes["early_stop"][0] is True
    assert [setting.name for setting in draft.named("not modelled")] == ["packing"]


def test_axolotl_alone_trains_what_it_loads(tmp_path: Path) -> None:
    draft = read(tmp_path, "a.yml", base_model="Qwen/Qwen2.5-7B", sequence_len=1024, bf16="auto")
    plan = plan_of(draft, 1)
    assert (plan.precision.master, plan.optimizer.dtype, plan.optimizer.impl) == ("bf16", "bf16", "fused")
    assert plan.seq_len == 1024


def test_llama_factory_fills_in_its_deepspeed_file() -> None:
    draft = read_plan(FILES / "llama-factory-full.yaml")
    plan = plan_of(draft)
    assert (plan.implementation, plan.zero, plan.dp_shard) == ("deepspeed", 3, 8)
    assert (plan.micro_batch_size, plan.num_micro_batches, plan.precision.compute) == (2, 4, "bf16")
    assert plan.deepspeed.reduce_bucket_numel == Model.load("qwen2.5-7b").d_model ** 2
    assert plan.recompute.mode == "full"  # unless disable_gradient_checkpointing
    assert draft.stack_changes["loss"][0] == "fused_linear"


def test_llama_factory_trains_in_fp32_unless_pure(tmp_path: Path) -> None:
    common = {"model_name_or_path": "Qwen/Qwen2.5-7B", "finetuning_type": "full", "cutoff_len": 512}
    assert plan_of(read(tmp_path, "a.yaml", **common, bf16=True)).precision.master == "fp32"
    pure = plan_of(read(tmp_path, "b.yaml", **common, pure_bf16=True, disable_gradient_checkpointing=True))
    assert (pure.precision.master, pure.precision.compute, pure.optimizer.dtype) == ("bf16", "bf16", "bf16")
    assert pure.recompute.mode == "none"


def test_training_arguments_with_trl_s_own(tmp_path: Path) -> None:
    draft = read_plan(FILES / "training-arguments.json")
    plan = plan_of(draft, 2)
    assert (plan.peft.rank, plan.peft.targets, plan.peft.stored) == (64, ("q", "k", "v", "out"), "nf4")
    assert plan.peft.dropout == 0.05  # ModelConfig's default
    assert plan.precision.master == "bf16"  # trl casts adapters beside quantised weights
    assert (plan.micro_batch_size, plan.num_micro_batches, plan.recompute.mode) == (4, 2, "full")
    bare = read(tmp_path, "args.json", per_device_train_batch_size=2, bf16=True, model_name_or_path="Qwen/Qwen2.5-7B")
    assert {name: value for name, (value, _) in bare.assumed.items()} == {"seq_len": 2048, "master_dtype": "fp32"}
    assert bare.stack == "transformers-2024"


def test_fsdp_s_words_are_accelerate_s(tmp_path: Path) -> None:
    common = {"per_device_train_batch_size": 1, "bf16": True, "max_length": 512}
    one = plan_of(read(tmp_path, "a.json", **common, fsdp="full_shard auto_wrap"))
    assert (one.implementation, one.zero, one.dp_shard, one.precision.reduce) == ("fsdp1", 3, 8, "bf16")
    two = plan_of(
        read(tmp_path, "b.json", **common, fsdp=True, fsdp_config={"version": 2, "activation_checkpointing": True})
    )
    assert (two.implementation, two.recompute.mode) == ("fsdp2", "full")
    grads = plan_of(read(tmp_path, "c.json", **common, fsdp=["shard_grad_op"]))
    assert grads.zero == 2
    hybrid = read(tmp_path, "d.json", **common, fsdp="hybrid_shard")
    assert "--dp-shard" in told(hybrid)


def test_torchtune_s_builder_names_model_and_adapters() -> None:
    draft = read_plan(FILES / "torchtune-lora.yaml")
    plan = plan_of(draft, 2)
    assert (draft.model, draft.stack, plan.seq_len) == ("llama3.1-8b", "torchtune-2024", 4096)
    assert (plan.implementation, plan.zero, plan.dp_shard) == ("fsdp2", 3, 2)
    assert (plan.peft.method, plan.peft.rank) == ("lora", 16)
    assert set(plan.peft.targets) == {"q", "v", "out", "mlp"}
    assert (plan.precision.master, plan.optimizer.dtype, plan.optimizer.impl) == ("bf16", "bf16", "fused")
    assert (plan.micro_batch_size, plan.num_micro_batches, plan.recompute.mode) == (2, 8, "full")


@pytest.mark.parametrize(
    ("builder", "preset"),
    [
        ("qwen2_5.qwen2_5_0_5b", "qwen2.5-0.5b"),
        ("qwen2_5.qwen2_5_7b_instruct", "qwen2.5-7b"),
        ("qwen2.qwen2_0_5b", "qwen2-0.5b"),
        ("llama2.llama2_13b", "llama2-13b"),
        ("mistral.mistral_7b", "mistral-7b"),
        ("phi3.phi3_mini", "phi-3-mini"),
        ("llama4.llama4_scout_17b_16e", "llama4-scout"),
    ],
)
def test_torchtune_s_builders_are_presets(builder: str, preset: str, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        f"model:\n  _component_: torchtune.models.{builder}\nbatch_size: 1\ntensor_parallel_dim: 2\ncompile: True\n"
        "loss:\n  _component_: torchtune.modules.loss.LinearCrossEntropyLoss\n"
    )
    draft = read_plan(file)
    assert draft.model == preset
    assert draft.fields.get("etp", 1) == (2 if "llama4" in preset else 1)  # its experts are split as well
    assert draft.stack_changes["loss"][0] == "linear_chunks"


def test_torchtune_on_one_device_shards_nothing(tmp_path: Path) -> None:
    text = (
        (FILES / "torchtune-lora.yaml").read_text().replace("lora_finetune_distributed", "lora_finetune_single_device")
    )
    file = tmp_path / "t.yaml"
    file.write_text(text)
    draft = read_plan(file)
    assert (draft.num_devices, plan_of(draft, 1).zero) == (1, 0)
    assert read_plan(file, define={"recipe": "lora_finetune_distributed"}).num_devices is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rl": "grpo"}, ("rl", "grpo: its generation, rewards", "without rl")),
        ({"optimizer": "came_pytorch"}, ("optimizer", "came_pytorch is not modelled", "--optimizer")),
        ({"adapter": "qlora"}, ("load_in_4bit", "load_in_4bit: true")),
        ({"adapter": "prompt"}, ("adapter", "one of lora, qlora")),
        ({"deepspeed": "none.json", "fsdp": ["full_shard"]}, ("contradicts fsdp", "none.json")),
        ({"deepspeed": [1, 2]}, ("deepspeed", "[1, 2] is not text")),
        ({"bf16": True, "fp16": True}, ("fp16", "contradicts bf16")),
        ({"micro_batch_size": 0}, ("micro_batch_size", "0 is not a whole number of 1 or more")),
        ({"adapter": "lora", "lora_dropout": 2}, ("lora_dropout", "2 is no fraction")),
        ({"adapter": "lora", "lora_target_modules": "(a+)+$"}, ("lora_target_modules", "is no pattern")),
        (
            {"adapter": "lora", "lora_target_modules": r".*layers\.[02]\.mixer.*"},
            ("lora_target_modules", "is no pattern"),
        ),
        ({"adapter": "lora", "peft_layers_to_transform": ["3"]}, ("peft_layers_to_transform", "no numbers of layers")),
        ({"adapter": "lora", "lora_rank_pattern": {"q_proj": 0.5}}, ("lora_rank_pattern", "q_proj: '0.5' is no rank")),
        ({"gradient_acumulation_steps": 4}, ("gradient_acumulation_steps", "gradient_accumulation_steps?")),
        ({"unfrozen_parameters": ["mlp.down"]}, ("unfrozen_parameters", "'mlp.down' matches no", "--freeze-modules")),
        ({"unfrozen_parameters": ["(a+)+$"]}, ("unfrozen_parameters", "matches no parameter")),
        ({"plugins": 1.5}, ("plugins", "1.5 is not a list of words")),
        ({"plugins": [["liger"]]}, ("plugins", "is not a list of words")),
        ({"unfrozen_parameters": 3}, ("unfrozen_parameters", "is no list of at most")),
        ({"unfrozen_parameters": ["^model.embed_tokens.weight$[:32000]"]}, ("rows of a parameter", "[0:32000]")),
        ({"unfrozen_parameters": ["lm_head"], "adapter": "lora"}, ("unfrozen_parameters", "without adapter")),
    ],
)
def test_what_cannot_be_read_is_told_with_what_to_write(
    settings: dict[str, object], words: tuple[str, ...], tmp_path: Path
) -> None:
    common: dict[str, object] = {"base_model": "Qwen/Qwen2.5-7B", "sequence_len": 512, "bf16": True}
    found = told(read(tmp_path, "a.yml", **{**common, **settings}))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    ("model", "patterns", "frozen"),
    [
        ("Qwen/Qwen2.5-7B", ["^lm_head.weight$", "model.layers.(0|27).mlp"],
         ("embedding.*", "attention.q.*", "attention.k.*", "attention.v.*", "attention.out.*", "layers.1-26.mlp.gate.*",
          "layers.1-26.mlp.up.*", "layers.1-26.mlp.down.*", "norm_1.*", "norm_2.*", "norm.*")),
        ("mistralai/Mixtral-8x7B-v0.1", ["model.layers.[0-9]+.block_sparse_moe", "model.layers.[0-9]+.self_attn.[qkvo]_proj",
                                         "model.embed_tokens", "lm_head", "model.layers.[12]?[0-9].input_layernorm"],
         ("layers.30-31.norm_1.*", "norm_2.*", "norm.*")),
    ],
)  # fmt: skip
def test_axolotl_trains_what_its_patterns_match(
    model: str, patterns: list[str], frozen: tuple[str, ...], tmp_path: Path
) -> None:
    settings = {"base_model": model, "sequence_len": 512, "bf16": True, "unfrozen_parameters": patterns}
    draft = read(tmp_path, "a.yml", **settings)
    assert set(plan_of(draft).peft.frozen) == set(frozen)
    assert any("frozen layers below" in setting.note for setting in draft.named("not modelled"))


def test_so_many_patterns_of_parameters_end_after_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.formats.readers.plans.axolotl._MOST_S", 0.1)
    patterns = [f"{'[a-z_.0-9]*' * 5}x{number}" for number in range(1100)]
    common = {"base_model": "Qwen/Qwen2.5-7B", "sequence_len": 512}
    assert "at most 1,024 patterns" in told(read(tmp_path, "a.yml", **common, unfrozen_parameters=patterns))
    assert "take too long to try" in told(read(tmp_path, "a.yml", **common, unfrozen_parameters=patterns[:1000]))


def test_a_gpu_without_bf16_computes_in_fp16_where_the_file_leaves_it_to_the_gpu(tmp_path: Path) -> None:
    asks = read(tmp_path, "a.yml", base_model="Qwen/Qwen2.5-7B", sequence_len=512, bf16="auto")
    says = read(tmp_path, "b.yml", base_model="Qwen/Qwen2.5-7B", sequence_len=512, bf16=True)
    script = python(tmp_path, "train.py", UNSLOTH)
    for draft, gpu, precision in ((asks, "t4", "fp16"), (asks, "a100-sxm4-80gb", "bf16"), (says, "t4", "bf16"),
                                  (script, "t4", "fp16"), (script, "rtx-4090", "bf16")):  # fmt: skip
        assert plan_of(draft.settled((), None, Device.load(gpu)), 1).precision.compute == precision
    assert "precision" not in asks.settled(("precision",), None, Device.load("t4")).assumed


def test_neat_packing_and_pretraining_pack(tmp_path: Path) -> None:
    common = {"model_name_or_path": "Qwen/Qwen2.5-7B", "finetuning_type": "full", "cutoff_len": 512}
    for settings, padded in (({"neat_packing": True}, False), ({"stage": "pt"}, False), ({}, True),
                             ({"stage": "pt", "packing": False}, True)):  # fmt: skip
        draft = read(tmp_path, "a.yaml", **common, **settings)
        assert ("packing" in [setting.name for setting in draft.named("not modelled")]) == padded, settings
    assert "neat_packing" in told(read(tmp_path, "a.yaml", **common, stage="dpo", neat_packing=True))


def test_fsdp1_s_offload_is_read(tmp_path: Path) -> None:
    settings = {"fsdp": ["full_shard", "offload", "auto_wrap"], "base_model": "Qwen/Qwen2.5-7B", "sequence_len": 512}
    plan = plan_of(read(tmp_path, "a.yml", **settings, optimizer="adamw_torch"))
    assert (plan.implementation, plan.offload.parameters, plan.offload.optimizer) == ("fsdp1", "host", "host")


def test_faults_come_together_and_name_the_file_s_own_settings(tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "finetuning_type": "oft",
        "quantization_bit": 3,
        "stage": "ppo",
        "cutoff_len": "long",
    }
    found = told(read(tmp_path, "a.yaml", **settings))
    for words in (
        "finetuning_type: oft is not modelled",
        "quantization_bit: 3 bits",
        "stage: ppo",
        "cutoff_len: long is not a whole number",
    ):
        assert words in found
    assert "max_length" not in found


def test_patterns_of_modules_are_matched_as_peft_does(tmp_path: Path) -> None:
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj"
    draft = read(tmp_path, "a.yml", base_model="Qwen/Qwen2.5-7B", adapter="lora", lora_target_modules=pattern)
    assert set(plan_of(draft).peft.targets) == {"q", "v", "up", "down"}
    some = read(tmp_path, "b.yml", base_model="Qwen/Qwen2.5-7B", adapter="lora", lora_target_modules=["q_proj", "v_proj"],
                peft_layers_to_transform=[0, 1, 5], lora_rank_pattern={"v_proj": 4})  # fmt: skip
    assert plan_of(some).peft.targets == (
        "layers.0-1.v:4",
        "layers.5.v:4",
        "layers.0-1.q",
        "layers.0-1.v",
        "layers.5.q",
        "layers.5.v",
    )


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, ("layers.0-25", "embedding", "positions", "embedding_norm.*", "norm.*", "lm_head")),
        ({"freeze_trainable_layers": -27, "freeze_extra_modules": "embed_tokens,norm"}, ("layers.27", "lm_head")),
        ({"freeze_trainable_layers": 28, "freeze_trainable_modules": "mlp", "freeze_extra_modules": "embed_tokens,norm,lm_head"},
         ("attention", "norm_1.*", "norm_2.*")),
        ({"freeze_trainable_layers": 14, "use_llama_pro": True, "freeze_extra_modules": "embed_tokens,norm,lm_head"},
         tuple(f"layers.{number}" for number in range(0, 28, 2))),
        ({"freeze_trainable_layers": 5, "use_llama_pro": True}, "28 layers are not a multiple"),
        ({"freeze_trainable_layers": 0, "freeze_trainable_modules": "mpl"}, "0 is no number of layers"),
        ({"freeze_trainable_modules": "mpl"}, "mpl is not read"),
    ],
)  # fmt: skip
def test_llama_factory_freezes_all_but_some_layers(settings: dict[str, object], frozen: Any, tmp_path: Path) -> None:
    draft = read(
        tmp_path, "a.yaml", model_name_or_path="Qwen/Qwen2.5-7B", finetuning_type="freeze", cutoff_len=512, **settings
    )
    if isinstance(frozen, str):
        assert frozen in told(draft)
    else:
        assert plan_of(draft).peft.frozen == frozen


@pytest.mark.parametrize(
    ("word", "kind", "dtype"),
    [
        ("adamw_torch_4bit", "adam4bit", "bf16"),
        ("lion_8bit", "lion8bit", "fp32"),
        ("paged_adamw_32bit", "paged_adamw", "fp32"),
        ("paged_adamw_8bit", "paged_adam8bit", "fp32"),  # bitsandbytes' wide states are fp32 whatever is trained
        ("adafactor", "adafactor", "bf16"),
        ("muon", "muon", "bf16"),
    ],
)
def test_words_for_optimizers(word: str, kind: str, dtype: str, tmp_path: Path) -> None:
    plan = plan_of(read(tmp_path, "a.yml", base_model="Qwen/Qwen2.5-7B", optimizer=word), 1)
    assert (plan.optimizer.kind, plan.optimizer.dtype) == (kind, dtype)


@pytest.mark.parametrize(
    ("settings", "wide"),
    [
        ({"optimizer": "adamw_bnb_8bit"}, True),
        ({"optimizer": "paged_adamw_8bit"}, True),
        ({"optimizer": "adamw_torch_8bit"}, False),  # torchao's
        ({"optimizer": "adamw_bnb_8bit", "deepspeed": "deepspeed_configs/zero2.json"}, False),
    ],
)
def test_the_trainer_keeps_an_embedding_s_states_wide(settings: dict[str, str], tmp_path: Path, *, wide: bool) -> None:
    draft = read(tmp_path, "a.yml", base_model="Qwen/Qwen2.5-7B", **settings)
    assert draft.fields.get("wide_embedding", False) is wide


def test_torchtune_is_known_in_one_line_each() -> None:
    text = "model: {_component_: torchtune.models.llama3_2.llama3_2_3b}\nbatch_size: 2\n"
    assert detect(text, "a.yaml") == "torchtune"


def test_pairs_are_two_sequences_each(tmp_path: Path) -> None:
    trained = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "per_device_train_batch_size": 3,
        "bf16": True,
        "max_length": 512,
    }
    for name, settings in (
        ("a.yml", {"base_model": "Qwen/Qwen2.5-7B", "micro_batch_size": 3, "rl": "dpo"}),
        ("b.yaml", {**trained, "finetuning_type": "lora", "stage": "dpo"}),
        ("c.json", {**trained, "beta": 0.1}),
    ):
        draft = read(tmp_path, name, **settings)
        assert plan_of(draft, 1).micro_batch_size == 6
        assert draft.reference_forwards == 1


def test_grpo_s_files_are_the_policy_s_own_step(tmp_path: Path) -> None:
    settings = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 4, "bf16": True, "beta": 0.04,
                "num_generations": 8, "max_prompt_length": 256, "use_vllm": True}  # fmt: skip
    draft = read(tmp_path, "a.json", **settings)
    plan = plan_of(draft, 1)
    assert (plan.seq_len, plan.micro_batch_size) == (256 + 512, 4)  # answers as long as trl's own default; no pairs
    assert {setting.name for setting in draft.named("not modelled")} >= {"num_generations", "use_vllm"}
    assert not draft.named("unknown")


def test_galore_s_rank(tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "finetuning_type": "full",
        "use_galore": True,
        "galore_rank": 32,
    }
    plan = plan_of(
        read(tmp_path, "a.yaml", **settings, galore_layerwise=True, pure_bf16=True, per_device_train_batch_size=1), 1
    )
    assert (plan.optimizer.kind, plan.optimizer.galore_rank, plan.optimizer.in_backward) == ("galore", 32, True)
    arguments = {"optim": "galore_adamw", "optim_args": "rank=64, scale=2", "num_train_epochs": 1, "max_length": 512}
    assert plan_of(read(tmp_path, "b.json", **arguments), 1).optimizer.galore_rank == 64


def test_an_unknown_model_is_told_with_a_flag(tmp_path: Path) -> None:
    draft = read(tmp_path, "a.yml", base_model="someone/new-model-9b", sequence_len=512)
    assert (draft.model, draft.model_unknown) == (
        None,
        "someone/new-model-9b is not a preset; --model NAME, or its config.json",
    )


def test_an_adapter_s_file_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--recipe"):
        read(tmp_path, "adapter_config.json", peft_type="LORA", r=8)


XTUNER = """from xtuner.model import SupervisedFinetune
from torch.optim import AdamW
pretrained_model_name_or_path = 'meta-llama/Meta-Llama-3-8B'
max_length = 2 * 1024
pack_to_max_length = True
sequence_parallel_size = 2
accumulative_counts = 16
accumulative_counts *= sequence_parallel_size
model = dict(type=SupervisedFinetune, llm=dict(
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    quantization_config=dict(load_in_4bit=True, bnb_4bit_use_double_quant=True)), lora=dict(r=64, lora_dropout=0.1))
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(type=AdamW, lr=-2e-4), accumulative_counts=accumulative_counts, dtype='float16')
raise SystemExit('configs are not run')
"""
UNSLOTH = """from unsloth import FastLanguageModel
MOST = 4096
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length=MOST)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj", "v_proj"], layers_to_transform=[30, 31])
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit",
                 fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported())
raise SystemExit('scripts are not run')
"""


def python(folder: Path, name: str, text: str, **define: str) -> Draft:
    file = folder / name
    file.write_text(text)
    return read_plan(file, define=define)


def test_xtuner_s_config_is_read_and_not_run(tmp_path: Path) -> None:
    draft = python(tmp_path, "config.py", XTUNER)
    plan = plan_of(draft, 4)
    assert (draft.format, draft.model, plan.seq_len, plan.cp, plan.num_micro_batches) == (
        "xtuner",
        "llama3-8b",
        2048,
        2,
        32,
    )
    assert (plan.peft.rank, plan.peft.stored, plan.peft.targets, plan.peft.upcasts) == (
        64,
        "nf4_double",
        ("all",),
        True,
    )
    assert (plan.precision.compute, plan.implementation, plan.recompute.mode) == ("fp16", "ddp", "full")
    assert not draft.named("unknown")
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}')
    sharded = plan_of(python(tmp_path, "config.py", XTUNER, deepspeed="zero2.json"), 4)
    assert (sharded.implementation, sharded.zero, sharded.num_micro_batches) == ("deepspeed", 2, 32)


@pytest.mark.parametrize(
    ("kind", "sequences", "forwards", "faulty"),
    [("SupervisedFinetune", 1, 0, False), ("DPO", 2, 1, False), ("ORPO", 2, 0, False), ("RewardModel", 1, 0, True),
     ("LLaVAModel", 1, 0, True)],
)  # fmt: skip
def test_xtuner_s_model_says_what_its_step_is(
    kind: str, sequences: int, forwards: int, tmp_path: Path, *, faulty: bool
) -> None:
    """Pairs are two sequences; what is no language model's own step is no plan of one."""
    draft = python(tmp_path, "config.py", XTUNER.replace("SupervisedFinetune", kind))
    assert (draft.fields["micro_batch_size"], draft.reference_forwards) == (sequences, forwards)
    assert bool(draft.faults) is faulty
    assert not draft.named("unknown")


def test_unsloth_s_script_is_read_and_not_run(tmp_path: Path) -> None:
    draft = python(tmp_path, "train.py", UNSLOTH)
    plan = plan_of(draft, 1)
    assert (draft.format, draft.model, plan.seq_len, plan.micro_batch_size) == ("unsloth", "llama3.1-8b", 4096, 2)
    assert (plan.peft.targets, plan.peft.rank, plan.peft.stored) == (
        ("layers.30-31.q", "layers.30-31.v"),
        32,
        "nf4_double",
    )
    assert (plan.optimizer.kind, plan.recompute.mode, plan.offload.activations) == ("adam8bit", "full", "host")
    assert draft.stack_changes["adapters"][0] == "fused"
    assert not draft.named("unknown")
    pairs = python(tmp_path, "train.py", UNSLOTH.replace("SFTConfig(", "KTOConfig("))
    assert plan_of(pairs, 1).micro_batch_size == 2
    assert pairs.reference_forwards == 3
    assert "generation and rewards" in told(python(tmp_path, "train.py", UNSLOTH.replace("SFTConfig(", "PPOConfig(")))
    answers = python(tmp_path, "train.py", UNSLOTH.replace("SFTConfig(", "GRPOConfig(max_completion_length=100, "))
    assert plan_of(answers, 1).seq_len == 512 + 100


def test_unsloth_studio_s_file(tmp_path: Path) -> None:
    training = {"training_type": "lora", "max_seq_length": 2048, "load_in_4bit": False, "batch_size": 2}
    settings = {
        "model": "unsloth/Qwen2.5-7B",
        "lora": {"lora_r": 64, "use_dora": True, "target_modules": "q_proj,v_proj"},
    }
    file = tmp_path / "run.yaml"
    lines = [f"{key}: {value}" for key, value in training.items()]
    file.write_text("\n".join([f"model: {settings['model']}", "training:", *(f"  {line}" for line in lines),
                               "lora:", *(f"  {k}: {v}" for k, v in settings["lora"].items())]))  # type: ignore[attr-defined]  # fmt: skip
    plan = plan_of(draft := read_plan(file), 1)
    assert (draft.format, plan.peft.method, plan.peft.rank, plan.peft.stored) == ("unsloth", "dora", 64, "compute")
    assert plan.optimizer.kind == "adam8bit"


def test_litgpt_s_pretraining_is_refused_as_what_it_is(tmp_path: Path) -> None:
    """Its file has train.global_batch_size as Megatron-Bridge's do, and was asked for a recipe."""
    file = tmp_path / "debug.yaml"
    file.write_text("model_name: pythia-14m\ninitial_checkpoint_dir:\ntrain:\n  global_batch_size: 125\n  micro_batch_size: 5\n")  # fmt: skip
    with pytest.raises(PlanError, match=r"LitGPT's pretraining is not read.*--data-parallel fsdp1"):
        read_plan(file)


@pytest.mark.parametrize(
    ("settings", "name", "meant"),
    [
        ({"base_model": "Qwen/Qwen2.5-7B", "sequence_length": 4096}, "sequence_length", "sequence_len"),
        ({"model_name_or_path": "Qwen/Qwen2.5-7B", "finetuning_type": "lora", "cutoff_length": 4096}, "cutoff_length", "cutoff_len"),
    ],
    ids=["axolotl", "llama-factory"],
)  # fmt: skip
def test_a_length_by_a_longer_word_is_a_fault(settings: dict[str, Any], name: str, meant: str, tmp_path: Path) -> None:
    """It decides time and memory, and the default was taken instead."""
    assert f"{name}: is no option ({meant}?)" in told(read(tmp_path, "a.yaml", **settings))


def test_torchtune_s_vision_recipes_say_what_of_them_is_left_out(tmp_path: Path) -> None:
    """recipes/configs/llama3_2_vision/11B_lora.yaml: what is trained of decoder, tower and cross-attention."""
    model = {
        "_component_": "torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b", "decoder_trainable": "frozen",
        "encoder_trainable": "lora", "fusion_trainable": "lora", "lora_rank": 8, "lora_attn_modules": ["q_proj"], "image_size": 560,
    }  # fmt: skip
    settings = {
        "model": model,
        "tokenizer": {"max_seq_len": 8192},
        "batch_size": 2,
        "optimizer": {"_component_": "torch.optim.AdamW"},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(settings))
    draft = read_plan(tmp_path / "a.yaml", "torchtune")
    assert not draft.named("unknown")
    left_out = {
        f"model.{name}" for name in ("decoder_trainable", "encoder_trainable", "fusion_trainable", "image_size")
    }
    assert left_out <= {setting.name for setting in draft.settings if setting.use == "not modelled"}


def test_what_other_kinds_of_runs_read_is_told_as_that(tmp_path: Path) -> None:
    """GRPO's length of prompts in a file of DPO's: the name is known, so none like it is proposed."""
    draft = read(tmp_path, "a.yaml", model_name_or_path="Qwen/Qwen2.5-7B", beta=0.1, max_length=2048, max_prompt_length=512, per_device_train_batch_size=1)  # fmt: skip
    assert not draft.named("unknown")
    (found,) = (setting for setting in draft.settings if setting.name == "max_prompt_length")
    assert (found.use, found.note) == ("not modelled", "a run of this kind does not ask for it")


def test_litgpt_shards_over_the_devices_that_it_states(tmp_path: Path) -> None:
    common = {"checkpoint_dir": "checkpoints/meta-llama/Llama-2-7b-hf", "precision": "bf16-true", "lora_r": 8,
              "lora_query": True, "lora_key": False, "lora_value": True, "lora_mlp": True,
              "train": {"global_batch_size": 16, "micro_batch_size": 2, "max_seq_length": 512}}  # fmt: skip
    one = plan_of(
        read(tmp_path, "a.yaml", **common, quantize="bnb.nf4-dq", optimizer={"class_path": "torch.optim.AdamW"}), 1
    )
    assert (one.peft.targets, one.peft.stored, one.num_micro_batches) == (("q", "v", "mlp"), "nf4_double", 8)
    assert (one.optimizer.kind, one.precision.master, one.recompute.mode) == ("paged_adamw", "bf16", "none")
    four = read(tmp_path, "b.yaml", **common, devices=4)
    plan = plan_of(four, 4)
    assert (four.num_devices, four.stack, four.model) == (4, "litgpt-2024", "llama2-7b")
    assert (plan.implementation, plan.dp_shard, plan.num_micro_batches, plan.recompute.mode) == ("fsdp2", 4, 2, "full")
    bad = {**common, "devices": 2, "quantize": "bnb.nf4", "precision": "bf17", "lora_r": "many"}
    found = told(read(tmp_path, "c.yaml", **bad))
    for words in (
        "quantize: LitGPT does not quantise on several",
        "bf17 is unknown",
        "lora_r: many is not a whole number",
    ):
        assert words in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import unsloth\nx = (", "not Python"),
        ("import unsloth\n" + "x = " + "-" * 5000 + "1", "not Python"),
        (
            "import xtuner\nmax_length = 9 ** 999999\ntrain_dataloader = dict(batch_size=1 // 0)",
            "1 // 0 is not a whole number",
        ),
        ("import xtuner\nmax_length = min(1, 2)", "min(1, 2) is not a whole number"),
        ("import torch", "is Python code"),
    ],
)
def test_python_that_cannot_be_read_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(python(tmp_path, "a.py", text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [({}, 3), ({"loss_type": "apo_zero_unpaired"}, 1), ({"precompute_ref_log_probs": True}, 1)],
)
def test_kto_s_answers_are_single_and_meet_more_forwards(
    settings: dict[str, object], forwards: int, tmp_path: Path
) -> None:
    draft = read(
        tmp_path, "a.json", per_device_train_batch_size=4, desirable_weight=1.0, max_length=512, bf16=True, **settings
    )
    assert plan_of(draft, 1).micro_batch_size == 4
    assert draft.reference_forwards == forwards


@pytest.mark.parametrize(
    ("launcher", "found"),
    [
        ("zero3", ("deepspeed", 3)),
        ("fsdp1", ("fsdp1", 3)),
        ("fsdp2", ("fsdp2", 3)),
        ("multi_gpu", ("ddp", 0)),
        ("mine.yaml", None),
    ],
)
def test_trl_s_command_line_launches_by_a_word(launcher: str, found: tuple[str, int] | None, tmp_path: Path) -> None:
    draft = read(tmp_path, "sft.yaml", model_name_or_path="Qwen/Qwen2.5-7B", dataset_name="trl-lib/Capybara", use_peft=True,
                 per_device_train_batch_size=2, max_length=512, bf16=True, accelerate_config=launcher, num_processes=8)  # fmt: skip
    if found is None:
        assert "accelerate_config: a file of accelerate's" in told(draft)
        return
    plan = plan_of(draft)
    assert (plan.implementation, plan.zero, plan.peft.method, plan.num_micro_batches) == (*found, "lora", 1)
    assert not draft.named("unknown")


def test_trl_s_trainers_checkpoint_and_compute_in_bf16_unless_told(tmp_path: Path) -> None:
    """trl/trainer/base_config.py: gradient_checkpointing is true, and bf16 is not fp16."""
    plan = plan_of(
        read(
            tmp_path,
            "sft.json",
            model_name_or_path="meta-llama/Llama-3.1-8B",
            packing=True,
            max_steps=9,
            lr_scheduler_type="cosine",
        )
    )
    assert (plan.precision.compute, plan.recompute.mode, plan.seq_len) == ("bf16", "full", 1024)
    told = {"fp16": True, "gradient_checkpointing": False, "packing": True, "learning_rate": 1e-5}
    plan = plan_of(read(tmp_path, "sft.json", model_name_or_path="meta-llama/Llama-3.1-8B", use_peft=False, **told))
    assert (plan.precision.compute, plan.recompute.mode) == ("fp16", "none")


def test_litgpt_s_pairs_have_dropout_unless_told(tmp_path: Path) -> None:
    """litgpt/finetune/lora.py: setup takes 0.05."""
    told = {"checkpoint_dir": "checkpoints/meta-llama/Llama-3.1-8B", "lora_r": 8}
    assert plan_of(read(tmp_path, "lora.json", **told), 1).peft.dropout == 0.05
    assert plan_of(read(tmp_path, "lora.json", **told, lora_dropout=0.0), 1).peft.dropout == 0.0


@pytest.mark.parametrize(
    ("settings", "loss", "words"),
    [
        ({"loss_type": "chunked_nll"}, "chunked", ""),
        ({"loss_type": "nll"}, None, ""),
        ({"use_liger_kernel": True}, "fused_linear", ""),
        ({}, None, "TRL 1.10 and later"),
        ({"loss_type": "chunked_nll", "use_liger_kernel": True}, "fused_linear", "goes without Liger"),
        ({"loss_type": "sigmoid"}, None, "nll, is taken"),
    ],
)
def test_trl_s_loss_of_plain_text_is_its_chunks_of_the_head(
    settings: dict[str, Any], loss: str | None, words: str, tmp_path: Path
) -> None:
    draft = read(tmp_path, "sft.json", model_name_or_path="Qwen/Qwen3-8B", packing=True, dataset_name="x", bf16=True,
                 per_device_train_batch_size=2, learning_rate=1e-5, output_dir="out", **settings)  # fmt: skip
    assert draft.format == "transformers"
    assert draft.stack_changes.get("loss", (None, ""))[0] == loss
    said = told(draft) if "Liger" in words else " ".join(one.note for one in draft.named("not modelled"))
    assert words in said


def test_llama_factory_s_later_files_are_refused_and_not_read_as_earlier_ones(tmp_path: Path) -> None:
    later = {"model": "Qwen/Qwen3-4B", "peft_config": {"name": "lora", "r": 16}, "dist_config": {"name": "fsdp2"},
             "train_dataset": "data.yaml", "micro_batch_size": 1, "cutoff_len": 2048}  # fmt: skip
    assert "a setting of LLaMA-Factory 1" in told(read(tmp_path, "v1.json", **later))
    common = {"model_name_or_path": "Qwen/Qwen3-4B", "finetuning_type": "full", "template": "qwen3", "cutoff_len": 512}
    of_megatron = told(read(tmp_path, "mca.json", **common, pipeline_model_parallel_size=4))
    assert "its Megatron trainer" in of_megatron, "a plan without the stages that the file states"


@pytest.mark.parametrize(
    ("halves", "faulty"),
    [
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, False),
        ({"fp16": {"enabled": False}}, False),
        ({"bf16": {"enabled": True}}, False),
        ({"bf16": {"enabled": False}}, True),
        ({"fp16": {"enabled": True}}, True),
    ],
)
def test_a_deepspeed_file_contradicts_only_what_it_states(
    halves: dict[str, dict[str, object]], tmp_path: Path, *, faulty: bool
) -> None:
    """What it leaves out or to "auto" is filled in from the arguments (accelerate, DeepSpeedPlugin.set_mixed_precision)."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **halves}))
    common = {"model_name_or_path": "Qwen/Qwen3-4B", "finetuning_type": "full", "template": "qwen3", "cutoff_len": 512}
    draft = read(tmp_path, "a.json", **common, bf16=True, deepspeed="ds.json")
    assert bool(draft.faults) is faulty
    assert draft.fields["precision"] == "bf16"


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "simpo"])
def test_pairs_without_a_reference_are_told_apart(loss: str, tmp_path: Path) -> None:
    """LLaMA-Factory's use_ref_model; axolotl's rl words."""
    common = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "finetuning_type": "lora", "template": "llama3", "cutoff_len": 512,
              "per_device_train_batch_size": 2}  # fmt: skip
    factory = read(tmp_path, "f.json", **common, stage="dpo", pref_loss=loss)
    told_of = [factory]
    if loss != "sigmoid":
        told_of.append(read(tmp_path, "a.json", base_model="meta-llama/Llama-3.2-1B", rl=loss, micro_batch_size=2,
                            sequence_len=512, datasets=[{"path": "x"}]))  # fmt: skip
    for draft in told_of:
        assert plan_of(draft).micro_batch_size == 4
        assert draft.reference_forwards == (loss == "sigmoid")
        assert ("--reference none" in " ".join(draft.notes)) == (loss == "sigmoid")


@pytest.mark.parametrize(
    ("attention", "mlp", "targets"), [(True, True, ("all",)), (True, False, ("attention",)), (False, True, ("mlp",))]
)
def test_unsloth_s_words_for_what_is_finetuned(
    *, attention: bool, mlp: bool, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """FastModel's notebooks: parts of the language model; nothing trained of it is an error."""
    words = f"finetune_vision_layers=False, finetune_attention_modules={attention}, finetune_mlp_modules={mlp}"
    script = UNSLOTH_FAST.format(words)
    draft = python(tmp_path, "fast.py", script)
    assert not draft.named("unknown")
    assert plan_of(draft, 1).peft.targets == targets
    with pytest.raises(PlanError, match="nothing of the language model"):
        plan_of(python(tmp_path, "fast.py", script.replace("vision_layers", "language_layers")), 1)


UNSLOTH_FAST = """from unsloth import FastModel
model, tokenizer = FastModel.from_pretrained(model_name="unsloth/gemma-3-4b-it", max_seq_length=2048, load_in_4bit=True)
model = FastModel.get_peft_model(model, r=8, {})
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2))
"""


@pytest.mark.parametrize(("model", "targets"), [("openai/gpt-oss-20b", ("attention",)), ("Qwen/Qwen3-8B", ("all",))])
def test_experts_that_are_no_modules_have_no_adapters(model: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """gpt-oss's are parameters of one module each, which `all-linear` does not find."""
    draft = read(tmp_path, "a.yml", base_model=model, adapter="lora", lora_r=8, lora_target_linear=True)
    assert plan_of(draft, 1).peft.targets == targets


TRL = """from peft import LoraConfig, prepare_model_for_kbit_training
from trl import SFTConfig, SFTTrainer
NAME = "mistralai/Mistral-7B-v0.1"
quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=quantised, torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = prepare_model_for_kbit_training(model)
lora = LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
args = SFTConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=8, max_length=1024,
                 optim="paged_adamw_8bit", packing=True, bf16=True, learning_rate=2e-4)
SFTTrainer(model=model, args=args, peft_config=lora, train_dataset=data).train()
"""


def test_a_script_of_trl_s_is_read_and_not_run(tmp_path: Path) -> None:
    draft = python(tmp_path, "sft.py", TRL + "raise SystemExit('scripts are not run')")
    plan = plan_of(draft, 1)
    assert (draft.format, draft.model, plan.seq_len, plan.num_micro_batches) == ("transformers", "mistral-7b", 1024, 8)
    assert (plan.peft.stored, plan.peft.rank, plan.peft.dropout, plan.peft.targets) == ("nf4_double", 64, 0.1, ("all",))
    assert (plan.peft.upcasts, plan.recompute.mode, plan.optimizer.kind) == (True, "full", "paged_adam8bit")
    assert not draft.named("unknown")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ('DPOTrainer("Qwen/Qwen3-8B", args=DPOConfig(per_device_train_batch_size=2, bf16=True))', (4, 1)),
        ('GRPOTrainer(model="Qwen/Qwen3-8B", args=GRPOConfig(per_device_train_batch_size=8, bf16=True))', (8, 0)),
        ('Trainer("Qwen/Qwen3-8B", args=TrainingArguments(per_device_train_batch_size=3, bf16=has_bf16()))', (3, 0)),
    ],
)
def test_a_script_s_trainer_says_what_is_trained_on(call: str, found: tuple[int, int], tmp_path: Path) -> None:
    draft = python(tmp_path, "x.py", call)
    assert (plan_of(draft, 1).micro_batch_size, draft.reference_forwards) == found
    assert draft.model == "qwen3-8b"


def test_what_a_script_computes_is_an_error_where_the_plan_needs_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"per_device_train_batch_size.*args\.batch"):
        plan_of(python(tmp_path, "x.py", "Trainer(args=TrainingArguments(per_device_train_batch_size=args.batch))"), 1)


def test_litgpt_s_file_is_no_megatron_bridge_s(tmp_path: Path) -> None:
    """Both have a table `train` with a global_batch_size."""
    file = tmp_path / "lit.yaml"
    file.write_text("checkpoint_dir: checkpoints/meta-llama/Llama-3.2-3B\nlora_r: 32\ntrain:\n  global_batch_size: 8\n")
    assert read_plan(file).format == "litgpt"


@pytest.mark.parametrize("loss", ["torchtune.rlhf.loss.DPOLoss", "torch.nn.CrossEntropyLoss"])
def test_torchtune_s_preferences_are_pairs_with_a_reference(loss: str, tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    text = "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\nbatch_size: 4\nloss:\n  _component_: " + loss
    file.write_text(f"{text}\noptimizer:\n  _component_: torch.optim.AdamW\n")
    draft = read_plan(file)
    paired = "DPO" in loss
    assert (plan_of(draft, 1).micro_batch_size, draft.reference_forwards) == ((8, 1) if paired else (4, 0))


_COMMON = {"per_device_train_batch_size": 2, "bf16": True, "gradient_accumulation_steps": 4, "model_name_or_path": "Qwen/Qwen2.5-7B"}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"torch_compile_backend": "inductor"}, {"torch_compile": True}),
        ({"torch_compile_mode": "default"}, {"torch_compile": True}),
        ({"adafactor": True, "optim": "adamw_torch"}, {"optim": "adafactor"}),
        ({"tf32": "True", "bf16": False}, {"tf32": True, "bf16": False}),
        (
            {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 2}},
            {"fsdp": "auto_wrap", "fsdp_config": {"version": 2, "reshard_after_forward": False}},
        ),
        (
            {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
            {"fsdp": True, "fsdp_config": {"version": 2}},
        ),
    ],
)
def test_what_training_arguments_say_in_two_ways_is_one_plan(tmp_path: Path, one: Any, other: Any) -> None:
    """training_args.py: what __post_init__ makes of each."""
    drafts = [read(tmp_path, "a.json", **{**_COMMON, **each}) for each in (one, other)]
    assert plan_of(drafts[0]) == plan_of(drafts[1])
    assert drafts[0].stack == drafts[1].stack


@pytest.mark.parametrize("engine", [{}, {"fsdp": "full_shard auto_wrap"}])
def test_gradients_are_reduced_each_time_where_the_plugin_says_so(tmp_path: Path, engine: dict[str, Any]) -> None:
    kwargs = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    each, last = (plan_of(read(tmp_path, "a.json", **_COMMON, **engine, **more)) for more in (kwargs, {}))
    assert (each.syncs_every_micro_batch, last.syncs_every_micro_batch) == (True, False)


def test_without_a_largest_norm_nothing_is_clipped(tmp_path: Path) -> None:
    clips = [read(tmp_path, "a.json", **_COMMON, max_grad_norm=norm).stack_changes.get("clips") for norm in (0, 1.0)]
    assert clips[0] is not None
    assert clips == [("", clips[0][1]), None]
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    draft = read(tmp_path, "a.json", **_COMMON, max_grad_norm=0, deepspeed=zero)  # which computes it all the same
    assert "clips" not in draft.stack_changes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fsdp": "full_shard"}, "fsdp_config.fsdp_auto_wrap_policy"),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 10_000}}, "fsdp_config.min_num_params"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode"),
    ],
)
def test_what_the_trainer_would_run_otherwise_is_told(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    usual = {setting.name for setting in read(tmp_path, "a.json", **_COMMON).named("not modelled", "unknown")}
    named = {
        setting.name for setting in read(tmp_path, "a.json", **_COMMON, **settings).named("not modelled", "unknown")
    }
    assert named - usual == {told}


def test_axolotl_quantises_below_adapters_alone_and_may_choose_to_compile(tmp_path: Path) -> None:
    common = {"base_model": "Qwen/Qwen2.5-7B", "sequence_len": 512}
    draft = read(tmp_path, "a.yml", **common, load_in_4bit=True)
    assert [fault.problem for fault in draft.faults] == ["goes with adapters alone"]
    assert read(tmp_path, "a.yml", **common, torch_compile="auto").stack == "torch-2.11-compiled"
    assert read(tmp_path, "a.yml", **common, torch_compile_backend="inductor").stack == "transformers-2024"


def test_a_reference_of_its_own_is_told(tmp_path: Path) -> None:
    settings = {
        "finetuning_type": "lora",
        "stage": "dpo",
        "ref_model": "Qwen/Qwen2.5-7B",
        "model_name_or_path": "Qwen/Qwen2.5-7B",
    }
    assert "ref_model" in [s.name for s in read(tmp_path, "a.yml", **settings).named("not modelled")]


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD", "OneBitAdam"])
def test_the_optimizer_of_a_deepspeed_file_is_the_one_that_runs(tmp_path: Path, kind: str) -> None:
    """transformers/integrations/deepspeed.py, deepspeed_optim_sched: the file's before `optim`."""
    stage = {"stage": 0 if kind == "OneBitAdam" else 2, "overlap_comm": True}
    settings = {"zero_optimization": stage, "optimizer": {"type": kind}}
    alone = read(tmp_path, "ds.json", **settings)
    under = read(tmp_path, "a.json", **_COMMON, deepspeed=settings, optim="adamw_8bit")
    for field in ("optimizer", "optimizer_impl", "one_bit"):
        assert under.fields.get(field) == alone.fields.get(field)
    assert [s.name for s in under.named("overruled")] == ["optim"]
    assert read(tmp_path, "a.json", **_COMMON, deepspeed={"zero_optimization": stage}).fields["optimizer"] == "adamw"


_BRIDGE = """model:
  tensor_model_parallel_size: 2
  seq_length: 4096
{model}train:
  micro_batch_size: 1
  global_batch_size: 32
optimizer:
  use_precision_aware_optimizer: true
{optimizer}"""


def _bridge(folder: Path, model: str = "", optimizer: str = "") -> Draft:
    file = folder / "a.yaml"
    file.write_text(_BRIDGE.format(model=model, optimizer=optimizer))
    return read_plan(file, define={"recipe": "llama3_8b_pretrain_config"})


@pytest.mark.parametrize("form", ["{}: torch.bfloat16", "{}: bf16", "{}: {{_call_: false, _target_: torch.bfloat16}}"])
def test_megatron_bridge_s_dtypes_are_read_as_they_are_stated_or_saved(tmp_path: Path, form: str) -> None:
    moments = "".join(f"  {form.format(name)}\n" for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    draft = _bridge(tmp_path, optimizer=moments)
    assert draft.fields["optimizer_dtype"] == "bf16"
    assert not draft.named("unknown", "not modelled")
    saved = _bridge(tmp_path, model="  params_dtype: {_call_: false, _target_: torch.bfloat16}\n")
    assert "optimizer_dtype" not in saved.fields
    assert not saved.named("unknown", "not modelled")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("gradient_accumulation_fusion", ("weight_gradients", "added")),
        ("apply_rope_fusion", ("rope", "unfused")),
        ("bias_swiglu_fusion", ("gated_activation", "operators")),
    ],
)
def test_megatron_bridge_s_fusions_are_on_unless_switched_off(
    tmp_path: Path, key: str, change: tuple[str, object]
) -> None:
    name, value = change
    for on in (True, False):
        draft = _bridge(tmp_path, model=f"  {key}: {str(on).lower()}\n")
        assert not draft.faults
        assert not draft.named("unknown")
        assert draft.stack_changes.get(name, (None,))[0] == (None if on else value)
