"""What do six of a user's own runs teach? Judges `shardwise calibrate learn` on every source of more than twenty measured runs.

    python experiments/learning.py [--rows 40] [--only SOURCE]     # some minutes; writes docs/learning.md with --write

Of each source six runs teach and the others judge. The six are chosen by a rule that does not look at errors: each next run is
the one that brings all runs of the source nearest to a chosen one, by GPU, precision, parameters, GPUs, sequence length,
micro-batch, degrees and experts. Twice: with the software described, and as if nobody had described it (the generic stack, as
experiments/unnamed_software.py does). Of large sources a sample is judged, drawn by the SHA-256 of ids, and no pipelines of more
than eight positions (pp x vpp), which take seconds each.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from unnamed_software import undescribed

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.predict.confidence import Z90
from simulator.spec.calibration.learned import ADDED, NAMES
from simulator.spec.software.stack import Stack
from simulator.studies.learning.observed import Array, Observed, observed, on_one_stack
from simulator.studies.learning.posterior import Posterior, posterior

ROOT = Path(__file__).resolve().parents[1]
TABLES = tuple(ROOT / "experiments" / "measured" / f"{name}-plain.csv.gz" for name in ("runs", "runs-2"))
PAGE = ROOT / "docs" / "learning.md"
TAUGHT, MORE_THAN, ROWS, POSITIONS = 6, 20, 22, 8
FAR = 0.06


@dataclass(frozen=True, slots=True)
class Judged:
    """The runs that did not teach: log of predicted over measured, and half the 90 % interval's width in logs; before and after."""

    source: str
    described: bool
    taught: tuple[str, ...]
    before: Array
    wide_before: Array
    after: Array
    wide_after: Array
    learned: Posterior


def main() -> int:
    """Judge every source, print a line each, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a source, those that teach among them")
    parser.add_argument("--only", default="", help="sources whose name holds this")
    parser.add_argument("--write", action="store_true", help="write docs/learning.md")
    arguments = parser.parse_args()
    found = list[Judged]()
    for source, rows in sources(arguments.rows):
        if arguments.only not in source:
            continue
        for described in (True, False):
            one = judged(source, rows, described=described)
            if one is not None:
                found.append(one)
                print(_line(one), flush=True)
    if arguments.write:
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


def sources(most: int) -> Iterator[tuple[str, list[RunRow]]]:
    """Each source of more than twenty runs that can teach: a sample of its rows, calibration runs of stacks left out."""
    used = {run for name in Stack.names() for run in Stack.load(name).fitted.calibration_runs}
    by_source: dict[str, list[RunRow]] = defaultdict(list)
    for table in TABLES:
        for row in read_runs(table):
            if isinstance(row, RunRow) and row.metric and not row.excluded and row.id not in used:
                by_source[row.source].append(row)
    for source, rows in sorted(by_source.items()):
        if len(rows) > MORE_THAN:
            short = [row for row in rows if (row.pp or 1) * (row.vpp or 1) <= POSITIONS]
            yield source, sorted(short, key=lambda row: hashlib.sha256(row.id.encode()).hexdigest())[:most]


def judged(source: str, rows: Sequence[RunRow], *, described: bool) -> Judged | None:
    """Six of the rows teach, the others are predicted before and after; None where too few can be predicted."""
    runs, _ = observed(rows if described else [undescribed(row) for row in rows])
    if len(runs) <= 2 * TAUGHT:
        return None
    runs = on_one_stack(runs)
    chosen = choose(runs, TAUGHT)
    learned = posterior([runs[i] for i in chosen])
    rest = [run for i, run in enumerate(runs) if i not in chosen]
    before, wide_before = np.array([_before(run) for run in rest]).T
    after, wide_after = np.array([_after(run, learned) for run in rest]).T
    taught = tuple(runs[i].id for i in chosen)
    return Judged(source, described, taught, before, wide_before, after, wide_after, learned)


def choose(runs: Sequence[Observed], count: int) -> list[int]:
    """Indices of runs such that every run is near one of them: each next one takes most off the summed distance."""
    points = np.array([_features(run) for run in runs])
    deviation = points.std(axis=0)
    points = points / np.where(deviation > 0, deviation, 1)
    distances = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2))
    nearest, taken = np.full(len(runs), np.inf), list[int]()
    for _ in range(count):
        left = np.minimum(nearest[:, None], distances).sum(axis=0)
        left[taken] = np.inf
        taken.append(int(np.argmin(left)))
        nearest = np.minimum(nearest, distances[:, taken[-1]])
    return sorted(taken)


def _features(run: Observed) -> list[float]:
    model, plan, device = run.run.model, run.run.plan, run.run.cluster.device
    numbers = (model.num_parameters, plan.num_devices, plan.seq_len, plan.micro_batch_size, plan.tp, plan.pp, plan.cp)
    kinds = (device.memory_bytes_per_s, device.peak("bf16") or 1.0, model.experts.num_experts if model.experts else 1)
    words = (
        plan.precision.compute == "fp8",
        plan.precision.compute == "bf16",
        plan.recompute.mode == "none",
        plan.zero,
    )
    return [*map(math.log, (*numbers, *kinds)), *map(float, words)]


def _before(run: Observed) -> tuple[float, float]:
    step = run.step({})
    own = math.hypot(step.scatter, math.sqrt(float(((step.prior * step.slopes) ** 2).sum())))
    return math.log(step.seconds / run.measured_s), Z90 * own


def _after(run: Observed, learned: Posterior) -> tuple[float, float]:
    taught = learned.as_file("learned", ("runs",)).at(run.point)
    step = run.step(taught.values, nodes=learned.nodes)
    indices = [NAMES.index(name) for name in learned.names]
    j, known = step.slopes[indices], np.zeros(len(NAMES))
    known[indices] = learned.prior
    left = taught.sigma(dict(zip(learned.names, j, strict=True))) ** 2
    left += float((np.maximum(0, step.prior**2 - known**2) * step.slopes**2).sum())
    return math.log(step.seconds / run.measured_s), learned.reach * math.hypot(learned.scatter, math.sqrt(left))


def _line(one: Judged) -> str:
    b, a = np.abs(one.before), np.abs(one.after)
    words = "described" if one.described else "generic"
    return (f"{one.source[:34]:34} {words:9} n {len(b):3}  median {np.median(b):.3f} -> {np.median(a):.3f}  "
            f"p90 {np.quantile(b, 0.9):.3f} -> {np.quantile(a, 0.9):.3f}  bias {np.median(one.before):+.3f} -> {np.median(one.after):+.3f}  "
            f"hold {np.mean(b <= one.wide_before):.2f} -> {np.mean(a <= one.wide_after):.2f}  "
            f"width {np.median(one.wide_before):.2f} -> {np.median(one.wide_after):.2f}  tau {one.learned.scatter:.3f}")  # fmt: skip


HEAD = """# Learning from six runs

