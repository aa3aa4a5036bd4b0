"""The command among a script's commands that trains, taken apart: launcher, script, and the script's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.base.files import ordinary
from simulator.formats.readers.plans.launch_environment import Surroundings, surroundings
from simulator.formats.readers.plans.launch_world import World, slurm_variables, world_of
from simulator.formats.readers.plans.options import megatron_arguments, table_of
from simulator.formats.readers.plans.reading import MAX_SETTINGS, UNSET, Entry, Setting
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Unknown, Word, chosen_command, words_of

# Words that only a training command of Megatron's has
_SIGNS: Final = {
    "--micro-batch-size", "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--global-batch-size",
}  # fmt: skip
# what never trains
_PRINTS: Final = {"echo", "printf", "cat", "tee", "logger", "export", "declare", "local", "readonly"}
_MAX_SOURCED: Final = 2**20


@dataclass
class LaunchLine:
    """options: of the training script, by name. unknown: what their values hang on; cures: flags that would give them.

    world: what the launcher starts, if it says so. around: the command's environment.
    """

    options: dict[str, Entry]
    unknown: dict[str, tuple[Unknown, ...]]
    world: World
    around: Surroundings = field(default_factory=Surroundings)
    cures: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)  # what the script compares its variables with
    settings: list[Setting] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def gathered(self, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """Faults, those that the same variables would mend as one."""
        groups: dict[object, list[Fault]] = {}
        for fault in map(self._curable, faults):
            alike = bool(fault.flags) and all(flag == "--define" for flag, _ in fault.flags)
            groups.setdefault(fault.flags if alike else fault, []).append(fault)
        return tuple(fault for group in groups.values() for fault in self._joined(group))

    def _curable(self, fault: Fault) -> Fault:
        """With a flag, where there is none: without the option the rest is at one with itself."""
        option = fault.place.split(": ")[-1]
        if not fault.flags and option in self.options:
            return replace(fault, flags=(("--define", f"{option}="),))
        known = self._known(fault.flags)
        return (
            replace(fault, remedy=f"{fault.remedy}, one of {known}")
            if known and "one of" not in fault.remedy
            else fault
        )

    def _known(self, flags: Sequence[tuple[str, str]]) -> str:
        names = [text.partition("=")[0] for flag, text in flags if flag == "--define"]
        return ", ".join(word for name in names for word in self.choices.get(name, ()))

    def _joined(self, faults: Sequence[Fault]) -> Sequence[Fault]:
        named = (f.problem.split()[1] if f.problem.startswith("options:") else f.place.split(": ")[-1] for f in faults)
        names = list(dict.fromkeys(named))
        if len(names) == 1:
            return faults
        variables = ", ".join(text.partition("=")[0] for _, text in faults[0].flags)
        problem = f"{', '.join(names)} hang on {variables}, which this file does not settle"
        place, flags = faults[0].place.split(": ")[0], faults[0].flags
        return [Fault(place=place, problem=problem, remedy=self.remedy_for(flags), flags=flags)]

    def remedy_for(self, flags: Sequence[tuple[str, str]]) -> str:
        """Flags without their values, and the values that the script knows."""
        names = [text.partition("=")[0] for _, text in flags]
        known = self._known(flags)
        return " ".join(f"--define {name}=VALUE" for name in names) + (f", one of {known}" if known else "")


def read_launch_line(text: str, file: str, define: Mapping[str, str]) -> LaunchLine:
    """The one training command of a script, a shell line or a list of arguments. Raises PlanError.

    define: variables, the script's arguments as `@`, which of several commands as `command`, and options by their names.
    """
    shell = Shell(text, file, define, source=lambda name: _beside(file, name))
    slurm = slurm_variables(text, file)
    shell.variables |= {name: [[(char, 1) for char in value]] for name, value in slurm.items()}
    found = _training(shell.read()) or _training(shell.read_uncalled())
    line = LaunchLine({}, {}, World(file), choices=shell.shared.literals)
    if not found and (options := _options_of_variables(shell)):
        found = [options]
        note = "no command here trains: the options that its variables hold are read"
        line.settings.append(Setting(name="the script", value="settings", place=file, use="not modelled", note=note))
    launcher, script = _parted(_only(found, file, define.get("command", "")))
    _take_options(script, file, line, shell)
    for name, value in define.items():
        if name.startswith("--"):
            _put(line, name, value.split(), f"--define {name}", ())
            if not value:
                line.options.pop(name)
    _take_stage(shell, file, line)
    line.world = world_of(launcher, text, file)
    line.around = surroundings(shell, launcher, file, define)
    line.settings += [*line.world.settings, *line.around.settings]
    line.faults += line.around.faults
    _tell(shell, file, line)
    return line


def _take_stage(shell: Shell, file: str, line: LaunchLine) -> None:
    """Take ZeRO's stage from DeepSpeed's own file: a here-document of the script, or a file in its folder."""
    config = line.options.get("--deepspeed_config")
    if "--deepspeed" not in line.options or "--zero-stage" in line.options or config is None:
        return
    beside = _beside(file, str(config.value).rpartition("/")[2])
    for text in (*(text for text, _ in shell.shared.bodies), *([beside] if beside else [])):
        found = re.search(r'"stage"\s*:\s*(\d|\$\{?(\w+)\}?)', text)
        value = words_of(shell.value(found[2], quoted=False), shell.unknown) if found and found[2] else []
        digit = value[0].text if value else found[1] if found else ""
        if digit.isdecimal():
            line.options["--zero-stage"] = Entry(name="--zero-stage", value=digit, place=config.place)


def _beside(file: str, name: str) -> str | None:
    """A file in the script's folder, None where there is none that can be read."""
    path = Path(file).parent / name
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SOURCED:
            return None
        return ordinary(path).read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None


