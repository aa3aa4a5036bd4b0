"""Random amounts, drawn by their quantile, so that one uniform number is one draw."""

from __future__ import annotations

from functools import cache
from math import exp, log1p, sqrt
from statistics import NormalDist
from typing import Annotated, Final, Generic, Literal, Self, TypeVar

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from simulator.base.schema import Strict
from simulator.base.units import Seconds

T = TypeVar("T")
_NORMAL: Final = NormalDist()
_EDGE: Final = 1e-12  # of the unit interval: the normal's quantile has no ends
_STEPS: Final = 20_000  # of the integral over the quantiles of a maximum


class Uniform(Strict, Generic[T]):
    """Evenly between low and high."""

    distribution: Literal["uniform"]
    low: T = Field(ge=0)
    high: T = Field(ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if float(self.low) > float(self.high):  # type: ignore[arg-type]
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def at(self, share: float) -> float:
        low, high = float(self.low), float(self.high)  # type: ignore[arg-type]
        return low + (high - low) * share


class Exponential(Strict, Generic[T]):
    """Exponential with this mean."""

    distribution: Literal["exponential"]
    mean: T = Field(gt=0)

    def at(self, share: float) -> float:
        return -float(self.mean) * log1p(-min(share, 1 - _EDGE))  # type: ignore[arg-type]


class Lognormal(Strict, Generic[T]):
    """exp of a normal with this median and sigma."""

    distribution: Literal["lognormal"]
    median: T = Field(gt=0)
    sigma: float = Field(ge=0, le=5)

    def at(self, share: float) -> float:
        z = _NORMAL.inv_cdf(min(max(share, _EDGE), 1 - _EDGE))
        return float(self.median) * exp(self.sigma * z)  # type: ignore[arg-type]


def _kind(value: object) -> str:
    return "table" if isinstance(value, dict | Strict) else "number"


AnySpread = Uniform[float] | Exponential[float] | Lognormal[float]
_OfTimes = Annotated[
    Uniform[Seconds] | Exponential[Seconds] | Lognormal[Seconds], Field(discriminator="distribution"), Tag("table")
]
_OfShares = Annotated[AnySpread, Field(discriminator="distribution"), Tag("table")]
Shares = Annotated[Annotated[float, Field(ge=0, le=100), Tag("number")] | _OfShares, Discriminator(_kind)]
Times = Annotated[Annotated[Seconds, Field(ge=0), Tag("number")] | _OfTimes, Discriminator(_kind)]


def amount(value: float | AnySpread, share: float) -> float:
    """A constant, or the quantile of a distribution."""
    return float(value) if isinstance(value, int | float) else value.at(share)


@cache
def slowest(value: float | AnySpread, count: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of `count` independent draws.

    The largest lies below x with probability F(x)^count, so its quantile at v is that of one draw at v^(1/count); the
    mean is the integral of it over v.
    """
    shares = ((np.arange(_STEPS) + 0.5) / _STEPS) ** (1 / count)
    values = np.array([amount(value, share) for share in shares.tolist()])
    mean = float(np.mean(values))
    return mean, sqrt(max(float(np.mean(values**2)) - mean**2, 0.0))
