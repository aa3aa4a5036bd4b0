"""Packages whose own engines play a plan, where torch has no such data parallelism. None is loaded here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from simulator.base.errors import Fault
from simulator.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Engine:
    """package: as it is installed. tried: the release that was looked at.

    stacks: what stands before the version in the names of stacks that describe its own layers; empty: the layers are torch's.
    """

    package: str
    tried: str
    stacks: str = ""

    @property
    def installed(self) -> str:
        """The installed version; empty where there is none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


ENGINES: Final[dict[str, Engine]] = {
    "deepspeed": Engine("deepspeed", "0.19.8"),
    "megatron": Engine("megatron-core", "0.16.1", "megatron-core"),
}


def engine_of(plan: Plan) -> Engine | None:
    """Who plays the plan's data parallelism; None: torch itself."""
    return ENGINES.get(plan.implementation)


def package_faults(plan: Plan) -> Iterator[Fault]:
    """The package that the plan's data parallelism comes from is not installed."""
    engine = engine_of(plan)
    if engine is not None and not engine.installed:
        problem = f"{plan.implementation} is played by {engine.package}, which is not installed"
        yield Fault(
            place="plan: data_parallel", problem=problem, remedy=f"pip install {engine.package}=={engine.tried}"
        )


def package_notes(plan: Plan, packages: dict[str, str]) -> Iterator[str]:
    """Another release than the one whose code was read."""
    engine = engine_of(plan)
    found = packages.get(engine.package, "") if engine is not None else ""
    if engine is not None and found and found != engine.tried:
        yield f"{engine.package} {found}: predicted as {engine.tried} does, the release that was looked at"
