"""Quantities as people write them: "80GiB", "400Gb/s", "5us", "1.5TFLOP/s"; and how a quantity is printed.

Inside, everything is SI: bytes are int, bytes/s, seconds and FLOP/s are float. `b` is a bit and `B` a byte; GB is 1e9
and GiB is 2**30. The Annotated types parse unit strings in every pydantic model; in files a bare number is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(?![eE][+-]?\d)([^\d.\s]\S*)", re.ASCII)
_MAX_LENGTH: Final = 40  # no honest quantity is longer; keeps hostile digits away from big-integer arithmetic

_SI: Final = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


def _scales(unit: str, factor: Fraction = Fraction(1), *, binary: bool = False) -> dict[str, Fraction]:
    scales = {f"{prefix}{unit}": factor * 10**power for prefix, power in _SI.items()}
    if binary:
        scales |= {f"{prefix}{unit}": factor * 2**power for prefix, power in _BINARY.items()}
    return scales


_BITS: Final = _scales("b", Fraction(1, 8)) | _scales("bit", Fraction(1, 8))
_SIZES: Final = _scales("B", binary=True)
_RATES: Final = {f"{unit}/s": scale for unit, scale in (_SIZES | _BITS).items()}
_TIMES: Final = {
    "d": Fraction(86_400),
    "h": Fraction(3_600),
    "min": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_SPEEDS: Final = _scales("FLOP/s")


class UnitError(ValueError):
    """Text that is not a quantity of the expected kind. `remedy` says what would be right."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A kind of quantity: its noun, the units it may be written in, and an example to show."""

    noun: str
    scales: Mapping[str, Fraction]
    example: str

    def parse(self, text: str) -> Fraction:
        """`text` in the base unit, exactly. Raises UnitError."""
        match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
        if match is None:
            problem = f"{_short(text)} is not {self.noun}: write a number and a unit"
            raise UnitError(problem, f"for example {self.example!r}")
        number, unit = match.groups()
        if unit not in self.scales:
            raise UnitError(f"{text!r} is not {self.noun}{_meaning(unit)}", self._remedy(number, unit))
        return Fraction(number) * self.scales[unit]

    def _remedy(self, number: str, unit: str) -> str:
        """The nearest legal spelling: right letters in the wrong case, `ps` for `/s`, a missing `/s`."""
        near = re.sub(r"(?i)flops?(/s)?$", "FLOP/s", unit)
        near = re.sub(r"(?i)ps$|/sec$", "/s", near)
        for candidate in (near, f"{near}/s", near.removesuffix("/s")):
            if candidate in self.scales:
                return f"did you mean {number + candidate!r}?"
        folded = [legal for legal in self.scales if legal.lower() == near.lower()]
        if folded:
            return f"did you mean {' or '.join(repr(number + legal) for legal in folded)}?"
        return f"for example {self.example!r}"


SIZE: Final = Dimension(noun="a size in bytes", scales=_SIZES, example="80GiB")
RATE: Final = Dimension(noun="a data rate", scales=_RATES, example="400Gb/s")
TIME: Final = Dimension(noun="a time", scales=_TIMES, example="5us")
SPEED: Final = Dimension(noun="a compute speed", scales=_SPEEDS, example="989TFLOP/s")


