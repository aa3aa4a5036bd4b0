"""NCCL as a user sets it up: its version, its environment variables, a tuner's table, a vendor's plugin."""

from simulator.spec.software.nccl.environment import Nccl, assignments, read_environment

__all__ = ["Nccl", "assignments", "read_environment"]
