"""NCCL's environment variables, as a shell sets them -> what they say to the model.

Syntax of NCCL_ALGO and NCCL_PROTO since 2.24: `ring,tree`, `^tree`, `ring;allreduce:tree,nvls;broadcast:^ll128`; the first
entry without a function is for all, later ones for their function. Levels of paths are words or NCCL's old numbers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import Fault, InputError
from simulator.base.presets import facts
from simulator.base.schema import nearest
from simulator.spec.software.nccl.names import ALGORITHMS, FUNCTIONS, PROTOCOLS

if TYPE_CHECKING:
    from simulator.spec.software.nccl.tuner import TunerRule

LEVELS: Final = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")  # near to far
_OLD_LEVELS: Final = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
DEFAULT_BUFFER_BYTES: Final = 4 * 2**20
_MOST_CHANNELS: Final = 64
_LARGEST_BUFFER: Final = 2**30
_CHANNELS: Final = {
    "NCCL_MIN_CTAS": "min_channels",
    "NCCL_MIN_NCHANNELS": "min_channels",
    "NCCL_MIN_NRINGS": "min_channels",
    "NCCL_MAX_CTAS": "max_channels",
    "NCCL_MAX_NCHANNELS": "max_channels",
    "NCCL_MAX_NRINGS": "max_channels",
}
_LISTS: Final = {"NCCL_ALGO": ("algorithms", ALGORITHMS), "NCCL_PROTO": ("protocols", PROTOCOLS)}
_LEVELS: Final = {"NCCL_P2P_LEVEL": "p2p_level", "NCCL_NET_GDR_LEVEL": "gdr_level"}
# name -> (field, legal integers)
_SWITCHES: Final = {
    "NCCL_NVLS_ENABLE": ("nvls", (0, 1, 2)),
    "NCCL_P2P_DISABLE": ("p2p_disable", (0, 1)),
    "NCCL_CROSS_NIC": ("cross_nic", (0, 1, 2)),
    "NCCL_PXN_DISABLE": ("pxn_disable", (0, 1)),
    "NCCL_COLLNET_ENABLE": ("collnet", (0, 1)),
    "NCCL_PAT_ENABLE": ("pat", (0, 1, 2)),
    "NCCL_IB_DISABLE": ("ib_disable", (0, 1)),
    "NCCL_NET_GDR_READ": ("gdr_read", (0, 1)),
    "NCCL_LL128_C2C": ("ll128_c2c", (0, 1)),
}
TUNER_FILE: Final = "NCCL_TUNER_CONFIG_FILE"
_TEXTS: Final = {"NCCL_NET": "net", "NCCL_TUNER_PLUGIN": "tuner_plugin", TUNER_FILE: "tuner_file"}

Restriction = tuple[tuple[str, frozenset[str]], ...]  # collective ("" for all) -> the names that are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the variables say; None and "" where they are unset, so that NCCL decides.

    algorithms, protocols: what NCCL_ALGO and NCCL_PROTO leave. min_channels, max_channels: of NCCL_{MIN,MAX}_CTAS or their
    older names. p2p_level, gdr_level: words of LEVELS. transport: settings of the network's own software, NAME=value, that
    calibrated networks are told apart by. unmodelled: names that were given and change nothing here.
    """

    algorithms: Restriction = ()
    protocols: Restriction = ()
    min_channels: int | None = None
    max_channels: int | None = None
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    nvls: int = 2
    p2p_disable: int = 0
    p2p_level: str = ""
    gdr_level: str = ""
    gdr_read: int | None = None
    cross_nic: int = 2
    pxn_disable: int = 0
    collnet: int = 0
    pat: int = 2
    ib_disable: int = 0
    ll128_c2c: int = 1
    net: str = ""
    tuner_plugin: str = ""
    tuner_file: str = ""
    transport: frozenset[str] = frozenset()
    unmodelled: tuple[str, ...] = ()

    def allows(self, kind: str, algorithm: str, protocol: str) -> bool:
        """NCCL_ALGO and NCCL_PROTO leave the pair for this collective."""
        return algorithm in _left(self.algorithms, kind, ALGORITHMS) and protocol in _left(
            self.protocols, kind, PROTOCOLS
        )

    @property
    def no_peers(self) -> bool:
        """No GPU reaches another's memory, by NVLink either: a level of LOC is what NCCL makes of NCCL_P2P_DISABLE."""
        return bool(self.p2p_disable) or self.p2p_level == "LOC"

    @property
    def sockets(self) -> bool:
        """Bytes leave a node over TCP, whatever the NICs could do."""
        return bool(self.ib_disable) or self.net.lower() == "socket"


@cache
def variable_groups() -> dict[str, frozenset[str]]:
    """NCCL's and its plugins' variables: "modelled", "unmodelled" and "harmless"."""
    return {group: frozenset(names) for group, names in facts(__file__, "variables").items()}


def _left(restriction: Restriction, kind: str, every: tuple[str, ...]) -> frozenset[str]:
    own = dict(restriction)
    return own.get(kind, own.get("", frozenset(every)))


def assignments(texts: Iterable[str], place: str) -> dict[str, str]:
    """`NCCL_ALGO=Ring NCCL_PROTO=LL`, each text as a shell splits it. Raises InputError with every fault."""
    found: dict[str, str] = {}
    faults: list[Fault] = []
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as exc:
            faults.append(Fault(place=f"{place} {text!r}", problem=f"cannot be split as a shell would: {exc}"))
            continue
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not name:
                faults.append(Fault(place=f"{place} {word}", problem="is not an assignment", remedy="NAME=value"))
            elif found.get(name, value) != value:
                faults.append(Fault(place=f"{place} {name}", problem="is set twice", remedy="keep one"))
            else:
                found[name] = value
    InputError.raise_for(faults)
    return found


