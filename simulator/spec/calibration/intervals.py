"""How much wider or narrower published runs say that the named parts of an interval are than what was known beforehand.

What data sheets, residuals of fits and spreads of published costs say of kernels, links and hosts is a prior. Whole runs judge it:
`experiments/intervals.py` fits one factor for each kind of part on all sources and keeps the sample in the file.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Final, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from simulator.base.errors import CalibrationError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, faults_of, read_json

FILE: Final = TOPOLOGIES / "calibrations" / "intervals.json"
# kernels: by category. links, pcie, network: collectives inside NVLink domains, over PCIe and between nodes; exchanges: all-to-alls
# between nodes. uncounted: what hosts do beside the operators that are counted. experts: releases of software with experts; eager
# experts: loops over them. untimed: kernels that bytes price. transfers: copies to and from the host. stack: what a described program
# leaves unexplained whose framework brings its layers; model code: one whose layers are a model's own calls of operators, compiled or
# not. software: what is not known of others
Part = Literal["kernels", "links", "pcie", "network", "exchanges", "host", "uncounted", "experts", "eager experts", "untimed", "transfers",
               "stack", "model code", "software"]  # fmt: skip
PARTS: Final[tuple[Part, ...]] = get_args(Part)
# One sigma of the logarithm of a host's time: published costs of an eager operator lie at 5 to 15 us, hosts of one GPU generation
# within that (docs/background/host.md); 5 to 15 taken for 90 % of them, 1.6449 sigma to each side
HOST_SIGMA: Final = math.log(3) / (2 * 1.6449)


class Intervals(Strict):
    """factors: on one sigma of each kind of part; 90 % of a source that the fit has not seen lie within 1.645 of all together.

    sample: source -> runs that judged, and what share of them an interval held and its half-width (of log time) by the other
    sources' factors.
    """

    source: str
    factors: dict[Part, float]
    sample: dict[str, dict[str, float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if missing := [part for part in PARTS if part not in self.factors]:
            raise ValueError(f"factors lack {', '.join(missing)}")
        return self

    @classmethod
    def load(cls) -> Self:
        """As shipped. Raises CalibrationError with every fault."""
        try:
            return cls.model_validate_json(json.dumps(read_json(FILE, CalibrationError)))
        except ValidationError as exc:
            raise CalibrationError(faults_of(exc, FILE.name)) from None

    def factor(self, part: Part | None) -> float:
        """1 for what no run judged."""
        return 1.0 if part is None else self.factors[part]


@lru_cache(maxsize=1)
def intervals() -> Intervals:
    """The factors shipped with the project."""
    return Intervals.load()
