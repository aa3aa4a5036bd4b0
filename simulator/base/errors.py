"""The error types. Every error a user can cause derives from one root and lists *all* its faults.

ShardwiseError
├── InputError            a file, a flag or a table is wrong; carries every fault with its place   (exit code 3)
│   ├── ArgumentError     of a call from Python; a TypeError and a ValueError too
│   ├── ModelError        the model's description
│   ├── ClusterError      devices, links, tiers
│   ├── PlanError         degrees, divisibilities, contradictory options
│   ├── StackError        the software stack's file
│   ├── CalibrationError  a number is missing, or a calibration file is malformed
│   └── TableError        a table of measurements
└── EngineError           a program that cannot run: a cycle, a collective nobody else joins (a defect of ours)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from typing_extensions import override

_LONGEST, _HEAD, _TAIL = 1000, 600, 200
_MOST_LISTED = 1100  # faults of one error: readers stop at 1,000 and say so
_MOST_READY = 4096  # characters of a command that is shown: nobody copies a longer one


def printable(text: str) -> str:
    """Foreign text made safe for a terminal: control characters are escaped, and long text is cut in the middle."""
    if len(text) > _LONGEST:
        text = f"{text[:_HEAD]} … ({len(text):,} characters) … {text[-_TAIL:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same of a whole answer, line by line."""
    return "\n".join(map(printable, text.split("\n")))


_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BUT_COLORS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


def without_commands(text: str, *, color: bool) -> str:
    """Escape a terminal's control characters, except colours if there are any."""
    return (_BUT_COLORS if color else _COMMANDS).sub(lambda found: ascii(found[0])[1:-1], text)


_UNFIT = re.compile(
    "[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)  # JSON takes them: a terminal obeys, UTF-8 has none


def json_text(answer: object, *, indent: int | None = 2) -> str:
    """The answer as JSON, without a character that a terminal would obey. Raises ValueError for NaN and infinity."""
    text = json.dumps(answer, indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNFIT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def finite_number(text: str) -> float:
    """A constant or a fraction of JSON. Raises ValueError for NaN, infinity and what no double can hold (1e309)."""
    value = float(text)
    if not math.isfinite(value):
        msg = f"{text} is not a number"
        raise ValueError(msg)
    return value


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its place, the problem, and what would be right (empty if unknown).

    flags: of the command line, with values, that would mend it: of them a ready command is made.
    """

    place: str
    problem: str
    remedy: str = ""
    flags: tuple[tuple[str, str], ...] = ()

    @override
    def __str__(self) -> str:
        tail = f" ({self.remedy})" if self.remedy else ""
        return printable(f"{self.place}: {self.problem}{tail}")


def listed(notes: Sequence[object], most: int = 20) -> list[str]:
    """The first notes, and how many more there are: a table may have a million bad lines."""
    more = [f"and {len(notes) - most:,} more"] if len(notes) > most else []
    return [*map(str, notes[:most]), *more]


class ShardwiseError(Exception):
    """Root of everything this package raises on purpose."""


class InputError(ShardwiseError):
    """Bad input, with every fault found. `faults` is never empty. ready: a command line that works; empty: none is known."""

    noun = "input"

    def __init_subclass__(cls, noun: str = "") -> None:
        cls.noun = noun or cls.noun

    def __init__(self, faults: Iterable[Fault] | Fault, ready: str = "") -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        self.ready = ready
        super().__init__(str(self))

    @classmethod
    def at(cls, place: str, problem: str, remedy: str = "") -> Self:
        """Of one fault."""
        return cls(Fault(place=place, problem=problem, remedy=remedy))

    @classmethod
    def raise_for(cls, faults: Collection[Fault]) -> None:
        """Raise an error of all these faults, if there are any."""
        if faults:
            raise cls(faults)

    @override
    def __str__(self) -> str:
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the {self.noun}"
        tail = [f"  this runs; put your own values in: {self.ready}"] if 0 < len(self.ready) < _MOST_READY else []
        return "\n".join([head, *(f"  {fault}" for fault in listed(self.faults, _MOST_LISTED)), *tail])


class Collected:
    """`with Collected(faults):` an InputError raised inside adds its faults to the list, and execution continues."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(exc, InputError):
            return False
        self._faults += exc.faults
        return True


class ArgumentError(InputError, TypeError, ValueError, noun="arguments"):
    """A call from Python has unknown arguments, or arguments of the wrong type."""


class ModelError(InputError, noun="model"):
    """The model cannot be built."""


class ClusterError(InputError, noun="cluster"):
    """The cluster cannot be built."""


class PlanError(InputError, noun="plan"):
    """The plan is illegal. (A plan that does not fit in memory is an answer, not an error.)"""


class StackError(InputError, noun="stack"):
    """The software stack cannot be read."""


class CalibrationError(InputError, noun="calibration"):
    """A number is missing from the calibration, or its file is malformed."""


class TableError(InputError, noun="table"):
    """A table of measurements cannot be read at all (single bad rows are reported, not raised)."""


class EngineError(ShardwiseError):
    """The engine was handed a program that cannot finish."""
