"""Inputs that vary: a leaf of a study between two values, or an error of the prediction's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Self

from simulator.base.errors import InputError
from simulator.base.sums import summed
from simulator.base.units import SIZE

_END: Final = re.compile(r"(x?)(\d{1,15}(?:\.\d{1,12})?)\s*([A-Za-z/]*)")
_EDGE: Final = 1e-9  # of the unit interval: an error has no end
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """KEY=LOW..HIGH: values of one unit, spread evenly; multiples (x0.5..x2) are spread evenly by their ratio.

    only: the alternative whose input it is (B:KEY=...); None: all alternatives' together.
    """

    leaf: str
    low: float
    high: float
    prefix: str = ""
    unit: str = ""
    only: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The range of a flag. Raises InputError."""
        key, equals, span = (part.strip() for part in text.partition("="))
        letter, colon, rest = key.partition(":")
        if colon and len(letter) == 1 and letter.isascii() and letter.isupper():
            key, only = rest, ord(letter) - ord("A")
        else:
            only = None
        remedy = "KEY=LOW..HIGH, as link.inter.bytes_per_s=200Gb/s..400Gb/s or price.per_gpu_hour=x0.5..x2"
        ends = [_END.fullmatch(part.strip()) for part in span.split("..")]
        if not equals or len(ends) != 2 or ends[0] is None or ends[1] is None:
            raise InputError.at(f"--vary {text}", "is not a range", remedy)
        (prefix, low, unit), (other, high, same) = ends[0].groups(), ends[1].groups()
        if (prefix, unit) != (other, same):
            raise InputError.at(f"--vary {key}", "its two ends have different units", remedy)
        if not float(low) < float(high):
            raise InputError.at(f"--vary {key}", f"{low} is not below {high}", remedy)
        if prefix and float(low) == 0:
            raise InputError.at(f"--vary {key}", "x0 is not a multiple", "a factor above 0")
        return cls(leaf=key, low=float(low), high=float(high), prefix=prefix, unit=unit, only=only)

    @property
    def key(self) -> str:
        """As on the command line."""
        return self.leaf if self.only is None else f"{chr(ord('A') + self.only)}:{self.leaf}"

    def concerns(self, alternative: int) -> bool:
        """It is an input of that alternative."""
        return self.only in (None, alternative)

    def value(self, share: float) -> float:
        """What lies at that share of the range, from 0 to 1."""
        if self.prefix:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share

    def text(self, share: float) -> str:
        """The same as it is written behind KEY=; sizes between the ends in whole bytes."""
        if self.unit in SIZE.scales and 0 < share < 1:
            return f"{round(self.value(share) * float(SIZE.scales[self.unit]))}B"
        number = f"{self.value(share):.12f}".rstrip("0").rstrip(".")
        return f"{self.prefix}{number}{self.unit}"

    @property
    def words(self) -> str:
        return f"{self.text(0)}..{self.text(1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """An error of the prediction: what one sigma makes of each alternative's step, relative to it. Normal; upward: no step is shorter for it."""

    key: str
    sigmas: tuple[float, ...]
    upward: bool = False

    def log_factor(self, alternative: int, share: float) -> float:
        """What it adds to the logarithm of an alternative's step at a share of its distribution."""
        return self.sigmas[alternative] * _NORMAL.inv_cdf(min(max(share, _EDGE), 1 - _EDGE))

    @property
    def words(self) -> str:
        low, high = (f"{each:.1%}" for each in (min(self.sigmas), max(self.sigmas)))
        sign, span = "+" if self.upward else "±", low if low == high else f"{low} to {high}"
        return f"{sign} {span} of the step"


def together(errors: Iterable[tuple[Error, float]], alternative: int) -> float:
    """What errors at their shares add to the logarithm of an alternative's step.

    Half of all sums lie on either side of the middle. Those below it are as narrow as the errors are that go both ways.
    """
    moved = tuple(errors)
    whole = summed(one.log_factor(alternative, share) for one, share in moved)
    if whole >= 0:
        return whole
    up, both = (
        summed(e.sigmas[alternative] ** 2 for e, _ in moved if e.upward in kinds) for kinds in ((True, False), (False,))
    )
    return whole * math.sqrt(both / up)


Input = Range | Error
