"""How wrong is a prediction of a server whose engine nobody described? Writes topologies/calibrations/unknown-engine.json.

    python experiments/unnamed_engines.py [--rows 10] [--records FILE]    # some minutes

Of each described engine but vLLM, whose description stands in for unknown ones, and of each kind, at most so many rows are predicted as
if nobody had described it, drawn by the SHA-256 of what they were measured on. The error of a row is log(measured) over the nearest of
the ways in which it was played. Of each engine follows the sigma that holds 90 % of its rows beside what is known beforehand: `step` of
all figures but waits, `wait` of first tokens in closed loops besides. An unknown engine is one more than there are: of n engines the
sigma of the file is the smallest but so many that 0.9 (n + 1) of them need no more (split conformal; that of the widest where there are
fewer than nine, which holds 90 % of a new engine's rows in n / (n + 1) of the cases). What is said of an engine comes of the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from accuracy_serving import TABLE, as_run, undescribed

from simulator.formats.readers.measured_table import read_measured
from simulator.spec.calibration.intervals import ENGINES, unknown_engine
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.serving import evaluate_row
from simulator.studies.backtest.serving_figures import WAIT_SIGMA, deployed_once, runs_of
from simulator.studies.backtest.serving_rows import resolve, stack_of
from simulator.studies.serving.decoding import Z90, sigma_of

SHARE: Final = 0.9
Kind = Literal["step", "wait"]
KINDS: Final[tuple[Kind, ...]] = ("step", "wait")


@dataclass(frozen=True, slots=True)
class Judged:
    """A row.

    error: log of measured over the nearest way. reach: log of the furthest way above over the likeliest. known: one sigma of all that
    is not the engine's.
    """

    engine: str
    kind: Kind
    error: float
    reach: float
    known: float


def judged(row: ServingRow) -> Judged | None:
    """The row as if nobody had described its engine; None where it cannot be compared."""
    alone = undescribed(row)
    outcome = evaluate_row(alone)
    if not outcome.low or not outcome.high or not outcome.predicted or not outcome.measured:
        return None
    server = resolve(alone)
    deployed, (runs, batch) = deployed_once(server), runs_of(server)
    waits, unknown = server.waits and len(runs) > 1, unknown_engine()
    total = sigma_of(deployed.costs, batch, deployed.calibration, deployed.curves)
    known = math.sqrt(total**2 - unknown.step**2)
    total, known = (
        (math.hypot(total, WAIT_SIGMA, unknown.wait), math.hypot(known, WAIT_SIGMA)) if waits else (total, known)
    )
    low, high = outcome.low * math.exp(Z90 * total), outcome.high / math.exp(Z90 * total)
    error = math.log(outcome.measured / min(max(outcome.measured, low), high))
    return Judged(
        stack_of(as_run(row)).name, "wait" if waits else "step", error, math.log(high / outcome.predicted), known
    )


def drawn(most: int) -> list[ServingRow]:
    """At most so many rows of each engine that wait for users in a closed loop, and as many others; those of one server together."""

    def place(row: ServingRow) -> str:
        server = (row.source, row.model, row.gpu, row.tp, row.pp, row.precision, row.input_tokens, row.output_tokens)
        return hashlib.sha256(repr((*server, row.concurrency_or_rate)).encode()).hexdigest()

    found: dict[tuple[str, bool], list[ServingRow]] = defaultdict(list)
    rows = [row for row in read_measured(TABLE).rows if isinstance(row, ServingRow)]
    for row in sorted(rows, key=place):
        name, waits = stack_of(as_run(row)), row.metric.startswith("ttft") and row.concurrency_or_rate.isdigit()
        kind = found[name.name, waits]
        if not name.name.startswith("vllm") and row.id not in name.fitted.calibration_runs and len(kind) < most:
            kind.append(row)
    return sorted((row for kind in found.values() for row in kind), key=place)


def rows_of(most: int, records: Path | None) -> Iterator[Judged]:
    """The drawn rows, as far as they can be compared. records: what is there is not predicted again."""
    kept = records.read_text(encoding="utf-8").splitlines() if records and records.exists() else []
    known = {one["id"]: one["row"] for one in map(json.loads, kept)}
    for row in drawn(most):
        if row.id not in known:
            found = judged(row)
            known[row.id] = found and asdict(found)
            if records:
                with records.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"id": row.id, "row": known[row.id]}) + "\n")
        if known[row.id]:
            yield Judged(**known[row.id])


def needed(rows: Sequence[Judged], step: float = 0.0) -> float:
    """The sigma of the engine that holds so many of an engine's rows. step: that is in them already."""
    each = sorted(math.sqrt(max(0.0, (row.error / Z90) ** 2 - row.known**2 - step**2)) for row in rows)
    return each[math.ceil(SHARE * len(each)) - 1]


def conformal(values: Sequence[float]) -> float:
    """The value that one more than these does not exceed in SHARE of the cases; the largest where they are too few to say."""
    if not values:
        return 0.0
    return sorted(values)[min(math.ceil(SHARE * (len(values) + 1)), len(values)) - 1]


def fitted(engines: Mapping[str, Sequence[Judged]]) -> dict[Kind, float]:
    """The sigma of each kind. Waits have that of steps in them."""
    found: dict[Kind, float] = {}
    for kind in KINDS:
        alike = ([row for row in rows if row.kind == kind] for rows in engines.values())
        found[kind] = conformal([needed(rows, found.get("step", 0.0)) for rows in alike if rows])
    return found


def held(rows: Sequence[Judged], sigmas: Mapping[Kind, float]) -> dict[str, float]:
    """Rows, the share that is held, and how far the upper end lies above the prediction in the middle."""
    wide = [math.hypot(row.known, sigmas["step"], sigmas["wait"] if row.kind == "wait" else 0.0) for row in rows]
    inside = sum(abs(row.error) <= Z90 * sigma for row, sigma in zip(rows, wide, strict=True))
    upper = median(math.exp(row.reach + Z90 * sigma) - 1 for row, sigma in zip(rows, wide, strict=True))
    return {"rows": len(rows), "holds": round(inside / len(rows), 3), "upper": round(upper, 3)}


def document(engines: Mapping[str, Sequence[Judged]], most: int) -> dict[str, Any]:
    """What the file holds. What it says of an engine comes of the others."""
    others = {name: fitted({one: rows for one, rows in engines.items() if one != name}) for name in engines}
    rounded = {kind: math.ceil(1000 * sigma) / 1000 for kind, sigma in fitted(engines).items()}
    sample = {name: held(rows, others[name]) for name, rows in sorted(engines.items())}
    source = f"python experiments/unnamed_engines.py --rows {most}"
    return {"source": source, "step": rounded["step"], "wait": rounded["wait"], "sample": sample}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10, help="of an engine and kind")
    parser.add_argument("--records", type=Path, help="a file of records: read, and appended to")
    arguments = parser.parse_args(argv)
    engines: dict[str, list[Judged]] = defaultdict(list)
    for row in rows_of(arguments.rows, arguments.records):
        engines[row.engine].append(row)
    for name, rows in sorted(engines.items()):
        each = {kind: alike for kind in KINDS if (alike := [row for row in rows if row.kind == kind])}
        print(name, {kind: (len(alike), round(needed(alike), 3)) for kind, alike in each.items()})
    found = document(engines, arguments.rows)
    ENGINES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(ENGINES.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
