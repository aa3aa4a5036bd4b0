"""What a command that fine-tunes says of its run: the file that it names, its options over it, its launcher's under both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, PlanError
from simulator.base.schema import merged, nested
from simulator.formats.readers.plans.accelerate_launch import trainer_settings
from simulator.formats.readers.plans.by_framework import settings_of, text_of
from simulator.formats.readers.plans.launch_world import WORLD_OPTIONS
from simulator.formats.readers.plans.options import options_of, shipped, table_of
from simulator.formats.readers.plans.reading import UNSET, Setting, shortened
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Word, words_of
from simulator.formats.readers.plans.tuning_command import Command, Option, parsed

# Names that scripts give to arguments of the Trainer's (FastChat, fastchat/train; QwenLM/Qwen, finetune.py; artidoro/qlora, qlora.py;
# transformers, examples/pytorch/language-modeling)
_ALIASES: Final = {
    "model_max_length": "max_length", "max_seq_length": "max_length", "max_seq_len": "max_length", "block_size": "max_length",
    "use_lora": "use_peft", "lora_rank": "lora_r", "lora_target": "lora_target_modules", "double_quant": "use_bnb_nested_quant",
    "use_flash_attn": "attn_implementation", "use_flash_attention": "attn_implementation", "torch_dtype": "dtype",
}  # fmt: skip
_OF_LLAMA_FACTORY: Final = frozenset({"finetuning_type", "cutoff_len", "lora_target", "stage", "template"})
_OF_SCRIPTS: Final = frozenset({"q_lora", "bits", "use_peft", "load_in_4bit", "load_in_8bit"})
# Names of a script's own options that may change what is trained, how long sequences are, or what products run in
_MATTERS: Final = re.compile(
    r"lora|peft|adapter|freez|unfreez|tune|quant|[48]_?bit|bits|length|_len|seq|pack|flash|attn|attention|dtype|precision|shard|parallel|"
    r"offload|checkpointing|compile|batch|accumul|optim|world|ref_model|freeze"
)
_STARTS: Final = re.compile(r"^[^-].*?(accelerate|torchrun|deepspeed|launch|run)$|^launch$")
_EXAMPLES: Final = {"model_name_or_path": "llama3.1-8b", "max_length": "2048", "base_model": "llama3.1-8b"}
_OF_XTUNER: Final = ("work-dir", "launcher", "seed", "resume", "auto-scale-lr", "local-rank", "cfg-options")
_LAUNCHERS: Final = {
    key: frozenset(table_of("accelerate")[f"launcher_{key}"]) for key in ("no_effect", "switches", "of_trl")
}
_COPY: Final = {"torchtune": "tune cp {} .", "xtuner": "xtuner copy-cfg {} ."}

Find = Callable[[str], Path]


@dataclass
class Launch:
    """One command as it is read. places, unset, cures: as `Stated` has them."""

    command: Command
    file: str
    shell: Shell
    find: Find
    launcher: dict[str, Option] = field(default_factory=dict)
    config: dict[str, tuple[Any, str]] = field(default_factory=dict)  # accelerate's, with the place of each
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)
    cures: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    recipe: str = ""  # of Megatron-Bridge
    own_words: bool = False  # the script has words of its own for adapters

    def put(self, name: str, option: Option, value: object = None) -> None:
        """A setting that the command states, over its file's."""
        self.data = nested(self.data, name.split("."), option.value if value is None else value)
        self.places[name] = (option.spelled, option.place)
        if option.unknown:
            self.unset[name] = ", ".join(one.what for one in option.unknown)
            asked = [one.variable for one in option.unknown if one.variable]
            self.cures[name] = tuple(("--define", f"{one}={_EXAMPLES.get(name, '1')}") for one in dict.fromkeys(asked))

    def tell(self, option: Option, use: Any, note: str = "") -> None:  # noqa: ANN401  a Setting's use
        """What became of an option that no reader takes."""
        value = UNSET if option.unknown else shortened(option.value)
        self.settings.append(Setting(name=option.spelled, value=value, place=option.place, use=use, note=note))

    def variable(self, name: str) -> tuple[str, int]:
        """An environment variable that the script sets, and its line; "": not set."""
        words = words_of(self.shell.value(name, quoted=True), self.shell.unknown) if self.shell.holds(name) else []
        return (words[0].text, words[0].line) if words and not words[0].unknown else ("", 0)


# -- the program's settings ------------------------------------------------------------------------------------------


