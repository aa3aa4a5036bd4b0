"""Capturing a program: starts it in a process of its own, keeps deadline and memory, writes the file whole or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.formats.readers.capture import VERSION
from simulator.spec.cluster.device import Device
from validate.capture.merge import merged
from validate.machine import memory_limit
from validate.supervise import Deadlines, SupervisedOutcome, scratch_folder, supervise

WARM_UP: Final = 2  # steps: the first makes the optimizer's state, the second is the first that finds it
MINUTES: Final = 10.0
# What torch calls architectures, for programs that ask (CUDA C++ programming guide, compute capabilities)
_CAPABILITY = {
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to capture: a script or module:function with its arguments, as rank `rank` of `world_size` on a device."""

    target: str
    arguments: Sequence[str] = ()
    world_size: int
    gpus_per_node: int
    device: Device
    rank: int = 0
    check: bool = False  # the last rank too, which stands for the others that look like the first
    warm_up: int = WARM_UP
    minutes: float = MINUTES
    expert_imbalance: float = 1.0  # a router's choices of the busiest expert over the mean
    recipe: str = ""  # what to do with a config.json: `validate.capture.recipe`
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, by flag
    given: Collection[str] = ()  # flags that somebody gave
    num_gpus: int = 0  # of the nodes asked for


class CaptureError(InputError):
    """The program could not be captured. traceback: the program's own, empty where it raised nothing."""

    noun = "program"

    def __init__(self, faults: Fault, traceback: str = "") -> None:
        super().__init__(faults)
        self.traceback = traceback


