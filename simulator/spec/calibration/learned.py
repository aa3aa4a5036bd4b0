"""What a user's own measured steps taught: factors on physical coefficients, how sure each is, and how they hang together.

`shardwise calibrate learn` writes the file (docs/guides/learn.md). Factors multiply what calibration, links and stack say;
the covariance is that of their logarithms, so a plan like those that were measured is surer than the coefficients one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from simulator.base.errors import CalibrationError, StackError
from simulator.base.files import write_whole
from simulator.base.schema import Strict
from simulator.spec.calibration.collective_curves import LearnedLinks, LinkCurves
from simulator.spec.calibration.curve_set import SpeedOf
from simulator.spec.calibration.likeness import Likeness, Point
from simulator.spec.software.stack import Stack

LEARNED_SUFFIX: Final = ".learned.json"

# products, attention, elementwise: time of kernels (elementwise: all that stream over memory). operators, collectives: host
# time of each. node_links, network: time of bytes inside a node and between nodes, the latter at `nodes` nodes; growth: what
# each doubling of the nodes beyond adds. latency: of collectives before their bytes flow. overlap: share of a collective's
# time that the compute beside it loses beyond what the calibration says (no factor: added). overhead: seconds a step beside all
# that plans and kernels explain (added). software: everything alike.
CoefficientName = Literal[
    "products", "attention", "elementwise", "operators", "collectives", "node_links", "network", "growth", "latency",
    "overlap", "overhead", "software",
]  # fmt: skip
NAMES: Final[tuple[CoefficientName, ...]] = get_args(CoefficientName)
_OPERATORS: Final = ("host_launch_s", "host_module_s", "host_layer_s", "host_checkpoint_s", "host_hook_s",
                     "host_parameter_s", "host_kernel_s")  # fmt: skip
_COLLECTIVES: Final = ("host_collective_s", "host_unit_s", "host_dtensor_s", "host_redistribute_s", "host_message_s",
                       "collective_wait_s")  # fmt: skip
ADDED: Final = ("overlap", "overhead")  # shares, seconds
_MARK: Final = "learned"
Values = Mapping[CoefficientName, float]  # logarithms of factors; of ADDED the number itself


# Of one sigma of log time, and of a 90 % quantile in sigmas (Student's with one degree of freedom has 6.3): beyond them an interval
# says nothing, and its end is no number
WIDEST, FURTHEST = 10.0, 20.0


class Coefficient(Strict):
    """One coefficient. value: logarithm of its factor, or what is added (ADDED); prior_sigma, sigma: before and after, one sigma."""

    name: CoefficientName
    value: float = Field(ge=-FURTHEST, le=FURTHEST)
    prior_sigma: float = Field(gt=0, le=WIDEST)
    sigma: float = Field(ge=0, le=WIDEST)


class Learned(Strict):
    """A file of learned coefficients.

    runs: ids of the rows that taught. covariance: of the values, in the order of `coefficients`. scatter: one sigma of
    log time by which steps differ whatever the coefficients. reach: 90 % quantile in sigmas, wider than a normal
    distribution's where few runs said how much steps scatter. nodes: where the network's growth begins. likeness: what runs err by
    that are like the measured ones.
    """

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    runs: tuple[str, ...] = Field(strict=False, min_length=1)
    coefficients: tuple[Coefficient, ...] = Field(strict=False, min_length=1)
    covariance: tuple[tuple[Annotated[float, Field(ge=-(WIDEST**2), le=WIDEST**2)], ...], ...] = Field(strict=False)
    scatter: float = Field(ge=0, le=WIDEST)
    reach: float = Field(gt=0, le=FURTHEST)
    nodes: float = Field(ge=1, default=1.0)
    likeness: Likeness | None = None
    _here: float = PrivateAttr(default=0.0)  # what `software` has of the likeness of one run

    @model_validator(mode="after")
    def _covariance_fits(self) -> Self:
        count = len(self.coefficients)
        if [len(row) for row in self.covariance] != [count] * count:
            raise ValueError(f"covariance must have {count} rows of {count} numbers, one for each coefficient")
        if len({one.name for one in self.coefficients}) < count:
            raise ValueError("coefficients: a name appears twice")
        if self.likeness is not None and len(self.likeness.cross) != count:
            raise ValueError(f"likeness: cross must have {count} rows, one for each coefficient")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a file. Raises CalibrationError with every fault."""
        return cls.of_json(Path(path), CalibrationError)

    def save(self, path: Path) -> None:
        """Write the file whole; equal coefficients give equal bytes."""
        data = self.model_dump(mode="json", exclude_none=True)
        write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    @property
    def values(self) -> dict[CoefficientName, float]:
        return {one.name: one.value for one in self.coefficients}

    @property
    def here(self) -> float:
        """What everything takes longer by (log time) in the run that the coefficients were brought to (`at`)."""
        return self._here

    def at(self, point: Point) -> Self:
        """The coefficients at a point: errors shared by similar runs are part of `software`, with more uncertainty far from them."""
        if self.likeness is None:
            return self
        here, variance, cross = self.likeness.near(point)
        at = [one.name for one in self.coefficients].index("software")
        covariance = np.array(self.covariance)
        covariance[at] += cross
        covariance[:, at] += cross
        covariance[at, at] += variance
        coefficients = [
            one
            if k != at
            else one.model_copy(update={"value": one.value + here, "sigma": math.sqrt(max(0.0, covariance[k, k]))})
            for k, one in enumerate(self.coefficients)
        ]
        changed = {
            "coefficients": tuple(coefficients),
            "covariance": tuple(map(tuple, covariance.tolist())),
            "likeness": None,
        }
        found = self.model_copy(update=changed)
        found._here = here  # noqa: SLF001  its own
        return found

    @property
    def alone(self) -> Self:
        """The coefficients without likeness, for studies of very different plans: there the error shared by similar runs is scatter."""
        if self.likeness is None:
            return self
        return self.model_copy(update={"likeness": None, "scatter": math.hypot(self.scatter, self.likeness.sigma)})

    def of(self, stack: Stack) -> Stack:
        """The stack on the hosts that were learned of; a second time changes nothing."""
        if stack.sources.get(_MARK) == (mark := f"{self.name} {self._here:.9g}"):
            return stack
        return on_stack(self.values, stack).copy_with(sources={**stack.sources, _MARK: mark})

    def as_stack(self, stack: Stack, architecture: str) -> Stack:
        """What was learned of kernels and hosts as a stack of its own, for devices of one architecture.

        Links and overlap are no part of a stack. Raises StackError where more runs taught than a stack may name.
        """
        speed, fitted, attention = speeds(self.values), stack.fitted, stack.attention
        gemm = {architecture: stack.gemm_factor_on(architecture, "")} | fitted.gemm_factor
        mine = {key: factor * speed["gemm"] for key, factor in gemm.items() if key.partition("_")[0] == architecture}
        streams = {architecture: stack.elementwise_factor_on(architecture) / speed["elementwise"]}
        others = fitted.elementwise_factor if isinstance(fitted.elementwise_factor, dict) else {}
        kernel = {architecture: attention.speed_factor.get(architecture, 1.0) * speed["attention"]}
        source = f"calibrate learn on the runs of calibration_runs ({self.name})"
        hosted = on_stack(self.values, stack)
        found = hosted.copy_with(
            name=self.name,
            describes=(),
            gemm_factor=fitted.gemm_factor | mine,
            elementwise_factor=others | streams,
            attention=attention.model_copy(update={"speed_factor": attention.speed_factor | kernel}),
            calibration_runs=self.runs,
            sigma=max(self.scatter, 1e-3),
            sources=stack.sources
            | dict.fromkeys(("gemm_factor", "elementwise_factor", "attention_efficiency", "step_overhead_s"), source)
            | {name: source for name in (*_OPERATORS, *_COLLECTIVES) if hosted.value(name) != stack.value(name)},
        )
        return Stack.parse(found.model_dump(mode="json", exclude_unset=True), self.name, StackError)

    def sigma(self, slopes: Mapping[CoefficientName, float]) -> float:
        """One sigma of log time that the coefficients leave to a step of these slopes."""
        j = [slopes.get(one.name, 0.0) for one in self.coefficients]
        rows = (sum(c * b for c, b in zip(row, j, strict=True)) for row in self.covariance)
        return math.sqrt(max(0.0, sum(a * row for a, row in zip(j, rows, strict=True))))