def read_program(launch: Launch, define: Mapping[str, str]) -> tuple[str, str]:
    """The format of the program's settings, and its part; fills in the launch's settings."""
    command = launch.command
    words = list(command.words)
    launcher: dict[str, Option] = {}
    part = command.part
    if command.form == "torchtune":
        launcher, words, part = _recipe(words, launch.file)
    elif command.form == "axolotl" and any(word.text == "--" for word in words):
        index = next(index for index, word in enumerate(words) if word.text == "--")
        launcher, words = parsed(words[index + 1 :], launch.file)[1], words[:index]
    launch.recipe = define.get("recipe", "") if command.form == "megatron-bridge" else ""
    loose, options = parsed(words, launch.file)
    options |= _defined(define)
    if command.launcher:
        launcher |= parsed(_after_program(command.launcher), launch.file)[1]
    form = command.form
    if form in ("script", "trl"):
        _accelerate(launch, launcher, options if command.alone else {})
        form = _trainer_options(launch, loose, options)
    else:
        if form in ("axolotl", "llama-factory", "ms-swift"):  # a Trainer's
            _accelerate(launch, launcher, {})
        _FRAMEWORKS[form](launch, loose, options)
    launch.launcher |= launcher
    _launcher_rest(launch)
    if launch.recipe:
        return form, launch.recipe
    return form, part if command.form in ("trl", "torchtune", "ms-swift") else "script" if launch.own_words else ""


def _defined(define: Mapping[str, str]) -> dict[str, Option]:
    """Options that the caller gives by their names."""
    return {
        name[2:]: Option(spelled=name, values=tuple(value.split()), place=f"--define {name}")
        for name, value in define.items()
        if name.startswith("--")
    }


def _after_program(words: Any) -> list[Word]:  # noqa: ANN401  a sequence of words
    """A launcher's words without its name, and without a container's or Slurm's ahead of it."""
    starts = [index for index, word in enumerate(words) if _STARTS.search(word.text)]
    return list(words[starts[-1] + 1 :] if starts else words)


def _accelerate(launch: Launch, launcher: Mapping[str, Option], own: dict[str, Option]) -> None:
    """What accelerate's launcher passes on. own: trl's options, some of which are the launcher's (cli/commands/training.py)."""
    for name in [
        name for name in own if name.replace("-", "_") in _LAUNCHERS["of_trl"] or f"--{name}" in WORLD_OPTIONS
    ]:
        launcher = {**launcher, name: own.pop(name)}
    by_accelerate = any("accelerate" in word.text for word in launch.command.launcher) or launch.command.alone
    config: dict[str, Any] = {}
    named = launcher.get("config_file")
    file = launch.file
    if named is not None and by_accelerate and not named.unknown:
        config, file = _yaml(launch, str(named.value), named.place, "")
    if by_accelerate:
        found, faults = trainer_settings(launcher, config, file, launch.file)
        launch.faults += faults
        for name, (value, (spelled, place)) in found.items():
            launch.data = nested(launch.data, name.split("."), value)
            launch.places[name] = (spelled, place)
        launch.config = {key: (value, f"{file}: {key}") for key, value in config.items()}
    launch.launcher = dict(launcher)


def _launcher_rest(launch: Launch) -> None:
    """What of a launcher's options is neither read nor without effect."""
    spelled = {one[0] for one in launch.places.values()}
    for name, option in launch.launcher.items():
        key = name.replace("-", "_")
        read = option.spelled in spelled or f"--{name}" in WORLD_OPTIONS
        if not read and key not in _LAUNCHERS["switches"] and not _LAUNCHERS["no_effect"] & {key, name}:
            launch.tell(option, "unknown", "of the launcher")


def _yaml(launch: Launch, name: str, place: str, form: str) -> tuple[dict[str, Any], str]:
    """A file that the command names, as plain data, and its path."""
    path = launch.find(name)
    whose, data = shipped(name, "accelerate-packaged") if not form and not path.is_file() else ("", {})
    if whose:
        return dict(data), f"{name} (not here: {whose}'s own)"
    if not path.is_file():
        remedy = f"put it there; or --plan {Path(name).name}"
        if form in _COPY and not Path(name).suffix:
            remedy = f"`{_COPY[form].format(name)}` writes it: put it beside this file, and name it in the command"
        launch.faults.append(Fault(place, f"{name} is not beside this file", remedy))
        return {}, name
    try:
        data = settings_of(form, text_of(path), str(path), {})
    except PlanError as exc:
        launch.faults += exc.faults
        return {}, name
    launch.places |= {key: (key, f"{path}: {key}") for key in data}
    return data, str(path)


