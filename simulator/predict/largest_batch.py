"""The largest micro-batch of a plan that fits in memory: found on memory alone, everything else as the plan has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from simulator.base.fit import Fit
from simulator.play.lower import lower
from simulator.predict import memory_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """micro_batch_size: the largest that surely fits. tight: the largest that is `tight`, where one is larger than that.

    None: there is none. plan: with that micro_batch_size, or with 1 where none surely fits.
    """

    plan: Plan
    micro_batch_size: int | None
    tight: int | None

    @property
    def words(self) -> str:
        """The result as one line."""
        found, tight = self.micro_batch_size, self.tight
        largest = max(found or 0, tight or 0)
        if not largest:
            return "not even micro_batch_size 1 fits"
        sure = "no micro_batch_size surely fits"
        if found:
            batch = f"global batch {self.plan.global_batch_size:,} sequences"
            sure = f"largest micro_batch_size that surely fits: {found} ({batch})"
        is_tight = f"{tight} is tight, " if tight else ""
        return f"{sure}; {is_tight}{largest + 1} does not fit"

    def report(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        batch = self.plan.global_batch_size if self.micro_batch_size else None
        return {"micro_batch_size": self.micro_batch_size, "global_batch_size": batch, "largest_tight": self.tight}


def largest_batch(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> LargestBatch:
    """The largest micro_batch_size of `plan` that fits; its own is not looked at, and num_micro_batches stays.

    The verdict on what was found, and that on one sequence more, are both predicted. Memory is not assumed to grow
    evenly, but a size that fits beyond one that does not may be missed. Arguments and errors as of `predict`.
    """
    stack = stack or Stack.of(plan)
    calibration = calibration or Calibration.for_device(cluster.device)
    curves = calibration.links or default_curves()

    @cache
    def verdict(size: int) -> Fit:
        sized = plan.copy_with(micro_batch_size=size)
        return memory_of(lower(model, sized, cluster, stack, calibration, curves), quick=True).verdict

    sure = _largest(lambda size: verdict(size) is Fit.FITS, 0)
    runs = _largest(lambda size: verdict(size).runs, sure)
    if runs and verdict(runs) is Fit.FITS:  # beyond a size that was tight
        sure = runs
    return LargestBatch(
        plan=plan.copy_with(micro_batch_size=sure or 1),
        micro_batch_size=sure or None,
        tight=runs if runs > sure else None,
    )


def _largest(good: Callable[[int], bool], known: int) -> int:
    """A size that is good while the next is not, by doubling and bisection from one that is known to be good, or 0."""
    step = 1
    while good(known + step):
        known, step = known + step, 2 * step
    bad = known + step
    while bad - known > 1:
        middle = (known + bad) // 2
        known, bad = (middle, bad) if good(middle) else (known, middle)
    return known
