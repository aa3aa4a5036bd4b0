"""Plan: how a model is placed and run."""

from simulator.spec.plan.offload import NOTHING_OFFLOADED, Offload
from simulator.spec.plan.order import AXES
from simulator.spec.plan.plan import CudaGraph, DataParallel, Fp8Recipe, Plan, RecomputeModule

__all__ = [
    "AXES",
    "NOTHING_OFFLOADED",
    "CudaGraph",
    "DataParallel",
    "Fp8Recipe",
    "Offload",
    "Plan",
    "RecomputeModule",
]
