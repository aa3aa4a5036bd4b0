"""Where tasks run: in this process, or on this machine's cores. Answers come in the order of asking, and are kept in a journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from pydantic import TypeAdapter

from simulator.base.errors import InputError
from simulator.base.processes import WorkerPool
from simulator.studies.search.journal import REMEDY, Journal, checked
from simulator.studies.serving_search.plays import Player
from simulator.studies.serving_search.study import ServingSearch
from simulator.studies.serving_search.tasks import Fewest, Survey, Task


class Workers:
    """Answers tasks, from the journal where that knows them. player: of this process."""

    def __init__(self, study: ServingSearch, jobs: int, notes: Notes | None = None) -> None:
        self.player = Player(study)
        self._notes = notes
        self._known = notes.known() if notes is not None else {}
        self._workers = WorkerPool(jobs, _begin, (study,)) if jobs > 1 else None

    def answers(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Of each task."""
        missing = [task for task in tasks if task.key not in self._known]
        if self._workers is not None:
            found = self._workers.mapped(_run, missing, chunk=1)
        else:
            found = (task.run(self.player) for task in missing)
        for task, answer in zip(missing, found, strict=True):
            self._known[task.key] = answer
            if self._notes is not None:
                self._notes.keep(task, answer)
        return [self._known[task.key] for task in tasks]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            self._workers.__exit__(kind, exc, trace)


_PLAYERS: list[Player] = []  # of this worker


def _begin(study: ServingSearch) -> None:
    _PLAYERS[:] = [Player(study)]


def _run(task: Task) -> dict[str, Any]:
    return task.run(_PLAYERS[0])


_OF_REQUESTS: Final = ("first_s", "rest_s")  # of a play: a number a request
ANSWER: Final = TypeAdapter[Survey | Fewest](Survey | Fewest)


class Notes(Journal):
    """Answers by their tasks. Raises InputError where the file cannot be used, and says why."""

    def known(self) -> dict[str, dict[str, Any]]:
        """All answers. Raises InputError where one cannot be read."""
        found = self._read(lambda text: checked(ANSWER, text))
        lengths = {len(play[name]) for one in found.values() for play in one.get("plays", ()) for name in _OF_REQUESTS}
        if len(lengths) > 1:
            raise InputError.at(str(self.path), "is damaged: its answers are of different requests", REMEDY)
        for key, answer in found.items():
            layouts = {one["layout"] for one in (answer, *answer.get("plays", ()))}
            if layouts != {json.loads(key)[1]}:
                raise InputError.at(str(self.path), f"is damaged: {key[:80]} has another task's answer", REMEDY)
        return found

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """When this returns, it is on disk. Raises InputError where the disk refuses."""
        self._write(task.key, json.dumps(answer))
