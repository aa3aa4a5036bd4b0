"""The command among a script's commands that trains, taken apart: launcher, script, and the script's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.formats.readers.plans.options import megatron_arguments
from simulator.formats.readers.plans.reading import MAX_SETTINGS, UNSET, Entry, Setting
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Unknown, Word

# Words that only a training command of Megatron's has
_SIGNS: Final = {
    "--micro-batch-size", "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--global-batch-size",
}  # fmt: skip
_SBATCH: Final = re.compile(r"^#SBATCH\s+(--[\w-]+|-[A-Za-z])(?:[=\s]\s*|(?=\d))(\S+)", re.MULTILINE)
_SHORT: Final = {"-N": "--nodes", "-n": "--ntasks"}
_WORLD: Final = (
    ("nodes", ("--nnodes", "--nodes", "--num_nodes", "--num_machines", "--num-machines", "--num-nodes")),
    ("each", ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node", "--gres", "--ntasks-per-node")),
    ("all", ("--num_processes", "--num-processes", "--ntasks")),
)


@dataclass
class LaunchLine:
    """options: of the training script, by name. num_devices, world_place: what the launcher starts, if it says so."""

    options: dict[str, Entry]
    unknown: dict[str, tuple[Unknown, ...]]
    num_devices: int | None
    world_place: str
    world_fault: Fault | None = None
    settings: list[Setting] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def read_launch_line(text: str, file: str, define: Mapping[str, str]) -> LaunchLine:
    """The one training command of a script, a shell line or a list of arguments. Raises PlanError."""
    found = []
    for command in Shell(text, file, define).read():
        unwrapped = _unwrapped(command)
        if any(word.text.partition("=")[0] in _SIGNS for word in unwrapped):
            found.append(unwrapped)
    if not found:
        problem = "no command here has Megatron's arguments (--micro-batch-size, --hidden-size, …)"
        raise PlanError(Fault(place=file, problem=problem, remedy="the training command, or its arguments"))
    if len(found) > 1:
        lines = ", ".join(str(command[0].line) for command in found)
        problem = f"{len(found)} commands train, at lines {lines}"
        raise PlanError(Fault(place=file, problem=problem, remedy="keep one"))
    launcher, script = _parted(found[0])
    line = LaunchLine({}, {}, None, file)
    _take_options(script, file, line)
    _take_world(launcher, text, file, line)
    return line


def _unwrapped(command: Sequence[Word]) -> list[Word]:
    """`bash -c "…"`, `eval "…"`: the words inside the quotes."""
    words: list[Word] = []
    for word in command:
        if re.search(r"\s--[a-z]", word.text) or (word.text.startswith("--") and re.search(r"\s", word.text)):
            offset = 0
            for piece in re.split(r"(\s+)", word.text):
                if piece.strip():
                    words.append(Word(piece.strip("'\""), word.line + offset, word.unknown))
                offset += piece.count("\n")
        else:
            words.append(word)
    return words


def _parted(words: list[Word]) -> tuple[list[Word], list[Word]]:
    """The launcher's words, and the words after the script's name; without a script name, all words count as both."""
    for index, word in enumerate(words):
        if PurePosixPath(word.text).suffix == ".py" and not word.text.startswith("-"):
            return words[:index], words[index + 1 :]
    modules = [index for index, word in enumerate(words[:-1]) if word.text == "-m"]
    if modules:  # python -m package.of.the.script
        return words[: modules[-1]], words[modules[-1] + 2 :]
    return words, words


def _take_options(words: Sequence[Word], file: str, line: LaunchLine) -> None:
    name, place, values = "", "", [""]
    unknown: list[Unknown] = []

    def close() -> None:
        if name:
            _put(line, name, values, place, tuple(unknown))

    values = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            close()
            name, equals, value = word.text.partition("=")
            values, place = ([value] if equals else []), f"{file}:{word.line}"
            unknown = list(word.unknown)
        elif word.unknown and not re.sub(r"[\ue000-\uf6ff]", "", word.text) and not _wants_value(name, values):
            _loose(word, file, line)
        elif name:
            values.append(word.text)
            unknown += word.unknown
    close()
    if len(line.options) > MAX_SETTINGS:
        raise PlanError(Fault(place=file, problem=f"more than {MAX_SETTINGS} options", remedy="a training command"))


def _wants_value(name: str, values: Sequence[str]) -> bool:
    """An unknown word behind an option that has none yet is taken for its value, unless it is known as a flag."""
    return bool(name) and not values and name not in megatron_arguments().flags


def _loose(word: Word, file: str, line: LaunchLine) -> None:
    """A word that may hold any options: those of a condition's arm must be given, unset ones are taken as empty."""
    for unknown in word.unknown:
        place = f"{file}:{unknown.line}"
        if unknown.options and all(map(megatron_arguments().has_no_effect, unknown.options)):
            note = f"{', '.join(sorted(unknown.options))}, or none of them"
            line.settings.append(
                Setting(name=unknown.what.split()[0], value="?", place=place, use="no effect", note=note)
            )
        elif unknown.kind == "condition":
            variable = unknown.what.split()[0].removeprefix("$")
            remedy = f"--define {variable}='…' with what this run has"
            line.faults.append(Fault(place=place, problem=f"options: {unknown.what}", remedy=remedy))
        else:
            note = "not set in the file: taken as empty; --define NAME='…' gives it"
            line.settings.append(Setting(name=unknown.what, value="?", place=place, use="unknown", note=note))


