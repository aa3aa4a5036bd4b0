"""More commands and the small files that they read: fine-tuning frameworks' own, tables of measurements, options that read a file."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Final

from tests.campaign import inputs

_TUNED: Final = "predict --gpus 1xa100 --plain --plan"
_LAUNCHED: Final = "predict --gpus 8xa100 --json --plan"
XTUNER: Final = b"""from torch.optim import AdamW
from xtuner.model import SupervisedFinetune
pretrained_model_name_or_path = 'meta-llama/Llama-3.2-1B'
max_length = 2 * 1024
pack_to_max_length = True
sequence_parallel_size = 1
batch_size = 1
accumulative_counts = 16
accumulative_counts *= sequence_parallel_size
model = dict(type=SupervisedFinetune, use_varlen_attn=False, llm=dict(
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    quantization_config=dict(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type='nf4')),
    lora=dict(type=LoraConfig, r=64, lora_alpha=16, lora_dropout=0.1))
train_dataloader = dict(batch_size=batch_size, num_workers=0)
optim_wrapper = dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW, lr=2e-4), accumulative_counts=accumulative_counts, dtype='float16')
"""
_UNSLOTH: Final = b"""from unsloth import FastLanguageModel, is_bfloat16_supported
MOST = 2048
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-bnb-4bit", max_seq_length=MOST, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0, layers_to_transform=[14, 15])
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit",
                 fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported())
"""
_VISION: Final = b"""from unsloth import FastModel
model, tokenizer = FastModel.from_pretrained(model_name="unsloth/Llama-3.2-1B", max_seq_length=1024, full_finetuning=False)
model = FastModel.get_peft_model(model, r=8, finetune_attention_modules=True, finetune_mlp_modules=False)
trainer = GRPOTrainer(model=model, args=GRPOConfig(max_completion_length=100, num_generations=4, per_device_train_batch_size=4))
"""
_STUDIO: Final = b"""model: unsloth/Llama-3.2-1B
training:
  training_type: lora
  max_seq_length: 2048
  load_in_4bit: false
  batch_size: 2
lora:
  lora_r: 64
  use_dora: true
  target_modules: "q_proj,v_proj"
"""
_LITGPT: Final = b"""checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
quantize: bnb.nf4-dq
devices: 1
num_nodes: 1
lora_r: 32
lora_alpha: 16
lora_query: true
lora_key: false
lora_value: true
lora_mlp: true
train:
  global_batch_size: 16
  micro_batch_size: 2
  max_seq_length: 512
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
"""
_LITGPT_FULL: Final = b"""checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-mixed
devices: 4
train:
  global_batch_size: 64
  micro_batch_size: 4
  max_seq_length: 1024
"""
_TORCHTUNE: Final = b"""# tune run --nproc_per_node 2 full_finetune_distributed --config mine.yaml
model:
  _component_: torchtune.models.llama3_2.llama3_2_1b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 1024
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: true
batch_size: 2
gradient_accumulation_steps: 4
optimizer:
  _component_: torch.optim.AdamW
  fused: true
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
enable_activation_checkpointing: true
dtype: bf16
"""
_SFT: Final = b"""#!/bin/bash
#SBATCH --nodes=1 --gpus-per-node=8
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
MODEL=${MODEL:-meta-llama/Llama-3.2-1B}
case "$MODEL" in
  *70B) LENGTH=512 ;;
  *) LENGTH=$((4 * 256)) ;;
esac
accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP -m trl sft \\
  --model_name_or_path "$MODEL" --use_peft --lora_r 16 --lora_target_modules all-linear \\
  --max_length "$LENGTH" --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16
"""
_TRAINER: Final = b"""#!/bin/bash
NPROC=$(( 2 * 4 ))
if [ -z "$LR" ]; then LR=1e-5; fi
torchrun --nproc_per_node $NPROC --nnodes ${NNODES:-1} train.py --model_name_or_path meta-llama/Llama-3.2-1B \\
  --deepspeed zero2.json --per_device_train_batch_size 2 --gradient_checkpointing True --model_max_length 1024 \\
  --bf16 True --learning_rate $LR --optim adamw_bnb_8bit --num_train_epochs 1
