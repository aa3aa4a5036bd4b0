"""A pinned sample of measured runs, and how far off it was: `python tests/accuracy/gate.py` fails where a change made it worse.

    python tests/accuracy/gate.py          # then and now by source; exit code 1 where worse
    python tests/accuracy/gate.py --pin    # choose the rows anew and write down how far off they are now

The rows are chosen without a look at their errors: 120 over all sources of experiments/measured/runs*-plain.csv.gz, equally
many of each as far as a source has them, in the order of the SHA-256 of their ids. Rows that were used for calibration or are
refused are passed over, and so are pipelines of more than four positions (pp x vpp), which take longest.

Eleven figures of servers are pinned likewise, of experiments/measured/serving.csv.gz, in a file of their own (`pinned_servers.csv`): those whose users
ask for few tokens in all, and of maximum load the shortest answers, as the others take longest.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.accuracy_serving import as_run  # noqa: E402
from simulator.formats.readers.measured_table import read_serving  # noqa: E402
from simulator.formats.readers.runs_table import RunRow, read_runs  # noqa: E402
from simulator.studies.backtest import serving  # noqa: E402
from simulator.studies.backtest.evaluate import evaluate_row  # noqa: E402
from simulator.studies.backtest.rows import ServingRow  # noqa: E402

TABLES = tuple(ROOT / "experiments" / "measured" / f"{name}-plain.csv.gz" for name in ("runs", "runs-2"))
SERVERS = ROOT / "experiments" / "measured" / "serving.csv.gz"
PINNED, PINNED_SERVERS = (Path(__file__).with_name(f"{name}.csv") for name in ("pinned", "pinned_servers"))
ROWS, POSITIONS = 120, 4
FIGURES = 11  # of servers
TOKENS, SHORTEST = 10_000, 128  # of answers: that users have under way; of one, at a rate or at most load
# A median may rise by this share of itself, or by the floor where that is more: errors are written with four digits, and a
# change of a tenth of a point in a median of seven rows says nothing.
OF_A_SOURCE, FLOOR_OF_A_SOURCE = 0.10, 0.003
OF_ALL, FLOOR_OF_ALL = 0.05, 0.001


@dataclass(frozen=True, slots=True)
class Known:
    """A row and its errors (predicted over measured, minus 1); None: not measured. A server's figure stands as time."""

    id: str
    source: str
    time: float | None
    memory: float | None


@cache
def rows() -> dict[str, RunRow]:
    """All runs that a prediction may exist for, by id."""
    read = (row for table in TABLES for row in read_runs(table) if isinstance(row, RunRow))
    return {row.id: row for row in read if row.metric and not row.excluded}


def servers() -> dict[str, ServingRow]:
    """The figures of servers that cost little, by id."""
    read = (as_run(row) for row in read_serving(SERVERS) if isinstance(row, ServingRow))
    return {row.id: row for row in read if _cheap(row)}


def _cheap(row: ServingRow) -> bool:
    load, answer = row.concurrency_or_rate, row.output_tokens or 0
    return int(load) * answer <= TOKENS if load.isdigit() else answer <= SHORTEST


def now(row: RunRow | ServingRow) -> Known | None:
    """How far off the row is; None where it is refused, calibrates a stack, or has no time."""
    if isinstance(row, ServingRow):
        found = serving.evaluate_row(row)
        return (
            None
            if found.status != "ok" or found.error is None
            else Known(row.id, row.source, round(found.error, 4), None)
        )
    outcome = evaluate_row(row)
    if outcome.status != "ok" or outcome.step_error is None:
        return None
    memory = outcome.memory_error
    return Known(row.id, row.source, round(outcome.step_error, 4), None if memory is None else round(memory, 4))


def chosen(candidates: Iterable[RunRow | ServingRow], most: int = ROWS) -> list[Known]:
    """The rows of the rule, in the order of source and id."""
    by_source: dict[str, list[RunRow | ServingRow]] = defaultdict(list)
    for row in sorted(candidates, key=lambda row: hashlib.sha256(row.id.encode()).hexdigest()):
        if isinstance(row, ServingRow) or (row.pp or 1) * (row.vpp or 1) <= POSITIONS:
            by_source[row.source].append(row)
    waiting = {source: _judged(found) for source, found in sorted(by_source.items())}
    taken: list[Known] = []
    while waiting and len(taken) < most:
        for source in list(waiting):
            one = next(waiting[source], None)
            if one is None:
                del waiting[source]
            elif len(taken) < most:
                taken.append(one)
    return sorted(taken, key=lambda known: (known.source, known.id))


