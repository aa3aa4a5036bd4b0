"""A command line that works: what was asked, with the flags that the faults of a plan's file name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import Fault, InputError
from simulator.formats.study.tables import PlanFile
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from simulator.formats.readers.plans import Draft

_MOST_ROUNDS: Final = 12  # what a flag settles can bring the next fault to light


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command was given: a study's file, flags of nouns and of Plan's fields, `--set`s, and a plan's file."""

    file: Path | None
    flags: Mapping[str, str]
    plan_flags: Mapping[str, str]
    settings: tuple[str, ...]
    plan_file: PlanFile
    nouns: frozenset[str] = field(default=frozenset({"model", "cluster", "nodes", "placement", "calibration"}))

    def command(self) -> str:
        """As a shell takes it."""
        words = ["shardwise", "predict", *([str(self.file)] if self.file else []), "--plan", str(self.plan_file.path)]
        words += ["--plan-format", self.plan_file.form] if self.plan_file.form else []
        words += [f"--define={text}" for text in self.plan_file.define]
        for name, text in (*self.flags.items(), *self.plan_flags.items()):
            words += [f"--{name.replace('_', '-')}", text]
        for text in self.settings:
            words += ["--set", text]
        return " ".join(map(_quoted, words))

    def also(self, given: Iterable[tuple[str, str]]) -> Command:
        """With more flags; of one that is there already the new value holds."""
        flags, plan_flags = dict(self.flags), dict(self.plan_flags)
        settings, define = self.settings, self.plan_file.define
        for flag, value in given:
            name = flag.removeprefix("--").replace("-", "_")
            if name in ("define", "set"):
                key = value.partition("=")[0] + "="
                rest = define if name == "define" else settings
                rest = (*(text for text in rest if not text.startswith(key)), value)
                define, settings = (rest, settings) if name == "define" else (define, rest)
            elif name in self.nouns:
                flags[name] = value
            else:
                plan_flags[name] = value
        plan_file = replace(self.plan_file, define=define)
        return replace(self, flags=flags, plan_flags=plan_flags, settings=settings, plan_file=plan_file)


def _quoted(word: str) -> str:
    """For a shell, and for the terminal that shows it: what that would obey is spelled out as bash and zsh read it."""
    if word.isprintable():
        return shlex.quote(word)
    spelled = (
        c if c.isprintable() and c not in "'\\" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c in word
    )
    return f"$'{''.join(spelled)}'"


def ready_command(command: Command, faults: Iterable[Fault], attempt: Callable[[Command], Draft | None]) -> str:
    """A command that `attempt` takes, made by adding the flags that faults name; empty if they lead to none."""
    for _ in range(_MOST_ROUNDS):
        more = command.also(pair for fault in faults for pair in fault.flags or _by_remedy(fault))
        if more == command:
            return ""
        command = more
        try:
            draft = attempt(command)
        except InputError as exc:
            faults = exc.faults
        else:
            return _complete(command, draft).command()
    return ""


def _by_remedy(fault: Fault) -> tuple[tuple[str, str], ...]:
    """A rule of legality says what would be right as `tp = 2`; whether it is, the next attempt shows."""
    found = re.match(r"([a-z_]+) = (\w+)", fault.remedy)
    return ((f"--{found[1]}", found[2]),) if found and found[1] in Plan.flat_fields() else ()


def assumed_note(command: Command, draft: Draft | None) -> tuple[str, ...]:
    """One line that lists assumed values and a command that states them all; empty if the file states everything."""
    if draft is None or not draft.assumed:
        return ()
    flags = ", ".join(f"--{name.replace('_', '-')} {value}" for name, (value, _) in draft.assumed.items())
    head = f"assumed, because {draft.file} leaves it to the training script: {flags}"
    return (f"{head}; to give your own: {_complete(command, draft).command()}",)


def _complete(command: Command, draft: Draft | None) -> Command:
    taken = draft.assumed if draft is not None else {}
    return command.also((f"--{name}", str(value)) for name, (value, _) in taken.items())
