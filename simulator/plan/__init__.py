"""Plan: how a model is placed and run."""

from simulator.plan.acting import idle_fields
from simulator.plan.noun import CudaGraph, DataParallel, Fp8Recipe, Plan, RecomputeModule
from simulator.plan.offload import NOTHING_OFFLOADED, Offload
from simulator.plan.order import AXES, MAX_COUNT

__all__ = [
    "AXES",
    "MAX_COUNT",
    "NOTHING_OFFLOADED",
    "CudaGraph",
    "DataParallel",
    "Fp8Recipe",
    "Offload",
    "Plan",
    "RecomputeModule",
    "idle_fields",
]
