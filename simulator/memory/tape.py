"""Tapes: the allocations and frees of one block, recorded once and replayed for every equal block.

A slot is a storage. Slots of a tape are numbered from 0 and moved to where an instance begins; INPUT and GRADIENT
stand for the storages that the neighbours made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# (slot, bytes or FREE, stream, category)
Event = tuple[int, int, int, int]
FREE = -1
FREE_LATER = -2  # freed, but the allocator waits for the event whose number stands in the stream's place
DONE = -3  # that event has come
RECORDED = -4  # in the place of an event's number: of the pass that the tape is played for
INPUT = -1  # the block's input, made by the block before it
GRADIENT = -2  # the gradient of the block's output, made by the block after it

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buckets",
    "buffers",
    "inputs",
    "workspaces",
    "activations",
    "unsharded_parameters",
    "all_gather",
    "reduce_scatter",
    "loss",
    "temporaries",
)
TAG = {name: index for index, name in enumerate(CATEGORIES)}
# kept until somebody frees them; added to existing ones and freed; accumulated: like that, but products make none and
# add theirs into a buffer themselves
ParameterGradients = Literal["kept", "added", "accumulated"]


@dataclass(slots=True)
class Part:
    """One phase of a block: its events, and where each op begins."""

    events: list[Event] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A backward in two parts.

    Gradients of inputs, with what is freed once those of the whole stage are there; gradients of weights,
    with what is freed once all are there. gradient, parameter_gradients: as a tape's.
    """

    inputs: Part
    after_inputs: Part
    weights: Part
    after_weights: Part
    gradient: int
    parameter_gradients: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """A block's phases on its own slots.

    output, gradient: slots of its result and of its input's gradient (may be INPUT or GRADIENT: the same storage).
    parameter_gradients: slots that its backward leaves. cut: index in `forward.events` where the model's own forward
    ends and the loss begins (the head), else its length. early: events of the forward that precede the block's hooks.
    result: slot of what the model's own forward returns, where the caller holds it and frees it, else INPUT.
    halves: its backward where a schedule splits that.
    """

    forward: Part
    backward: Part
    num_slots: int
    output: int
    gradient: int
    parameter_gradients: tuple[tuple[int, int], ...]
    cut: int
    early: int
    result: int = INPUT
    halves: Halves | None = None
