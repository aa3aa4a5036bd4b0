"""A search's journal: that of `shardwise search`, with answers of tasks instead of simulated plans."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.studies.search.journal import Journal
from simulator.studies.serving_search.tasks import Task


class Notes(Journal):
    """Answers by their tasks. Raises InputError where the file cannot be used, and says why."""

    def known(self) -> dict[str, dict[str, Any]]:
        """All answers. Raises InputError where one cannot be read."""
        try:
            rows = self._database.execute("SELECT key, outcome FROM outcomes").fetchall()
            return {key: json.loads(text) for key, text in rows}
        except (sqlite3.Error, ValueError) as exc:
            remedy = "another --journal, or remove the file"
            raise InputError(Fault(place=str(self.path), problem=f"is damaged: {exc}", remedy=remedy)) from None

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """When this returns, it is on disk. Raises InputError where the disk refuses."""
        try:
            self._database.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?)", (task.key, json.dumps(answer)))
        except sqlite3.Error as exc:
            raise InputError(Fault(place=str(self.path), problem=f"cannot be written: {exc}")) from None
