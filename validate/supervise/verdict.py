"""What is agreed on about a supervised run: kinds of trouble, deadlines, verdicts, outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "ok", "interrupted", "killed", "out_of_memory", "storage_full", "port_taken", "wrong_world", "bad_plan",
    "device_busy", "missing", "bad_report", "failed", "no_result", "hung", "peer_lost",
]  # fmt: skip
# Which of several ranks' troubles is told: the cause rather than its echo in the others.
PRIORITY: tuple[Kind, ...] = (
    "killed", "out_of_memory", "storage_full", "port_taken", "wrong_world", "bad_plan", "device_busy", "missing",
    "bad_report", "failed", "no_result", "hung", "peer_lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds a rank may spend in a phase, by the phase's first word; `other_s` for the rest. total_s: for the run.

    settle_s: after the first trouble, for the other ranks to say theirs. grace_s: between SIGTERM and SIGKILL.
    """

    by_phase_s: Mapping[str, float] = field(default_factory=dict)
    other_s: float = 120.0
    total_s: float = 480.0
    settle_s: float = 1.0
    grace_s: float = 3.0

    def of(self, phase: str) -> float:
        return self.by_phase_s.get(phase.split(" ", maxsplit=1)[0], self.other_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a run. rank, host: whose trouble it was; None and empty where it was nobody's, or there is one host.

    waits: a rank that hung inside a collective, most likely for another one.
    """

    kind: Kind
    detail: str = ""
    rank: int | None = None
    phase: str = ""
    host: str = ""
    waits: bool = False

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def __str__(self) -> str:
        who = f"rank {self.rank}{f' on {self.host}' if self.host else ''}" if self.rank is not None else ""
        where = f"in phase {self.phase!r}" if self.phase else ""
        place = " ".join(part for part in (who, where) if part)
        return f"{self.kind}{f' ({place})' if place else ''}{f': {self.detail}' if self.detail else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedOutcome:
    """A run's verdict and what its ranks reported until then: results by rank, and parts of results where none came."""

    verdict: Verdict
    results: Mapping[int, dict[str, Any]]
    partials: Mapping[int, dict[str, Any]]
    stderr: Mapping[int, str]


def cause_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The cause rather than its echoes; of equal ones the rank that does not merely wait, then the lowest."""
    return min(verdicts, key=lambda v: (PRIORITY.index(v.kind), v.waits, v.rank or 0))
