"""A plan's step by DeepSpeed's own engine around our modules: ZeRO stages 0 to 3.

Options are DeepSpeed's usual ones but for those that the plan states. Stage 3 lets a unit go behind its use, as a plan says
it: DeepSpeed itself keeps what is used again within 1e9 elements (stage3_max_reuse_distance), so a whole small model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.parallel import Built, build, materialise, optimizer_of
from validate.steps import Announce, TrainingStep, ignore_phase
from validate.task import Task

_FOREVER = 10**9  # steps between two lines of DeepSpeed's own log


def make_step(task: Task, device: torch.device) -> DeepSpeedStep:
    """Our modules in DeepSpeed's engine."""
    model, plan, stack = task.model, task.plan, task.stack
    built = build(model, plan, stack, device)
    materialise(built, device)
    return DeepSpeedStep(built, model, plan, stack, device)


class DeepSpeedStep(TrainingStep):
    """All micro-batches by the engine, which reduces and steps when it has counted them."""

    def __init__(self, built: Built, model: Model, plan: Plan, stack: Stack, device: torch.device) -> None:
        super().__init__(built, model, plan, stack, device)
        self._engine = engine_of(built.module, plan, device)

    def run(self, announce: Announce = ignore_phase, num_micro_batches: int | None = None) -> None:
        """All micro-batches, whatever is asked for: the engine counts them."""
        del num_micro_batches
        for _ in range(self.plan.num_micro_batches):
            self._pass(announce)
        announce("end")

    def _pass(self, announce: Announce) -> None:
        announce("forward")
        with set_checkpoint_early_stop(self.stack.kernels.early_stop):
            logits = self._engine(self.ids)
            loss = self.built.loss(logits, self.labels)
            del logits
            announce("backward")
            self._engine.backward(loss)
        del loss
        if self._engine.is_gradient_accumulation_boundary():
            announce("optimizer")
        self._engine.step()


def engine_of(module: nn.Module, plan: Plan, device: torch.device) -> Any:  # noqa: ANN401  DeepSpeed's
    """DeepSpeed's engine around modules that are on the device. Process groups exist."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.comm.torch import TorchBackend  # the package has the name `torch` for torch itself

    if device.type == "cpu":  # by gloo, not by an operator that DeepSpeed compiles for ranks of one host
        vars(sys.modules[TorchBackend.__module__])["build_shm_op"] = lambda: None
    deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    kind, options = optimizer_of(plan)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=kind(module.parameters(), **options), config=settings(plan), dist_init_required=False
    )
    return engine


def settings(plan: Plan) -> dict[str, Any]:
    """A plan as DeepSpeed's JSON has it."""
    zero: dict[str, Any] = {"stage": plan.zero, "reduce_bucket_size": plan.deepspeed.reduce_bucket_numel}
    if plan.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": plan.deepspeed.prefetch_bucket_numel,
            "stage3_param_persistence_threshold": plan.deepspeed.param_persistence_numel,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "bf16": {"enabled": plan.compute_dtype == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _FOREVER,
    }