def speeds(values: Values) -> dict[SpeedOf, float]:
    """Speeds of kernels under these values."""
    every = values.get("software", 0.0)
    of: dict[SpeedOf, CoefficientName] = {"gemm": "products", "attention": "attention", "elementwise": "elementwise",
                                          "scan": "elementwise"}  # fmt: skip
    return {kernel: math.exp(-every - values.get(name, 0.0)) for kernel, name in of.items()}


def longer(curves: LinkCurves, here: float) -> LinkCurves:
    """The curves of links that were learned where everything takes e^here as long."""
    if curves.learned is None or not here:
        return curves
    links, factor = curves.learned, math.exp(here)
    more = {name: getattr(links, name) * factor for name in ("node", "network", "latency")}
    return curves.model_copy(update={"learned": links.model_copy(update=more)})


def on_stack(values: Values, stack: Stack) -> Stack:
    """The stack's host times under these values."""
    factors = {
        **dict.fromkeys(_OPERATORS, math.exp(values.get("software", 0.0) + values.get("operators", 0.0))),
        **dict.fromkeys(_COLLECTIVES, math.exp(values.get("software", 0.0) + values.get("collectives", 0.0))),
    }
    stated = {name: (stack.value(name), factor) for name, factor in factors.items()}
    changed = {name: time * factor for name, (time, factor) in stated.items() if time}
    if overhead_s := values.get("overhead", 0.0):
        changed["step_overhead_s"] = max(0.0, stack.fitted.step_overhead_s + overhead_s)
    return stack.copy_with(**changed)


def on_links(values: Values, curves: LinkCurves, nodes: float) -> LinkCurves:
    """The curves of links under these values."""
    every = values.get("software", 0.0)

    def factor(name: CoefficientName) -> float:
        return math.exp(every + values.get(name, 0.0))

    learned = LearnedLinks(
        node=factor("node_links"),
        network=factor("network"),
        growth=math.exp(values.get("growth", 0.0)),
        nodes=nodes,
        latency=factor("latency"),
        compute_share=values.get("overlap", 0.0),
    )
    return curves.model_copy(update={"learned": learned})
