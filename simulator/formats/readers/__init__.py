"""Readers: one module per file format; each returns one of the inputs."""

from typing import Final

PLAN_FORMATS: Final = ("toml", "megatron", "deepspeed", "accelerate", "torchtitan", "search")  # of `readers.plans`