def _judged(found: Iterable[RunRow | ServingRow]) -> Iterator[Known]:
    return (known for row in found if (known := now(row)) is not None)


def medians(known: Iterable[Known]) -> dict[tuple[str, str], float]:
    """(source, "time" or "memory") -> median of the errors' size; the source "all" is the whole."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in known:
        for figure, error in (("time", one.time), ("memory", one.memory)):
            if error is not None:
                errors[one.source, figure].append(abs(error))
                errors["all", figure].append(abs(error))
    return {key: median(sizes) for key, sizes in errors.items()}


def worse(then: Mapping[tuple[str, str], float], today: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """Which medians rose by more than they may."""
    found = []
    for (source, figure), old in then.items():
        share, floor = (OF_ALL, FLOOR_OF_ALL) if source == "all" else (OF_A_SOURCE, FLOOR_OF_A_SOURCE)
        if today.get((source, figure), float("inf")) > old + max(share * old, floor):
            found.append((source, figure))
    return found


def read(file: Path = PINNED) -> list[Known]:
    """The rows as pinned."""
    with file.open(encoding="utf-8", newline="") as stream:
        return [
            Known(one["id"], one["source"], *(float(one[f]) if one[f] else None for f in ("time", "memory")))
            for one in csv.DictReader(stream)
        ]


def write(known: Iterable[Known], file: Path = PINNED) -> None:
    """A line a row, so that a re-pinned row shows in a diff."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(Known)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(one) for one in known)


def judged(pinned: Iterable[Known]) -> tuple[list[Known], list[str]]:
    """The pinned rows as they are predicted now, and the ids of those that no longer are."""
    known: dict[str, RunRow | ServingRow] = {**rows(), **servers()}
    found = {one.id: now(known[one.id]) if one.id in known else None for one in pinned}
    return [one for one in found.values() if one], [row for row, one in found.items() if one is None]


def verdict(pinned: list[Known]) -> tuple[list[str], bool]:
    """A line for each median, then and now, those that are worse marked; and whether all holds."""
    today, lost = judged(pinned)
    then, is_now = medians(pinned), medians(today)
    failed = worse(then, is_now)
    lines = [f"{row}: is no longer predicted" for row in lost]
    for key, old in sorted(then.items(), key=lambda item: item[0][::-1]):
        mark = "  WORSE" if key in failed else ""
        lines.append(f"{key[1]:6} {key[0][:60]:60} {old:7.2%} -> {is_now.get(key, float('nan')):7.2%}{mark}")
    lines += [
        _moved(one, after) for one in pinned for after in today if after.id == one.id and _far(one, after, failed)
    ]
    return lines, not failed and not lost


def _far(one: Known, after: Known, failed: list[tuple[str, str]]) -> bool:
    """A row of a source that became worse, itself farther off by more than a point."""
    return any(
        source in (one.source, "all") and abs(getattr(after, figure) or 0) > abs(getattr(one, figure) or 0) + 0.01
        for source, figure in failed
    )


def _moved(one: Known, after: Known) -> str:
    pairs = (("time", one.time, after.time), ("memory", one.memory, after.memory))
    return f"  {one.id}: " + ", ".join(f"{what} {a:+.1%} -> {b:+.1%}" for what, a, b in pairs if a is not None and b)


def main() -> int:
    """Compare, or pin anew and say what moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pin", action="store_true", help="choose the rows anew and write down their errors")
    if parser.parse_args().pin:
        known, figures = chosen(rows().values()), chosen(servers().values(), FIGURES)
        before = {**medians(read()), **_of_servers(read(PINNED_SERVERS))} if PINNED.exists() else {}
        after = {**medians(known), **_of_servers(figures)}
        write(known)
        write(figures, PINNED_SERVERS)
        for key in sorted(before.keys() | after.keys(), key=lambda key: key[::-1]):
            old, new = (f"{each[key]:.2%}" if key in each else "none" for each in (before, after))
            if old != new:
                print(f"{key[1]:6} {key[0][:60]:60} {old} -> {new}")
        return 0
    verdicts = [verdict(read(file)) for file in (PINNED, PINNED_SERVERS)]
    print("\n".join(line for lines, _ in verdicts for line in lines))
    return int(not all(holds for _, holds in verdicts))


def _of_servers(known: Iterable[Known]) -> dict[tuple[str, str], float]:
    """Their medians, apart from those of runs."""
    return {("all servers" if source == "all" else source, what): m for (source, what), m in medians(known).items()}


if __name__ == "__main__":
    sys.exit(main())
