"""Readers: one module per file format; each returns one of the inputs."""

from typing import Final

READ_ONLY: Final = (
    "search", "launch", "transformers", "axolotl", "llama-factory", "torchtune", "litgpt", "unsloth", "xtuner", "megatron-bridge"
)  # fmt: skip
PLAN_FORMATS: Final = ("toml", "megatron", "deepspeed", "accelerate", "torchtitan", *READ_ONLY)  # of `readers.plans`
