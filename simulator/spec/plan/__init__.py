"""Plan: how a model is placed and run."""

from simulator.spec.plan.order import AXES
from simulator.spec.plan.peft import PeftPlan
from simulator.spec.plan.plan import CudaGraph, DataParallel, Fp8Recipe, Plan, RecomputeModule
from simulator.spec.plan.records import (
    NOTHING_OFFLOADED,
    DdpPlan,
    DeepSpeedPlan,
    ExpertsPlan,
    FsdpPlan,
    Offload,
    OptimizerPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputePlan,
)

__all__ = [
    "AXES", "NOTHING_OFFLOADED", "CudaGraph", "DataParallel", "DdpPlan", "DeepSpeedPlan", "ExpertsPlan", "Fp8Recipe",
    "FsdpPlan", "Offload", "OptimizerPlan", "PeftPlan", "PipelinePlan", "Plan", "PrecisionPlan", "RecomputeModule",
    "RecomputePlan",
]  # fmt: skip
