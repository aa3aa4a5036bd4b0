"""How much wider or narrower published runs say that the named parts of an interval are than what was known beforehand.

What data sheets, residuals of fits and spreads of published costs say of kernels, links and hosts is a prior. Whole runs judge it:
`experiments/intervals.py` fits one factor for each kind of part on all sources and keeps the sample in the file. Of servers
`experiments/unnamed_engines.py` does the like for engines that nobody described.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal, Self, get_args

from pydantic import Field, model_validator

from simulator.base.errors import CalibrationError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict

FILE: Final = TOPOLOGIES / "calibrations" / "intervals.json"
ENGINES: Final = TOPOLOGIES / "calibrations" / "unknown-engine.json"
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

    def factor(self, part: Part | None) -> float:
        """1 for what no run judged."""
        return 1.0 if part is None else self.factors[part]


class UnknownEngine(Strict):
    """What is not known of a server's engine that no stack describes: one sigma, of log time, beside all other parts'.

    step: of everything that its steps decide. wait: of first tokens in a closed loop besides. sample: described engine, predicted as if
    it were not -> rows, and what share of them an interval held and how far its upper end lay above, by the other engines' sigmas.
    """

    source: str
    step: float = Field(ge=0)
    wait: float = Field(ge=0)
    sample: dict[str, dict[str, float]] = Field(default_factory=dict)


@lru_cache(maxsize=1)
def unknown_engine() -> UnknownEngine:
    """The sigmas shipped with the project. Raises CalibrationError with every fault."""
    return UnknownEngine.of_json(ENGINES, CalibrationError)


@lru_cache(maxsize=1)
def intervals() -> Intervals:
    """The factors shipped with the project. Raises CalibrationError with every fault."""
    return Intervals.of_json(FILE, CalibrationError)
