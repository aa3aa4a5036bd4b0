"""The command among a script's commands that trains, taken apart: launcher, script, and the script's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.base.units import whole
from simulator.formats.readers.plans.allocator import allocator_of
from simulator.formats.readers.plans.options import megatron_arguments, table_of
from simulator.formats.readers.plans.reading import MAX_SETTINGS, UNSET, Entry, Setting
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Unknown, Word, words_of
from simulator.spec.plan.alloc_conf import VARIABLES

# Words that only a training command of Megatron's has
_SIGNS: Final = {
    "--micro-batch-size", "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--global-batch-size",
}  # fmt: skip
_SBATCH: Final = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_SBATCH_OPTION: Final = re.compile(r"(?<!\S)(--[\w-]+|-[A-Za-z])(?:[=\s]\s*|(?=\d))([^\s-]\S*)")
_SHORT_N: Final = "-N"
_SHORT: Final = {_SHORT_N: "--nodes", "-n": "--ntasks", "-np": "--ntasks"}
_WORLD: Final = (
    ("nodes", ("--nnodes", "--nodes", "--num_nodes", "--num_machines", "--num-machines", "--num-nodes")),
    ("each", ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node", "--gres", "--ntasks-per-node")),
    ("all", ("--num_processes", "--num-processes", "--ntasks")),
)


_SLURM: Final = {  # what Slurm tells a job of its #SBATCH lines
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}
_PRINTS: Final = {
    "echo",
    "printf",
    "cat",
    "tee",
    "logger",
    "export",
    "declare",
    "local",
    "readonly",
}  # what never trains
_MAX_SOURCED: Final = 2**20


@dataclass
class LaunchLine:
    """options: of the training script, by name. unknown: what their values hang on; cures: flags that would give them.

    num_devices, num_nodes, world_place: what the launcher starts, if it says so. allocator: PyTorch's settings of it.
    """

    options: dict[str, Entry]
    unknown: dict[str, tuple[Unknown, ...]]
    num_devices: int | None
    world_place: str
    num_nodes: int | None = None
    world_fault: Fault | None = None
    allocator: Entry | None = None
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
        return [Fault(place=place, problem=problem, remedy=self.asked_for(flags), flags=flags)]

    def asked_for(self, flags: Sequence[tuple[str, str]]) -> str:
        """Flags without their values, and the values that the script knows."""
        names = [text.partition("=")[0] for _, text in flags]
        known = self._known(flags)
        return " ".join(f"--define {name}=VALUE" for name in names) + (f", one of {known}" if known else "")


def read_launch_line(text: str, file: str, define: Mapping[str, str]) -> LaunchLine:
    """The one training command of a script, a shell line or a list of arguments. Raises PlanError.

    define: variables, the script's arguments as `@`, which of several commands as `command`, and options by their names.
    """
    shell = Shell(text, file, define, source=lambda name: _beside(file, name))
    for option, names in _SLURM.items():
        value = _headers(text, file).get(option, ("", ""))[0].rpartition(":")[2]
        shell.variables |= {name: [[(char, 1) for char in value]] for name in names if value.isdecimal()}
    found = _training(shell.read()) or _training(shell.read_uncalled())
    line = LaunchLine({}, {}, None, file, choices=shell.shared.literals)
    if not found and (options := _held(shell)):
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
    _take_world(launcher, text, file, line)
    held = {name: words_of(shell.value(name, quoted=True), shell.unknown) for name in VARIABLES if shell.holds(name)}
    line.allocator, settings, faults = allocator_of(held, launcher, file, define)
    line.settings, line.faults = [*line.settings, *settings], [*line.faults, *faults]
    _tell(shell, file, line)
    return line


def _take_stage(shell: Shell, file: str, line: LaunchLine) -> None:
    """ZeRO's stage where it stands in DeepSpeed's own file alone: a here-document of the script, or a file beside it."""
    asked = line.options.get("--deepspeed_config")
    if "--deepspeed" not in line.options or "--zero-stage" in line.options or asked is None:
        return
    beside = _beside(file, str(asked.value).rpartition("/")[2])
    for text in (*(text for text, _ in shell.shared.bodies), *([beside] if beside else [])):
        found = re.search(r'"stage"\s*:\s*(\d|\$\{?(\w+)\}?)', text)
        value = words_of(shell.value(found[2], quoted=False), shell.unknown) if found and found[2] else []
        digit = value[0].text if value else found[1] if found else ""
        if digit.isdecimal():
            line.options["--zero-stage"] = Entry(name="--zero-stage", value=digit, place=asked.place)


def _beside(file: str, name: str) -> str | None:
    """A file in the script's folder, None where there is none that can be read."""
    path = Path(file).parent / name
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SOURCED:
            return None
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
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