def _trainer_options(launch: Launch, loose: list[Word], options: dict[str, Option]) -> str:
    """TrainingArguments as options, over trl's `--config` or the one file that HfArgumentParser takes; the format."""
    options = {name.replace("-", "_"): option for name, option in options.items()}
    llama_factory = bool(_OF_LLAMA_FACTORY & options.keys()) and launch.command.form == "script"
    files = [word.text for word in loose if Path(word.text).suffix in (".yaml", ".yml", ".json")]
    config = options.pop("config", None)
    if config is not None and not config.unknown:
        files.append(str(config.value))
    for name in files[:1]:
        data, _ = _yaml(launch, name, f"{launch.file}:{launch.command.line}", "")
        launch.data = {**launch.data, **data}
        llama_factory = llama_factory or bool(_OF_LLAMA_FACTORY & data.keys())
    form = "llama-factory" if llama_factory else "transformers"
    known = options_of(form)
    takes = known.known | known.no_effect | set(known.off) | set(table_of(form)["names"])
    for name, option in options.items():
        key = name if name in takes or form != "transformers" else _ALIASES.get(name, name)
        if name.startswith("no_") and name[3:] in takes:
            launch.put(name[3:], option, value=False)
        elif name in _OF_SCRIPTS and launch.command.form == "script":
            _own(launch, name, option)
        elif key == "attn_implementation" and option.value is True:
            launch.put(key, option, value="flash_attention_2")
        elif isinstance(option.value, str) and name.endswith("_config") and option.value.endswith(".json"):
            launch.put(key, option, value=_yaml(launch, option.value, option.place, "")[0])
        elif key in takes or f"{key}." in takes or any(word.startswith(f"{key}.") for word in takes):
            launch.own_words = launch.own_words or name == "use_lora"
            launch.put(key, option)
        elif _MATTERS.search(name) and option.value not in (False, None):
            note = "the script's own: by its name it may change what is trained or how; flags of predict state it"
            launch.tell(option, "unknown", note)
        else:
            launch.tell(option, "unknown", "the script's own")
    return form


def _own(launch: Launch, name: str, option: Option) -> None:
    """Scripts' words for what peft and bitsandbytes do: `--q_lora` (FastChat: NF4; Qwen: GPTQ, by the model's name), `--bits 4`."""
    launch.own_words = launch.own_words or name in ("bits", "q_lora")
    if name == "bits":
        launch.put("use_peft", option, value=option.value in (4, 8))
        if option.value in (4, 8):
            launch.put(f"load_in_{option.value}bit", option, value=True)
    elif name == "q_lora":
        launch.put("load_in_4bit", option, value=bool(option.value))
    else:
        launch.put(name, option)


# -- frameworks with a file of their own -----------------------------------------------------------------------------


def _file_of(launch: Launch, loose: list[Word], form: str, named: Option | None = None) -> None:
    """The settings of the file that the command names first, or by `--config`."""
    name, place = (str(named.value), named.place) if named is not None else (loose[0].text, f"{launch.file}:{loose[0].line}") if loose else ("", launch.file)  # fmt: skip
    if (named.unknown if named is not None else loose[0].unknown if loose else ()) or not name:
        what = "hangs on what only a run knows" if name else "is not named"
        launch.faults.append(
            Fault(
                place,
                f"the file of its settings {what}",
                "its path in the command; --define NAME=VALUE sets a variable",
            )
        )
        return
    data, path = _yaml(launch, name, place, form)
    launch.data = {**launch.data, **data}
    if form == "torchtune":
        launch.settings.append(Setting(name="--config", value=name, place=place, use="used", note=f"read from {path}"))


def _pairs(launch: Launch, words: list[Word]) -> None:
    """OmegaConf's `key=value`, over the file's."""
    for word in words:
        key, equals, value = word.text.lstrip("+").partition("=")
        key = key if equals or not word.unknown else word.unknown[0].what
        option = Option(spelled=key, values=(value,), place=f"{launch.file}:{word.line}", unknown=word.unknown)
        if equals:
            launch.put(key, option)
        else:
            launch.tell(option, "unknown")