def read_environment(variables: Mapping[str, str], place: str) -> Environment:
    """`variables` by name. Raises InputError with every unknown name and every value that NCCL could not read."""
    reader = _Reader(place)
    fields: dict[str, object] = {}
    for name, value in variables.items():
        reader.put(name, value.strip(), fields)
    low, high = fields.get("min_channels"), fields.get("max_channels")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        reader.fault("NCCL_MIN_CTAS", f"at least {low} channels and at most {high}", "a minimum below the maximum")
    if reader.faults:
        raise InputError(reader.faults)
    return Environment(
        **fields,  # type: ignore[arg-type]  # _Reader gives each field its type
        transport=frozenset(f"{n}={v}" for n, v in variables.items() if n in _TRANSPORT),
        unmodelled=tuple(sorted(variable_groups()["unmodelled"] & set(variables))),
    )


# Settings of a network's own software that calibrated networks know, and their values
_TRANSPORT: Final = {
    "FI_CXI_RX_MATCH_MODE": ("hardware", "software", "hybrid"),
    "FI_CXI_DISABLE_NON_INJECT_MSG_IDC": ("0", "1"),
}


class _Reader:
    """Reads one variable after the other and keeps the faults."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.faults: list[Fault] = []

    def fault(self, name: str, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(place=f"{self.place}: {name}", problem=problem, remedy=remedy))

    def put(self, name: str, value: str, fields: dict[str, object]) -> None:
        """Read `value` into the field of `name`."""
        known = frozenset().union(*variable_groups().values())
        if name not in known:
            self.fault(name, "is not a variable of NCCL or its plugins", nearest(name, known))
        elif name in variable_groups()["modelled"]:
            self._modelled(name, value, fields)

    def _modelled(self, name: str, value: str, fields: dict[str, object]) -> None:
        if name in _LISTS:
            field, legal = _LISTS[name]
            fields[field] = self._names(name, value, legal)
        elif name in _CHANNELS:
            self._channels(name, value, fields)
        elif name in _SWITCHES:
            field, numbers = _SWITCHES[name]
            fields[field] = self._switch(name, value, numbers)
        elif name == "NCCL_BUFFSIZE":
            fields["buffer_bytes"] = self._integer(name, value, 2**10, _LARGEST_BUFFER)
        elif name in _LEVELS:
            fields[_LEVELS[name]] = self._level(name, value)
        elif name in _TEXTS:
            fields[_TEXTS[name]] = value
        elif value not in _TRANSPORT[name]:
            self.fault(name, f"{value!r} is not one of its values", ", ".join(_TRANSPORT[name]))

    def _integer(self, name: str, value: str, low: int, high: int) -> int:
        try:
            found = int(value, 0)
        except ValueError:
            self.fault(name, f"{value!r} is not a whole number", f"{low} to {high}, digits only")
            return low
        if not low <= found <= high:
            self.fault(name, f"{found} is out of range", f"{low} to {high}")
        return found

    def _switch(self, name: str, value: str, legal: tuple[int, ...]) -> int:
        if value not in {str(one) for one in legal}:
            self.fault(name, f"{value!r} is not one of its values", ", ".join(map(str, legal)))
            return legal[0]
        return int(value)

    def _channels(self, name: str, value: str, fields: dict[str, object]) -> None:
        field, count = _CHANNELS[name], self._integer(name, value, 1, _MOST_CHANNELS)
        if fields.setdefault(field, count) != count:
            self.fault(name, f"{count} contradicts an older name of the same setting: {fields[field]}", "keep one")

    def _level(self, name: str, value: str) -> str:
        found = _OLD_LEVELS.get(value, value.upper())
        if found not in LEVELS:
            self.fault(name, f"{value!r} is not a kind of path", f"{', '.join(LEVELS)}, or 0 to 5")
        return found

    def _names(self, name: str, value: str, legal: tuple[str, ...]) -> Restriction:
        """`ring,tree;allreduce:^nvls` as sets by collective."""
        found: dict[str, frozenset[str]] = {}
        for index, part in enumerate(value.split(";")):
            function, colon, names = part.rpartition(":")
            key = FUNCTIONS.get(function.strip().lower(), "") if colon else ""
            if colon and not key:
                self.fault(name, f"{function.strip()!r} is not a collective", ", ".join(FUNCTIONS))
            elif not colon and index:
                self.fault(name, f"{part!r} names no collective", "only the first entry is for all: allreduce:ring")
            found[key] = self._set(name, names.strip(), legal)
        return tuple(sorted(found.items()))

    def _set(self, name: str, text: str, legal: tuple[str, ...]) -> frozenset[str]:
        without = text.startswith("^")
        words = [word.strip() for word in text.removeprefix("^").split(",")]
        for word in words:
            if word.lower() not in legal:
                self.fault(name, f"{word!r} is not one of NCCL's", nearest(word.lower(), legal) or ", ".join(legal))
        named = frozenset(legal).intersection(word.lower() for word in words)
        left = frozenset(legal) - named if without else named
        if without and not left:
            self.fault(name, f"{text!r} leaves nothing", "leave one")
        return left


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
