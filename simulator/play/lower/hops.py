"""Reductions in several hops, beside the backward: each hop's passes and collective, a unit's backward apart.

Implementations run them on a stream of their own. Here a reduction goes one hop further behind each later unit's
compute, so its collectives have that unit's time to travel and its passes take the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.play.lower.builder import Builder
from simulator.play.lower.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class HopWork:
    """A hop with the time of its passes; `simulator.work.script.Hop`."""

    work: Work
    kind: str
    role: str
    size_bytes: int
    count: int
    blocking: bool = False


@dataclass(slots=True)
class _HopProgress:
    label: str
    hops: Sequence[HopWork]
    last: int | None


@dataclass(slots=True)
class Hopping:
    """The reductions under way in one backward."""

    build: Builder
    _in_progress: list[_HopProgress] = field(default_factory=list)

    def begin(self, label: str, hops: Sequence[HopWork], after: int) -> int | None:
        """Start a reduction once `after` is done, and take the older ones a hop further: its first collective."""
        self.advance()
        one = _HopProgress(label, hops, after)
        self._hop(one)
        while one.hops and one.hops[0].blocking:
            self._hop(one)
        self._in_progress.append(one)
        return one.last

    def advance(self) -> None:
        """Issue the next hop of every reduction."""
        for one in self._in_progress:
            self._hop(one)

    def drain(self) -> list[int | None]:
        """All hops that are left; the last op of each reduction."""
        while any(one.hops for one in self._in_progress):
            self.advance()
        done, self._in_progress = [one.last for one in self._in_progress], []
        return done

    def _hop(self, one: _HopProgress) -> None:
        if not one.hops:
            return
        hop, *one.hops = one.hops
        label = f"{hop.kind.replace('_', '-') or 'end of'} {one.label}"
        if hop.work.parts:
            one.last = self.build.compute(f"passes of {label}", hop.work, one.last, waits=hop.blocking)
        sent = self.build.collective(label, hop.kind, hop.role, hop.size_bytes, one.last, count=hop.count)
        one.last = one.last if sent is None else sent
