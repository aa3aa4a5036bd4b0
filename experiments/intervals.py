"""Do the named parts of intervals hold? Writes topologies/calibrations/intervals.json: a factor on each kind of part.

    python experiments/intervals.py [--rows 12]                     # some minutes; prints what the others' factors make of each source
    python experiments/intervals.py --records FILE [--part 1/2]     # keeps each run's record in FILE, and takes from it what is there
    python experiments/intervals.py --undescribed                   # the factor of undescribed software alone, all others as they are

Of each kind at most so many published runs are predicted, drawn by the SHA-256 of their ids: with their stacks, and of each source
some as if nobody had described them. A kind is a source's runs of one stack on one node, or on several. The factors of the parts are the most probable ones where log(measured / predicted) scatters as
Student's t with their sigma, above zero with that of the upper end: heavy tails, since a few sources stand for many; half of all
runs are taken to lie on either side. Each source counts once, and in it each kind alike, whatever its runs; all together count as many
as there are groups of a source's runs on one GPU in one precision. Each factor starts at 1, within a factor of two, and nearer where the part itself was
measured. Then all are multiplied by what 90 % of the sources' weight needs (split conformal), over a normal distribution's 1.645.
Runs with options that no prediction holds, and those that calibrated a stack, take no part. The factor of undescribed software
follows from the undescribed runs, with all others as they are.

Nothing is judged by itself: what the file's sample says of a source comes of factors that were fitted without it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from unnamed_software import chosen, undescribed

from simulator.base.errors import InputError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.predict import Z90
from simulator.predict.confidence import kind_of, own_part, upward
from simulator.spec.calibration.intervals import FILE, PARTS, intervals
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.evaluate import answer
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.unstated import counted_otherwise
from simulator.studies.backtest.work import measured_step_s

Array = NDArray[np.float64]
TABLES = tuple(Path(__file__).resolve().parent / "measured" / f"{name}-plain.csv.gz" for name in ("runs", "runs-2"))
ROWS, UNDESCRIBED = 12, 5
FREEDOM: Final = 4.0  # of Student's t
# One sigma of a factor's logarithm: a factor of two, but of releases, which experiments/release_spread.py has measured: 42 rows in 15
# groups leave 27 degrees of freedom, and the logarithm of a standard deviation from n of them has one sigma of 1 / sqrt(2 n)
PRIOR: Final = np.array([1 / math.sqrt(2 * 27) if part == "experts" else math.log(2) for part in PARTS])
SHARE: Final = 0.9
SOFTWARE: Final = PARTS.index("software")


@dataclass(frozen=True, slots=True)
class Judged:
    """A run.

    squares: sigma² of each of PARTS as they are known beforehand; late: the same of the upper end alone. others: of parts that no
    run judges, at either end. error: log of measured over the nearest of the ways that may have run; half: half the distance of
    these ways (log time).
    """

    source: str
    kind: str
    group: str
    squares: tuple[float, ...]
    late: tuple[float, ...]
    others: tuple[float, float]
    error: float
    half: float


def judged(row: RunRow, *, described: bool) -> Judged | None:
    """The run predicted; None where nothing can be compared."""
    try:
        answered = answer(row if described else undescribed(row))
        measured_s = measured_step_s(answered.variant.run)
    except (InputError, RefusedError):
        return None
    run, prediction = answered.variant.run, answered.variant.prediction
    if not measured_s or run.unmodelled:
        return None
    known = intervals()
    ends = [dict.fromkeys((*PARTS, None), 0.0) for _ in range(2)]
    for name, one in (prediction.spread | {own_part(run.stack): prediction.stack_sigma}).items():
        kind = kind_of(name)
        ends[upward(name)][kind] += (one / known.factor(kind)) ** 2
    others = (ends[0].pop(None), ends[1].pop(None))
    middles = [each.seconds(each.prediction.step_s) for each in (answered.variant, *answered.spanned)]
    longer = counted_otherwise(run.row, run.model, run.plan.num_devices)
    low_s, high_s = min(middles) / max(longer, 1.0), max(middles) / min(longer, 1.0)
    error = math.log(measured_s / min(max(measured_s, low_s), high_s))
    group = f"{row.source} {row.gpu} {row.precision}"
    squares, late = (tuple(end.values()) for end in ends)
    return Judged(row.source, kind_of_run(row), group, squares, late, others, error, math.log(high_s / low_s) / 2)


def kind_of_run(row: RunRow) -> str:
    """What runs are drawn and weighed by, within their source: stack, and whether a network joins their GPUs."""
    several = (row.n_gpus or 1) > (row.gpus_per_node or 8)
    return f"{row.stack} {'nodes' if several else 'node'}"


def drawn(rows: Iterable[RunRow], most: int) -> list[RunRow]:
    """At most so many of each kind of each source."""
    kinds = defaultdict[tuple[str, str], list[RunRow]](list)
    for row in rows:
        kinds[row.source, kind_of_run(row)].append(row)
    return [row for rows in kinds.values() for row in chosen(rows, most)]


def predicted(most: int, records: Path | None, part: str) -> tuple[list[Judged], list[Judged]]:
    """The sample with its stacks, and as if nobody had described it. Of a part, what the records lack of it is predicted alone."""
    used = {run for name in Stack.names() for run in Stack.load(name).fitted.calibration_runs}
    rows = [row for table in TABLES for row in read_runs(table) if isinstance(row, RunRow)]
    rows = [row for row in rows if row.metric and not row.excluded and row.id not in used]
    wanted = [(row, True) for row in drawn(rows, most)] + [(row, False) for row in chosen(rows, UNDESCRIBED)]
    this, of = map(int, part.split("/"))
    known = _kept(records)
    for at, (row, described) in enumerate(wanted):
        key = _key(row, described=described)
        if key not in known and at % of == this - 1:
            known[key] = judged(row, described=described)
            _keep(records, key, known[key])
    found: dict[bool, list[Judged]] = {True: [], False: []}
    for row, described in wanted:
        one = known.get(_key(row, described=described))
        if one is not None:
            found[described].append(one)
    return found[True], found[False]


def _key(row: RunRow, *, described: bool) -> str:
    return f"{row.id} {'described' if described else 'undescribed'}"


def _kept(records: Path | None) -> dict[str, Judged | None]:
    """Records by key; None of a run that cannot be compared."""
    if records is None or not records.exists():
        return {}
    lines = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    lists = ("squares", "late", "others")
    return {
        one["key"]: one["run"] and Judged(**one["run"] | {key: tuple(one["run"][key]) for key in lists})
        for one in lines
    }


def _keep(records: Path | None, key: str, run: Judged | None) -> None:
    if records is not None:
        with records.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": key, "run": run and asdict(run)}) + "\n")


def weights(runs: Sequence[Judged]) -> Array:
    """Each source counts once, and each kind of its runs alike."""
    count = Counter((one.source, one.kind) for one in runs)
    kinds = Counter(source for source, _ in count)
    return np.array([1 / (count[one.source, one.kind] * kinds[one.source]) for one in runs])


def sigmas(runs: Sequence[Judged], factors: Array) -> tuple[Array, Array]:
    """One sigma of each run by these factors, below and above what was predicted."""
    squares, late = (
        np.array(each) @ factors**2 for each in ([one.squares for one in runs], [one.late for one in runs])
    )
    others = np.array([one.others for one in runs]).T
    below = squares + others[0]
    return np.sqrt(below), np.sqrt(below + late + others[1])


def own(runs: Sequence[Judged], factors: Array) -> Array:
    """That of the side that each run's error lies on."""
    below, above = sigmas(runs, factors)
    return np.where(np.array([one.error for one in runs]) > 0, above, below)


