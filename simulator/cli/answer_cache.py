"""Answers about large captures, cached for a second look where SHARDWISE_CACHE names a folder.

A file is named by the SHA-256 of all that its answer follows from: this release's files, the capture, and where and how it is
predicted. It holds JSON; what is damaged, or written by another release, is as if it were not there. Without timelines:
pictures and traces are made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from simulator.base.errors import InputError
from simulator.base.files import ordinary, write_whole
from simulator.base.presets import TOPOLOGIES
from simulator.formats.readers.capture import kind_of
from simulator.formats.study import Study
from simulator.predict import Prediction
from simulator.spec.calibration import Calibration
from simulator.work.trace import MemoryTrace, Timeline

_WORTH_S: Final = 2.0  # of the CPU; what is found sooner is not cached
_MOST: Final = 100  # answers, of some 10 KB
_MOST_BYTES: Final = 1 << 24
_SUFFIX: Final = ".answer.json"
_NOT_CACHED: Final = ("timeline", "memory_trace")


def cached(program: Path, place: Study, tokens_per_step: int | None, predict: Callable[[], Prediction]) -> Prediction:
    """The cached answer, without timeline and memory history; otherwise a new one, cached if it took long."""
    folder = os.environ.get("SHARDWISE_CACHE")
    if not folder or not program.is_file() or kind_of(program) != "packed":  # a script may import what changes
        return predict()
    path = Path(folder) / f"{_name(program, place, tokens_per_step)}{_SUFFIX}"
    found = _read(path)
    if found is not None:
        return found
    begin = time.process_time()
    found = predict()
    if time.process_time() - begin >= _WORTH_S:
        with suppress(OSError, InputError):  # a folder that cannot be written costs no answer
            _write(path, found)
    return found


def _name(program: Path, place: Study, tokens_per_step: int | None) -> str:
    calibration = place.calibration or Calibration.for_device(place.cluster.device)
    given = (place.cluster, calibration, place.stack, place.plan.memory)
    inputs = [one and one.model_dump_json() for one in given]
    data = json.dumps([_release(), str(program), tokens_per_step, *inputs]).encode()
    return hashlib.sha256(data + ordinary(program).read_bytes()).hexdigest()


def _release() -> list[tuple[str, int, int]]:
    """Size and modification time of every file that an answer may depend on."""
    code = Path(__file__).resolve().parents[1]
    found = (
        one for root in (code, TOPOLOGIES) for one in sorted(root.rglob("*")) if one.suffix in (".py", ".toml", ".json")
    )
    return [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in found]


@cache
def _adapters() -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(Prediction)
    return {one.name: TypeAdapter(hints[one.name]) for one in fields(Prediction) if one.name not in _NOT_CACHED}


def _write(path: Path, found: Prediction) -> None:
    """Beside at most so many others, the oldest of which go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda one: one.stat().st_mtime)
    for one in old[: len(old) + 1 - _MOST] if len(old) >= _MOST else ():
        one.unlink(missing_ok=True)
    data = {name: one.dump_python(getattr(found, name), mode="json") for name, one in _adapters().items()}
    write_whole(path, json.dumps(data))


def _read(path: Path) -> Prediction | None:
    try:
        data = json.loads(ordinary(path, _MOST_BYTES).read_bytes())
        values = {name: one.validate_python(data[name]) for name, one in _adapters().items()}
    except (OSError, ValueError, ValidationError, KeyError, TypeError, RecursionError):
        return None
    nothing: dict[str, Any] = {
        "timeline": Timeline(spans=(), step_s=values["step_s"]),
        "memory_trace": MemoryTrace(samples=(), peak_index=0, by_category={}),
    }
    return Prediction(**values, **nothing)
