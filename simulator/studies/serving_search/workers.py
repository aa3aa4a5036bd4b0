"""Where tasks run: in this process, or on this machine's cores. Answers come in the order of asking, and are kept in a journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from simulator.base.processes import WorkerPool
from simulator.studies.serving_search.notes import Notes
from simulator.studies.serving_search.plays import Player
from simulator.studies.serving_search.study import ServingSearch
from simulator.studies.serving_search.tasks import Task


class Workers(AbstractContextManager["Workers"]):
    """Answers tasks, from the journal where that knows them. player: of this process."""

    def __init__(self, study: ServingSearch, jobs: int, notes: Notes | None = None) -> None:
        self.player = Player(study)
        self._notes = notes
        self._known = notes.known() if notes is not None else {}
        self._workers = WorkerPool(jobs, _begin, (study,)) if jobs > 1 else None

    def answers(
        self, tasks: Sequence[Task], told: Callable[[int, int], None] = lambda *_: None
    ) -> list[dict[str, Any]]:
        """Of each task. told: hears how many of how many are done."""
        missing = [task for task in tasks if task.key not in self._known]
        if self._workers is not None:
            found = self._workers.mapped(_run, missing, chunk=1)
        else:
            found = (task.run(self.player) for task in missing)
        for done, (task, answer) in enumerate(zip(missing, found, strict=True), 1):
            self._known[task.key] = answer
            told(done, len(missing))
            if self._notes is not None:
                self._notes.keep(task, answer)
        return [self._known[task.key] for task in tasks]

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._workers is not None:
            self._workers.__exit__(kind, *raised)


_PLAYERS: list[Player] = []  # of this worker


def _begin(study: ServingSearch) -> None:
    _PLAYERS[:] = [Player(study)]


def _run(task: Task) -> dict[str, Any]:
    return task.run(_PLAYERS[0])
