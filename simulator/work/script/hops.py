"""Gradients that are reduced in several hops, with passes over memory before each."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.base.kernels import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Passes over memory, then `count` collectives that carry `size_bytes` together; none where that is 0.

    role: whose group, as `simulator.play.lower.builder.Fabric.axis` names it. blocking: the host waits for it, and the backward
    for the host.
    """

    kernels: tuple[Kernel, ...] = ()
    kind: str = ""
    role: str = ""
    size_bytes: int = 0
    count: int = 1
    blocking: bool = False
