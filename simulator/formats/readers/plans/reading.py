"""The treatment of each setting of a foreign format: used, without effect, overruled, not modelled, or unknown.

Nothing is dropped: what no reader asks for is sorted by the format's tables, and what those do not hold is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal

from simulator.base.errors import Fault
from simulator.base.schema import nearest
from simulator.base.value_errors import shown
from simulator.formats.readers.plans.options import Off, Options

Use = Literal["used", "no effect", "overruled", "not modelled", "unknown"]

MAX_SETTINGS: Final = 20_000
UNSET: Final = "?"  # the value of a shell's option that only a run knows
AUTO: Final = "auto"  # DeepSpeed's and accelerate's word for "whoever launches fills it in"
_TRUE, _FALSE = {"true", "yes", "1", "on"}, {"false", "no", "0", "off"}
_WHO: Final = "your launcher or training script decides it"
_TYPO: Final = 0.93  # likeness (difflib's ratio) of a name of 15 or more letters with one of them wrong
_LONG: Final = 8  # letters of a name with which another one begins that goes on in the same word: sequence_length
_SHOWN: Final = 60  # characters of a value in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One setting of the file. value: plain data; on command lines a text, a list of texts, or True (a flag)."""

    name: str
    value: Any
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting and its treatment. note: its result, or what a prediction misses without it."""

    name: str
    value: str
    place: str
    use: Use
    note: str = ""

    def __str__(self) -> str:
        where = self.place if self.place.endswith(self.name) else f"{self.place}: {self.name}"
        return f"{where} = {self.value}" + (f" ({self.note})" if self.note else "")


@dataclass
class Reading:
    """The settings of one file, each taken at most once; faults are collected, never raised.

    given: Plan's fields that the caller states, so that the file need not: "auto" is right for them.
    unset: settings whose value only a run of the script knows, and what it hangs on. auto: how such a value is written.
    """

    entries: Mapping[str, Entry]
    file: str
    given: Collection[str] = ()
    unset: Mapping[str, str] = field(default_factory=dict)
    auto: str = AUTO
    cures: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)  # flags that would give unset ones
    faults: list[Fault] = field(default_factory=list)
    taken: dict[str, Setting] = field(default_factory=dict)
    added: list[Setting] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.value is not None

    def place(self, name: str) -> str:
        """The place of the setting, or where it would be."""
        return self.entries[name].place if name in self.entries else f"{self.file}: {name}"

    def fault(self, name: str, problem: str, remedy: str = "", flags: tuple[tuple[str, str], ...] = ()) -> None:
        """Report a fault of this setting by its name, since a line may hold several settings."""
        place, own = self.place(name), self.entries[name].name if name in self.entries else name
        if not place.endswith(f": {own}"):
            place = f"{place}: {own}"
        self.faults.append(Fault(place=place, problem=problem, remedy=remedy, flags=flags))

    # -- taking a setting ----------------------------------------------------------------------------------------

    def raw(self, name: str, plan_field: str = "") -> Any:  # noqa: ANN401  plain data of any type
        """The value, None where it is not stated or is "auto" for a field that the caller gives."""
        if name not in self:
            return None
        entry = self.entries[name]
        self._mark(entry, "used")
        if entry.value != self.auto:
            return entry.value
        if plan_field and plan_field in self.given:
            self.note(name, f"auto, given by --{plan_field.replace('_', '-')}")
        else:
            flag = f"--{plan_field.replace('_', '-')} VALUE" if plan_field else "a value in the file"
            hangs = self.unset.get(name, "")
            names = [text.partition("=")[0] for _, text in self.cures.get(name, ())]
            flag += f", or --define {' --define '.join(f'{one}=VALUE' for one in names)}" if names else ""
            problem = f"hangs on {hangs}, which this file does not settle" if hangs else f'is "{self.auto}": {_WHO}'
            self.fault(name, problem, flag, self.cures.get(name, ()))
        return None

    def integer(self, name: str, *, least: int = 1, plan_field: str = "") -> int | None:
        """A whole number; 5e8 is one."""
        value = self.raw(name, plan_field)
        if value is None:
            return None
        number = _number(value)
        if number is None or number != int(number) or number < least:
            self.fault(name, f"{_wrong(value)} is not a whole number of {least} or more")
            return None
        return int(number)

    def integers(self, names: Mapping[str, str], *, above: int = 0) -> dict[str, int]:
        """Plan's field -> its whole number, of the settings (field -> name) that state one above a limit."""
        found = {field: self.integer(name, plan_field=field) for field, name in names.items()}
        return {field: value for field, value in found.items() if value is not None and value > above}

    def number(self, name: str) -> float | None:
        """Any number."""
        value = self.raw(name)
        number = None if value is None else _number(value)
        if value is not None and number is None:
            self.fault(name, f"{_wrong(value)} is not a number")
        return number

    def flag(self, name: str, *, plan_field: str = "") -> bool | None:
        """True or false, written in any of the ways the frameworks take."""
        value = self.raw(name, plan_field)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        self.fault(name, f"{_wrong(value)} is neither true nor false")
        return None

    def text(self, name: str) -> str | None:
        """A word or path."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        self.fault(name, f"{_wrong(value)} is not text")
        return None

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words, or a single one."""
        value = self.raw(name)
        found = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return tuple(found)
        self.fault(name, f"{_wrong(value)} is not a list of words")
        return ()

    def choice(self, name: str, words: Collection[str], *, plan_field: str = "") -> str | None:
        """One of some words, upper or lower case; as `words` has it."""
        value = self.raw(name, plan_field)
        if value is None:
            return None
        found = {word.lower(): word for word in words}.get(str(value).strip().lower())
        if found is None:
            self.fault(name, f"{_wrong(value)} is unknown", f"one of {', '.join(words)}")
        return found

    def note(self, name: str, text: str) -> None:
        """Note the setting's result."""
        if name in self.entries:
            self._mark(self.entries[name], "used", text)

    def unmodelled(self, name: str, why: str) -> None:
        """Its effect on time or memory is not modelled."""
        if name in self.entries:
            self._mark(self.entries[name], "not modelled", why)

    def overruled(self, name: str, why: str) -> None:
        """Note a setting that the framework itself overrides."""
        if name in self.entries:
            self._mark(self.entries[name], "overruled", why)

    def default_unmodelled(self, name: str, value: str, why: str) -> None:
        """The same for a default of the format."""
        setting = Setting(name=name, value=value, place=f"{self.file} (default)", use="not modelled", note=why)
        self.added.append(setting)

    # -- what is left --------------------------------------------------------------------------------------------

    def sort_rest(self, options: Options, *, typos: bool = False) -> None:
        """Classify every setting that was not read. A name ending in "." covers all settings below it.

        typos: a name that is all but one that the reader asks for is a fault, since it would matter.
        """
        for name, entry in self.entries.items():
            if entry.name in self.taken:
                continue
            if entry.value is None or _listed(name, options.no_effect):
                self._mark(entry, "no effect")
            elif (found := options.off.get(name) or _below(name, options.off)) is not None:
                is_off = entry.value == "" or any(_same(entry.value, value) for value in found.values)
                self._mark(entry, "no effect" if is_off else "not modelled", "" if is_off else found.why)
            elif name in options.known:
                self._mark(entry, "not modelled", "a run of this kind does not ask for it")
            else:
                hint = nearest(name, {*options.known, *options.no_effect, *options.off})
                self._mark(entry, "unknown", hint if hint.startswith("did") else "")
                others = sorted(options.known - self.entries.keys()) if typos else []
                meant = get_close_matches(name, others, n=1, cutoff=_TYPO) or [
                    one for one in others if len(one) >= _LONG and name.startswith(one) and name[len(one) :].isalpha()
                ]
                if meant:
                    flags = (("--define", f"{name}="), ("--define", f"{meant[0]}={shortened(entry.value)}"))
                    self.fault(name, "is no option", f"{meant[0]}?", flags)

    def settings(self) -> tuple[Setting, ...]:
        """Every setting, in the file's order."""
        names = dict.fromkeys(entry.name for entry in self.entries.values())  # as the file spells them
        return (*(self.taken[name] for name in names if name in self.taken), *self.added)

    def _mark(self, entry: Entry, use: Use, note: str = "") -> None:
        setting = Setting(name=entry.name, value=shortened(entry.value), place=entry.place, use=use, note=note)
        old = self.taken.get(entry.name)
        if old is not None and old.note and not note and use == "used":
            setting = replace(old)
        self.taken[entry.name] = setting


