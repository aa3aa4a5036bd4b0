"""One compared quantity, and which of several parts explains an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

Z90: Final = 1.6449  # half of a 90 % interval, in sigmas


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One quantity: S predicted, D measured, and the three uncertainties. All in the unit that `name` ends with."""

    name: str
    predicted: float
    measured: float
    u_num: float = 0.0
    u_input: float = 0.0
    u_data: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted - self.measured

    @property
    def u_val(self) -> float:
        return math.sqrt(self.u_num**2 + self.u_input**2 + self.u_data**2)

    @property
    def in_the_noise(self) -> bool:
        """Whether the error says nothing about the model."""
        return abs(self.error) <= self.u_val

    def as_json(self) -> dict[str, Any]:
        relative = self.error / self.measured if self.measured else None
        derived = {"error": self.error, "relative_error": relative, "u_val": self.u_val}
        return {**asdict(self), **derived, "in_the_noise": self.in_the_noise}


def explains(total: float, parts: Mapping[str, float]) -> dict[str, Any] | None:
    """The part whose error is largest, and its share of the sum of the parts' absolute errors."""
    absolute = sum(map(abs, parts.values()))
    if not absolute:
        return None
    name = max(parts, key=lambda part: abs(parts[part]))
    return {"part": name, "error": parts[name], "share": abs(parts[name]) / absolute, "of_error": total}
