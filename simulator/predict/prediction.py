"""Prediction: the answer of `predict`, and figures of its verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import override

from simulator.base.fit import Fit
from simulator.base.picture import Picture
from simulator.base.registry import VIEWS
from simulator.base.units import counted, format_bytes, format_seconds
from simulator.memory import MemoryUse
from simulator.work.checkpoint import Saving
from simulator.work.trace import MemoryTrace, Timeline

OWN_ALLOCATOR: Final = "allocator"  # the same of an own allocator's time that the host does not hide
STALL: Final = "cuda_malloc"  # the category of the breakdown that retries of the allocator are in


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one input came from: `kind` is measured, calibrated, datasheet, ideal, assumed or given."""

    what: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that makes the plan fit, and what it costs; both were predicted.

    change: in words, as on the command line. plan: the plan's fields that change. environment: a variable to set.
    step_s is not comparable where tokens_per_step differs; cost: device-seconds a token over those of the plan as it is.
    changes_numerics: the losses of a run will not be the same.
    """

    change: str
    plan: dict[str, object]
    environment: str
    num_devices: int
    tokens_per_step: int
    step_s: float
    cost: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    used_bytes: int
    changes_numerics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KindUse:
    """Time and memory of the GPUs of one kind, on a cluster with different GPUs. kind: the difference, as text.

    compute_s: of the busiest of them, with all that slows it; waiting_s: for others, a pipeline's bubble among it; the
    rest is communication and the host. memory, cause: of the fullest of them.
    """

    kind: str
    device: str
    num_devices: int
    compute_s: float
    waiting_s: float
    memory: MemoryUse
    cause: str

    @property
    def verdict(self) -> Fit:
        return self.memory.fit


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShare:
    """hangs_s: what the step would be shorter with endless bandwidth between nodes; tenth_less_s: longer with 10 % less."""

    hangs_s: float
    tenth_less_s: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction:
    """Time and peak memory of a step, their uncertainty and its causes.

    step_s lies in [low_s, high_s] with 90 % confidence; low_s is never below floor_s, the data sheet's limit. With the
    kernel and link times as predicted, lower_s ≤ step_s ≤ upper_s, whatever overlaps.
    breakdown: category -> seconds on the critical path; the values sum to step_s.
    spread: category -> what its one-sigma error makes of the step, relative to it; stack_sigma: the stack's own.
    communication: kind -> (exposed_s, hidden_s). remedies: what would make it fit, cheapest first, where it does not.
    kinds: where GPUs differ; memory and verdict are then those of the kind that fits least. network: where several nodes
    take part and it was asked for (advise).
    """

    model: str
    cluster: str
    num_devices: int
    step_s: float
    low_s: float
    high_s: float
    lower_s: float
    upper_s: float
    tokens_per_step: int
    model_flop_per_step: int
    hardware_flop_per_step: int
    peak_flop_per_s: float  # of one device, in the plan's precision; their mean where devices differ
    breakdown: dict[str, float]
    communication: dict[str, tuple[float, float]]
    memory: MemoryUse
    cause: str
    suggestion: str
    extrapolated: tuple[str, ...]
    sources: tuple[Source, ...]
    timeline: Timeline = field(repr=False)
    memory_trace: MemoryTrace = field(repr=False)
    checkpoint: Saving | None = None  # of one checkpoint, where the study asks
    remedies: tuple[Remedy, ...] = ()
    spread: dict[str, float] = field(default_factory=dict)
    stack_sigma: float = 0.0
    kinds: tuple[KindUse, ...] = ()
    network: NetworkShare | None = None
    num_played: int = 0  # micro-batches that `timeline` shows

    @property
    def verdict(self) -> Fit:
        return self.memory.fit

    @property
    def fits(self) -> bool:
        """The best estimate is that it runs: `verdict` is not `does not fit`."""
        return self.verdict.runs

    @property
    def needs(self) -> str:
        """The figures behind the verdict: needed and available memory, and the cost of retries."""
        return _needs(self.memory, self.breakdown.get(STALL))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def floor_s(self) -> float:
        """No step is faster, whatever is measured: every operation at the data sheet's peak."""
        return self.hfu * self.step_s

    @property
    def uncertainty(self) -> dict[str, float]:
        """The parts of the interval: part -> one sigma relative to the step; they add in quadrature.

        Kernels by category, links, the host, the software: a stack's own spread, and what is unknown where it is not named.
        """
        parts: dict[str, float] = {}
        for name, one in ({"stack": self.stack_sigma} | self.spread).items():
            key = name.partition(":")[0]
            parts[key] = math.hypot(parts.get(key, 0.0), one)
        return {name: one for name, one in parts.items() if one}

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: the model's own FLOP (causal attention counted half) over peak."""
        return self.model_flop_per_step / (self.step_s * self.num_devices * self.peak_flop_per_s)

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: recomputation counted too."""
        return self.hardware_flop_per_step / (self.step_s * self.num_devices * self.peak_flop_per_s)

    @override
    def __repr__(self) -> str:
        devices = counted(self.num_devices, "device")
        step = f"step {format_seconds(self.step_s)}, {self.tokens_per_s:,.0f} tokens/s"
        return f"<Prediction of {self.model} on {self.cluster}, {devices}: {self.verdict}, {self.needs}; {step}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data with the keys of `shardwise predict --json` (docs/reference/json-output.md); `inputs` is empty."""
        data: dict[str, Any] = VIEWS["dict"](self)
        return data

    def to_json(self) -> str:
        """The same as text that ends in a newline. Raises ValueError if a figure is infinite."""
        text: str = VIEWS["json"](self)
        return text

    def plot_memory(self) -> Picture:
        """Live and reserved bytes over the step, and where the device ends."""
        picture: Picture = VIEWS["memory"](self)
        return picture

    def plot_timeline(self) -> Picture:
        """What each stream of a rank does in the step."""
        picture: Picture = VIEWS["timeline"](self)
        return picture

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        text: str = VIEWS["html"](self)
        return text


def _needs(memory: MemoryUse, stall_s: float | None) -> str:
    """stall_s: what retries add to a step, if known."""
    name, needed, there = memory.binding
    if memory.retries:
        return f"{format_bytes(needed)} of {format_bytes(there)} used after {_retries(memory, stall_s)}"
    spare = there - needed
    share = f" ({abs(spare) / there:.0%})" if there else ""
    margin = f"{format_bytes(abs(spare))}{share} {'to spare' if spare >= 0 else 'too much'}"
    return f"{format_bytes(needed)} of {format_bytes(there)}{name and f' of {name}'} needed, {margin}"


def _retries(memory: MemoryUse, stall_s: float | None) -> str:
    count = memory.pressure.num_retries if memory.pressure else 0
    if not count:
        return "retries in the first step"
    cost = "whose cost nobody measured" if stall_s is None else f"which cost {format_seconds(stall_s)}"
    return f"{count:,} {'retry' if count == 1 else 'retries'} a step, {cost}"
