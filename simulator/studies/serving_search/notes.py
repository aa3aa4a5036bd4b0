"""A search's journal: that of `shardwise search`, with answers of tasks instead of simulated plans."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import TypeAdapter

from simulator.base.errors import Fault, InputError
from simulator.studies.search.journal import REMEDY, Journal, checked
from simulator.studies.serving_search.tasks import Fewest, Survey, Task

_ANSWER: Final = TypeAdapter[Survey | Fewest](Survey | Fewest)


class Notes(Journal):
    """Answers by their tasks. Raises InputError where the file cannot be used, and says why."""

    def known(self) -> dict[str, dict[str, Any]]:
        """All answers. Raises InputError where one cannot be read."""
        found = self._read(lambda text: checked(_ANSWER, text))
        for key, answer in found.items():
            layouts = {one["layout"] for one in (answer, *answer.get("plays", ()))}
            if layouts != {json.loads(key)[1]}:
                problem = f"is damaged: {key[:80]} has another task's answer"
                raise InputError(Fault(place=str(self.path), problem=problem, remedy=REMEDY))
        return found

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """When this returns, it is on disk. Raises InputError where the disk refuses."""
        self._write(task.key, json.dumps(answer))
