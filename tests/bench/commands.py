"""What each command costs in seconds of CPU and in memory, as a table: python tests/bench/commands.py [--slow] [--write]

Each of commands.toml runs as a process of its own in an empty folder, with Python's bytecode cached: seconds of a core, of the
user and of the system, its own children included (the least of so many runs, as other processes only ever add), and
the most memory that one of its processes held. --write puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.files import write_whole

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
START, END = "<!-- what tests/bench/commands.py prints -->", "<!-- end of commands.py -->"
_RUNS: Final = 3
_QUICK_S: Final = 20.0  # what takes longer runs once
_FOLDERS: Final = {"examples": ROOT / "docs" / "examples", "measured": ROOT / "experiments" / "measured"}


def ran(command: str, folder: Path) -> tuple[int, float, float]:
    """(exit code, seconds of CPU, most memory in MB) of one command in a folder."""
    words = [sys.executable, "-m", "simulator.cli", *command.format(**_FOLDERS).split()]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **quiet)
    _, status, used = os.wait4(process.pid, 0)  # what this one and its own children used, as no other call says
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def measured(row: Mapping[str, Any]) -> tuple[int, float, float]:
    """(exit code, least seconds of CPU, most memory in MB) of a row's command."""
    found: list[tuple[int, float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in row.get("files", {}).items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        for command in row.get("before", ()):
            ran(command, Path(scratch))
        while len(found) < _RUNS and (not found or found[-1][1] < _QUICK_S):
            found.append(ran(row["command"], Path(scratch)))
    return max(code for code, _, _ in found), min(s for _, s, _ in found), max(mb for _, _, mb in found)


def table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the page's table, each as soon as it is known."""
    cores = len(os.sched_getaffinity(0))
    yield f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {cores} shared cores, load {os.getloadavg()[0]:.1f} at the start:"
    yield ""
    yield "| command | of what | CPU, s | memory, MB | target |"
    yield "| --- | --- | --: | --: | --- |"
    for row in rows:
        code, cpu_s, memory_mb = measured(row)
        targets = [f"{row['target_s']} s"] if "target_s" in row else []
        targets += [f"{row['target_mb']:,} MB"] if "target_mb" in row else []
        # 3 and the like are answers too: a plan that does not fit, a queue that grows
        took = f"{cpu_s:.2f}" if cpu_s < 10 else f"{cpu_s:.0f}"
        name = row["command"].split()[0]
        yield f"| `{name}`{f' (exit code {code})' if code else ''} | {row['what']} | {took} | {memory_mb:.0f} | {', '.join(targets)} |"


def main() -> int:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="rows that take minutes too")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--only", help="rows whose command begins with this")
    options = parser.parse_args()
    rows = tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))["row"]
    rows = [row for row in rows if options.slow or not row.get("slow")]
    rows = [row for row in rows if row["command"].startswith(options.only or "")]
    lines = []
    for line in table(rows):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        lines.append(line)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        write_whole(PAGE, "\n".join([before + START, "", *lines, "", END]) + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
