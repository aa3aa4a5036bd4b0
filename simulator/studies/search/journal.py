"""Journal: every finished candidate is on disk before it is used, so that nothing is simulated twice.

SQLite in write-ahead mode with full synchronisation: a row whose commit has returned outlives kill -9 and a power cut.
The file says which shardwise and which study it belongs to, and refuses any other.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from simulator.base.errors import InputError
from simulator.base.processes import remove_abandoned
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.study import SearchBrokenError, software_version

SCHEMA: Final = "4"  # of the file; another is refused
_APPLICATION: Final = 0x53485744  # "SHWD": distinguishes our files from other SQLite databases
REMEDY: Final = "another --journal, or remove the file"
_LEAST: Final = 1e-18  # seconds, bytes and counts are none, or between this and its inverse
_OUTCOME: Final = TypeAdapter(PlanOutcome)
FoundT = TypeVar("FoundT")


class Journal:
    """Outcomes by key. Raises InputError where the file cannot be used, and says why."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        try:
            self._refuse_unwritable()
            self._database = sqlite3.connect(path, isolation_level=None, timeout=5)
            self._open(identity)
        except sqlite3.Error as exc:
            raise InputError.at(str(path), f"is not a journal that can be used: {exc}", REMEDY) from None
        # Of a killed run that this one goes on from, maybe without a pool of its own
        remove_abandoned(Path(gettempdir()))

    def _refuse_unwritable(self) -> None:
        folder = self.path.parent
        problem = ""
        if not folder.is_dir():
            problem = "there is no such folder"
        elif not os.access(folder, os.W_OK) or (self.path.exists() and not os.access(self.path, os.W_OK)):
            problem = "cannot be written"
        if problem:
            place = str(folder if not self.path.exists() else self.path)
            raise InputError.at(place, problem, "--journal with a path that can be written")

    def _open(self, identity: str) -> None:
        database = self._database
        marked = database.execute("PRAGMA application_id").fetchone()[0]
        empty = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not empty and marked != _APPLICATION:
            raise InputError.at(str(self.path), "is another program's database", "another --journal")
        if empty:
            database.execute("PRAGMA page_size=16384")  # rows of 1.6 kB fill those; a fifth less than in pages of 4 kB
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        if empty:
            self._create(identity)
        self._check(identity)

    def _create(self, identity: str) -> None:
        """All in one transaction: a journal is whole or empty."""
        facts = {"schema": SCHEMA, "version": software_version(), "study": identity}
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute(f"PRAGMA application_id={_APPLICATION}")
        self._database.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS outcomes (key TEXT PRIMARY KEY, outcome TEXT NOT NULL, sum INTEGER NOT NULL)"
        )
        self._database.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", facts.items())
        self._database.execute("COMMIT")

    def _check(self, identity: str) -> None:
        found = dict(self._database.execute("SELECT name, value FROM facts"))
        expected = {"schema": SCHEMA, "version": software_version(), "study": identity}
        words = {
            "schema": "is a journal of another format",
            "version": "was written by another version of shardwise",
            "study": "belongs to another study (model, cluster, batch, fixed values, stack or calibration differ)",
        }
        for name, value in expected.items():
            if found.get(name) != value:
                detail = "" if name == "study" else f": {found.get(name)}, this is {value}"
                raise InputError.at(str(self.path), words[name] + detail, REMEDY)

    def outcomes(self, *, ranked: bool = False) -> dict[str, PlanOutcome]:
        """All that is known; ranked: of plans, with all their figures. Raises InputError where a row cannot be read."""
        found = self._read(lambda text: PlanOutcome.of(checked(_OUTCOME, text)))
        if wrong := [
            key for key, one in found.items() if one.key != key or not one.sound or (ranked and not one.complete)
        ]:
            problem = f"is damaged: {wrong[0][:80]} has no outcome that a prediction could have"
            raise InputError.at(str(self.path), problem, REMEDY)
        return found

    def add(self, outcome: PlanOutcome) -> None:
        """Keep an outcome: when this returns, it is on disk. Raises InputError where the disk refuses."""
        self._write(outcome.key, outcome.to_json())

    def _read(self, parse: Callable[[str], FoundT]) -> dict[str, FoundT]:
        """Every row, if it is what was written: a number that somebody or a disk has changed would be ranked like any other."""
        try:
            rows = self._database.execute("SELECT key, outcome, sum FROM outcomes").fetchall()
            if changed := [key for key, text, checksum in rows if checksum != _sum(key, text)]:
                msg = f"{len(changed)} of {len(rows)} outcomes are not what was written"
                raise ValueError(msg)  # noqa: TRY301
            return {key: parse(text) for key, text, _ in rows}
        except (sqlite3.Error, ValueError, TypeError, KeyError) as exc:
            raise InputError.at(str(self.path), f"is damaged: {exc}", REMEDY) from None

    def _write(self, key: str, text: str) -> None:
        try:
            self._database.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", (key, text, _sum(key, text)))
        except sqlite3.Error as exc:
            raise SearchBrokenError.at(str(self.path), f"cannot be written: {exc}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def checked(kind: TypeAdapter[Any], text: str) -> dict[str, Any]:
    """A row's table, if it is one of that kind and no number is below zero or none at all. Raises ValueError."""
    try:
        plain = kind.dump_python(kind.validate_json(text, strict=True), mode="json", exclude_unset=True)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        msg = f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
        raise ValueError(msg) from None
    data: dict[str, Any] = json.loads(text)
    _check_numbers(data)
    if plain != data:
        msg = "has a value that nobody writes there"
        raise ValueError(msg)
    return data


def _check_numbers(data: object) -> None:
    if isinstance(data, float | int) and data and not _LEAST < data < 1 / _LEAST:
        msg = f"{data} is no time, size or count"
        raise ValueError(msg)
    for one in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _check_numbers(one)


def _sum(key: str, text: str) -> int:
    return zlib.crc32(f"{key}\n{text}".encode())
