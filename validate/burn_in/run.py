"""The parent of a burn-in: starts the ranks under `validate.supervise`, and says which of them computed what wrong."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from validate.joined import joined
from validate.launch import Launch
from validate.machine import memory_limit, running_jobs
from validate.measure import START_S, environment
from validate.stopwatch import MEMORY_SHARE, DeviceKind, SessionSettings
from validate.supervise import Deadlines, Verdict, scratch_folder, supervise

ROUND_S: Final = 120.0  # of one round, and of the first results
_SAID_S: Final = 60.0  # between two lines that say how far it is
_LEAST: Final = 0.5  # of the minutes: played even where starting took more than the rest
WRONG: Final = 1  # exit code: something computed wrongly
LOST: Final = 5
PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """What is asked: ranks on this machine (or those of a launcher), and for how long."""

    minutes: float
    device: DeviceKind
    num_ranks: int
    threads: int
    tiny: bool = False
    patience: float = 1.0
    memory_fraction: float = MEMORY_SHARE
    command: str = "shardwise calibrate burn-in"


@dataclass(slots=True)
class Burnt:
    """What came of it. ranks: rounds, checks and clocks of each.

    wrong: of each rank and check whose result was not what it must be, the first round (0: before it), what was wrong then,
    and in how many rounds it was.
    """

    verdict: Verdict
    machine: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        if self.wrong:
            return WRONG
        if self.verdict.kind == "interrupted":
            return ExitCode.INTERRUPTED
        return ExitCode.OK if self.verdict.ok else LOST

    def as_json(self) -> dict[str, Any]:
        trouble = None if self.verdict.ok else {**asdict(self.verdict), "text": str(self.verdict)}
        return {
            "sound": self.verdict.ok and not self.wrong,
            "trouble": trouble,
            "wrong": self.wrong,
            "ranks": [{"rank": rank, **counts} for rank, counts in sorted(self.ranks.items())],
            "machine": self.machine,
        }

    def lines(self) -> list[str]:
        """For people: what was wrong by rank and check, then what was played."""
        found = [_wrong_line(row) for row in self.wrong]
        found += [] if self.verdict.ok else [f"trouble: {self.verdict}"]
        for rank, counts in sorted(self.ranks.items()):
            if reasons := (counts.get("clocks") or {}).get("throttled_by"):
                found.append(f"rank {rank}: its clock was held back by {reasons}")
        rounds = [counts.get("rounds", 0) for counts in self.ranks.values()]
        checks: list[str] = next((counts["checks"] for counts in self.ranks.values() if "checks" in counts), [])
        found.append(f"{len(self.ranks)} ranks, {min(rounds, default=0)} rounds of {', '.join(checks) or 'nothing'}")
        return [*found, "sound" if self.status == ExitCode.OK else "not sound"]


def _wrong_line(row: Mapping[str, Any]) -> str:
    where = f" on {row['host']}" if row["host"] else ""
    often = f"{row['rounds']} rounds, the first {row['round']}" if row["round"] else "before the first round"
    return f"WRONG: rank {row['rank']}{where}: {row['check']}: {row['detail']} ({often})"


def burn_in(job: Burn, print_line: PrintLine) -> Burnt:
    """Play rounds until the minutes are over or a rank is in trouble. Raises InputError for what is refused."""
    faults = running_jobs(job.num_ranks) if job.device == "cuda" else []
    launch = Launch.of_environment()
    ranks = (launch.rank,) if launch.outside else tuple(range(job.num_ranks))
    end_s = time.monotonic() + 60 * job.minutes
    found = Burnt(verdict=Verdict(kind="ok"))
    with (
        joined(InputError(faults) if faults else None, patience=job.patience) as peers,
        scratch_folder() as scratch,
    ):
        outcome = supervise(
            [_command(job, scratch, rank, end_s) for rank in ranks],
            _deadlines(job, end_s),
            environments=[environment(job.device, job.threads) | {"RANK": str(rank)} for rank in ranks],
            scratch=scratch,
            memory_bytes=memory_limit(job.memory_fraction, launch.local_size) if job.device == "cpu" else None,
            progress=None if launch.rank else _progress(end_s, print_line),
            samples=lambda _, row: _take(found, row, print_line),
            peers=peers,
        )
        found.verdict = outcome.verdict
        found.ranks = {
            ranks[index]: {**outcome.partials.get(index, {}), **outcome.results.get(index, {})}
            for index in range(len(ranks))
        }
        if peers is not None:
            found.verdict = peers.settle("end", outcome.verdict)
            _merge_answers(found, peers.gather("burnt", {"ranks": found.ranks, "wrong": found.wrong}))
    return found


def _progress(end_s: float, print_line: PrintLine) -> Callable[[int, str], None]:
    """Once a minute, of the first rank here: the round, and the time that is left."""
    last_s = -math.inf

    def show(index: int, phase: str) -> None:
        nonlocal last_s
        now = time.monotonic()
        if index == 0 and now - last_s >= _SAID_S:
            last_s = now
            print_line(f"{phase}, {max(0.0, end_s - now) / 60:.3g} minutes left")

    return show


def _take(found: Burnt, row: Mapping[str, Any], print_line: PrintLine) -> None:
    if row.get("kind") == "machine":
        found.machine = {key: value for key, value in row.items() if key != "kind"}
    elif row.get("kind") == "wrong":
        known = [one for one in found.wrong if (one["rank"], one["check"]) == (row["rank"], row["check"])]
        if known:
            known[0]["rounds"] += 1
            return
        found.wrong.append({**{key: value for key, value in row.items() if key != "kind"}, "rounds": 1})
        print_line(f"rank {row['rank']}: {row['check']}: {row['detail']}")


def _merge_answers(found: Burnt, answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Under a launcher each rank has a parent of its own."""
    found.ranks = {int(rank): counts for one in answers.values() for rank, counts in one["ranks"].items()}
    found.wrong = [row for _, one in sorted(answers.items()) for row in one["wrong"]]


def _deadlines(job: Burn, end_s: float) -> Deadlines:
    start_s, round_s = job.patience * START_S, job.patience * ROUND_S
    total_s = start_s + max(0.0, end_s - time.monotonic()) + 2 * round_s
    return Deadlines(by_phase_s={"start": start_s}, other_s=round_s, total_s=total_s)


def _command(job: Burn, scratch: Path, rank: int, end_s: float) -> list[str]:
    setting = SessionSettings(
        device=job.device, rank=rank, num_ranks=job.num_ranks, threads=job.threads, until_s=end_s, least_s=_LEAST * 60 * job.minutes,
        phases=(), folder=str(scratch), out="", tiny=job.tiny, command=job.command,
        memory_fraction=job.memory_fraction, join_s=2 * job.patience * ROUND_S,  # a rank that hangs is found before others tire
    )  # fmt: skip
    path = scratch / f"setting-{rank}.json"
    path.write_text(json.dumps(asdict(setting)), encoding="utf-8")
    return [sys.executable, "-P", "-m", "validate.burn_in.worker", str(path)]
