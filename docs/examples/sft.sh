#!/bin/bash
# Supervised fine-tuning of a LoRA adapter by trl on eight GPUs
accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP -m trl sft \
  --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara \
  --use_peft --lora_r 16 --lora_target_modules all-linear \
  --max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16
