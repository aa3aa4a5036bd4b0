"""Live bytes at the borders of a step's phases, as a tracker of tensors reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from simulator.memory.history import CUDA_GRANULARITY_BYTES, History, moment_of, step_live_bytes, write_history
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.script import stepped_numels, units


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """Bytes before a step, after its forward, after its backward, and the most in each phase and in all."""

    start: int
    after_fwd: int
    after_bwd: int
    peak_fwd: int
    peak_bwd: int
    peak_opt: int

    @property
    def peak(self) -> int:
        return max(self.peak_fwd, self.peak_bwd, self.peak_opt)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "peak": self.peak}


def tracked_phase_bytes(model: Model, plan: Plan, stack: Stack, *, cuda: bool) -> PhaseBytes:
    """What torch's MemTracker reads of a steady step on one rank: tensors alone, no library's workspaces.

    cuda: storages count in blocks of 512 bytes; on a CPU they count as they are, and Adam's step counters, which stay
    on the host unless the optimizer is fused, count too.
    """
    history = write_history(model, plan, stack, build_blocks(model, stack, plan), (), steps=1)
    return _phase_bytes(history, CUDA_GRANULARITY_BYTES if cuda else 1, 0 if cuda else host_counter_bytes(model, plan))


def host_counter_bytes(model: Model, plan: Plan) -> int:
    """Adam's step counters in host memory: 4 bytes a parameter tensor; the fused optimizer keeps its on the device."""
    if plan.optimizer.kind not in ("adam", "adamw") or plan.optimizer.impl == "fused":
        return 0
    if plan.traits.reduces_among_all:
        return 4 * len(stepped_numels(model, plan))
    return 4 * sum(len(unit.shapes) for unit in units(model, plan))


def _phase_bytes(history: History, granularity_bytes: int, beside_bytes: int) -> PhaseBytes:
    moments = step_live_bytes(history, granularity_bytes)
    most = {"forward": 0, "backward": 0, "optimizer": 0}
    entered: dict[str, int] = {}
    before = moments.resident
    for (live, index), ended in zip(moments.most, moments.ends, strict=True):
        phase = moment_of(history, index)[0]
        most[phase] = max(most[phase], live)
        entered.setdefault(phase, before)
        before = ended
    return PhaseBytes(
        start=moments.resident + beside_bytes,
        after_fwd=entered["backward"] + beside_bytes,
        after_bwd=entered["optimizer"] + beside_bytes,
        peak_fwd=most["forward"] + beside_bytes,
        peak_bwd=most["backward"] + beside_bytes,
        peak_opt=most["optimizer"] + beside_bytes,
    )