def _training(commands: Sequence[Sequence[Word]]) -> list[list[Word]]:
    """Commands with Megatron's arguments; one that stands twice with the same words counts once."""
    found: dict[tuple[str, ...], list[Word]] = {}
    for command in commands:
        unwrapped = _unwrapped(command)
        is_one = any(word.text.partition("=")[0] in _SIGNS for word in unwrapped)
        if is_one and command[0].text not in _PRINTS:
            found.setdefault(tuple(word.text for word in unwrapped), unwrapped)
    return list(found.values())


def _options_of_variables(shell: Shell) -> list[Word]:
    """Options in the script's variables, where another script is to take them."""
    words: list[Word] = []
    for name in list(shell.variables):
        inside = _unwrapped(words_of(shell.value(name, quoted=False), shell.unknown))
        if any(word.text.partition("=")[0] in _SIGNS for word in inside):
            words += inside
    return words


def _only(found: Sequence[list[Word]], file: str, chosen: str) -> list[Word]:
    if not found:
        problem = "no command here has Megatron's arguments (--micro-batch-size, --hidden-size, …)"
        raise PlanError.at(file, problem, "the training command, or its arguments")
    return chosen_command(found, [command[0].line for command in found], file, chosen)


def _tell(shell: Shell, file: str, line: LaunchLine) -> None:
    """Files that are not there, and variables that the script's conditions found unset."""
    for name, where in dict.fromkeys(shell.shared.missing):
        note = "not beside the script: what it sets is unknown; --define NAME=VALUE gives it"
        line.settings.append(Setting(name="source", value=name, place=f"{file}:{where}", use="unknown", note=note))
    for name, where in shell.shared.unset.items():
        note = "not set in the file: a condition takes it as unset; --define gives it"
        line.settings.append(Setting(name=name, value="?", place=f"{file}:{where}", use="no effect", note=note))


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


def _take_options(words: Sequence[Word], file: str, line: LaunchLine, shell: Shell) -> None:
    name, place, values = "", "", [""]
    unknown: list[Unknown] = []

    def close() -> None:
        if name:
            _put(line, name, values, place, tuple(unknown))
            line.cures[name] = _cures(unknown, name, shell)

    values = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            close()
            name, equals, value = word.text.partition("=")
            values, place = ([value] if equals else []), f"{file}:{word.line}"
            unknown = list(word.unknown)
        elif word.unknown and not re.sub(r"[\ue000-\uf6ff]", "", word.text) and not _wants_value(name, values):
            _loose(word, file, line, shell)
        elif name:
            values.append(word.text)
            unknown += word.unknown
    close()
    if len(line.options) > MAX_SETTINGS:
        raise PlanError.at(file, f"more than {MAX_SETTINGS} options", "a training command")


def _wants_value(name: str, values: Sequence[str]) -> bool:
    """An unknown word behind an option that has none yet is taken for its value, unless it is known as a flag."""
    return bool(name) and not values and name not in megatron_arguments().flags


def _loose(word: Word, file: str, line: LaunchLine, shell: Shell) -> None:
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
            cures = _cures([unknown], variable, shell)
            remedy = f"--define {variable}='…' with what this run has"
            remedy += f", or {line.remedy_for(cures)}" if unknown.asks else ""
            line.faults.append(Fault(place=place, problem=f"options: {unknown.what}", remedy=remedy, flags=cures))
        else:
            note = "not set in the file: taken as empty; --define NAME='…' gives it"
            line.settings.append(Setting(name=unknown.what, value="?", place=place, use="unknown", note=note))


def _cures(unknown: Sequence[Unknown], option: str, shell: Shell) -> tuple[tuple[str, str], ...]:
    """Flags that would settle a value: one of the words that the script compares it with, or any job's number."""
    found = {}
    for one in unknown:
        for name in sorted(one.asks) or [one.variable]:
            words = [word for word in shell.shared.literals.get(name, []) if not set(word) & set("*?[")]
            others = [{"true": "false", "false": "true"}[word] for word in words if word in ("true", "false")]
            fits = [word for word in (*words, *others) if word not in shell.shared.refused.get(name, ())]
            example = "" if one.options else table_of("megatron")["examples"].get(option.removeprefix("--"), "1")
            known = next((word for word in ("none", "bf16", "false") if word in fits), fits[0] if fits else example)
            if name:
                found[name] = known
    return tuple(("--define", f"{name}={value}") for name, value in found.items())


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
