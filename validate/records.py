"""A results file, and the shape of its lines: what `validate compare` reads of them. Other keys may stand beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simulator.base.errors import Fault, InputError, finite_number
from simulator.base.files import ordinary
from simulator.base.schema import MOST_TEXT_BYTES

SCHEMA_VERSION: Final = 1
MOST_FAULTS: Final = 10  # of lines that are no runs, one by one

Record = dict[str, Any]

Size = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sizes = dict[str, Size]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Timed(_Part):
    """`median_s` with its standard error."""

    median_s: Seconds
    standard_error_s: Seconds


class Times(Timed):
    """Of the steps, and of their phases."""

    reference_s: Seconds | None = None
    phases: dict[str, Timed] = {}


class AtPeak(_Part):
    """Bytes by category at the peak."""

    peak: Sizes


class Tracked(_Part):
    """Bytes at the borders of a step's phases; a run that ended early holds none.

    end_bytes: of a program's step alone, whose phases nobody knows: it has its begin, its peak and its end.
    """

    start_bytes: Size | None = None
    end_bytes: Size | None = None
    after_forward_bytes: Size | None = None
    after_backward_bytes: Size | None = None
    peak_bytes: Size | None = None
    peak_phase: str = ""
    peak_by_phase_bytes: dict[Literal["forward", "backward", "optimizer"], Size] = {}
    by_category: AtPeak | None = None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        others = {"peak_bytes"}
        if self.end_bytes is None:
            others |= {"after_forward_bytes", "after_backward_bytes", "peak_phase", "peak_by_phase_bytes"}
        stated = {name for name in self.model_fields_set if getattr(self, name) is not None}
        if self.start_bytes is not None and (lost := others - stated):
            msg = f"start_bytes stands without {', '.join(sorted(lost))}"
            raise ValueError(msg)
        return self


class Memory(Tracked):
    """The same, and the allocator's peaks on a GPU."""

    tracked: Tracked | None = None
    peak_allocated_bytes: Size | None = None
    peak_reserved_bytes: Size | None = None
    device_used_bytes: Size | None = None

    @model_validator(mode="after")
    def _of_the_allocator(self) -> Self:
        if self.peak_reserved_bytes is not None and None in (self.peak_allocated_bytes, self.device_used_bytes):
            msg = "peak_reserved_bytes stands without peak_allocated_bytes or device_used_bytes"
            raise ValueError(msg)
        return self


class Exposed(_Part):
    """Of one kind of collective."""

    exposed_s: Seconds


class Profile(_Part):
    """A profiled step."""

    step_s: Seconds
    compute_s: dict[str, Seconds]
    communication: dict[str, Exposed]


class Studied(_Part):
    """What was asked."""

    cluster: dict[str, Any] | None = None
    calibration: str | None = None


class ShapeOfRun(_Part):
    """A line."""

    kind: Literal["run"]
    schema_version: Literal[1]
    mode: Literal["full", "solo", "cpu", "fake", "program", "imported"]
    verdict: str
    machine: dict[str, Any] | None = None
    device: str | None = None
    num_ranks: Annotated[int, Field(ge=1)] | None = None
    time: Times | None = None
    memory: Memory | None = None
    rank: Size | None = None
    memory_by_rank: list[Size | None] | None = None
    memory_by_stage: list[Tracked] | None = None
    profile: Profile | None = None
    study: Studied | None = None
    files: dict[str, str] | None = None
    notes: list[str] | None = None
    allocator_settings: str | None = None
    collectives: list[tuple[str, Size | None]] | None = None


def faults_of_run(entry: object) -> str:
    """What is wrong with a line, key by key; empty where nothing is."""
    try:
        ShapeOfRun.model_validate_json(json.dumps(entry))
    except ValidationError as exc:
        found = [f"{'.'.join(map(str, one['loc'])) or 'the line'}: {one['msg'][:100]}" for one in exc.errors()]
        return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    return ""


def read_records(path: Path) -> tuple[list[Record], list[Fault]]:
    """The runs of a results file, and a fault for each line that is none. Raises InputError if nothing is left."""
    records: list[Record] = []
    faults: list[Fault] = []
    try:
        lines = ordinary(path, MOST_TEXT_BYTES).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        raise InputError(Fault(place=str(path), problem=f"cannot be read: {exc.strerror}")) from None
    wrong = 0
    for number, line in enumerate(lines, 1):
        record, problem = _record(line)
        if record is not None:
            records.append(record)
        elif problem and (wrong := wrong + 1) <= MOST_FAULTS:
            place = f"{path}: line {number}"
            faults.append(Fault(place=place, problem=problem, remedy="what `validate run` wrote"))
    if wrong > MOST_FAULTS:
        faults.append(Fault(place=str(path), problem=f"{wrong - MOST_FAULTS} more lines are none"))
    if not records:
        raise InputError(faults or Fault(place=str(path), problem="holds no run", remedy="shardwise validate run"))
    return records, faults


def _record(line: str) -> tuple[Record | None, str]:
    """(the run, "") or (None, what is wrong; nothing with an empty line)."""
    if not line.strip():
        return None, ""
    if not line.lstrip().startswith("{"):
        return None, "not a run"
    try:
        entry = json.loads(line, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError) as exc:
        return None, f"not JSON: {exc}"
    if entry.get("kind") == "machine" or "time_s" in entry:
        return None, "is a line of calibrate run, which calibrate fit and check read"
    if entry.get("kind") != "run" or entry.get("schema_version") != SCHEMA_VERSION:
        return None, "not a run"
    problem = faults_of_run(entry)
    return (None, problem) if problem else (entry, "")