def _llama_factory(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    if loose and Path(loose[0].text).suffix in (".yaml", ".yml", ".json"):
        _file_of(launch, loose, "llama-factory")
        _pairs(launch, loose[1:])
    for name, option in options.items():
        launch.put(name.replace("-", "_"), option)


def _axolotl(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    _file_of(launch, loose, "axolotl")
    for name, option in options.items():
        key = name.replace("-", "_").replace("__", ".")
        if key not in _OF_AXOLOTL and f"--{key}" not in WORLD_OPTIONS:
            launch.put(key, option)


# Options of its command line that are no settings (cli/main.py, cli/args.py)
_OF_AXOLOTL: Final = frozenset({"launcher", "cloud", "sweep", "debug", "debug_text_only", "debug_num_examples", "prompter", "shard", "accelerate", "main_process_port", "use_ray", "ray_num_workers", "config"})  # fmt: skip


def _recipe(words: list[Word], file: str) -> tuple[dict[str, Option], list[Word], str]:
    """Options of torchrun, the recipe's words, and its name: the first word that is no option and no option's value."""
    for index, word in enumerate(words):
        behind = index > 0 and words[index - 1].text.startswith("--") and "=" not in words[index - 1].text
        if not word.text.startswith("-") and not (
            behind and words[index - 1].text not in ("--standalone", "--no-python")
        ):
            return parsed(words[:index], file)[1], words[index + 1 :], word.text
    raise PlanError.at(file, "tune run names no recipe", "tune run lora_finetune_single_device --config FILE")


def _torchtune(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    _file_of(launch, [], "torchtune", options.pop("config", None))
    _pairs(launch, loose)
    for option in options.values():
        launch.tell(option, "unknown")


def _litgpt(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    part = launch.command.part
    if "adapter" in part:
        place = f"{launch.file}:{launch.command.line}"
        launch.faults.append(Fault(place, f"litgpt {part} is not modelled", "finetune_lora or finetune_full"))
    if (config := options.pop("config", None)) is not None:
        _file_of(launch, [], "litgpt", config)
    if part != "finetune_full":
        launch.data.setdefault("lora_r", 8)  # finetune/lora.py: setup
    if loose:
        launch.put("checkpoint_dir", Option(spelled="checkpoint_dir", values=(loose[0].text,), place=f"{launch.file}:{loose[0].line}", unknown=loose[0].unknown))  # fmt: skip
    for name, option in options.items():
        launch.put(name.replace("-", "_"), option)


def _xtuner(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    _file_of(launch, loose, "xtuner")
    for name, option in options.items():
        if name == "deepspeed":
            launch.put(name, option)
        elif name.replace("_", "-") not in _OF_XTUNER:
            launch.tell(option, "unknown")
    for word in loose[1:]:
        if "=" in word.text:  # --cfg-options
            _pairs(launch, [word])
    found, line = launch.variable(name := "USE_TRITON_KERNEL")
    if found:  # any word: model/modules/dispatch reads bool(os.getenv(...))
        launch.data = {**launch.data, name.lower(): True}
        launch.places[name.lower()] = (name, f"{launch.file}:{line}")


def _verl(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    """Hydra's `key=value`, of which two say what Ray starts, as torchrun's options would; a configuration by its name."""
    stated = {word.text.lstrip("+").partition("=")[0]: word for word in loose}
    for key, name, usual in (("n_gpus_per_node", "nproc_per_node", 8), ("nnodes", "nnodes", 1)):
        word = stated.pop(f"trainer.{key}", Word(f"={usual}", launch.command.line))
        values, place = (word.text.partition("=")[2],), f"{launch.file}:{word.line}"
        launch.launcher[name] = Option(spelled=f"--{name}", values=values, place=place, unknown=word.unknown)
    for name, option in options.items():
        launch.tell(option, "no effect")
        if name == "config-name" and "megatron" in str(option.value):
            launch.put("actor_rollout_ref.actor.strategy", option, value="megatron")
    _pairs(launch, list(stated.values()))


def _megatron_bridge(launch: Launch, loose: list[Word], options: dict[str, Option]) -> None:
    """A recipe, a YAML file over it, options for common settings, and `key=value` over all."""
    from simulator.formats.readers.plans.megatron_bridge import CONTAINED, recipe_over

    options = {name.replace("-", "_"): option for name, option in options.items()}
    recipe, model, mode = (options.pop(name, None) for name in ("recipe", "model", "mode"))
    kind = str(mode.value) if mode is not None else ""
    task = {"lora": "peft", "dora": "peft"}.get(kind, kind or "sft")
    name = launch.recipe or (str(recipe.value) if recipe else f"{model.value}_{task}_config" if model else "")
    place = next((one.place for one in (recipe, model) if one is not None), f"{launch.file}:{launch.command.line}")
    launch.recipe, launch.data, faults = recipe_over(name, {}, place)
    launch.faults += faults
    if (config := options.pop("config_file", None)) is not None:
        data, _ = _yaml(launch, str(config.value), config.place, "megatron-bridge")
        launch.data = merged(launch.data, data)
    if kind == "dora":
        launch.data = nested(launch.data, ("peft", "_target_"), "DoRA")
    degrees = [key for key in options if key.startswith("tensor_") or key.endswith("_parallel_size")]
    for key in dict.fromkeys([*(key for key in options if key in CONTAINED), *degrees]):
        launch.put(CONTAINED.get(key, f"model.{key}"), options.pop(key))
    _pairs(launch, loose)
    for key, option in options.items():
        launch.tell(option, "no effect" if key in ("dataset", "step_func", "dry_run", "dump_env") else "unknown")


_FRAMEWORKS: Final[Mapping[str, Callable[[Launch, list[Word], dict[str, Option]], None]]] = {
    "llama-factory": _llama_factory, "ms-swift": _llama_factory, "axolotl": _axolotl, "torchtune": _torchtune, "litgpt": _litgpt, "megatron-bridge": _megatron_bridge, "xtuner": _xtuner, "verl": _verl,
}  # fmt: skip
