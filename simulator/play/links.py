"""Links: how collectives share bandwidth. `fair_rates` is the rule, `Network` plays it on the SimPy clock.

A flow is fluid: its progress runs from 0 to 1, and at progress rate x it loads link l with x × bytes[l]. All its links
drain together, so the slowest decides. Rates change only when a flow starts or ends; between two such moments one
timeout waits for the next completion. A link is a number, not a `simpy.Resource`.

What is fair: rates rise together, as bytes per second of each flow's `share_bytes`, until a link is full; the flows on
it stop there and the others rise on (progressive filling; Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from simpy import Environment, Event
from simpy.events import Timeout

from simulator.base.errors import EngineError
from simulator.work.program import Number

Usage = Mapping[str, Number]  # link name -> bytes of the whole flow


def fair_rates(
    flows: Sequence[Usage], capacities: Mapping[str, Number], share_bytes: Sequence[Number] | None = None
) -> list[Number]:
    """Max-min fair progress rates, 1/s, in the order of `flows`; exact if the numbers are.

    flows: bytes by link, at least one of them > 0 (a flow without bytes has no rate). capacities: bytes/s by link.
    share_bytes: what stands for each flow when a link is divided; two flows on one link get equal share_bytes/s.
    Empty: the most that the flow puts on any link, so that on one link both get the same bytes/s.
    """
    shares = [_exact(share) for share in share_bytes or [max(flow.values()) for flow in flows]]
    loads = [{link: b / share for link, b in flow.items() if b} for flow, share in zip(flows, shares, strict=True)]
    residual = dict(capacities)
    rates: list[Number] = [0] * len(flows)
    rising = dict.fromkeys(range(len(flows)))
    while rising:
        level, full = _next_full(loads, rising, residual)
        for f in [f for f in rising if not full.isdisjoint(loads[f])]:
            rates[f] = level / shares[f]
            for link, load in loads[f].items():
                residual[link] -= level * load
            del rising[f]
    return rates


def _exact(number: Number) -> Number:
    """Integers as fractions, so that dividing them loses nothing."""
    return Fraction(number) if isinstance(number, int) else number


def _next_full(
    loads: Sequence[Usage], rising: Mapping[int, None], residual: Mapping[str, Number]
) -> tuple[Number, set[str]]:
    """The level at which the next links fill, and those links."""
    total: dict[str, Number] = {}
    for f in rising:
        for link, load in loads[f].items():
            total[link] = total.get(link, 0) + load
    levels = {link: residual[link] / load for link, load in total.items()}
    lowest = min(levels.values())
    return lowest, {link for link, level in levels.items() if level == lowest}


class _Flow:
    """One collective moving bytes."""

    __slots__ = ("done", "kind", "left", "rate")

    def __init__(self, kind: int, done: Event) -> None:
        self.kind = kind  # index of its usage among those seen: what rates are memoised on
        self.done = done
        self.left: Number = 1
        self.rate: Number = 0


class Network:
    """Fluid flows over links with capacities in bytes/s.

    Flows that finish together finish in the order in which they started. Rates are taken once per instant, after all
    starts and ends that fall on it. Those of flows that share no link, nor have others between them that do (two stages of
    a pipeline), do not depend on each other: each such part of the network has rates of its own.
    """

    def __init__(self, env: Environment, capacities: Mapping[str, Number]) -> None:
        self._env = env
        self._capacities = {link: _exact(capacity) for link, capacity in capacities.items()}
        self._kinds: dict[tuple[tuple[tuple[str, Number], ...], Number], int] = {}
        self._usages: list[tuple[Usage, Number]] = []
        self._alone_s: list[Number] = []
        self._rates: dict[tuple[int, ...], dict[int, Number]] = {(): {}}
        self._parts: list[int] = []  # of each usage: a name of its part of the network
        self._part_of_link: dict[str, int] = {}
        self._changed: set[int] = set()  # parts in which a flow began or ended at this instant
        self._active: dict[_Flow, None] = {}  # in the order of their starts
        self._first: list[_Flow] = []  # those that finish at the timeout now set
        self._as_of: Number = 0
        self._version = 0  # of the timeout now set: older ones are ignored when they fire
        self._stale = False  # rates are to be taken anew at this instant

    def start(self, usage: Usage, share_bytes: Number, done: Event) -> Number:
        """Start a flow now; `done` succeeds when its last byte has arrived (at once if it has none).

        Returns the seconds it would take alone. Raises EngineError where a link has no capacity here.
        """
        key = (tuple(sorted(usage.items())), share_bytes)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._new_kind(usage, share_bytes)
        alone_s = self._alone_s[kind]
        if alone_s:
            self._active[_Flow(kind, done)] = None
            self._changed.add(self._parts[kind])
            self._rerate_soon()
        else:
            done.succeed()
        return alone_s

    def _new_kind(self, usage: Usage, share_bytes: Number) -> int:
        missing = sorted(usage.keys() - self._capacities.keys())
        if missing:
            msg = f"no capacity is known for link {', '.join(missing)}; known: {', '.join(self._capacities)}"
            raise EngineError(msg)
        self._usages.append((usage, share_bytes))
        self._alone_s.append(max((b / self._capacities[link] for link, b in usage.items()), default=0))
        self._join(usage)
        return len(self._usages) - 1

    def _join(self, usage: Usage) -> None:
        """The links of a new usage are one part of the network, with all that any of them was part of."""
        joined = {self._part_of_link[link] for link in usage if link in self._part_of_link}
        part = min(joined, default=len(self._parts))
        if len(joined) > 1:
            self._parts = [part if one in joined else one for one in self._parts]
            self._part_of_link = {link: part if one in joined else one for link, one in self._part_of_link.items()}
            self._changed = {part if one in joined else one for one in self._changed}
        self._parts.append(part)
        self._part_of_link |= dict.fromkeys(usage, part)

    def _settle(self) -> None:
        """Bring every flow's progress up to now. One that starts now has had no rate until now."""
        elapsed = self._env.now - self._as_of
        for flow in self._active:
            flow.left -= flow.rate * elapsed
        self._as_of = self._env.now

    def _rerate_soon(self) -> None:
        if not self._stale:
            self._stale = True
            Timeout(self._env, 0).callbacks.append(self._rerate)

    def _rerate(self, _: Event) -> None:
        self._stale = False
        self._version += 1
        self._settle()
        if not self._active:
            return
        rates: dict[int, Number] = {}
        changed = [flow for flow in self._active if self._parts[flow.kind] in self._changed]
        for part in self._changed:
            rates |= self._rates_of(tuple(sorted(flow.kind for flow in changed if self._parts[flow.kind] == part)))
        for flow in changed:
            flow.rate = rates[flow.kind]
        self._changed.clear()
        delays = [flow.left / flow.rate for flow in self._active]
        delay: Any = min(delays)
        self._first = [flow for flow, each in zip(self._active, delays, strict=True) if each == delay]
        # Rounding can leave a float a hair below zero; an exact number never is.
        Timeout(self._env, max(delay, 0), self._version).callbacks.append(self._complete)

    def _rates_of(self, kinds: tuple[int, ...]) -> dict[int, Number]:
        rates = self._rates.get(kinds)
        if rates is None:
            usages, shares = zip(*(self._usages[kind] for kind in kinds), strict=True)
            rates = self._rates[kinds] = dict(zip(kinds, fair_rates(usages, self._capacities, shares), strict=True))
        return rates

    def _complete(self, timeout: Event) -> None:
        if timeout.value != self._version:
            return
        for flow in self._first:
            del self._active[flow]
            flow.done.succeed()
            self._changed.add(self._parts[flow.kind])
        self._rerate_soon()
