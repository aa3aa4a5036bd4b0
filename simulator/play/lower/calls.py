"""Calls: collectives of a program before they are placed in it."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.play.lower.fabric import MeshFabric
from simulator.work.ops import Exchange
from simulator.work.program import CollectiveCost
from simulator.work.script.instructions import Communicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`count` equal collectives, back to back. slows: the share of compute that each takes while it runs.

    stream: where it is not the role's. meets: what it is called among several programs, and how many of them meet.
    """

    label: str
    kind: str
    role: str
    size_bytes: int
    cost: CollectiveCost
    slows: float
    host_s: float
    count: int = 1
    waits: bool = False
    stream: str = ""
    meets: tuple[str, int] | None = None


def captured_call(one: Communicate, fabric: MeshFabric) -> Call:
    """A captured collective, or one end of a message, whose sender pays."""
    cost, slows = fabric.price(one.kind, one.role, one.size_bytes)
    return Call(
        label=one.label,
        kind=one.kind,
        role=one.role,
        size_bytes=one.size_bytes,
        cost=cost if one.sends else CollectiveCost(latency_s=0.0, link_bytes={}),
        slows=0.0 if one.lane else slows,
        host_s=fabric.issue_s(one.role) + (fabric.stack.host.unit_s if one.hooked else 0.0),
        waits=one.waits,
        stream=one.lane,
        meets=(one.meets, one.members) if one.meets else None,
    )


def issued_s(exchange: Exchange, fabric: MeshFabric) -> float:
    """Host time to issue it; of copies, each and its signal; none inside a CUDA graph."""
    stack = fabric.stack
    if exchange.captured:
        return 0.0
    if exchange.copied:
        return 2 * exchange.pieces * stack.further_kernel_s()
    return fabric.issue_s(exchange.axis) + (stack.host.redistribute_s if exchange.axis == "tp" else 0.0)


def times(one: CollectiveCost, count: int) -> CollectiveCost:
    """The cost of as many, back to back."""
    if count == 1:
        return one
    share = one.share_bytes and count * one.share_bytes
    link_bytes = {link: count * size for link, size in one.link_bytes.items()}
    return CollectiveCost(latency_s=count * one.latency_s, link_bytes=link_bytes, share_bytes=share)


def ids(after: tuple[int | None, ...]) -> tuple[int, ...]:
    """Ids of an op's dependencies, each once."""
    return tuple(sorted({i for i in after if i is not None}))
