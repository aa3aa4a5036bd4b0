"""The environment of a script's training command: PyTorch's allocator, NCCL's variables, Transformer Engine's kernels."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.plans.reading import Entry, Setting, Use, shortened
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Word, words_of
from simulator.spec.plan.alloc_conf import VARIABLES, parse_alloc_conf
from simulator.spec.software.nccl.environment import TUNER_FILE, read_environment, variable_groups

# What a script's environment says: a variable exported, set before a command, or passed by a launcher.
_UNMODELLED: Final = variable_groups()["unmodelled"] | {TUNER_FILE, "NCCL_TUNER_PLUGIN"}  # what nodes have
_ENGINE: Final = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")  # Transformer Engine's kernels of attention: 0 leaves one out
_NAMES: Final = (*VARIABLES, *_ENGINE, *sorted(variable_groups()["modelled"] | _UNMODELLED))
_PASSED: Final = re.compile(rf"(?:^|[=,])({'|'.join(_NAMES)})=(.+)$")  # `env X=Y`, `-e X=Y`, `--export=ALL,X=Y`
_BETWEEN: Final = re.compile(r",(?=\w+=|ALL$|NONE$)")  # variables of `--export`, whose values may have commas
_DRIVERS: Final = re.compile(r"(^|,)\s*backend\s*:\s*cudaMallocAsync\b")


@dataclass
class Surroundings:
    """A script's environment. allocator: PyTorch's settings of it. changes: of the stack; what became of each, what is wrong."""

    allocator: Entry | None = None
    changes: dict[str, tuple[object, str]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def put(self, name: str, text: str, place: str) -> None:
        """Take one variable."""
        use, note = (self._allocator if name in VARIABLES else self._software)(name, text, place)
        if use:
            self.settings.append(Setting(name=name, value=shortened(text), place=place, use=use, note=note))

    def _software(self, name: str, text: str, place: str) -> tuple[Use | None, str]:
        if name in _ENGINE:
            return "used", f"Transformer Engine {'leaves this kernel out' if text == '0' else 'may take this kernel'}"
        if name in _UNMODELLED:
            return "not modelled", "what it does to a step is not known here"
        try:
            read_environment({name: text}, place)
        except InputError as exc:
            self.faults += (replace(fault, flags=(("--define", f"{name}="),)) for fault in exc.faults)
        self.changes[f"nccl.env.{name}"] = (text, place)
        return "used", f"stack.nccl.env.{name}"

    def _allocator(self, name: str, text: str, place: str) -> tuple[Use | None, str]:
        if self.allocator is not None:
            return "overruled", f"torch reads {self.allocator.name} first"
        if _DRIVERS.search(text):
            return "not modelled", "the driver's pool has no published rules: PyTorch's own allocator is taken"
        try:
            parse_alloc_conf(text)
        except ValueError as exc:
            remedy, flags = f"as torch takes it, or --define {name}= for none", (("--define", f"{name}="),)
            self.faults.append(Fault(place=f"{place}: {name}", problem=str(exc), remedy=remedy, flags=flags))
            return None, ""
        self.allocator = Entry(name=name, value=text, place=place)
        return "used", "plan.memory.alloc_conf"


def surroundings(shell: Shell, launcher: Sequence[Word], file: str, define: Collection[str]) -> Surroundings:
    """The environment of the command that trains. define: variables that the caller gives."""
    found = Surroundings()
    values = {name: words_of(shell.value(name, quoted=True), shell.unknown) for name in _NAMES if shell.holds(name)}
    stated = {name: ("".join(word.text for word in words), words) for name, words in values.items() if words}
    for part, whole in ((part, word) for word in launcher for part in _BETWEEN.split(word.text)):
        if passed := _PASSED.search(part):
            stated[passed[1]] = passed[2], [whole]
    for name in (name for name in _NAMES if name in stated):
        text, words = stated[name]
        place = f"--define {name}" if name in define else f"{file}:{words[0].line}"
        if unknown := [one.what for word in words for one in word.unknown]:
            note = f"hangs on {', '.join(unknown)}: taken as not set; --define {name}='…' gives it"
            found.settings.append(Setting(name=name, value="?", place=place, use="unknown", note=note))
        elif text:
            found.put(name, text, place)
    off = [name for name in _ENGINE if stated.get(name, ("",))[0] == "0"]
    if _ENGINE[1] in off:  # without either PyTorch's operators are left
        where = f"{file}:{stated[_ENGINE[1]][1][0].line}"
        found.changes["attention.kernel"] = ("math" if len(off) > 1 else "flash2", where)
    return found
