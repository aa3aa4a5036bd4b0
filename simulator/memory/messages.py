"""Buffers of the messages that a pipeline stage receives and sends."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.memory.writer import Writer
from simulator.spec.plan import Plan
from simulator.work.script.instructions import Pass
from simulator.work.script.order import Chunk


class Messages:
    """Activations and gradients between stages: tensors that come and go, or torch's buffers.

    torch/distributed/pipelining: a stage makes a buffer for what it gets of each micro-batch once and keeps it (stage.py,
    _prepare_forward_infra, _setup_backward_recv_info); what it sends on it keeps until its backward (fwd_cache); and its
    schedules but 1F1B wait for what they have sent, and hold it, until the step's end (schedules.py,
    _PipelineScheduleRuntime: send_ops; of ScheduleGPipe only gradients: bwd_sends_to_wait); 1F1B holds the gradient that it sent until its next
    backward is over (Schedule1F1B: bwd_sends). Where backwards are split, a buffer's gradient stays with it to the next step
    (_backward.py, stage_backward_input: inp.grad). Where a V turns, the other chunk's tensor is put in a buffer's place
    (set_local_fwd_input, set_local_bwd_input). They are given the batch of the whole step. So torch
    2.13; 2.15 makes a buffer when it is needed.
    """

    def __init__(self, writer: Writer, plan: Plan, num_bytes: int, stage: int) -> None:
        self._writer, self._bytes, self._unsent = writer, num_bytes, list[int]()
        self.buffered = plan.pp > 1 and plan.traits.uses_torch_pipelines
        self._holds = self.buffered and plan.pipeline_schedule != "1f1b"
        self._holds_outputs = self._holds and (plan.pipeline_schedule, plan.pipeline.virtual_stages) != ("gpipe", 1)
        self.micro_batches_here = plan.num_micro_batches if self.buffered else 1
        self._turns = self.buffered and plan.pipeline_schedule == "dualpipe_v" and stage == plan.pp - 1
        self._leaves = plan.pipeline_schedule == "zb_h1"  # dualpipe_v's steady passes are whole
        self._turned: dict[tuple[str, int], int] = {}  # slots in the place of buffers
        self._left: list[int] = []  # gradients of buffers

    def make(self, chunks: Sequence[Chunk]) -> None:
        """The buffers of a stage's chunks: each gets activations, but the model's first, and gradients, but its last."""
        ends = sum(chunk.embedding + chunk.head for chunk in chunks)
        count = (2 * len(chunks) - ends) * self.micro_batches_here if self.buffered else 0
        made = self._writer.alloc_each([self._bytes] * count, "activations")
        if self._turns:
            turned = [
                (kind, index) for kind in ("activations", "gradients") for index in range(self.micro_batches_here)
            ]
            self._turned = dict(zip(turned, made, strict=False))

    def begin(self, chunks: Sequence[Chunk], passed: int) -> None:
        """A step begins: buffers lose their gradients. passed: micro-batches that have left what they sent, and nothing else."""
        self._writer.free(*self._left)
        self._left = []
        if not (self._holds and passed):
            return
        self._writer.at("forward", 0, "", "messages of those before")
        for chunk in [*chunks] * passed:
            if not (chunk.head or (self._turns and chunk is chunks[0])):
                self._unsent.append(self._writer.alloc(self._bytes, "activations"))
            if not (chunk.embedding or (self._turns and chunk is chunks[1])):
                left = self._left if self._leaves else self._unsent
                left.append(self._writer.alloc(self._bytes, "temporaries"))

    def came(self, category: str) -> int:
        """Slot of what came; of no size where it lies in a buffer."""
        return self._writer.alloc(0 if self.buffered else self._bytes, category)

    def went(self, slot: int, one: Pass) -> int | None:
        """A forward's result is sent on: it goes, or its slot is kept until the backward."""
        if self._turns and one.chunk == 0:
            self._turn("activations", one, slot)
            return None
        if self.buffered:
            return slot
        self._writer.free(slot)
        return None

    def over(self, forward: Sequence[int], backward: Sequence[int], one: Pass) -> None:
        """What was sent in a forward and in its backward, once that is over."""
        if self._turns and one.chunk == 1:
            self._turn("gradients", one, *backward)
            backward = ()
        elif one.direction == "inputs":
            self._left += backward
            backward = ()
        if self._holds_outputs:
            self._unsent += forward
            forward = ()
        if self._holds:
            self._writer.free(*forward)
            self._unsent += backward
            return
        self._writer.free(*forward, *self._unsent)
        self._unsent = list(backward)
        if not self.buffered:
            self.end()

    def _turn(self, kind: str, one: Pass, slot: int) -> None:
        self._writer.free(self._turned[kind, one.micro_batch])
        self._turned[kind, one.micro_batch] = slot

    def end(self) -> None:
        """Every micro-batch has passed."""
        self._writer.free(*self._unsent)
        self._unsent = []
