"""How many GPUs a script's command runs on: by its launcher's options, or by the script's #SBATCH lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from simulator.base.errors import Fault
from simulator.formats.readers.plans.reading import Setting
from simulator.formats.readers.plans.shell_words import Word

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
WORLD_OPTIONS: Final = frozenset(name for _, names in _WORLD for name in names)


@dataclass
class World:
    """num_devices, num_nodes: of the job; None: not stated. place: where. fault: why it cannot be read. settings: what was not settled."""

    place: str
    num_devices: int | None = None
    num_nodes: int | None = None
    fault: Fault | None = None
    settings: list[Setting] = field(default_factory=list)


def slurm_variables(text: str, file: str) -> dict[str, str]:
    """What Slurm sets in a job's environment, of the script's #SBATCH lines."""
    stated = _headers(text, file)
    values = {option: stated.get(option, ("", ""))[0].rpartition(":")[2] for option in _SLURM}
    return {name: values[option] for option, names in _SLURM.items() for name in names if values[option].isdecimal()}


def world_of(words: Sequence[Word], text: str, file: str) -> World:
    """What the launcher starts: nodes × processes a node, from its options, or from the script's #SBATCH lines."""
    world = World(place=file)
    stated = {**_headers(text, file), **_launched(words, file)}
    counts: dict[str, tuple[int, str]] = {}
    for kind, names in _WORLD:
        for name in names:
            value, where = stated.get(name, ("", ""))
            value = value.rpartition(":")[2]  # torchrun's least:most, Slurm's gpu:h100:8
            if re.fullmatch(r"\d{1,7}", value) and int(value) and kind not in counts:
                counts[kind] = (int(value), where)
    _unsettled(words, file, world, counts)
    if "all" in counts:
        world.num_devices, world.place = counts["all"]
    elif "each" in counts and "nodes" in counts:
        world.num_devices, world.place = counts["each"][0] * counts["nodes"][0], counts["nodes"][1]
    elif "each" in counts and not any(name in stated for name in _WORLD[0][1]):
        world.num_devices, world.place = counts["each"]  # one node is torchrun's default
    world.num_nodes = counts["nodes"][0] if "nodes" in counts else world.num_nodes
    return world


def _unsettled(words: Sequence[Word], file: str, world: World, counts: dict[str, tuple[int, str]]) -> None:
    """Numbers that are known only when the script runs: of nodes, a fault; of processes a node, all of its GPUs."""
    kinds = {name: kind for kind, names in _WORLD for name in names} | {_SHORT_N: "nodes", "-n": "all"}
    for option, value in pairwise(words):
        kind = kinds.get(option.text)
        if kind is None or not value.unknown or kind in counts:
            continue
        text = value.unknown[0].what
        variable = value.unknown[0].variable
        remedy = f"--define {variable}=N, or --nodes N" if variable else "--nodes N"
        problem = f"{option.text} hangs on {text}, which this file does not settle"
        place = f"{file}:{option.line}"
        if kind == "each":
            note = f"{text} is not settled: all GPUs of a node" + (f"; --define {variable}=N" if variable else "")
            world.settings.append(Setting(name=option.text, value="?", place=place, use="used", note=note))
            if not any(word.text in kinds and kinds[word.text] == "nodes" for word in words):
                counts.setdefault("nodes", (1, place))
        elif world.fault is None:
            cure = (("--nodes", "1"),)
            world.fault = Fault(place=place, problem=problem, remedy=remedy, flags=cure)


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