def captured_json(job: Job, progress: Callable[[int, str], None] | None = None) -> dict[str, Any]:
    """Run the program until its recorded step ends: the capture as its file keeps it.

    Raises InputError where the job is wrong, CaptureError where the program fails.
    """
    _check(job)
    with scratch_folder() as scratch:
        (scratch / "job.json").write_text(json.dumps(_as_json(job)), encoding="utf-8")
        outcome = supervise(
            [
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-P",
                    "-m",
                    "validate.capture.child",
                    str(scratch / "job.json"),
                    *((job.target, job.recipe, json.dumps(job.settings)) if job.recipe else ()),
                    *job.arguments,
                ]
            ],
            Deadlines(other_s=60 * job.minutes, total_s=60 * job.minutes),
            environments=[{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}],  # nothing is computed
            scratch=scratch,
            memory_bytes=memory_limit(),
            progress=progress,
        )
        if not outcome.verdict.ok:
            raise _error(job, outcome, scratch)
        numbers = outcome.results[0]["ranks"]
        ranks = [json.loads((scratch / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in numbers]
        return {
            "format": "shardwise capture",
            "version": VERSION,
            **_head(job),
            "torch": ranks[0]["torch"],
            **merged(ranks),
        }


def _check(job: Job) -> None:
    faults = [*_unused(job)]
    if job.recipe or job.target.endswith(".json"):
        faults += _recipe_faults(job)
    elif job.target.endswith(".py"):
        if not Path(job.target).is_file():
            faults.append(Fault(place=job.target, problem="no such file", remedy="a Python script, or module:function"))
    elif ":" not in job.target:
        problem = "neither a script nor a function"
        faults.append(Fault(place=job.target, problem=problem, remedy="train.py, or module:function"))
    if not 0 <= job.rank < job.world_size:
        faults.append(Fault(place=f"--rank {job.rank}", problem=f"there are {job.world_size} ranks, from 0 on"))
    if job.device.architecture not in _CAPABILITY:
        known = ", ".join(_CAPABILITY)
        problem = f"{job.device.architecture} is no CUDA architecture that programs can be told of"
        faults.append(Fault(place=f"device {job.device.name}", problem=problem, remedy=f"a device of {known}"))
    InputError.raise_for(faults)


def _unused(job: Job) -> Iterator[Fault]:
    """Flags that would change nothing."""
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in job.given if name in job.settings)
    if flags and not job.recipe:
        problem = "a program says itself what it trains, and on what"
        yield Fault(place=flags, problem=problem, remedy="its own arguments behind --; a config.json with --recipe")
    if job.recipe and job.arguments:
        remedy = "--seq-len, or a script"
        yield Fault(place=f"-- {' '.join(job.arguments)}", problem="a recipe takes no arguments", remedy=remedy)
    if job.check and job.rank == job.world_size - 1:
        yield Fault(
            place="--check", problem=f"rank {job.rank} is the last one, and is captured", remedy="another --rank"
        )
    if "nodes" in job.given and job.num_gpus != job.world_size:
        problem = f"--nodes gives the job {job.num_gpus} GPUs"
        yield Fault(place=f"--ranks {job.world_size}", problem=problem, remedy="one of the two")
    side, images = job.settings.get("image_size"), job.settings.get("images")
    if side and images == 0:
        yield Fault(place=f"--image-size {side}", problem="there are no images", remedy="--images 1")


_MOST_BYTES: Final = 2**22  # of a config.json
_NEEDS: Final = {"fsdp2": ("transformers",), "ddp": ("transformers",), "zero3": ("transformers", "deepspeed")}


def _recipe_faults(job: Job) -> list[Fault]:
    """What is wrong with a config.json or with how it is to be trained."""
    if not job.recipe:
        return [Fault(place=job.target, problem="says no recipe", remedy=f"--recipe {'|'.join(_NEEDS)}")]
    adapter = job.settings.get("adapter", "")
    found = [
        Fault(
            place=f"--recipe {job.recipe}", problem=f"needs {one}, which is not installed", remedy=f"pip install {one}"
        )
        for one in (*_NEEDS[job.recipe], *(["peft"] if adapter else []))
        if find_spec(one) is None
    ]
    try:
        recipe = json.loads(ordinary(Path(job.target), _MOST_BYTES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        return [*found, Fault(place=job.target, problem=f"no config.json: {exc}", remedy="one of Hugging Face's")]
    if adapter and (problem := _no_adapter(Path(adapter))):
        found.append(Fault(place=f"--adapter {adapter}", problem=problem, remedy="peft's adapter_config.json of LoRA"))
    if not isinstance(recipe, dict) or not isinstance(recipe.get("model_type"), str):
        found.append(Fault(place=job.target, problem="has no model_type", remedy="a config.json of Hugging Face's"))
    return found


def _no_adapter(file: Path) -> str:
    """Why a file is no adapter_config.json of LoRA; "" where it is one."""
    try:
        written = json.loads(ordinary(file, _MOST_BYTES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        return str(exc)
    return "" if isinstance(written, dict) and written.get("peft_type") == "LORA" else "its peft_type is not LORA"


def _head(job: Job) -> dict[str, Any]:
    return {
        "target": Path(job.target).name if ":" not in job.target else job.target,
        "world_size": job.world_size,
        "gpus_per_node": job.gpus_per_node,
        "device": job.device.name,
    }


def _as_json(job: Job) -> dict[str, Any]:
    device = job.device
    last = [job.world_size - 1] if job.check else []
    return {
        "target": str(Path(__file__).with_name("recipe.py")) if job.recipe else job.target,
        "warm_up": job.warm_up,
        "expert_imbalance": job.expert_imbalance,
        "ranks": list(dict.fromkeys([job.rank, *last])),
        "machine": {
            "world_size": job.world_size,
            "gpus_per_node": job.gpus_per_node,
            "device_name": device.name,
            "capability": _CAPABILITY[device.architecture],
            "memory_bytes": device.memory_bytes,
            "num_sms": device.num_sms,
        },
    }


def _error(job: Job, outcome: SupervisedOutcome, scratch: Path) -> BaseException:
    """What went wrong, in the program's words and then in ours."""
    verdict, traceback_file = outcome.verdict, scratch / "traceback.txt"
    if verdict.kind == "interrupted":
        return KeyboardInterrupt()
    traceback = traceback_file.read_text(encoding="utf-8") if traceback_file.is_file() else ""
    where = f" (in {verdict.phase})" if verdict.phase and verdict.kind not in ("bad_plan", "failed") else ""
    remedies = {
        "hung": f"it did not reach the end of a step in {job.minutes:g} minutes: --minutes gives it more",
        "out_of_memory": "this machine's memory ended: build the model on the meta device, or use fewer ranks",
        "failed": "docs/guides/capture.md says what a capture answers and what it cannot",
    }
    fault = Fault(
        place=job.target, problem=f"{verdict.detail or verdict.kind}{where}", remedy=remedies.get(verdict.kind, "")
    )
    return CaptureError(fault, traceback)
