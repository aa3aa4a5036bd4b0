"""What a claim's file says: the claim, the commands that decide it, how figures are read, and what each must be."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .arithmetic import Number, names_in

HERE: Final = Path(__file__).parent
STUDIES: Final = HERE / "studies"
ABOUT: Final = 0.1  # a single number counts as met within a tenth of it
UNITS: Final = {
    "": 1.0,
    "×": 1.0,
    "%": 0.01,
    "yes": 1.0,
    "GB": 1e9,
    "TB": 1e12,
    "GiB": 2**30,
    "TiB": 2**40,
    "MB": 1e6,
    "GB/s": 1e9,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
}
DOCUMENTS: Final = {
    "A": "a note on sharding",
    "B": "a note on memory pools",
    "C": "a note on the arithmetic of memory",
    "D": "a note on communication between GPUs",
}
# `RUN: PATH` or `RUN: PATH (LOW, HIGH)`; of a path that may be absent: `RUN: PATH or 0`
READING: Final = re.compile(r"(?P<run>\w+): (?P<path>\S+)(?: \((?P<low>\S+), (?P<high>\S+)\))?(?P<absent> or 0)?")
FROM_FILE: Final = re.compile(r"(?P<file>topologies/\S+\.toml): (?P<path>\S+)")  # a data file, which says its sources
ROOT: Final = HERE.parents[1]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Constant(_Record):
    """A number that no command answers."""

    value: float = Field(allow_inf_nan=False)
    source: str = Field(min_length=10)


class Figure(_Record):
    """A number made of the commands' answers; with limits it decides the claim, or (`if`) the claim under a condition."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    formula: str
    unit: str
    says: str = Field(min_length=3)
    about: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    condition: str | None = Field(default=None, alias="if")
    hand: str | None = None
    hand_within: float = Field(default=0.05, gt=0, le=0.5)

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r}; one of {', '.join(filter(None, UNITS))}")
        if self.about is not None and (self.at_least, self.at_most) != (None, None):
            raise ValueError("`about` stands alone")
        if self.condition is not None and not self.decides:
            raise ValueError("`if` needs a limit")
        return self

    @property
    def decides(self) -> bool:
        """It has a limit."""
        return (self.about, self.at_least, self.at_most) != (None, None, None)

    @property
    def limits(self) -> tuple[float, float]:
        """What is claimed, in SI units; infinite where it has no end."""
        scale = UNITS[self.unit]
        if self.about is not None:
            return tuple(sorted(self.about * scale * (1 + sign * ABOUT) for sign in (-1, 1)))  # type: ignore[return-value]
        low, high = self.at_least, self.at_most
        return (-float("inf") if low is None else low * scale, float("inf") if high is None else high * scale)


class Claim(_Record):
    """One claim. `id` is its file's name."""

    id: str
    document: str
    title: str = Field(min_length=5, max_length=110)
    claim: str = Field(min_length=20)
    figure: str = Field(min_length=1)
    holds_where: str = Field(min_length=10)
    by_hand: str = Field(min_length=10)
    reading: str = Field(min_length=10)
    undecidable: str | None = None
    plot: tuple[str, ...] = ()
    commands: dict[str, str] = {}
    values: dict[str, str] = {}
    constants: dict[str, Constant] = {}
    figures: tuple[Figure, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        if self.document not in DOCUMENTS:
            yield f"document {self.document!r}: one of {', '.join(DOCUMENTS)}"
        if bool(self.undecidable) == any(figure.decides and figure.condition is None for figure in self.figures):
            yield "either figures with limits decide the claim, or `undecidable` says why none can"
        readings = {
            name: READING.fullmatch(text) for name, text in self.values.items() if not FROM_FILE.fullmatch(text)
        }
        yield from (f"values.{name}: not `RUN: PATH`" for name, one in readings.items() if one is None)
        runs = {one["run"] for one in readings.values() if one}
        yield from (f"values: no command {run!r}" for run in sorted(runs - set(self.commands)))
        yield from (f"commands.{run}: nothing is read of it" for run in sorted(set(self.commands) - runs))
        known, used = {*self.values, *self.constants}, set[str]()
        for figure in self.figures:
            for formula in filter(None, (figure.formula, figure.hand)):
                used |= names_in(formula)
                yield from (f"figures.{figure.name}: no value {name!r}" for name in sorted(names_in(formula) - known))
            known.add(figure.name)
        yield from (f"{name}: used by no figure" for name in sorted({*self.values, *self.constants} - used))
        yield from (f"plot: no figure {name!r}" for name in self.plot if name not in known)


def shown(number: float, unit: str) -> str:
    """Three digits and the unit."""
    if unit == "yes":
        return "yes" if number else "no"
    scaled = number / UNITS[unit]
    digits = f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.3g}"
    return digits + {"": "", "×": " ×", "%": " %"}.get(unit, f" {unit}")


def with_interval(number: Number, unit: str) -> str:
    """As the page says it."""
    middle = shown(number.value, unit)
    if number.counted or unit == "yes":
        return middle
    return f"{middle} ({shown(number.low, unit)} to {shown(number.high, unit)})"


def load(path: Path) -> Claim:
    """The claim of a file. Raises ValueError with every fault."""
    try:
        return Claim.model_validate({"id": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}, strict=False)
    except (ValidationError, tomllib.TOMLDecodeError) as exc:
        raise ValueError(f"{path.name}: {exc}") from exc


def load_all() -> list[Claim]:
    """Every claim, in the order of their files' names. Raises ValueError with the faults of all files."""
    found, faults = [], []
    for path in sorted(STUDIES.glob("*.toml")):
        try:
            found.append(load(path))
        except ValueError as exc:
            faults.append(str(exc))
    if faults:
        raise ValueError("\n".join(faults))
    return found