def _put(line: LaunchLine, name: str, values: Sequence[str], place: str, unknown: tuple[Unknown, ...]) -> None:
    old = line.options.pop(name, None)
    if old is not None:
        shown = " ".join(old.value) if isinstance(old.value, list) else str(old.value)
        note = f"given again at {place}: the last one holds"
        line.settings.append(Setting(name=name, value=shown, place=old.place, use="overruled", note=note))
    value = True if not values else values[0] if len(values) == 1 else list(values)
    line.unknown.pop(name, None)
    if unknown:
        line.unknown[name] = unknown
        value = UNSET if value is not True else True
    line.options[name] = Entry(name=name, value=value, place=place)


def _take_world(words: Sequence[Word], text: str, file: str, line: LaunchLine) -> None:
    """What the launcher starts: nodes × processes a node, from its options, or from the script's #SBATCH lines."""
    stated = {**_headers(text, file), **_launched(words, file)}
    line.world_fault = _unsettled(words, file)
    counts: dict[str, tuple[int, str]] = {}
    for kind, names in _WORLD:
        for name in names:
            value, where = stated.get(name, ("", ""))
            if re.fullmatch(r"\d{1,7}", value) and int(value) and kind not in counts:
                counts[kind] = (int(value), where)
    if "all" in counts:
        line.num_devices, line.world_place = counts["all"]
    elif "each" in counts and "nodes" in counts:
        line.num_devices = counts["each"][0] * counts["nodes"][0]
        line.world_place = counts["nodes"][1]
    elif "each" in counts and not any(name in stated for name in _WORLD[0][1]):
        line.num_devices, line.world_place = counts["each"]  # one node is torchrun's default


def _unsettled(words: Sequence[Word], file: str) -> Fault | None:
    """A number of nodes or processes that is known only when the script runs."""
    names = {name for _, names in _WORLD for name in names} | set(_SHORT)
    for option, value in pairwise(words):
        if option.text in names and value.unknown:
            what = value.unknown[0].what
            variable = what.lstrip("$")
            remedy = f"--define {variable}=N, or --nodes N" if variable.isidentifier() else "--nodes N"
            problem = f"{option.text} hangs on {what}, which this file does not settle"
            return Fault(place=f"{file}:{option.line}", problem=problem, remedy=remedy)
    return None


def _headers(text: str, file: str) -> dict[str, tuple[str, str]]:
    """#SBATCH lines: option -> (value, place); `gpu:h100:8` is 8."""
    found = {}
    for match in _SBATCH.finditer(text):
        name = _SHORT.get(match.group(1), match.group(1))
        where = f"{file}:{text.count(chr(10), 0, match.start()) + 1}"
        found[name] = (match.group(2).rpartition(":")[2] if name == "--gres" else match.group(2), where)
    return found


def _launched(words: Sequence[Word], file: str) -> dict[str, tuple[str, str]]:
    """A launcher's options: option -> (value, place)."""
    found = {}
    for index, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        name = _SHORT.get(name, name)
        if not equals and index + 1 < len(words):
            value = words[index + 1].text
        if name.startswith("--"):
            found[name] = (value, f"{file}:{word.line}")
    return found
