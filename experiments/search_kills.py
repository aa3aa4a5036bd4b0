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
import time
from pathlib import Path
from random import Random

SEARCH = (
    *(sys.executable, "-m", "simulator.cli", "search", "--model", "gpt2-xl", "--cluster", "hgx-h100-8", "--nodes", "1"),
    *("--global-batch", "32", "--seq-len", "1024", "--fix", "cp=1", "--json", "--jobs", "2"),
)


def main() -> None:
    """Kill, look, go on; compare every search that came to its end."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    random = Random(options.seed)  # noqa: S311  moments, no secrets
    begun = time.monotonic()
    undisturbed = subprocess.run(SEARCH, capture_output=True, check=True).stdout  # noqa: S603  the project's own
    longest_s = 1.2 * (time.monotonic() - begun)  # moments over all of a search, on this machine as it is now
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "search.db"
        found: list[int] = []  # acknowledged candidates at each kill
        tables = 0
        known: dict[str, str] = {}
        while len(found) < options.kills:
            table = _killed((*SEARCH, "--journal", str(journal)), random.uniform(0.1, longest_s))
            now = _rows(journal)
            lost = [key for key, text in known.items() if now.get(key) != text]
            if lost:
                sys.exit(f"{len(lost)} acknowledged candidates lost after {len(found)} kills")
            known = now
            if table is None:
                found.append(len(now))
                print(f"kill {len(found)}: {len(now)} candidates kept", file=sys.stderr, flush=True)
                continue
            tables += 1
            _must_equal(table, undisturbed, f"after {len(found)} kills")
            for file in Path(folder).glob("search.db*"):  # begin anew, so that there is something left to kill
                file.unlink()
            known = {}
        command = (*SEARCH, "--journal", str(journal))
        table = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603  the project's own
        _must_equal(table, undisturbed, "at the end")
    print(
        f"{options.kills} kills at up to {longest_s:.0f} s, {sum(n > 0 for n in found)} of them with candidates in the "
        f"journal; {tables + 1} searches came to their end: each with the same bytes, nothing acknowledged lost"
    )


def _must_equal(table: bytes, undisturbed: bytes, when: str) -> None:
    if table != undisturbed:
        sys.exit(f"ANOTHER TABLE {when}")


def _killed(command: tuple[str, ...], after_s: float) -> bytes | None:
    """What the search printed where it ended before the kill, else None."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        table, _ = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
    if process.returncode != 0:
        sys.exit(f"a search ended with {process.returncode}")
    return table


def _rows(journal: Path) -> dict[str, str]:
    if not journal.exists():
        return {}
    with contextlib.closing(sqlite3.connect(journal)) as database:
        if not database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'outcomes'").fetchone()[0]:
            return {}
        return dict(database.execute("SELECT key, outcome FROM outcomes"))


if __name__ == "__main__":
    main()
