"""Prices: what a GPU costs an hour, from a dated and sourced file of the user's own.

    currency = "USD"
    [[price]]
    cluster = "hgx-h100-8"        # or device = "h100-sxm5-80gb"
    kind = "on-demand"            # on-demand, reserved or spot: per_gpu_hour; purchase: the fields below
    per_gpu_hour = 2.99
    date = "2026-11-01"
    source = "the provider's page"

A purchase is paid off over its years and draws power:

    per GPU and hour = price_per_gpu / (years × 8766 h × utilization) + power_w / 1000 × power_per_kwh × pue
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from simulator.base.errors import InputError
from simulator.base.schema import Strict, read_toml
from simulator.base.value_errors import Expected
from simulator.spec.cluster import Cluster

Kind = Literal["on-demand", "reserved", "spot", "purchase"]
KINDS: Final[tuple[Kind, ...]] = ("on-demand", "reserved", "spot", "purchase")
HOURS_PER_YEAR: Final = 8766  # of 365.25 days


class Price(Strict):
    """One price of a cluster's or a device's GPU. power_w: of one GPU with its part of the node.

    utilization: share of its years in which it computes; pue: power of the building over that of the machines.
    """

    cluster: str | None = None
    device: str | None = None
    kind: Kind
    per_gpu_hour: float | None = Field(gt=0, le=1e6, default=None)
    price_per_gpu: float | None = Field(gt=0, le=1e9, default=None)
    years: float | None = Field(ge=0.01, le=50, default=None)
    power_w: float | None = Field(gt=0, le=1e5, default=None)
    power_per_kwh: float | None = Field(gt=0, le=100, default=None)
    utilization: float = Field(ge=1e-4, le=1, default=1.0)
    pue: float = Field(ge=1, le=5, default=1.0)
    date: Annotated[str, Expected('the day of the price, as "2026-01-31"')]
    source: Annotated[str, Expected("where the price was read")] = Field(min_length=1)

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str) -> str:
        try:
            dt.date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a date such as 2026-11-01") from None
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        bought = {name: getattr(self, name) for name in ("price_per_gpu", "years", "power_w", "power_per_kwh")}
        problems = []
        if (self.cluster is None) == (self.device is None):
            problems.append("give cluster or device, one of the two")
        if self.kind == "purchase":
            problems += [f"a purchase needs {name}" for name, value in bought.items() if value is None]
            problems += ["a purchase has no per_gpu_hour"] if self.per_gpu_hour is not None else []
        else:
            problems += [f"{self.kind} needs per_gpu_hour"] if self.per_gpu_hour is None else []
            problems += [f"{name} belongs to a purchase" for name, value in bought.items() if value is not None]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def gpu_hour(self) -> float:
        """What a GPU costs an hour of computing."""
        if self.per_gpu_hour is not None:
            return self.per_gpu_hour
        assert self.price_per_gpu is not None
        assert self.years is not None
        assert self.power_w is not None
        assert self.power_per_kwh is not None
        capital = self.price_per_gpu / (self.years * HOURS_PER_YEAR * self.utilization)
        return capital + self.power_w / 1000 * self.power_per_kwh * self.pue


class Prices(Strict):
    """A price file."""

    currency: Annotated[str, Expected('as "USD"')] = Field(min_length=1, max_length=8)
    price: tuple[Price, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.price:
            raise ValueError("there is no [[price]]")
        return self

    @classmethod
    def load(cls, path: Path, kind: Kind | None = None) -> Self:
        """The prices of a TOML file, or those of one kind. Raises InputError with every fault: missing or zero is one."""
        found = cls.parse(read_toml(path, InputError), str(path), InputError)
        if kind is None:
            return found
        prices = tuple(price for price in found.price if price.kind == kind)
        if not prices:
            has = ", ".join(dict.fromkeys(price.kind for price in found.price))
            raise InputError.at(f"--price-kind {kind}", f"{path} has none", f"one of {has}")
        return found.model_copy(update={"price": prices})

    def of(self, cluster: Cluster, kind: Kind | None = None) -> tuple[Price, ...]:
        """Prices of a cluster, its own before its device's, in the file's order. Raises InputError where there is none."""
        found = tuple(self._matching(cluster, kind))
        if found:
            return found
        noun = f"{kind} price" if kind else "price"
        remedy = f'a [[price]] with cluster = "{cluster.name}" or device = "{cluster.device.name}"'
        raise InputError.at("prices", f"no {noun} of {cluster.name}", remedy)

    def cheapest(self, cluster: Cluster) -> Price:
        """The first of the lowest. Raises InputError where there is none."""
        return min(self.of(cluster), key=lambda price: price.gpu_hour)

    def told(self, price: Price) -> dict[str, Any]:
        """One of these as the fields of `AtPrice`."""
        own = {name: getattr(price, name) for name in ("kind", "date", "source", "gpu_hour")}
        return {**own, "currency": self.currency}

    def _matching(self, cluster: Cluster, kind: Kind | None) -> Iterator[Price]:
        for own in (True, False):
            for price in self.price:
                named = price.cluster == cluster.name if own else price.device == cluster.device.name
                if named and kind in (None, price.kind):
                    yield price


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPrice:
    """What money is told beside: the price that it is by."""

    kind: Kind
    currency: str
    date: str
    source: str
    gpu_hour: float


def cost(price: Price, num_devices: int, seconds: float) -> float:
    """What GPUs cost for that long."""
    return price.gpu_hour * num_devices * seconds / 3600
