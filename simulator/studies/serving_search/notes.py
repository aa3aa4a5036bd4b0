"""A search's journal: that of `shardwise search`, with answers of tasks instead of simulated plans."""

from __future__ import annotations

import json
from typing import Any

from simulator.studies.search.journal import Journal
from simulator.studies.serving_search.tasks import Task


class Notes(Journal):
    """Answers by their tasks. Raises InputError where the file cannot be used, and says why."""

    def known(self) -> dict[str, dict[str, Any]]:
        """All answers. Raises InputError where one cannot be read."""
        return self._read(json.loads)

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """When this returns, it is on disk. Raises InputError where the disk refuses."""
        self._write(task.key, json.dumps(answer))
