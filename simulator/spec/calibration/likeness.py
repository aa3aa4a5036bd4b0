"""What runs err by that are like the measured ones: the part of their errors that no coefficient explains and that neighbours share.

A Gaussian process over plans (Kennedy and O'Hagan 2001, doi 10.1111/1467-9868.00294, the discrepancy of a computer model), with a
covariance that falls off exponentially with the distance of two runs. It counts for a run as a further change of everything alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from simulator.base.schema import Strict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan

Array = NDArray[np.float64]
Point = tuple[float, ...]
# The unit of distance: a factor of four in a size, or one setting; at four of them runs share 1/e of what they err by
_UNIT: Final = math.log(4)
REACH: Final = 4.0
_MOST: Final = 1e12
_Finite = Annotated[float, Field(ge=-_MOST, le=_MOST)]
_Row = Annotated[tuple[_Finite, ...], Field(strict=False)]
_Rows = Annotated[tuple[_Row, ...], Field(strict=False)]


def point_of(model: Model, plan: Plan, cluster: Cluster) -> Point:
    """Where a run lies among others: sizes, degrees, the GPU, precision, recomputation, sharding and adapters."""
    device, experts = cluster.device, model.experts
    sizes = (
        model.num_parameters,
        plan.num_devices,
        plan.seq_len,
        plan.micro_batch_size,
        *(plan.tp, plan.pp, plan.cp),
        device.memory_bytes_per_s,
        device.peak("bf16") or device.peak("fp16") or 1.0,
        experts.num_experts if experts else 1,
    )
    settings = (
        plan.precision.compute == "fp8",
        plan.precision.compute == "bf16",
        plan.recompute.mode == "none",
        plan.zero / 3,
        plan.peft.method not in ("none", "full"),
        plan.peft.method == "qlora",
    )
    return (*(math.log(size) / _UNIT for size in sizes), *map(float, settings))


def alike(points: Sequence[Point], others: Sequence[Point]) -> Array:
    """Correlation of the errors at each of `points` (rows) and each of `others`."""
    distance = np.linalg.norm(np.array(points)[:, None] - np.array(others)[None], axis=2)
    return np.asarray(np.exp(-distance / REACH), dtype=np.float64)


class Likeness(Strict):
    """The runs that taught (points), one sigma of what neighbours share, and the solved system of their errors.

    inverse: of the covariance of their errors. errors: that times the errors. cross: prior of the coefficients × slopes × inverse, a
    row for each coefficient. moved: a prediction follows; else it only says how far off the runs were (files of before may say so).
    """

    points: _Rows
    sigma: float = Field(ge=0, le=10)
    inverse: _Rows
    errors: _Row
    cross: _Rows
    moved: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        count = len(self.points)
        if (
            not count
            or {len(row) for row in (*self.inverse, self.errors, *self.cross)} != {count}
            or len(self.inverse) != count
        ):
            raise ValueError(f"inverse, errors and cross must have {count} numbers a row, one for each of the points")
        if len({len(point) for point in self.points}) > 1:
            raise ValueError("points must have equally many numbers")
        return self

    def near(self, point: Point) -> tuple[float, float, Array]:
        """(what a run there errs by, in log time; its variance; its covariance with each coefficient)."""
        if len(point) != len(self.points[0]):
            return 0.0, self.sigma**2, np.zeros(len(self.cross))
        k = self.sigma**2 * alike([point], self.points)[0]
        error = float(k @ np.array(self.errors))
        variance = max(0.0, self.sigma**2 - float(k @ np.array(self.inverse) @ k))
        cross = np.asarray(-np.array(self.cross) @ k, dtype=np.float64)
        return (error, variance, cross) if self.moved else (0.0, variance + error**2, cross)
