"""Captured programs where verbs take studies: what a program decides itself, where it is predicted, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.capture import capture_of, kind_of, read_capture
from simulator.formats.readers.recording import is_recording
from simulator.formats.study import Study, read_study
from simulator.spec.plan import Plan
from simulator.spec.plan.memory import TIERED, Policy
from simulator.spec.prices import Prices
from simulator.studies.compare import Subject
from simulator.work.captured.capture import Capture
from simulator.work.captured.meetings import columns
from simulator.work.captured.scaled import scaled
from simulator.work.checkpoint import Checkpoint, Saving, loaded_state_s, loading_s, saved_state, saving

_OF_POOL = tuple(flat for flat, place in Plan.flat_names.items() if place.startswith("memory."))
_TAKEN = ("cluster", "nodes", "calibration", "stack", "placement")
_OF_PLACE = ("cluster", "device", "link", "stack", "kernels", "checkpoint")


def is_program(file: Path | None) -> bool:
    """A capture file or a script by what it holds, not a STUDY.toml."""
    return file is not None and kind_of(file) != "other"


def place_of(
    flags: Mapping[str, Any], settings: Sequence[str], faults: Sequence[Fault] = (), *, pool: bool = False
) -> Study:
    """Where a program is predicted. Raises InputError with every flag and setting that a program decides itself.

    pool: the pool of its process can be said, too.
    """
    given = {name: text for name, text in flags.items() if text not in (None, ())}
    taken = (*_TAKEN, *_OF_POOL) if pool else _TAKEN
    own = "change the program and capture it again"
    found = [
        *faults,
        *(
            Fault(place=_flag(name), problem="a captured program has its own model and plan", remedy=own)
            for name in given
            if name not in taken
        ),
    ]
    leaves = f"leaves of {', '.join(_OF_PLACE)}{' and plan.memory' if pool else ''} can be set"
    found += [
        Fault(place=f"--set {one}", problem="is not known of a captured program", remedy=leaves)
        for one in settings
        if one.partition(".")[0].strip() not in _OF_PLACE and not (pool and _of_pool(one))
    ]
    InputError.raise_for(found)
    from simulator.predict.program import STACK

    plan = {name: text for name, text in given.items() if name in _OF_POOL} | {"stack": given.get("stack", STACK)}
    inputs = {name: text for name, text in given.items() if name not in plan}
    study = read_study(None, inputs, plan, settings)
    if study.plan.memory.tiered:
        problem = f"{study.plan.memory.policy}: tiers below HBM are played by the units of a described model"
        known = [one for one in get_args(Policy) if one not in TIERED]
        raise InputError.at("memory_policy", problem, f"one of {', '.join(known)}")
    sources = tuple(one for one in study.sources if not one.what.startswith(("model", "plan")))
    named = "stack" in given or any(one.partition(".")[0].strip() == "stack" for one in settings)
    return replace(study, sources=sources, stack=study.stack if named else None)  # else as the program says


def _of_pool(setting: str) -> bool:
    """`plan.memory.KEY=VALUE`, or by its flat name."""
    root, _, name = setting.partition("=")[0].strip().partition(".")
    return root == "plan" and (name.startswith("memory.") or name in _OF_POOL)


def _flag(name: str) -> str:
    return {"study": "STUDY.toml", "plan_file": "--plan"}.get(name, f"--{name.replace('_', '-')}")


def place_inputs(file: Path, place: Study) -> dict[str, Any]:
    """What a report says of its inputs."""
    inputs = {name: value for name, value in place.inputs().items() if name in ("cluster", "calibration")}
    return {"program": str(file), **inputs}


def program_at(file: Path, place: Study, tokens_per_step: int | None = None, scale_with: Path | None = None) -> Capture:
    """A capture file read, or a script captured now for as many ranks as the place has GPUs. Raises InputError.

    scale_with: a capture at another number of ranks, from which and the file sizes at the place's follow.
    """
    if scale_with is not None:
        files = (file, scale_with)
        remedy = "shardwise capture writes one"
        problem = "is a script, and two captures are needed"
        scripts = [Fault(place=str(one), problem=problem, remedy=remedy) for one in files if kind_of(one) == "script"]
        InputError.raise_for(scripts)
        both = [program_at(one, place, tokens_per_step) for one in files]
        return next((one for one in both if one.world_size == place.cluster.num_devices), None) or scaled(
            both[0], both[1], place.cluster.num_devices
        )
    script = kind_of(file) == "script"
    found = _captured_now(file, place) if script else _read(file, file.stat().st_mtime_ns if file.exists() else 0)
    return replace(found, tokens_per_step=tokens_per_step) if tokens_per_step else found


@cache
def _read(file: Path, _changed: int) -> Capture:
    """A study of many predictions reads its file once. Raises InputError for a recorded step."""
    if file.is_file() and is_recording(file):
        problem = "a recorded step, which only `predict --program` answers for"
        raise InputError.at(str(file), problem, "shardwise capture writes a program's file")
    return read_capture(file)


def _captured_now(script: Path, place: Study) -> Capture:
    from simulator.cli.capture import captured

    data = captured(str(script), (), place.cluster, ranks=None, rank=0, warm_up=2, minutes=10.0)
    return capture_of(data, str(script))


def subject_at(
    name: str,
    file: Path,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    prices: Prices | None,
    tokens_per_step: int | None,
) -> Subject:
    """A program as a column of a comparison, whose unit is a token. Raises InputError where their number is not stated."""
    place = place_of(flags, settings)
    return Subject(
        name=name,
        program=with_tokens(program_at(file, place, tokens_per_step), str(file)),
        cluster=place.cluster,
        calibration=place.calibration,
        stack=place.stack,
        prices=prices,
    )


def with_tokens(program: Capture, place: str) -> Capture:
    """The program with the tokens that a step trains on. Raises InputError where their number is not stated."""
    if not program.tokens_per_step:
        remedy = "--tokens-per-step N, of all ranks; shardwise capture takes it too, and keeps it in the file"
        raise InputError.at(place, "how many tokens its step trains on is not known", remedy)
    return program


def checkpoint_of(program: Capture | None, place: Study) -> tuple[Saving, float]:
    """What one checkpoint of a program, or of the study's own plan, costs, and the seconds to load it.

    Raises InputError for a program's that is gathered.
    """
    checkpoint = place.checkpoint or Checkpoint()
    if program is None:
        inputs = (place.model, place.plan, place.cluster, checkpoint)
        return saving(*inputs), loading_s(*inputs)
    if checkpoint.mode == "gather":
        problem = "is not known of a captured program: each rank saves its own share"
        raise InputError.at("checkpoint.mode = gather", problem, "checkpoint.mode=sharded")
    column, *_ = columns(program)
    state = sum(one.state_bytes for one in column.captures)
    size = (state, program.world_size, place.cluster, checkpoint)
    return saved_state(*size), loaded_state_s(*size)
