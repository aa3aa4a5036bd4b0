"""Data with sequences of different lengths: the cost of padding, and the gain of packing.

A padded batch is as long as its longest sequence, and FSDP's ranks wait for one another in every micro-batch. A step of
micro-batches of lengths L is the mean of the steps of equal ones, for what is constant in them is in each. No numbers are
drawn: of n lengths, the chance that the longest of b is at most the k-th is (k / n)^b.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil, exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.base.schema import MOST_TEXT_BYTES, unreadable
from simulator.predict import predict
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

_QUANTILES: Final = 2000
_MOST_FAULTS: Final = 1000  # nobody reads more of them
_SHARES: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the plan's length, where steps are predicted
_EXAMPLE: Final = "lognormal:400,0.8 (median, sigma of the logarithm), or a file with a length a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A plan's steps with data of these lengths, cut at its seq_len.

    padded_len: mean of the batches' lengths. tokens: of the data, in a step. packed_*: whole sequences of the plan's length made
    of documents, each of which attends to itself; document_len: the sum of their squares over their sum.
    """

    count: int
    mean_len: float
    longest: int
    padded_len: float
    step_s: float
    tokens_per_step: float
    document_len: int
    packed_step_s: float
    packed_tokens_per_step: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def packed_tokens_per_s(self) -> float:
        return self.packed_tokens_per_step / self.packed_step_s

    @property
    def padding(self) -> float:
        """Share of a batch that is padding."""
        return 1 - self.mean_len / self.padded_len

    def report(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        derived = ("tokens_per_s", "packed_tokens_per_s", "padding")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def read_lengths(text: str) -> tuple[int, ...]:
    """Lengths in ascending order: `lognormal:MEDIAN,SIGMA`, or a file with one a line. Raises InputError."""
    if text.startswith("lognormal:"):
        try:
            median, sigma = map(float, text.removeprefix("lognormal:").split(","))
        except ValueError:
            median, sigma = 0.0, -1.0
        if not (1 <= median <= 1e9 and 0 <= sigma <= 5):
            raise InputError.at("--lengths", f"{text!r} is no distribution", _EXAMPLE)
        normal = NormalDist()
        points = (normal.inv_cdf((index + 0.5) / _QUANTILES) for index in range(_QUANTILES))
        return tuple(max(1, min(round(exp(log(median) + sigma * point)), 2**30)) for point in points)
    return _of_file(Path(text))


def _of_file(path: Path) -> tuple[int, ...]:
    try:
        text = ordinary(path, MOST_TEXT_BYTES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(replace(unreadable(path, exc), place=f"--lengths {path}")) from None
    lengths, wrong = array("l"), list[str]()
    entries = (found[0] for found in re.finditer(r"\S+", text))  # one at a time: there may be millions
    for number, entry in enumerate(entries, 1):
        if entry.isdecimal() and 0 < int(entry[:12]) < 2**30:
            lengths.append(int(entry))
        elif len(wrong) < _MOST_FAULTS:
            wrong.append(f"entry {number}, {entry[:20]!r}, is no length")
        else:
            wrong.append(f"entry {number} and those behind it were not read")
            break
    if not (lengths or wrong):
        wrong.append("is empty")
    remedy = "a whole number of tokens a line"
    InputError.raise_for([Fault(place=f"--lengths {path}", problem=problem, remedy=remedy) for problem in wrong])
    return tuple(sorted(lengths))


def padding_of(
    lengths: Sequence[int],
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
) -> Padding:
    """What `plan` takes with data of these lengths, ascending."""

    def step_s(changed: Plan) -> float:
        return predict(model, changed, cluster, calibration, stack).step_s

    cut = [min(length, plan.seq_len) for length in lengths]
    together = plan.micro_batch_size * (plan.num_data_parallel if plan.zero == 3 else 1)
    weights = _of_the_longest(len(cut), together)
    mean, spread = _moments(_between(_curve(plan, cut[0], step_s)), cut, weights)
    if together == plan.micro_batch_size:  # ranks meet at the step's end, and wait for the slowest of them
        mean += spread / sqrt(plan.num_micro_batches) * _largest_of(plan.num_data_parallel)
    total = sum(cut)
    document = ceil(sum(length * length for length in cut) / total)
    packed = plan.copy_with(document_len=min(document, plan.seq_len))
    return Padding(
        count=len(cut),
        mean_len=total / len(cut),
        longest=cut[-1],
        padded_len=sum(
            weight * length
            for weight, length in zip(_of_the_longest(len(cut), plan.micro_batch_size), cut, strict=True)
        ),
        step_s=mean,
        tokens_per_step=total / len(cut) * plan.global_batch_size,
        document_len=document,
        packed_step_s=step_s(packed),
        packed_tokens_per_step=plan.tokens_per_step,
    )


def _curve(plan: Plan, least: int, step_s: Callable[[Plan], float]) -> list[tuple[int, float]]:
    """(length, step) where all sequences are as long, up to the plan's own length."""
    multiple = 2 * plan.cp * plan.tp
    found = sorted({min(plan.seq_len, ceil(share * plan.seq_len / multiple) * multiple) for share in _SHARES})
    lengths = [length for index, length in enumerate(found) if index + 1 == len(found) or found[index + 1] > least]
    unpacked = plan.copy_with(document_len=None)
    return [(length, step_s(unpacked.copy_with(seq_len=length))) for length in lengths]


def _between(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Linear between the points, flat outside."""

    def at(length: int) -> float:
        for (x0, y0), (x1, y1) in pairwise(points):
            if length <= x1:
                return y0 + (y1 - y0) * max(0.0, (length - x0) / (x1 - x0))
        return points[-1][1]

    return at


def _of_the_longest(count: int, together: int) -> list[float]:
    """The chance of each of so many lengths, ascending, to be the longest of some drawn together."""
    below = [(index / count) ** together for index in range(count + 1)]
    return [after - before for before, after in pairwise(below)]


def _moments(at: Callable[[int], float], lengths: Sequence[int], weights: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    values = [at(length) for length in lengths]
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return mean, sqrt(sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True)))


def _largest_of(count: int) -> float:
    """Mean of the largest of so many standard normals (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
