"""Outcome of one row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from simulator.base.errors import InputError

# Of the reports; rises when a key is removed or changes its meaning; new keys do not raise it
SCHEMA_VERSION: Final = 1
Progress = Callable[[int, int], None]  # rows done, rows in all
Status = Literal["ok", "refused", "bad", "failed", "calibration"]


class RefusedError(Exception):
    """The rules or the plan cannot express a row. reasons: (kind, detail); the kind is what the report counts."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        super().__init__("; ".join(f"{kind}: {detail}" if detail else kind for kind, detail in reasons))
        self.kind = reasons[0][0]


class Judged(Protocol):
    """Fields common to all outcomes."""

    @property
    def line(self) -> int: ...
    @property
    def status(self) -> Status: ...
    @property
    def reason(self) -> str | None: ...


O = TypeVar("O", bound=Judged)  # noqa: E741  an outcome


def judged(start: Any, judge: Callable[[], O]) -> O:  # noqa: ANN401  replace() knows no protocol
    """The outcome of `judge`, or the reason of its failure: an unexpected exception keeps the status of `start`, `failed`."""
    try:
        return judge()
    except RefusedError as exc:
        return replace(start, status="refused", kind=exc.kind, reason=str(exc))  # type: ignore[no-any-return]
    except InputError as exc:
        reasons = "; ".join(map(str, exc.faults))
        return replace(start, status="refused", kind=f"{exc.noun} refused", reason=reasons)  # type: ignore[no-any-return]
    except Exception as exc:  # noqa: BLE001  one row's defect must not cost the others
        return replace(start, reason=f"{type(exc).__name__}: {exc}")  # type: ignore[no-any-return]


def gathered(outcomes: Iterable[O], total: int, progress: Progress | None) -> tuple[list[O], bool]:
    """The outcomes, and whether Ctrl-C ended them early: those done so far are kept."""
    found: list[O] = []
    try:
        for outcome in outcomes:
            found.append(outcome)
            if progress is not None:
                progress(len(found), total)
    except KeyboardInterrupt:
        return found, True
    return found, False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Generic[O]):
    """Every row of a table in its order. unread: unknown columns."""

    table: str
    interrupted: bool
    outcomes: Sequence[O]
    unread: tuple[str, ...] = ()

    def count(self, status: Status) -> int:
        return sum(o.status == status for o in self.outcomes)

    def head_json(self) -> dict[str, Any]:
        """What every report's JSON begins with."""
        head = {"table": self.table, "interrupted": self.interrupted, "unread_columns": list(self.unread)}
        return {"schema_version": SCHEMA_VERSION, **head}


def flat(group: Any) -> dict[str, Any]:  # noqa: ANN401  of any report
    """A group as plain data, its score's figures beside its own."""
    data = asdict(group)
    score: dict[str, Any] = data.pop("score")
    return {**data, **score}


def by_group(outcomes: Iterable[O], *names: str) -> list[tuple[tuple[str, ...], list[O]]]:
    """Outcomes by the values of those attributes, sorted; bad rows are in no group."""
    found: dict[tuple[str, ...], list[O]] = {}
    for one in outcomes:
        if one.status != "bad":
            found.setdefault(tuple(getattr(one, name) for name in names), []).append(one)
    return sorted(found.items(), key=lambda item: item[0])


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Predicted over measured, minus 1."""
    return predicted / measured - 1 if predicted and measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The four numbers that the stronger baseline knows about a step on one GPU, and the model's own FLOP over peak.

    gemm_flop and attention_flop are what the hardware computes, recomputation included; stream_bytes what elementwise
    kernels, norms and the loss read and write; communication_bytes what the GPU receives.
    ideal_s: the model's FLOP (causal attention half, no recomputation) at the device's peak.
    """

    gemm_flop: float
    attention_flop: float
    stream_bytes: float
    communication_bytes: float
    ideal_s: float

    @property
    def terms(self) -> tuple[float, float, float, float]:
        return self.gemm_flop, self.attention_flop, self.stream_bytes, self.communication_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes at one moment of a tracked step; None where unknown."""

    predicted_bytes: int | None = None
    measured_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """One row: its status, why if it is not ok, and predicted beside measured; None where unknown.

    kind: what a refusal is counted as. duplicate_of: id of an earlier row with the same run and the same figures.
    fits: the predicted verdict; None too where it hangs on what the row does not state. open: how blanks of the row were filled, where that leaves a choice. measured_oom: the table says that the run did not fit. moments: of a tracked step, by name.
    unmodelled: options that the row states and the prediction does not hold. unread: what it says in words that nobody knows.
    framework: as the row names its software. stack: what it was predicted with; described: that is a stack of this software.
    """

    id: str
    line: int
    status: Status
    reason: str | None = None
    kind: str = ""
    source: str = ""
    gpu: str = ""
    precision: str = ""
    predicted_step_s: float | None = None
    low_step_s: float | None = None
    high_step_s: float | None = None
    measured_step_s: float | None = None
    mem_metric: str = ""
    predicted_memory_bytes: int | None = None
    measured_memory_bytes: int | None = None
    measured_oom: bool = False
    fits: bool | None = None
    open: str = ""
    work: Work | None = None
    duplicate_of: str = ""
    moments: Mapping[str, Moment] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    framework: str = ""
    stack: str = ""
    described: bool | None = None

    @property
    def mfu_predicted(self) -> float | None:
        """Model FLOP utilisation, causal attention counted half."""
        return self.work.ideal_s / self.predicted_step_s if self.work and self.predicted_step_s else None

    @property
    def mfu_measured(self) -> float | None:
        """The same FLOP over the measured time."""
        return self.work.ideal_s / self.measured_step_s if self.work and self.measured_step_s else None

    @property
    def scored(self) -> bool:
        return self.status == "ok" and not self.duplicate_of

    @property
    def step_error(self) -> float | None:
        return relative_error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        return relative_error(self.predicted_memory_bytes, self.measured_memory_bytes)
