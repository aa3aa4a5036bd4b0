"""Readers: a file a format, each turned into one of the inputs."""

from typing import Final

PLAN_FORMATS: Final = ("toml", "megatron", "deepspeed", "accelerate", "torchtitan", "search")  # of `readers.plans`
