"""Whether a calibration that is taken under load is refused or flagged: load of our own, one calibration after another.

    PYTHONPATH=. python experiments/under_load.py FOLDER --runs 20

Each run has as many processes beside it as --busy says (twice the cores by default), which multiply matrices all the time;
`calibrate run` measures, `calibrate fit` grades. Refused: exit status 3, grade F; flagged: grade C. A line a run is printed, and
the count; exit status 1 where one run was neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from simulator.base.exit_codes import ExitCode

_BUSY: Final = "while True: sum(i * i for i in range(100000))"
_GRADE: Final = re.compile(r"grade ([ABCF]).*")


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """As many processes that never wait."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]  # noqa: S603
    try:
        yield
    finally:
        for one in busy:
            one.kill()
        for one in busy:
            one.wait()


def taken(folder: Path, number: int, minutes: float) -> dict[str, object]:
    """A calibration, what became of it, and its grade."""
    samples, out = folder / f"samples-{number}.jsonl", folder / f"machine-{number}.calibration.json"
    samples.unlink(missing_ok=True)
    shardwise = [sys.executable, "-m", "simulator.cli", "calibrate"]
    measured = subprocess.run(  # noqa: S603  our own
        [*shardwise, "run", "--device", "cpu", "--minutes", f"{minutes:g}", "--out", str(samples)],
        capture_output=True,
        text=True,
        check=False,
    )
    fitted = subprocess.run(  # noqa: S603
        [*shardwise, "fit", str(samples), "-o", str(out)], capture_output=True, text=True, check=False
    )
    found = _GRADE.search(fitted.stderr)
    grade = found[1] if found else ""
    refused = fitted.returncode == ExitCode.BAD_INPUT
    return {
        "run": number,
        "measured": measured.returncode,
        "outcome": "refused" if refused else "flagged" if grade == "C" else "taken",
        "grade": found[0] if found else fitted.stderr.strip().splitlines()[-1:],
    }


def main() -> int:
    """All runs; what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=0.15, help="of each calibration")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    with load(options.busy):
        for number in range(1, options.runs + 1):
            found.append(taken(options.folder, number, options.minutes))
            print(json.dumps(found[-1]), flush=True)
    named = sum(one["outcome"] != "taken" for one in found)
    print(f"{named} of {len(found)} refused or flagged")
    return int(named < len(found))


if __name__ == "__main__":
    sys.exit(main())
