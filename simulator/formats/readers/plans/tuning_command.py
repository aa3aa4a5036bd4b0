"""The command among a script's commands that fine-tunes: its launcher, the program, the program's words.

Programs by their public command lines: accelerate 1.12 (commands/launch.py), trl 1 (cli/commands/training.py), LLaMA-Factory 0.9
(cli.py), axolotl 0.16 (cli/main.py), torchtune 0.6 (_cli/run.py), litgpt 0.5 (__main__.py), xtuner 0.1 (entry_point.py), ms-swift 4.5 (cli/main.py), Megatron-Bridge 0.5 (scripts/training/run_recipe.py), and
scripts with TrainingArguments as options (transformers, hf_argparser.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.formats.readers.plans.reading import MAX_SETTINGS, UNSET
from simulator.formats.readers.plans.shell_words import Unknown, Word, chosen_command

# Commands that start a program, by the program's name and its first word: the format of its settings
_COMMANDS: Final = {
    ("llamafactory-cli", "train"): "llama-factory", ("lmf", "train"): "llama-factory", ("axolotl", "train"): "axolotl",
    ("tune", "run"): "torchtune", ("xtuner", "train"): "xtuner", ("xtuner", "dist_train"): "xtuner",
    ("swift", "sft"): "ms-swift", ("swift", "pt"): "ms-swift", ("swift", "rlhf"): "ms-swift",
}  # fmt: skip
_MODULES: Final = {
    "axolotl.cli.train": "axolotl", "llamafactory.launcher": "llama-factory", "llamafactory.train": "llama-factory", "xtuner.tools.train": "xtuner",
    "verl.trainer.main_ppo": "verl",
}  # fmt: skip
_TRL: Final = ("sft", "dpo", "kto", "grpo", "reward", "rloo", "orpo", "cpo", "gkd", "ppo", "nash_md", "xpo", "online_dpo", "prm")  # fmt: skip
_PATHS: Final = (  # scripts of the libraries' own repositories
    (re.compile(rf"(?:^|/)(?:trl|examples)/scripts/({'|'.join(_TRL)})\.py$"), "trl"),
    (re.compile(r"(?:^|/)llamafactory/(?:launcher|train/tuner)\.py$"), "llama-factory"),
    (re.compile(r"(?:^|/)xtuner/tools/train\.py$"), "xtuner"),
    (re.compile(r"(?:^|/)run_recipe\.py$"), "megatron-bridge"),  # scripts/training
)
# Megatron-Bridge's ConfigContainer
_CONTAINER: Final = re.compile(r"\+{0,2}(?:model|train|ddp|peft|optimizer|dataset|mixed_precision)[.=]")
_SPAWNERS: Final = re.compile(r"(?:^|/)(?:accelerate|torchrun|deepspeed|srun|mpirun|accelerate-launch)$|torch\.distributed\.(?:run|launch)$")  # fmt: skip
# Options that only a script with TrainingArguments has
_SIGNS: Final = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "use_peft", "lora_r", "finetuning_type", "fsdp", "fsdp_config", "gradient_checkpointing"})  # fmt: skip
_PRINTS: Final = ("echo", "printf", "cat", "tee", "logger", "export")
_NAMED: Final = rf"llamafactory-cli[ \t]+train|lmf[ \t]+train|axolotl[ \t]+train|tune[ \t]+run|litgpt[ \t]+finetune\w*|xtuner[ \t]+(?:dist_)?train|swift[ \t]+(?:sft|pt|rlhf)|trl[ \t]+(?:{'|'.join(_TRL)})|-m[ \t]+(?:axolotl\.cli|trl\.scripts|llamafactory|verl\.trainer)\.\w+"  # fmt: skip
# Lines of libraries' own programs, and those that may launch a script
NAMED: Final = re.compile(rf"(?:^|[\s;&|/])(?:{_NAMED})\s")
LAUNCHES: Final = re.compile(rf"(?:^|[\s;&|/])(?:{_NAMED}|accelerate[ \t]+launch|torchrun|deepspeed[ \t]+\S+|python[\d.]*[ \t]+(?:-\S+[ \t]+)*\S+)\s")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: as it is spelled, its values as text, where it stands, what in them is not known."""

    spelled: str
    values: tuple[str, ...]
    place: str
    unknown: tuple[Unknown, ...] = ()

    @property
    def value(self) -> Any:  # noqa: ANN401  plain data
        """As plain data: a flag is true, JSON a table or a list."""
        if self.unknown:
            return UNSET
        found = [plain(text) for text in self.values]
        return True if not found else found[0] if len(found) == 1 else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """form: of the program's settings ("trl": those of `transformers`). part: which of the program's trainers or recipes.

    launcher: the words ahead of the program. words: those behind it. alone: the program starts its own processes.
    """

    form: str
    launcher: Sequence[Word]
    words: Sequence[Word]
    line: int
    part: str = ""
    alone: bool = False

    @property
    def spawns(self) -> bool:
        """Something starts a process a GPU."""
        return any(_SPAWNERS.search(word.text) for word in self.launcher)


