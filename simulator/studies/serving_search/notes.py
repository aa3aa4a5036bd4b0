"""The journal of a search over servers: answers by their tasks, of which an interrupted search goes on."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import TypeAdapter

from simulator.base.errors import InputError
from simulator.studies.search.journal import REMEDY, Journal, checked
from simulator.studies.serving_search.tasks import Fewest, Survey, Task

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