def flattened(
    data: Mapping[str, Any],
    file: str,
    leaves: Collection[str] = (),
    places: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> dict[str, Entry]:
    """Nested tables as entries with dotted names, in the file's order.

    leaves: tables that stay whole. places: how settings that stand elsewhere are spelled, and where they stand; of a table, all
    below it.
    """
    found: dict[str, Entry] = {}
    _flatten(data, "", file, leaves, found)
    for name, entry in found.items() if places else ():
        above = next((one for one in (name, *_parents(name)) if one in places), None)
        if above is not None:
            spelled, place = places[above]
            found[name] = replace(entry, name=spelled + name.removeprefix(above), place=place)
    return found


def _flatten(data: Mapping[str, Any], path: str, file: str, leaves: Collection[str], found: dict[str, Entry]) -> None:
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value and name not in leaves:
            _flatten(value, name, file, leaves, found)
        else:
            empty = isinstance(value, Mapping) and not value
            found[name] = Entry(name=name, value=None if empty else value, place=f"{file}: {name}")


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if abs(value) < 2**62 else None  # neither is NaN
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return number if abs(number) < 2**62 else None


def _same(value: object, other: object) -> bool:
    if isinstance(value, str) and not isinstance(other, str):
        word = value.strip().lower()
        if isinstance(other, bool):
            return word in (_TRUE if other else _FALSE)
        return other is not None and _number(value) == other
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    return value == other


def _listed(name: str, names: Collection[str]) -> bool:
    return name in names or any(f"{part}." in names for part in _parents(name))


def _below(name: str, off: Mapping[str, Off]) -> Off | None:
    return next((off[f"{part}."] for part in _parents(name) if f"{part}." in off), None)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _wrong(value: object) -> str:
    """A value that a message refuses: lists and tables as they are written, brackets and all."""
    return shown(value) if isinstance(value, list | tuple | dict) else shortened(value)


def shortened(value: object) -> str:
    """A value as a report has it."""
    if value is True or value is False:
        return str(value).lower()
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


ReadJson = Callable[[str], Mapping[str, Any]]
_NEVER: Final = "\0"  # these files' "auto" is a value like others


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Settings of one run.

    data: tables and values. read_json: reads a DeepSpeed file by the path that the settings name. given: Plan's fields that the
    caller states. places: (as it is spelled, where it stands) of settings that a command line states, by their dotted names.
    unset: what values hang on that only a run knows, which are `auto` in data; cures: flags that would give them.
    program: the part of a library that a command runs, as `dpo` of trl. num_devices, num_nodes: of the job, where a launcher says so.
    """

    data: Mapping[str, Any]
    file: str
    read_json: ReadJson
    given: Collection[str] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unset: Mapping[str, str] = field(default_factory=dict)
    cures: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    auto: str = _NEVER
    program: str = ""
    num_devices: int | None = None
    num_nodes: int | None = None
