"""A search killed again and again at random moments loses nothing and ends with the same table.

Nothing that its journal acknowledged may be lost, and the table must be that of a search that nobody interrupted.

    python experiments/search_kills.py [--kills 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

SEARCH = (
    *(sys.executable, "-m", "simulator.cli", "search", "--model", "gpt2-xl", "--cluster", "hgx-h100-8", "--nodes", "1"),
    *("--global-batch", "32", "--seq-len", "1024", "--fix", "cp=1", "--json", "--jobs", "2"),
)


def main() -> None:
    """Kill, look, go on; at the end compare."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    random = Random(options.seed)  # noqa: S311  moments, no secrets
    whole = subprocess.run(SEARCH, capture_output=True, check=True).stdout  # noqa: S603  the project's own
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "search.db"
        known: dict[str, str] = {}
        killed = finished = 0
        while killed < options.kills:
            ended = _killed((*SEARCH, "--journal", str(journal)), random.uniform(0.3, 6.0))
            killed, finished = killed + (not ended), finished + ended
            now = _rows(journal)
            lost = [key for key, text in known.items() if now.get(key) != text]
            if lost:
                sys.exit(f"{len(lost)} acknowledged candidates lost after {killed} kills")
            known = now
            if ended:  # begin anew, so that there is something left to kill
                for file in Path(folder).glob("search.db*"):
                    file.unlink()
                known = {}
        command = (*SEARCH, "--journal", str(journal))
        table = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603  the project's own
    same = "the same bytes" if table == whole else "ANOTHER TABLE"
    print(f"{killed} kills, {finished} searches finished between them, nothing acknowledged lost, at the end {same}")
    sys.exit(table != whole)


def _killed(command: tuple[str, ...], after_s: float) -> bool:
    """Whether the search ended by itself before the kill."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    try:
        process.wait(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _rows(journal: Path) -> dict[str, str]:
    if not journal.exists():
        return {}
    with contextlib.closing(sqlite3.connect(journal)) as database:
        if not database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'outcomes'").fetchone()[0]:
            return {}
        return dict(database.execute("SELECT key, outcome FROM outcomes"))


if __name__ == "__main__":
    main()
