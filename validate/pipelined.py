"""A pipelined step by torch.distributed.pipelining: its stages, its schedules, its messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import set_checkpoint_early_stop
from typing_extensions import override

from simulator.parallel.pipeline import position
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.models import Part
from validate.parallel import DTYPES, Built
from validate.steps import Announce, TrainingStep, ignore_phase
from validate.torch_private import held_messages, pipelining

PipelineStage, schedules, lone_stage = pipelining()

# Torch's class of each schedule, for one chunk a stage and for several. ZB-H1 is its interleaved zero bubble with one chunk.
_SCHEDULES: Final = {
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": ("Schedule1F1B", ""),
    "interleaved": ("", "ScheduleInterleaved1F1B"),
    "zb_h1": ("ScheduleInterleavedZeroBubble", ""),
    "dualpipe_v": ("", "ScheduleDualPipeV"),
}
_PASSES: Final = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


class PipelinedStep(TrainingStep):
    """All micro-batches in the order of the plan's schedule. The batch of the whole step is on the device, as torch wants it."""

    alone: ClassVar[bool] = False

    def __init__(self, built: Built, model: Model, plan: Plan, stack: Stack, device: torch.device) -> None:
        self.micro_batches_here = plan.num_micro_batches
        super().__init__(built, model, plan, stack, device)
        self._schedule: Any = None
        self._announce: Announce = ignore_phase
        self._begun = False  # the step's first phase

    def run(self, announce: Announce = ignore_phase, num_micro_batches: int | None = None) -> None:
        """All micro-batches, whatever is asked for; phases are announced as the stage goes to and fro."""
        del num_micro_batches
        optimizer = self.built.optimizer
        assert optimizer is not None
        if self._schedule is None:
            self._schedule = self._made()
        self._announce, self._begun = announce, False
        with set_checkpoint_early_stop(self.stack.kernels.early_stop), self.split_loss():
            given = (self.ids,) if any(chunk.part.embedding for chunk in self.built.chunks) else ()
            there = any(chunk.part.head for chunk in self.built.chunks)
            self._schedule.step(*given, target=self.labels if there else None, return_outputs=False)
        announce("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        announce("end")

    def _made(self) -> Any:  # noqa: ANN401  torch's schedule
        plan, mesh = self.plan, self.built.mesh
        assert mesh is not None
        group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        # NCCL makes a group's communicator in its first call, which all of its ranks must enter: messages are between two
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        count = plan.pipeline.virtual_stages
        stages = [
            self._stage(chunk, position(plan.pipeline_schedule, plan.pp, rank, chunk), group) for chunk in range(count)
        ]
        single, several = _SCHEDULES[plan.pipeline_schedule]
        made = getattr(schedules, single if count == 1 else several)
        one = issubclass(made, schedules.PipelineScheduleSingle)
        return made(stages[0] if one else stages, plan.num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.built.loss(logits, labels) / self.plan.num_micro_batches

    def _stage(self, chunk: int, number: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401  torch's stage
        """A stage that says when it begins a pass."""
        count, network = self.plan.pp * self.plan.pipeline.virtual_stages, self.built.networks[chunk]
        whole_module = self.alone or self.plan.traits.whole_modules
        shapes = self._shapes(self.built.chunks[chunk].part) if whole_module else {}
        kind = lone_stage() if self.alone else PipelineStage
        stage = kind(network, number, count, self.device, group=group, **shapes)
        for name, phase in _PASSES.items():
            if hasattr(stage, name):
                setattr(stage, name, partial(self._announced, getattr(stage, name), phase))
        if hasattr(network, "unshard"):  # by FSDP2; some schedules gather all before their first pass
            network.unshard = partial(self._gathered, network.unshard)
        return stage

    def _gathered(self, original: Callable[..., Any], **kwargs: object) -> Any:  # noqa: ANN401
        if not self._begun:
            self._begin("forward")
        return original(**kwargs)

    def _shapes(self, part: Part) -> dict[str, Tensor]:
        """What comes and goes, for DDP: torch would find out by a forward without a backward, which DDP waits for.

        And for a stage alone, which nobody tells. FSDP2's modules give what they compute in.
        """
        plan, model, autocast = self.plan, self.built.chunks[0].model, self.built.autocast
        stream = plan.micro_batch_size, plan.seq_len // plan.cp
        dtype = DTYPES[plan.compute_dtype if plan.traits.shards_rows else plan.precision.master]
        message = torch.empty(*stream, model.d_model, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(*stream, model.vocab_size, dtype=autocast or dtype, device="meta", requires_grad=True)
        ids = torch.empty(stream, dtype=torch.int64, device="meta")
        return {"input_args": ids if part.embedding else message, "output_args": logits if part.head else message}

    def _begin(self, phase: str) -> None:
        self._begun = True
        self._announce(phase)

    def _announced(self, original: Callable[..., Any], phase: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        self._begin(phase)
        if phase == "backward":
            return original(*args, **kwargs)
        with self.precision():
            return original(*args, **kwargs)


class LonePipelinedStep(PipelinedStep):
    """A stage whose neighbours are a process group that only pretends: what comes is a buffer as it lies."""

    alone = True

    @override
    def run(self, announce: Announce = ignore_phase, num_micro_batches: int | None = None) -> None:
        """The same, and what is sent is held as long as a real group would."""
        with held_messages():
            super().run(announce, num_micro_batches)