def command_of(commands: Sequence[Sequence[Word]], file: str, chosen: str) -> Command:
    """The one that trains; `chosen`: which of several. Raises PlanError."""
    found: dict[tuple[str, ...], Command] = {}
    for words in commands:
        command = _program(list(words)) if words and words[0].text not in _PRINTS else None
        if command is not None:
            found.setdefault(tuple(word.text for word in words), command)
    every = list(found.values())
    if not every:
        problem = "no command here fine-tunes (accelerate launch, torchrun, trl, llamafactory-cli, axolotl, tune, litgpt, xtuner, swift, verl, …)"
        raise PlanError.at(file, problem, "the training command; or the file that it names")
    return chosen_command(every, [command.line for command in every], file, chosen)


def _program(words: list[Word]) -> Command | None:
    """The program that a command's words run; None: none that trains."""
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        name, after = PurePosixPath(text).name, texts[index + 1] if index + 1 < len(texts) else ""
        ahead, line = words[:index], words[0].line
        form = _COMMANDS.get((name, after))
        if form is not None:
            return Command(form=form, part=after, launcher=ahead, words=words[index + 2 :], line=line, alone=True)
        if name == "trl" and after in _TRL:
            alone = index == 0 or texts[index - 1] != "-m"
            return Command(form="trl", part=after, launcher=ahead, words=words[index + 2 :], line=line, alone=alone)
        if name == "litgpt" and after.startswith("finetune"):
            more = after == "finetune" and texts[index + 2 : index + 3] in (["lora"], ["full"], ["adapter"])
            part = f"finetune_{texts[index + 2]}" if more else after
            rest = words[index + 2 + more :]
            return Command(form="litgpt", part=part, launcher=ahead, words=rest, line=line, alone=True)
        if text == "-m" and after:
            return _module(after, ahead, words[index + 2 :], line) or _unless_launcher(after, words, index)
        if PurePosixPath(text).suffix == ".py" and not text.startswith("-"):
            return _script(text, ahead, words[index + 1 :], line)
    return None


def _module(name: str, ahead: list[Word], rest: list[Word], line: int) -> Command | None:
    if name in _MODULES:
        return Command(form=_MODULES[name], launcher=ahead, words=rest, line=line)
    trl = re.fullmatch(rf"trl\.scripts\.({'|'.join(_TRL)})", name)
    return Command(form="trl", part=trl[1], launcher=ahead, words=rest, line=line) if trl else None


def _unless_launcher(name: str, words: list[Word], index: int) -> Command | None:
    """`python -m torch.distributed.run …` and `-m accelerate.commands.launch` launch what follows; other modules are scripts."""
    if name.startswith(("torch.distributed", "accelerate")) or name in ("trl", "litgpt", "trl.cli"):
        name = name.partition(".")[0] if name != "trl.cli" else "trl"
        found = _program([Word(name, words[index + 1].line), *words[index + 2 :]])
        return Command(
            form=found.form, part=found.part, launcher=[*words[: index + 2], *found.launcher], words=found.words, line=words[0].line
        ) if found else None  # fmt: skip
    return _script(name, words[:index], words[index + 2 :], words[0].line)


def _script(name: str, ahead: list[Word], rest: list[Word], line: int) -> Command | None:
    """A script, which trains if something launches it over GPUs or its options are those of a Trainer."""
    known = next(
        ((found[1] if form == "trl" else "", form) for pattern, form in _PATHS if (found := pattern.search(name))), None
    )
    if known is not None:
        return Command(form=known[1], part=known[0], launcher=ahead, words=rest, line=line)
    options = {word.text.partition("=")[0].lstrip("-").replace("-", "_") for word in rest if word.text.startswith("--")}
    if any(_CONTAINER.match(word.text) for word in rest) and (options & {"recipe", "config_file"} or "bridge" in name):
        return Command(form="megatron-bridge", launcher=ahead, words=rest, line=line)
    launched = any(_SPAWNERS.search(word.text) for word in ahead) and bool(rest)
    if not (options & _SIGNS or launched):
        return None
    return Command(form="script", part=name, launcher=ahead, words=rest, line=line)


def parsed(words: Sequence[Word], file: str) -> tuple[list[Word], dict[str, Option]]:
    """(words that are no option's, options by their names without dashes in front; the last of two holds).

    A word behind an option is its value; a `key=value` that begins with a letter is none. Raises PlanError.
    """
    loose: list[Word] = []
    found: dict[str, Option] = {}
    name = ""
    for word in words:
        begins = re.match(r"--?[A-Za-z]", word.text)
        if begins:
            name, equals, value = word.text.partition("=")
            key = name.lstrip("-")
            found.pop(key, None)
            values = (value,) if equals else ()
            found[key] = Option(spelled=name, values=values, place=f"{file}:{word.line}", unknown=word.unknown)
            name = "" if equals else key
        elif name and not re.match(r"\+{0,2}~?[A-Za-z_][\w.]*=", word.text):
            old = found[name]
            found[name] = Option(
                spelled=old.spelled, values=(*old.values, word.text), place=old.place, unknown=(*old.unknown, *word.unknown)
            )  # fmt: skip
        else:
            name = ""
            loose.append(word)
    if len(found) + len(loose) > MAX_SETTINGS:
        raise PlanError.at(file, f"more than {MAX_SETTINGS} options", "a training command")
    return loose, found


def plain(text: str) -> Any:  # noqa: ANN401, PLR0911  plain data of each kind
    """A word's value as YAML and argparse's types would have it."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none", ""):
        return None
    if re.fullmatch(r"[+-]?\d{1,18}", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.?\d+)(e[+-]?\d{1,3})?", word, re.IGNORECASE):
        return float(word)
    if word[0] in "{[":
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return text
    return text