def off(runs: Sequence[Judged], factors: Array) -> Array:
    """The runs' errors in sigmas of their side, in size."""
    found: Array = np.abs([one.error for one in runs]) / own(runs, factors)
    return found


def fitted(runs: Sequence[Judged]) -> Array:
    """The factors of PARTS, that of undescribed software at 1."""
    shares = weights(runs) / weights(runs).sum()
    groups = len({one.group for one in runs})

    def cost(logs: Array) -> float:
        factors = np.exp(logs)
        density = np.log(own(runs, factors)) + 0.5 * (FREEDOM + 1) * np.log1p(off(runs, factors) ** 2 / FREEDOM)
        return float(groups * (shares * density).sum() + 0.5 * ((logs / PRIOR) ** 2).sum())

    found = np.exp(minimize(cost, np.zeros(len(PARTS)), method="L-BFGS-B").x)
    found[SOFTWARE] = 1.0
    return found * quantile(off(runs, found), weights(runs)) / Z90


def quantile(sizes: Array, weight: Array, more: float = 0.0) -> float:
    """The smallest that so large a share of the weight, and of some more that nobody has seen, does not exceed."""
    order = np.argsort(sizes, kind="stable")
    reached = np.cumsum(weight[order])
    least = min(SHARE * (reached[-1] + more), reached[-1])
    return float(sizes[order][int(np.searchsorted(reached, least * (1 - 1e-12)))])


