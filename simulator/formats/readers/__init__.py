"""Readers: one module per file format; each returns one of the inputs."""

from typing import Final

READ_ONLY: Final = ("search", "transformers", "axolotl", "llama-factory", "torchtune", "litgpt", "unsloth", "xtuner")
PLAN_FORMATS: Final = ("toml", "megatron", "deepspeed", "accelerate", "torchtitan", *READ_ONLY)  # of `readers.plans`
