"""Bytes of live tensors by category over the phases of a step, from torch's own MemTracker.

Works on fake tensors (any size, no memory) and on real ones alike. What it cannot see: the caching allocator's
rounding beyond 512 bytes and its fragments, contexts, communicators, workspaces of libraries, temporaries inside kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from validate.torch_private import FakeTensor, FSDPMemTracker, MemTracker, device_of, running_node

ADD, DEVICE = torch.ops.aten.add.Tensor, torch.ops.prim.device.default
# The tracker's labels -> this project's categories. Gradients not yet reduced, and most of what a backward makes, are
# "Temp" to it until FSDP's post-backward or the accumulation names them.
CATEGORIES = {
    "Parameter": "parameters",
    "Sharded Param": "parameters",
    "Unsharded Param": "unsharded_parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "unsharded_gradients",
    "Activation": "activations",
    "Temp": "temporaries",
    "Optstate": "optimizer_state",
    "OptState": "optimizer_state",
    "All Gather": "all_gather",
    "Reduce Scatter": "reduce_scatter",
    "Inputs": "inputs",
    "Other": "inputs",
}


@dataclass(slots=True, kw_only=True)
class Moment:
    """Live bytes at one moment, in total and by category."""

    total_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TrackedMemory:
    """A tracked step: the moments between its phases, and the peak of each phase.

    start: before the step. after_forward, after_backward: of the last micro-batch. peak_phase: where the peak fell.
    """

    start: Moment
    after_forward: Moment
    after_backward: Moment
    peak: Moment
    peak_phase: str
    peak_by_phase_bytes: dict[str, int]

    def add(self, category: str, num_bytes: int) -> None:
        """Bytes that were there throughout and that the tracker could not see."""
        for moment in (self.start, self.after_forward, self.after_backward, self.peak):
            moment.total_bytes += num_bytes
            moment.by_category[category] = moment.by_category.get(category, 0) + num_bytes
        self.peak_by_phase_bytes = {name: size + num_bytes for name, size in self.peak_by_phase_bytes.items()}

    def as_json(self) -> dict[str, Any]:
        moments = ("start", "after_forward", "after_backward", "peak")
        return {
            **{f"{name}_bytes": getattr(self, name).total_bytes for name in moments},
            "peak_phase": self.peak_phase,
            "peak_by_phase_bytes": self.peak_by_phase_bytes,
            "by_category": {name: getattr(self, name).by_category for name in moments},
        }


class _Phases:
    """Mixed into a tracker: what matters here of each update, without its snapshots of every module."""

    _curr_mem_snap: dict[torch.device, dict[Any, int]]
    reset_mod_stats: Callable[[], None]

    def prepare(self, device: torch.device, buckets: Callable[[], int]) -> None:
        """Follow `device`. buckets: bytes that the tracker counts as activations and that are DDP's buckets."""
        self.device_type, self.buckets = device.type, buckets
        self.phase, self.moments = "start", dict[str, Moment]()
        self.peak, self.peak_phase = Moment(), "start"
        self.peak_by_phase: dict[str, int] = {}
        self.in_place, self.makers = False, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Where autograd adds a gradient to another, it makes a third under any mode of dispatch, and none without.

        Only to a tensor that nothing else holds, which a view's base does (torch/csrc/autograd/input_buffer.cpp,
        can_accumulate_inplace): where something else does, the operator behind sees both still. Two calls in three only
        ask a fake tensor for its device: they make nothing, but are when it is seen what backwards have freed and made.
        """
        if func is DEVICE and isinstance(args[0], FakeTensor):
            self._update_peak_stats(None)
            return device_of(args[0])
        number = running_node()
        self.in_place = func is ADD and not args[0]._is_view() and self._waited(args[0], number)  # noqa: SLF001
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]
        finally:
            self.in_place = False
        if number and isinstance(made, torch.Tensor):
            self.makers[made.untyped_storage()] = number
        return made

    def _waited(self, gradient: torch.Tensor, number: int) -> bool:
        """Another node of the backward made it: the engine adds the running one's to it, which a node's own sums are not."""
        return bool(self.makers.get(gradient.untyped_storage(), number) != number)

    def now(self) -> Moment:
        moment = Moment()
        for device, snapshot in self._curr_mem_snap.items():
            if device.type == self.device_type:
                self._add(moment, snapshot)
        bucket_bytes = min(self.buckets(), moment.by_category.get("activations", 0))
        if bucket_bytes:
            moment.by_category["activations"] -= bucket_bytes
            moment.by_category["buckets"] = bucket_bytes
        moment.by_category = {name: size for name, size in sorted(moment.by_category.items()) if size}
        return moment

    @staticmethod
    def _add(moment: Moment, snapshot: dict[Any, int]) -> None:
        for key, size in snapshot.items():
            label = getattr(key, "value", key)
            if label == "Total":
                moment.total_bytes += size
            elif size:
                name = CATEGORIES[label]
                moment.by_category[name] = moment.by_category.get(name, 0) + size

    def total(self) -> int:
        items = self._curr_mem_snap.items()
        return sum(snapshot["Total"] for device, snapshot in items if device.type == self.device_type)

    def announce(self, phase: str) -> None:
        """A phase begins: what is alive now ends the one before it."""
        self.moments[self.phase] = self.now()
        self.phase = phase
        if phase == "forward":
            self.reset_mod_stats()  # it refuses a second micro-batch while it remembers the first one's modules

    def _update_peak_stats(self, _peak_state: object) -> None:
        if self.in_place:
            return
        total = self.total()
        if total > self.peak_by_phase.get(self.phase, 0):
            self.peak_by_phase[self.phase] = total
        if total > self.peak.total_bytes:
            self.peak, self.peak_phase = self.now(), self.phase

    def get_tracker_snapshot(self, type: str = "current") -> dict[torch.device, dict[Any, int]]:  # noqa: A002, ARG002
        return {device: dict(snapshot) for device, snapshot in self._curr_mem_snap.items()}

    def tracked(self) -> TrackedMemory:
        """What was seen, after the step's "end"."""
        return TrackedMemory(
            start=self.moments["start"],
            after_forward=self.moments["forward"],
            after_backward=self.moments["backward"],
            peak=self.peak,
            peak_phase=self.peak_phase,
            peak_by_phase_bytes={name: size for name, size in self.peak_by_phase.items() if name != "start"},
        )


class PlainTracker(_Phases, MemTracker):  # type: ignore[misc]
    """For plain modules and DDP."""


class ShardedTracker(_Phases, FSDPMemTracker):  # type: ignore[misc]
    """For FSDP2."""


class TotalTracker(_Phases, MemTracker):  # type: ignore[misc]
    """For pipelines: all bytes, and nobody's. Torch's tracker refuses a module that is called again before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()


class _NoModules(contextlib.nullcontext[None]):
    """In the place of torch's tracker of modules: no pass is told from another."""

    is_bw, parents = False, frozenset[str]()

    def register_user_hooks(self, *_: object) -> None:
        """Nobody is called."""

    def clear_user_hooks(self) -> None:
        """There are none."""
