"""One NCCL: its version, its configuration, and the tuners that may override its choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import InputError
from simulator.spec.software.nccl.environment import Environment, read_environment

if TYPE_CHECKING:
    from simulator.spec.software.nccl.tuner import TunerRule

NEWEST: Final = (2, 30)  # whose constants are used where no version is given
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?:[-+ ].{0,40})?")
_OLDEST: Final = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nccl:
    """version: (major, minor[, patch]); () is a current one. tuner: rules that overrule NCCL's choice, first match first."""

    version: tuple[int, ...] = ()
    environment: Environment = field(default_factory=Environment)
    tuner: tuple[TunerRule, ...] = ()

    @property
    def release(self) -> tuple[int, ...]:
        """The version to compare with."""
        return self.version or NEWEST

    @classmethod
    def of(cls, version: str = "", variables: Mapping[str, str] | None = None, *, place: str = "nccl") -> Nccl:
        """From words: a version, and variables by name. Raises InputError with every fault."""
        environment = read_environment(variables or {}, place)
        rules: tuple[TunerRule, ...] = ()
        if environment.tuner_file:
            from simulator.spec.software.nccl.tuner import read_tuner

            rules = read_tuner(Path(environment.tuner_file))
        return cls(version=parse_version(version, place), environment=environment, tuner=rules)


def parse_version(text: str, place: str = "nccl") -> tuple[int, ...]:
    """`2.27.3`, `2.18`, `v2.21.5-1`; () for "". Raises InputError for anything else."""
    if not text:
        return ()
    match = _VERSION.fullmatch(text)
    found = tuple(int(part) for part in match.groups() if part) if match else ()
    if not found or found < _OLDEST:
        raise InputError.at(place, f"{text!r} is not a version of NCCL 2", "as 2.27.3")
    return found