Written by `python experiments/learning.py --write`; how `shardwise calibrate learn` works stands in [its guide](guides/learn.md).

Of each source of more than twenty published runs, {taught} runs teach and the others of a sample judge. The six are chosen by a rule
that does not look at errors: each next run is the one that brings all runs nearest to a chosen one, by GPU, precision, parameters,
GPUs, sequence length, micro-batch, degrees and experts. Samples of at most {rows} runs are drawn by the SHA-256 of ids, without pipelines of
more than {positions} positions and without the runs on which stacks are calibrated.

*described*: the stack of the row's software. *generic*: as if nobody had described it; what its documents say of blanks is
forgotten too, so some rows fewer can be predicted. *n*: runs that judge. Errors are |log(predicted / measured)|; *holds*: share of runs
inside their 90 % interval; *half-width*: of that interval, in the middle. **Bold** misses: where the median error before is above 6 %, after is not a third
lower; elsewhere it rose by more than a tenth; intervals hold less than 85 % or more than 95 %.
"""

TABLE = """
| source | software | n | median before | after | p90 before | after | holds before | after | half-width before | after |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""

TEACHERS = """
## The runs that taught

| source | software | runs | moved most |
|---|---|---|---|"""


def page(found: Sequence[Judged]) -> str:
    """docs/learning.md."""
    head = HEAD.format(taught=TAUGHT, rows=ROWS, positions=POSITIONS)
    rows = (f"| {' | '.join(_cells(one))} |" for one in found)
    taught = (
        f"| {one.source} | {_software(one)} | {', '.join(f'`{r}`' for r in one.taught)} | {_moved(one)} |"
        for one in found
    )
    return "\n".join([head, _counted(found), TABLE, *rows, TEACHERS, *taught]) + "\n"


def _counted(found: Sequence[Judged]) -> str:
    """How many lines meet what they should."""
    medians = [(float(np.median(np.abs(one.before))), float(np.median(np.abs(one.after)))) for one in found]
    far, near = ([pair for pair in medians if (pair[0] > FAR) is above] for above in (True, False))
    shares = [float(np.mean(np.abs(one.after) <= one.wide_after)) for one in found]
    return (
        f"Of {len(far)} lines above 6 %, {sum(b <= a * 2 / 3 for a, b in far)} fell by a third and {sum(b < a for a, b in far)} fell; of the "
        f"{len(near)} others, {sum(b > 1.1 * a for a, b in near)} rose by more than a tenth. Intervals hold 85 to 95 % in "
        f"{sum(0.85 <= h <= 0.95 for h in shares)} of {len(shares)}, more in {sum(h > 0.95 for h in shares)}, less in {sum(h < 0.85 for h in shares)}."
    )


def _software(one: Judged) -> str:
    return "described" if one.described else "generic"


def _cells(one: Judged) -> Iterator[str]:
    before, after = np.abs(one.before), np.abs(one.after)
    median, then = float(np.median(before)), float(np.median(after))
    missed = then > median * 2 / 3 if median > FAR else then > 1.1 * median
    share = float(np.mean(after <= one.wide_after))
    yield from (one.source, _software(one), str(len(before)), f"{median:.1%}", _bold(f"{then:.1%}", missed=missed))
    yield from (f"{np.quantile(before, 0.9):.1%}", f"{np.quantile(after, 0.9):.1%}")
    yield f"{np.mean(before <= one.wide_before):.0%}"
    yield _bold(f"{share:.0%}", missed=not 0.85 <= share <= 0.95)
    yield from (f"± {np.median(one.wide_before):.0%}", f"± {np.median(one.wide_after):.0%}")


def _bold(text: str, *, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _moved(one: Judged) -> str:
    """The coefficient that went farthest, in sigmas of what was known before."""
    learned = one.learned
    k = int(np.argmax(np.abs(learned.theta) / learned.prior))
    name, value = learned.names[k], float(learned.theta[k])
    return f"{name.replace('_', ' ')} " + (f"{value:+.3f}" if name in ADDED else f"× {math.exp(value):.2f}")


if __name__ == "__main__":
    sys.exit(main())
