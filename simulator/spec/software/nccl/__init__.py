"""NCCL as a user sets it up: its version, its environment variables, a tuner's table, a vendor's plugin."""

from simulator.spec.software.nccl.environment import Environment, assignments, read_environment
from simulator.spec.software.nccl.software import Nccl, parse_version

__all__ = ["Environment", "Nccl", "assignments", "parse_version", "read_environment"]
