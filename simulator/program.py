"""Programs: what a class of equal ranks does in a step, as ops on streams. The engine plays them.

A program is data: nothing here knows about models, plans or SimPy. Times may be float or Fraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Rational

Number = float | Rational  # seconds: the engine must not care which


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one collective costs each of its ranks: bytes over each class of link, and a delay before they flow.

    latency_s: launch plus steps × per-step latency; the links are not loaded while it passes.
    link_bytes: link name -> bytes that must cross it; all links of a bill drain together (the slowest decides).
    """

    latency_s: Number
    link_bytes: Mapping[str, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work on the compute stream. `parts` splits its duration by category (gemm, attention, ...); they sum to it.

    host_s: what the host needs to launch it; the host stream runs ahead of the device and never waits for it,
            except where `blocking` (the host waits until the work is done, as CUDA_LAUNCH_BLOCKING or .item() do).
    """

    id: int
    stream: str
    after: tuple[int, ...] = ()
    label: str
    duration_s: Number
    parts: tuple[tuple[str, Number], ...] = ()
    host_s: Number = 0
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective on a communication stream. Every rank (or class) that shares `key` must arrive before it starts.

    interference: share of the device's speed that compute loses while this collective moves bytes (0..1).
    """

    id: int
    stream: str
    after: tuple[int, ...] = ()
    label: str
    kind: str
    key: str
    members: int = 1
    bill: Bill
    size_bytes: int
    host_s: Number = 0
    interference: Number = 0


ProgramOp = Compute | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The ops of one rank class in host launch order. `links` are the capacities its bills refer to, bytes/s."""

    name: str
    num_ranks: int
    ops: tuple[ProgramOp, ...]
    links: Mapping[str, Number] = field(default_factory=dict)
