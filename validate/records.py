"""The shape of a line of a results file: what `validate compare` reads of it. Other keys may stand beside."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
        if self.start_bytes is not None and (lost := others - self.model_fields_set):
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