def software(runs: Sequence[Judged], factors: Array) -> float:
    """The factor of undescribed software at which its intervals hold, with all others as they are.

    Such software is a source that nobody has seen: one more than there are (split conformal).
    """
    weight = weights(runs)
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        tried = factors.copy()
        tried[SOFTWARE] = middle
        if quantile(off(runs, tried), weight, more=1.0) > Z90:
            low = middle
        else:
            high = middle
    return high


def document(described: Sequence[Judged], others: Sequence[Judged]) -> dict[str, Any]:
    """What the file holds."""
    factors = fitted(described)
    factors[SOFTWARE] = software(others, factors)
    sample: dict[str, dict[str, float]] = {}
    for source in sorted({one.source for one in described}):
        mine, rest = split(described, source)
        by_others = fitted(rest)
        sample[source] = {"runs": len(mine)} | held(mine, by_others) | unnamed(others, source, by_others)
    return written(factors, sample)


def of_undescribed(others: Sequence[Judged]) -> dict[str, Any]:
    """What the file holds where all factors but that of undescribed software stay."""
    known = intervals()
    factors = np.array([known.factor(part) for part in PARTS])
    factors[SOFTWARE] = software(others, factors)
    left = {
        source: {name: one for name, one in sample.items() if not name.startswith("undescribed")}
        for source, sample in known.sample.items()
    }
    return written(factors, {source: one | unnamed(others, source, factors) for source, one in left.items()})


def unnamed(others: Sequence[Judged], source: str, factors: Array) -> dict[str, float]:
    """What a source's undescribed runs would hold, by the factor that all other sources' say."""
    mine, theirs = split(others, source)
    if not mine:
        return {}
    by_others = factors.copy()
    by_others[SOFTWARE] = software(theirs, factors)
    return {f"undescribed_{name}": value for name, value in ({"runs": len(mine)} | held(mine, by_others)).items()}


def written(factors: Array, sample: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The file's content."""
    return {
        "source": f"python experiments/intervals.py --rows {ROWS}: published runs, each source once, each kind of its runs alike",
        "factors": {name: round(float(one), 3) for name, one in zip(PARTS, factors, strict=True)},
        "sample": sample,
    }


def split(runs: Sequence[Judged], source: str) -> tuple[list[Judged], list[Judged]]:
    """(those of the source, the others)."""
    return [one for one in runs if one.source == source], [one for one in runs if one.source != source]


def held(runs: Sequence[Judged], factors: Array) -> dict[str, float]:
    """Share inside, and the half-width in the middle."""
    inside = off(runs, factors) <= Z90
    reach = Z90 * sum(sigmas(runs, factors)) / 2
    half = float(np.median(reach + np.array([one.half for one in runs])))
    return {"holds": round(float(inside.mean()), 3), "half": round(half, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print it by source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a kind")
    parser.add_argument("--records", type=Path, help="a file of records: read, and appended to")
    parser.add_argument("--part", default="1/1", help="of the runs, every so many; writes no factors unless 1/1")
    parser.add_argument("--undescribed", action="store_true", help="fit the factor of undescribed software alone")
    arguments = parser.parse_args(argv)
    most = 0 if arguments.undescribed else arguments.rows
    described, others = predicted(most, arguments.records, arguments.part)
    if arguments.part != "1/1":
        return 0
    found = of_undescribed(others) if arguments.undescribed else document(described, others)
    plain = np.ones(len(PARTS))
    by_source = defaultdict(list)
    for one in described:
        by_source[one.source].append(one)
    for source, sample in found["sample"].items():
        before = held(by_source[source], plain) if described else {"holds": math.nan, "half": math.nan}
        print(f"{source[:40]:40} {sample['runs']:4} holds {before['holds']:.2f} -> {sample['holds']:.2f}  half {before['half']:.2f} -> {sample['half']:.2f}"
              f"   undescribed {sample.get('undescribed_holds', math.nan):.2f} half {sample.get('undescribed_half', math.nan):.2f}")  # fmt: skip
    print(found["factors"])
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