def _held(shell: Shell) -> list[Word]:
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
        raise PlanError(Fault(place=file, problem=problem, remedy="the training command, or its arguments"))
    if 1 <= (number := whole(chosen) or 0) <= len(found):
        return found[number - 1]
    if len(found) > 1:
        lines = ", ".join(str(command[0].line) for command in found)
        problem = f"{len(found)} commands train, at lines {lines}"
        remedy = f"keep one, or --define command=N, 1 to {len(found)}"
        raise PlanError(Fault(place=file, problem=problem, remedy=remedy, flags=(("--define", "command=1"),)))
    return found[0]


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
        raise PlanError(Fault(place=file, problem=f"more than {MAX_SETTINGS} options", remedy="a training command"))


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
            remedy += f", or {line.asked_for(cures)}" if unknown.asks else ""
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


def _take_world(words: Sequence[Word], text: str, file: str, line: LaunchLine) -> None:
    """What the launcher starts: nodes × processes a node, from its options, or from the script's #SBATCH lines."""
    stated = {**_headers(text, file), **_launched(words, file)}
    counts: dict[str, tuple[int, str]] = {}
    for kind, names in _WORLD:
        for name in names:
            value, where = stated.get(name, ("", ""))
            value = value.rpartition(":")[2]  # torchrun's least:most, Slurm's gpu:h100:8
            if re.fullmatch(r"\d{1,7}", value) and int(value) and kind not in counts:
                counts[kind] = (int(value), where)
    _unsettled(words, file, line, counts)
    if "all" in counts:
        line.num_devices, line.world_place = counts["all"]
    elif "each" in counts and "nodes" in counts:
        line.num_devices = counts["each"][0] * counts["nodes"][0]
        line.world_place = counts["nodes"][1]
    elif "each" in counts and not any(name in stated for name in _WORLD[0][1]):
        line.num_devices, line.world_place = counts["each"]  # one node is torchrun's default
    if "nodes" in counts:
        line.num_nodes = counts["nodes"][0]


def _unsettled(words: Sequence[Word], file: str, line: LaunchLine, counts: dict[str, tuple[int, str]]) -> None:
    """Numbers that are known only when the script runs: of nodes, a fault; of processes a node, all of its GPUs."""
    kinds = {name: kind for kind, names in _WORLD for name in names} | {_SHORT_N: "nodes", "-n": "all"}
    for option, value in pairwise(words):
        kind = kinds.get(option.text)
        if kind is None or not value.unknown or kind in counts:
            continue
        what = value.unknown[0].what
        variable = value.unknown[0].variable
        remedy = f"--define {variable}=N, or --nodes N" if variable else "--nodes N"
        problem = f"{option.text} hangs on {what}, which this file does not settle"
        place = f"{file}:{option.line}"
        if kind == "each":
            note = f"{what} is not settled: all GPUs of a node" + (f"; --define {variable}=N" if variable else "")
            line.settings.append(Setting(name=option.text, value="?", place=place, use="used", note=note))
            if not any(word.text in kinds and kinds[word.text] == "nodes" for word in words):
                counts.setdefault("nodes", (1, place))
        elif line.world_fault is None:
            cure = (("--nodes", "1"),)
            line.world_fault = Fault(place=place, problem=problem, remedy=remedy, flags=cure)


def _headers(text: str, file: str) -> dict[str, tuple[str, str]]:
    """#SBATCH lines: option -> (value, place); `gpu:h100:8` is 8."""
    found = {}
    for line in _SBATCH.finditer(text):
        where = f"{file}:{text.count(chr(10), 0, line.start()) + 1}"
        for name, value in _SBATCH_OPTION.findall(line.group(1).partition(" #")[0]):
            found[_SHORT.get(name, name)] = (value, where)
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