"""
_ZERO2: Final = b"""{"zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8},
"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}
"""
_ACCELERATE: Final = b"""compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
_SCRIPT: Final = b"""from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
args = SFTConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, max_length=1024,
                 gradient_checkpointing=True, optim="paged_adamw_8bit", packing=True)
trainer = SFTTrainer(model="meta-llama/Llama-3.2-1B", args=args)
"""
_SWIFT: Final = b"""NPROC_PER_NODE=8 swift sft --model meta-llama/Llama-3.2-1B --torch_dtype bfloat16 --max_length 1024 --dataset a#5 b \\
  --deepspeed zero3 --attn_impl flash_attn --packing true --quant_method bnb --quant_bits 4 --lora_rank 32 --target_modules q_proj
"""
_XTUNED: Final = b"""NPROC_PER_NODE=8 xtuner train config.py --deepspeed zero2.json --work-dir out
"""
_LITGPTED: Final = b"""litgpt finetune_lora meta-llama/Llama-3.2-1B --config mine.yaml --quantize null --devices 8 --train.micro_batch_size 1
"""
_FACTORY: Final = b"""FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train llama3_lora_sft.yaml lora_rank=64 cutoff_len=512 per_device_train_batch_size=1
"""
_TUNE: Final = b"""tune run --nproc_per_node 8 full_finetune_distributed --config mine.yaml batch_size=1 gradient_accumulation_steps=2
"""
_BRIDGED: Final = b"""torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe llama32_1b_sft_config train.global_batch_size=16 model.tensor_model_parallel_size=2
"""
_VERL: Final = b"""python3 -m verl.trainer.main_ppo data.max_prompt_length=256 data.max_response_length=256 trainer.n_gpus_per_node=8 \\
  actor_rollout_ref.model.path=meta-llama/Llama-3.2-1B actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.fsdp_config.fsdp_size=4
"""
_PYTHON: Final = b"""CUDA_VISIBLE_DEVICES=0,1 deepspeed --include localhost:0,1 finetune.py --deepspeed zero2.json --q_lora --bits 4 --lora_r 8 \\
  --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 --fp16 True --max_seq_length 512
"""


def recipes() -> Mapping[str, tuple[str, dict[str, bytes]]]:
    """Fine-tuning frameworks' files and the scripts that launch them."""
    yaml, config = {"mine.yaml": _LITGPT}, {"config.py": XTUNER}
    return {
        "xtuner config": (f"{_TUNED} config.py", config),
        "xtuner config under deepspeed": (f"{_LAUNCHED} config.py --define deepspeed=zero2.json", {**config, "zero2.json": _ZERO2}),
        "xtuner launched": (f"{_LAUNCHED} run.sh", {"run.sh": _XTUNED, **config, "zero2.json": _ZERO2}),
        "unsloth script": (f"{_TUNED} train.py", {"train.py": _UNSLOTH}),
        "unsloth script of answers": (f"{_TUNED} train.py", {"train.py": _VISION}),
        "unsloth studio": (f"{_TUNED} mine.yaml", {"mine.yaml": _STUDIO}),
        "litgpt recipe": (f"{_TUNED} mine.yaml", yaml),
        "litgpt recipe of all weights": ("predict --gpus 4xa100 --plain --plan mine.yaml", {"mine.yaml": _LITGPT_FULL}),
        "litgpt launched": (f"{_LAUNCHED} run.sh", {"run.sh": _LITGPTED, **yaml}),
        "torchtune recipe": (f"{_LAUNCHED} mine.yaml", {"mine.yaml": _TORCHTUNE}),
        "torchtune launched": (f"{_LAUNCHED} run.sh", {"run.sh": _TUNE, "mine.yaml": _TORCHTUNE}),
        "trl launched": (f"{_LAUNCHED} sft.sh", {"sft.sh": _SFT}),
        "trainer launched": (f"{_LAUNCHED} train.sh", {"train.sh": _TRAINER, "zero2.json": _ZERO2}),
        "trainer script": (f"{_TUNED} train.py", {"train.py": _SCRIPT}),
        "deepspeed launched": ("predict --gpus 2xa100 --plain --plan run.sh", {"run.sh": _PYTHON, "zero2.json": _ZERO2}),
        "accelerate config": (f"{_LAUNCHED} accelerate.yaml --model llama3.2-1b --seq-len 512", {"accelerate.yaml": _ACCELERATE}),
        "ms-swift launched": (f"{_LAUNCHED} run.sh", {"run.sh": _SWIFT}),
        "verl launched": (f"{_LAUNCHED} run.sh", {"run.sh": _VERL}),
        "megatron-bridge launched": (f"{_LAUNCHED} run.sh", {"run.sh": _BRIDGED}),
    }  # fmt: skip


_SERVERS: Final = b"""id,engine,model,gpu,input_tokens,output_tokens,concurrency_or_rate,metric,value,unit,n_gpus,tp,ep,precision,num_requests,shortest
a,vLLM 0.6,Llama-3.2-1B,H100-80GB-SXM,128,32,8,output_throughput,2000,tokens/s,1,1,1,bf16,40,1
b,SGLang,Llama-3.2-1B,H100-80GB-SXM,64,8,4 requests/s,ttft_p99,20,ms,2,2,,fp8,40,0.5
c,vLLM 0.6,Llama-3.2-1B,A100-80GB,32,8,inf,request_throughput,90,requests/s,1,1,,,50,
"""
_MEMORY: Final = b"""row,model,tool,n_layers,d_model,n_heads,d_ff,vocab,n_kv_heads,seq_len,micro_batch,world,strategy,ac,store_dtype,param_dtype,reduce_dtype,opt_dtype,amp,opt_impl,attn,ddp_bucket_view,device,peak_bytes
0,little,made up,4,512,8,1408,32000,4,512,2,8,fsdp2_full,none,fp32,bf16,fp32,fp32,none,adamw_fused,,,cuda,900000000
1,little,made up,4,512,8,1408,32000,4,512,2,4,ddp,selective,fp32,fp32,fp32,fp32,bf16,adamw_foreach,sdpa_repeat,True,cpu,800000000
2,little,made up,4,512,8,1408,32000,4,512,2,4,tp,full,fp32,fp32,,fp32,none,adamw_loop,,False,cpu,800000000
"""
_COLLECTIVES: Final = b"""source,location,collective,gpu,n_gpus,n_nodes,gpus_per_node,intra_link,inter_link_gbps_per_node,nccl_version,algo_env,proto_env,size_bytes,time_us,algbw_GBps,busbw_GBps,in_place,notes
mine,a,all_reduce,A100-SXM4-80GB,16,2,8,NVSwitch,1600,2.21.5,Ring,Simple,1048576,164.3,6.4,12.0,n,p4de; NCCL_BUFFSIZE=4194304
mine,a,all_gather,H100-80GB-SXM,8,1,8,NVLink4,,2.20,,,67108864,264.3,254.0,222.0,y,
mine,b,alltoall,H100-80GB-SXM,32,4,8,NVLink4,3200,2.23,,,1048576,300,3.4,3.3,n,InfiniBand
"""
_RUNS: Final = b"""id,framework,model_name,n_layers,d_model,n_heads,n_kv_heads,d_ff,mlp_kind,vocab,seq_len,gpu,nodes,gpus_per_node,zero_stage,mbs,grad_accum,precision,act_ckpt,flash_attn,compile,plan.optimizer.kind,Step time (ms),max_memory_allocated (GiB),notes
a,torchtitan (2025-06),mine,8,1024,16,8,2816,swiglu,32000,2048,H100-80GB-SXM,2,8,3,2,2,bf16,selective,y,y,adamw,120,20.5,activation offload
b,DeepSpeed,mine,8,1024,16,16,4096,gelu,50257,1024,A100-80GB,1,8,2,4,1,fp16,full,y,n,adam8bit,95,OOM,optimizer offload
"""


def tables() -> Mapping[str, tuple[str, dict[str, bytes]]]:
    """Tables of measurements, and other files that only an option reads."""
    history = {f"history/{day}.jsonl": inputs.samples(slower) for day, slower in (("1", 1.0), ("2", 1.01), ("3", 0.99))}
    ranks, study, titan = {"ranks.tsv": inputs.RANKS}, {"study.toml": inputs.STUDY}, {"job.toml": inputs.TITAN}
    gpt2 = "--model gpt2 --cluster hgx-h100-8 --set plan.seq_len=256"
    prices, matrix = (
        {"prices.toml": (inputs.EXAMPLES / "prices.toml").read_bytes()},
        {"node.xml": (inputs.EXAMPLES / "node.xml").read_bytes()},
    )
    step, captured = (
        (inputs.EXAMPLES / "step.json.gz").read_bytes(),
        {"a.capture.gz": inputs.capture(), "b.capture.gz": inputs.capture(4)},
    )
    return {
        "own serving table": ("backtest serving.csv --html page.html --json", {"serving.csv": _SERVERS}),
        "own memory table": ("backtest memory.csv --json", {"memory.csv": _MEMORY}),
        "own collectives table": ("backtest collectives.csv --json", {"collectives.csv": _COLLECTIVES}),
        "own runs table": ("backtest runs.csv --plain", {"runs.csv": _RUNS}),
        "samples in a history": ("calibrate check new.jsonl --history history --keep --threshold 0.1 --html page.html --json", {"new.jsonl": inputs.samples(1.3), **history}),
        "replayed plan": ("replay --plan study.toml --policy slab --policy fixed --block-size 4MiB --capacity 80GB --alloc-s 1us --free-s 1us --json", study),
        "replayed sizes": ("replay --plan study.toml --vary-sizes 0.1 --max-split-size 64MiB --roundup-power2-divisions 4 --garbage-collection-threshold 0.8 --calibration h100-sxm --html page.html --plain", study),
        "placed": ("predict --model gpt2 --cluster hgx-h100-8 --nodes 2 --seq-len 256 --placement ranks.tsv --html page.html --json", ranks),
        "compared placed": ("compare --model gpt2 --cluster hgx-h100-8 --nodes 2 --set plan.seq_len=256 --placement ranks.tsv --prices prices.toml --run-tokens 1B --telemetry --what-if plan.zero=2 --no-ablations --plot x.svg --json", {**ranks, **prices}),
        "placed plan": ("place --plan job.toml --model gpt2 --cluster hgx-h100-8 --nodes 2 --across-nodes --hosts node[1-2] --topology node.xml --launch-kit kit --json", {**titan, **matrix}),
        "evicted tensors": ("place --tensors t.csv --cluster hgx-h100-8 --room 8GB --evict belady --moves prefetch --json", {"t.csv": inputs.TENSORS}),
        "own tensors": ("place --tensors own study.toml --json", study),
        "explored at prices": (f"explore {gpt2} --vary plan.tp=1,2 --prices prices.toml --price-kind spot --jobs 1 --plain", prices),
        "sensitivity of two": (f"sensitivity {gpt2} --vary link.intra.bytes_per_s=200GB/s..450GB/s --no-errors --samples 8 --jobs 1 --by run-cost --prices prices.toml --run-tokens 1B --html page.html --json", prices),
        "long run of a plan": ('goodput --plan job.toml --model gpt2 --cluster hgx-h100-8 --tokens 1B --straggler-slowdown {distribution="uniform",low=0.1,high=0.5} --straggler-mtbf 90d --jitter 0.02 --spot-mtbf 6h --price-per-gpu-hour 2 --json', titan),
        "long run of two captures": ("goodput --program a.capture.gz --scale-with b.capture.gz --cluster hgx-h100-8 --tokens-per-step 4096 --steps 1000 --json", captured),
        "exported plan": ("export --plan job.toml --model gpt2 --cluster hgx-h100-8 --nodes 2 --to toml --json", titan),
        "launch kit of a topology": ("export study.toml --to launch-kit --topology node.xml --hosts node1 -o kit", {**study, **matrix}),
        "collective on a fabric": ("collective all_gather --cluster hgx-h100-8 --nodes 2 --per-node 4 --fabric log.txt --bucket 25MB --stack torch-2.6-eager --html page.html --json", {"log.txt": inputs.NCCL_LOG}),
        "collective on a table": ("collective all_reduce --gpus 16xa100 --fabric c.csv --size 1MB:4MB --json", {"c.csv": _COLLECTIVES.replace(b"n,p4de; NCCL_BUFFSIZE=4194304", b"n,")}),
        "recorded what if": ("predict --program step.json.gz --step 3 --communication hidden --graphed-host --tokens-times 2 --recorded-on hgx-h100-8 --json", {"step.json.gz": step}),
        "results on a page": ("validate compare runs.jsonl --calibration datasheet --html page.html --json", {"runs.jsonl": (inputs.EXAMPLES / "runs.jsonl").read_bytes()}),
        "calibrations of a cluster": ("calibrate diff a.calibration.json a.calibration.json --study study.toml --cluster hgx-h100-8 --json", {"a.calibration.json": (inputs.CALIBRATIONS / "h100-sxm.calibration.json").read_bytes(), **study}),
        "searched and launched": ("search --model gpt2 --seq-len 256 --cluster hgx-h100-8 --nodes 1 --global-batch 8 --fix tp=1 --fix pp=1 --fix zero=3 --fix recompute=none --fix cp=1 --jobs 1 --launch-kit kit --hosts node1 --topology node.xml --export plans.csv --html page.html --json", matrix),
        "searched at prices": ("search --model gpt2 --seq-len 256 --cluster hgx-h100-8 --max-gpus 16 --global-batch 16 --fix tp=1 --fix pp=1 --fix zero=3 --fix recompute=none --fix cp=1 --jobs 1 --front --prices prices.toml --run-tokens 1B --days 9 --plot front.svg --json", prices),
    }  # fmt: skip


def studies() -> Iterator[tuple[str, list[str], dict[str, bytes]]]:
    """The commands of the golden studies, each with its study's files alone: some are refused, or need what another writes."""
    for path in sorted((inputs.ROOT / "tests" / "golden" / "studies").glob("*.toml")):
        study = tomllib.loads(path.read_text(encoding="utf-8"))
        files = {name: text.encode() for name, text in study.get("files", {}).items()}
        for number, command in enumerate(study["commands"], 1):
            yield f"golden {path.stem} {number}", shlex.split(command), files