def _short(text: str) -> str:
    return repr(text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…")


def _meaning(unit: str) -> str:
    """The meaning of a unit of the wrong kind, for the error message."""
    if unit in _BITS:
        return f" ({unit} counts bits; B is a byte)"
    for dimension in (SIZE, RATE, TIME, SPEED):
        if unit in dimension.scales:
            return f" ({unit} measures {dimension.noun})"
    return f" (unknown unit {_short(unit)})"


def parse_bytes(text: str) -> int:
    """Bytes from "80GiB", "25MB". Raises UnitError, also where it is no whole number of bytes."""
    value = SIZE.parse(text)
    if value.denominator != 1:
        raise UnitError(f"{text!r} is not a whole number of bytes", f"for example {math.ceil(value)}B")
    return int(value)


def parse_bytes_per_s(text: str) -> float:
    """Bytes a second from "900GB/s" or, in bits, "400Gb/s". Raises UnitError."""
    return float(RATE.parse(text))


def parse_seconds(text: str) -> float:
    """Seconds from "5us", "1.2ms". Raises UnitError."""
    return float(TIME.parse(text))


def parse_flop_per_s(text: str) -> float:
    """FLOP a second from "989TFLOP/s". Raises UnitError."""
    return float(SPEED.parse(text))


FROM_FILE: Final = {"from_file": True}  # the validation context under which a bare number is refused


def _validator(parse: Callable[[str], float], dimension: Dimension, base: str) -> BeforeValidator:
    def convert(value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            return parse(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (info.context or {}).get("from_file"):
            remedy = f"write '{value}{base}', or for example {dimension.example!r}"
            raise UnitError(f"must be {dimension.noun} with its unit; it is {value}", remedy)
        return value

    return BeforeValidator(convert)


def _written(dimension: Dimension) -> WithJsonSchema:
    """As a file has it, for editors: a number and a unit in quotes."""
    return WithJsonSchema({"type": "string", "format": dimension.noun, "examples": [dimension.example]})


Bytes = Annotated[int, _validator(parse_bytes, SIZE, "B"), _written(SIZE)]
BytesPerS = Annotated[float, _validator(parse_bytes_per_s, RATE, "B/s"), _written(RATE)]
Seconds = Annotated[float, _validator(parse_seconds, TIME, "s"), _written(TIME)]
FlopPerS = Annotated[float, _validator(parse_flop_per_s, SPEED, "FLOP/s"), _written(SPEED)]
Share = Annotated[float, Field(gt=0, le=1)]  # of something, and some of it


def format_bytes(num_bytes: float) -> str:
    """Binary units, three digits: "79.2 GiB", "512 MiB"."""
    return _format(num_bytes, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_seconds(seconds: float) -> str:
    """Three digits, in the unit that suits: "1.23 s", "45.6 ms", "7.89 us"; the base unit for zero."""
    return _format(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_duration(seconds: float) -> str:
    """Three digits in days, hours, minutes or less: "53.8 d", "2.78 h", "16.7 min"."""
    if seconds < 60:
        return format_seconds(seconds)
    return _format(seconds, [(86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s")])


def format_days(days: float) -> str:
    """Three digits of days; below one in the unit that suits: "54.1 days", "2.78 h"."""
    return f"{format_number(days)} days" if days >= 1 else format_duration(86_400 * days)


def format_rate(bytes_per_s: float) -> str:
    """Decimal bytes a second: "50.0 GB/s"."""
    return _format(bytes_per_s, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])


def format_flop_per_s(flop_per_s: float) -> str:
    """Three digits and the unit: "989 TFLOP/s" for an H100 in bf16."""
    scales = [(1e18, "EFLOP/s"), (1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")]
    return _format(flop_per_s, [*scales, (1.0, "FLOP/s")])


_LEAST: Final = 0.0005


def _format(value: float, scales: list[tuple[float, str]]) -> str:
    """Three significant digits in the largest unit that keeps the number at 1 or more; zero in the base unit.

    Less than half a thousandth of the smallest unit is what rounding left of a difference: zero.
    """
    scale, unit = next(((s, u) for s, u in scales if abs(_three_digits(value / s)) >= 1), scales[-1])
    scaled = _three_digits(value / scale)
    if abs(scaled) < (0.5 if unit == "B" else _LEAST):
        return f"0 {next(unit for scale, unit in scales if scale == 1.0)}"
    decimals = 0 if unit == "B" else min(3, max(0, 2 - math.floor(math.log10(abs(scaled)))))
    return f"{scaled:,.{decimals}f} {unit}"


def counted(count: int, noun: str) -> str:
    """How many of something: "1 token", "65,536 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


WIDE: Final = 4.0  # ends of an interval this far apart, by a factor: off by two either way
NOTHING_NEAR: Final = "nothing near it was measured"


def format_interval(
    low: float, high: float, form: Callable[[float], str] = format_seconds, *, prefix: str = "", between: str = " to "
) -> str:
    """An interval as text, with the reason if it is wide. A table's cell (no prefix) has room for only one of the two."""
    ends = f"{prefix}{form(low)}{between}{form(high)}"
    if high <= WIDE * low:
        return ends
    return f"{ends}: wide, {NOTHING_NEAR}" if prefix else NOTHING_NEAR


def format_number(value: float) -> str:
    """Three significant digits and no exponent above one: 3.57, 357, 1,190."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _three_digits(value: float) -> float:
    """Rounded to three digits; from a thousand on unchanged, since rounding would hide whole units."""
    return float(f"{value:.3g}") if abs(value) < 1000 else value


_SUFFIXES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*([KMBT]?)\s*", re.ASCII | re.IGNORECASE)


def parse_count(text: str) -> int:
    """How many: 15T is 15,000,000,000,000. Raises UnitError."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise UnitError(f"{_short(text)} is not a count", "a number, or one with K, M, B or T, as 15T")
    number, suffix = match.groups()
    return round(Fraction(number) * _SUFFIXES[suffix.upper()])


def whole(text: str) -> int | None:
    """A count from 0 in plain digits, 18 at most (Python refuses thousands of them); None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _counted(value: object) -> object:
    """Whole numbers are accepted unchanged, 1e12 as one."""
    text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else value
    return parse_count(text) if isinstance(text, str) else value


Count = Annotated[
    int, BeforeValidator(_counted), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
]
