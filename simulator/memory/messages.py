"""Buffers of the messages that a pipeline stage receives and sends."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.memory.writer import Writer
from simulator.spec.plan import Plan
from simulator.work.script.order import Chunk


class Messages:
    """Activations and gradients between stages: tensors that come and go, or torch's buffers.

    torch/distributed/pipelining: a stage makes a buffer for what it gets of each micro-batch once and keeps it (stage.py,
    _prepare_forward_infra, _setup_backward_recv_info); what it sends on it keeps until its backward (fwd_cache); and its
    schedules but 1F1B wait for what they have sent, and hold it, until the step's end (schedules.py,
    _PipelineScheduleRuntime: send_ops; ScheduleGPipe: bwd_sends_to_wait); 1F1B holds the gradient that it sent until its next
    backward is over (Schedule1F1B: bwd_sends). They are given the batch of the whole step. So torch
    2.13; 2.15 makes a buffer when it is needed.
    """

    def __init__(self, writer: Writer, plan: Plan, num_bytes: int) -> None:
        self._writer, self._bytes, self._unsent = writer, num_bytes, list[int]()
        self.buffered = plan.pp > 1 and plan.traits.uses_torch_pipelines
        self._holds = self.buffered and plan.pipeline_schedule != "1f1b"
        self.micro_batches_here = plan.num_micro_batches if self.buffered else 1

    def make(self, chunks: Sequence[Chunk]) -> None:
        """The buffers of a stage's chunks: each gets activations, but the model's first, and gradients, but its last."""
        ends = sum(chunk.embedding + chunk.head for chunk in chunks)
        for _ in range((2 * len(chunks) - ends) * self.micro_batches_here if self.buffered else 0):
            self._writer.alloc(self._bytes, "activations")

    def came(self, category: str) -> int:
        """Slot of what came; of no size where it lies in a buffer."""
        return self._writer.alloc(0 if self.buffered else self._bytes, category)

    def went(self, slot: int) -> int | None:
        """A forward's result is sent on: it goes, or its slot is kept until the backward."""
        if self.buffered:
            return slot
        self._writer.free(slot)
        return None

    def over(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """What was sent in a forward and in its backward, once that is over."""
        if self._holds:
            self._unsent += [*forward, *backward]
            return
        self._writer.free(*forward, *self._unsent)
        self._unsent = list(backward)
        if not self.buffered:
            self.end()

    def end(self) -> None:
        """Every micro-batch has passed."""
        self._writer.free(*self._unsent)
        self._unsent = []
