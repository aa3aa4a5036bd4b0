"""Tasks: the parts of a search that run anywhere, each a question and its answer as plain data that a journal keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from simulator.studies.serving import InferencePlan, Slo
from simulator.studies.serving.report import Attainment, judged
from simulator.studies.serving_search.floors import Floors, floors_of
from simulator.studies.serving_search.plays import UNLIMITED, Play, Player
from simulator.studies.serving_search.space import Role, of_key
from simulator.studies.serving_search.study import ServingSearch

ONE_BY_ONE: Final = 4  # numbers of engines that are tried in order, before halves
BEYOND: Final = 4  # times the engines that capacity asks for, where any number may be taken: a quarter of the load


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known of a layout before any play at the rate.

    missing_bytes: in memory; then nothing else is known. capacity, least: by role, requests a second of one engine and
    the fewest engines whose queues do not grow without end. floor: by role, the worst limit's bound over the limit.
    """

    layout: str
    missing_bytes: int
    capacity: dict[Role, float]
    least: dict[Role, Annotated[int, Field(ge=1)]]
    floor: dict[Role, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewest:
    """The fewest engines of a layout in a role that meet the role's limits; None: no number that was tried does."""

    role: Role
    layout: str
    engines: Annotated[int, Field(ge=1)] | None
    plays: tuple[Play, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A question: a survey of a layout for roles, or the fewest engines in a role out of counts[0], …, counts[1] or values."""

    kind: str
    layout: str
    roles: tuple[Role, ...]
    counts: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        return json.dumps([self.kind, self.layout, self.roles, self.counts])

    def run(self, player: Player) -> dict[str, Any]:
        """The answer."""
        found = _survey(player, self) if self.kind == "survey" else _fewest(player, self)
        return asdict(found)


def fewest_of(data: dict[str, Any]) -> Fewest:
    """An answer to the fewest engines."""
    return Fewest(**(data | {"plays": tuple(Play.from_data(one) for one in data["plays"])}))


def slo_of(role: Role, slo: Slo) -> Slo:
    """The limits that engines of a role decide alone."""
    if role == "both":
        return slo
    if role == "prefill":
        return Slo(ttft_s=slo.ttft_s)
    return Slo(tpot_s=slo.tpot_s)


def excess(rows: Sequence[Attainment]) -> float:
    """The worst limit's percentile over it; 0 where there is no limit."""
    return max((row.excess for row in rows), default=0.0)


def fewest(counts: Sequence[int], holds: Callable[[int], bool], *, one_by_one: int) -> int | None:
    """The first count that holds; None where the last, the lightest load, does not.

    The first few are tried in order, the others by halves between one that does not hold and the last. So where a
    percentile grows with more engines, beyond the first few a later count may be found.
    """
    if not counts or holds(counts[0]):
        return counts[0] if counts else None
    if len(counts) == 1 or (one_by_one < len(counts) and not holds(counts[-1])):
        return None
    for count in counts[1:one_by_one]:
        if holds(count):
            return count
    rest = counts[one_by_one:]
    if not rest:
        return None
    low, high = -1, len(rest) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(rest[middle]) else (middle, high)
    return rest[high]


def counts_of(study: ServingSearch, layout: InferencePlan, least: int, fixed: Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of engines that may be tried."""
    most = study.most_devices // layout.engine_devices
    if fixed is not None:
        return tuple(sorted(n for n in set(fixed) if least <= n <= most))
    if study.any_nodes:
        most = min(most, BEYOND * least + BEYOND)
    return tuple(range(least, most + 1))


def _survey(player: Player, task: Task) -> Survey:
    study, layout = player.study, of_key(task.layout)
    missing = player.missing_bytes(layout)
    if missing:
        return Survey(layout=task.layout, missing_bytes=missing, capacity={}, least={}, floor={})
    floors = Floors(study, layout)
    bound: dict[Role, float] = {}
    for role in task.roles:
        values = floors_of(floors if role != "decode" else None, floors if role != "prefill" else None, player.counted)
        bound[role] = excess(judged(values, slo_of(role, study.slo))[0])
    open_roles: list[Role] = [role for role in task.roles if bound[role] <= 1 or study.exhaustive]
    least = {role: player.least(role, layout) for role in open_roles}
    capacity = {role: player.capacity(role, layout, least[role]) for role in open_roles}
    finite = {role: min(value, UNLIMITED) for role, value in capacity.items()}
    return Survey(layout=task.layout, missing_bytes=0, capacity=finite, least=least, floor=bound)


def _fewest(player: Player, task: Task) -> Fewest:
    study, layout, (role,) = player.study, of_key(task.layout), task.roles
    slo = slo_of(role, study.slo)
    plays: list[Play] = []

    def holds(count: int) -> bool:
        play = player.play(role, layout, count)
        plays.append(play)
        return excess(judged(player.values(play, play), slo)[0]) <= 1

    tried = len(task.counts) if study.exhaustive else ONE_BY_ONE
    found = fewest(task.counts, holds, one_by_one=tried)
    return Fewest(role=role, layout=task.layout, engines=found, plays=tuple(plays))
