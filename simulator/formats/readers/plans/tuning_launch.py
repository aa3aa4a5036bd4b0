"""Launch lines of fine-tuning programs as plans: what they state of the run, and the GPUs they start on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.base.files import ordinary
from simulator.formats.readers.plans.by_framework import read_stated
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.launch_environment import surroundings
from simulator.formats.readers.plans.launch_world import World, slurm_variables, world_of
from simulator.formats.readers.plans.reading import UNSET, Setting, Stated
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.readers.plans.shell_words import Word
from simulator.formats.readers.plans.tuning_command import Option, command_of
from simulator.formats.readers.plans.tuning_settings import Find, Launch, read_program


def read_tuning_launch(
    path: Path,
    text: str,
    given: Collection[str],
    define: Mapping[str, str],
    find: Find,
    read_json: Callable[[str], Any],
) -> Draft:
    """The plan of a script, or a line of one, that fine-tunes. Raises PlanError.

    find: a file that the command names, beside the script. read_json: a DeepSpeed file.
    """
    file = str(path)
    shell = Shell(text, file, define, source=lambda name: _sourced(find(name)))
    shell.variables |= {name: [[(char, 1) for char in value]] for name, value in slurm_variables(text, file).items()}
    commands = shell.read()
    command = command_of(commands or shell.read_uncalled(), file, define.get("command", ""))
    launch = Launch(command, file, shell, find)
    form, part = read_program(launch, define)
    world = _world(launch, text, form)
    stated = Stated(
        data=launch.data, file=file, read_json=read_json, given=given, places=launch.places, unset=launch.unset,
        cures=launch.cures, auto=UNSET, program=part,
        num_devices=world.num_devices, num_nodes=world.num_nodes,
    )  # fmt: skip
    draft = read_stated(form, stated)
    if launch.own_words:
        draft = replace(draft, **_assumed(draft, launch.data))
    around = surroundings(shell, command.launcher, file, define)
    nccl = {name: change for name, change in around.changes.items() if name != "attention.kernel"}
    return _with_world(
        replace(
            draft,
            format="launch",
            fields=draft.fields | ({"alloc_conf": around.allocator.value} if around.allocator else {}),
            stack_changes={**draft.stack_changes, **nccl},
            settings=(*draft.settings, *launch.settings, *around.settings),
            faults=(*launch.faults, *draft.faults, *around.faults),
        ),
        world,
    )


def _assumed(draft: Draft, data: Mapping[str, Any]) -> dict[str, Any]:
    """What of adapters a script's options leave to the script itself."""
    keys = {"lora_rank": "lora_r", "lora_targets": "lora_target_modules", "lora_dropout": "lora_dropout"}
    left = [name for name, key in keys.items() if name in draft.fields and data.get(key) is None]
    why = "the script's own default, which its options do not state"
    return {
        "assumed": {**draft.assumed, **{name: (draft.fields[name], why) for name in left}},
        "fields": {name: value for name, value in draft.fields.items() if name not in left},
    }


def _sourced(path: Path) -> str | None:
    try:
        return ordinary(path, 2**20).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _with_world(draft: Draft, world: World) -> Draft:
    if world.num_devices is None and world.fault is None:
        return replace(draft, num_nodes=draft.num_nodes or world.num_nodes)
    places = {**draft.places, "num_devices": world.place}
    return replace(
        draft,
        num_devices=world.num_devices or draft.num_devices,
        num_nodes=world.num_nodes or draft.num_nodes,
        devices_fault=world.fault,
        places=places,
        settings=(*draft.settings, *world.settings),
    )


# -- the GPUs that it starts on --------------------------------------------------------------------------------------


def _world(launch: Launch, text: str, form: str) -> World:
    """What starts, by the launcher's options, its configuration, the environment, or #SBATCH lines; a bare `python` is one process."""
    command, file = launch.command, launch.file
    words = [word for option in launch.launcher.values() for word in _words(option)]
    world = world_of([*words, *_environment(launch, form)], text, file)
    machines = launch.config.get("num_machines", (None, file))[0]
    if world.num_nodes is None and isinstance(machines, int) and machines > 0:
        world.num_nodes = machines
    if world.fault is not None or world.num_devices is not None:
        return world
    kind, place = launch.config.get("distributed_type", ("", file))
    count, where = (1, place) if str(kind).upper() == "NO" else launch.config.get("num_processes", (None, file))
    visible, line = launch.variable("CUDA_VISIBLE_DEVICES")
    included = launch.launcher.get("include")
    slots = visible or (
        included.values[0].rpartition(":")[2] if included and included.values and ":" in included.values[0] else ""
    )
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        world.num_devices, world.place = count, where
    elif not (command.spawns or command.alone) or (form in ("xtuner", "ms-swift") and command.alone):
        world.num_devices, world.place = 1, f"{file}:{command.line}"
        note = (
            "one process, which has one GPU; a Trainer that sees more spreads batches over them, which is not modelled"
        )
        world.settings.append(Setting(name="launcher", value="none", place=world.place, use="used", note=note))
    elif re.fullmatch(r"\d+(,\d+)*", slots) and form != "litgpt":
        world.num_devices = len(slots.split(","))
        world.place = f"{file}:{line}" if visible else included.place if included else file
    elif not world.num_nodes and (command.spawns or command.alone) and form not in ("litgpt", "megatron-bridge"):
        world.num_nodes = 1  # torchrun's and accelerate's default
    return world


def _words(option: Option) -> list[Word]:
    line = option.place.rpartition(":")[2]
    number = int(line) if line.isdecimal() else 0
    return [Word(option.spelled, number), *(Word(value, number, option.unknown) for value in option.values[:1])]


def _environment(launch: Launch, form: str) -> list[Word]:
    """Processes that LLaMA-Factory, ms-swift and xtuner start by variables of the environment, as torchrun's options."""
    if not (launch.command.alone and form in ("llama-factory", "ms-swift", "xtuner")):
        return []
    found = []
    for name, option in (("NPROC_PER_NODE", "--nproc_per_node"), ("NNODES", "--nnodes")):
        value, line = launch.variable(name)
        found += [Word(option, line), Word(value, line)] if value.isdecimal() else []
    return found
