"""What the parent of `calibrate run` does with what its supervisor tells it; the ranks themselves run in test_bench_cpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from validate import measure
from validate.measure import Job
from validate.phases import phases_of
from validate.samples import read_samples
from validate.supervise import SupervisedOutcome, Verdict

PHASES = phases_of("cpu", 2)
MACHINE = {"kind": "machine", "device": "cpu", "architecture": "cpu", "hostname": "here", "num_ranks": 2}
Told = Callable[[int, dict[str, Any]], None]


def product(side: int, rank: int = 0) -> dict[str, Any]:
    shape = {"m": side, "n": side, "k": side, "layout": "tn", "dtype": "fp32"}
    return {"kind": "gemm", "time_s": 1e-3 * side, "reps": 5, "rank": rank, **shape}


class Supervisor:
    """Plays verdicts one after another, and remembers which phases each attempt was asked for."""

    def __init__(self, *verdicts: Verdict, rows: Sequence[dict[str, Any]] = (MACHINE,)) -> None:
        self.verdicts, self.rows = list(verdicts), rows
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, commands: Sequence[Sequence[str]], *_: object, samples: Told, **__: object) -> SupervisedOutcome:
        setting = json.loads(Path(commands[0][-1]).read_text(encoding="utf-8"))
        self.asked.append(tuple(setting["phases"]))
        for row in self.rows:
            samples(0, row)
            samples(1, row)
        verdict = self.verdicts.pop(0) if self.verdicts else Verdict(kind="ok")
        return SupervisedOutcome(verdict=verdict, results={}, partials={}, stderr={})


def job(out: Path, **changes: Any) -> Job:
    return Job(**{"out": out, "minutes": 1.0, "device": "cpu", "num_ranks": 2, "threads": 1, **changes})


@pytest.mark.parametrize(
    "kind", ["killed", "hung", "out_of_memory", "failed", "bad_report", "peer_lost", "storage_full", "no_result"]
)
def test_trouble_costs_its_phase_and_the_rest_goes_on(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Supervisor(Verdict(kind=kind, detail="why", rank=1, phase="attention"))
    monkeypatch.setattr(measure, "supervise", played)
    outcome = measure.measure(job(tmp_path / "s.jsonl"))
    assert outcome.verdict == "partial"
    assert outcome.problems == [f"attention: {kind} (rank 1): why"]
    after = PHASES[PHASES.index("attention") + 1 :]
    assert played.asked == [PHASES, after]
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["error"] for row in rows if "error" in row] == [f"{kind} (rank 1): why"]


def test_the_machine_stands_above_lines_of_a_quicker_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(*_: object, samples: Told, **__: object) -> SupervisedOutcome:
        for index, row in ((1, MACHINE), (1, product(64, rank=1)), (0, MACHINE), (0, product(64))):
            samples(index, row)
        return SupervisedOutcome(verdict=Verdict(kind="ok"), results={}, partials={}, stderr={})

    monkeypatch.setattr(measure, "supervise", supervise)
    outcome = measure.measure(job(tmp_path / "s.jsonl"))
    found = read_samples([tmp_path / "s.jsonl"])
    assert not found.faults
    assert outcome.num_samples == 2
    assert [sample.rank for sample in found.samples] == [1, 0]


def test_trouble_before_the_first_phase_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Supervisor(Verdict(kind="missing", detail="torch", rank=0, phase="start"))
    monkeypatch.setattr(measure, "supervise", played)
    outcome = measure.measure(job(tmp_path / "s.jsonl"))
    assert outcome.verdict == "partial"
    assert outcome.problems == ["start: missing (rank 0): torch"]
    assert len(played.asked) == 1


def test_an_interruption_ends_it_and_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "supervise", Supervisor(Verdict(kind="interrupted", detail="Ctrl-C")))
    outcome = measure.measure(job(tmp_path / "s.jsonl"))
    assert (outcome.verdict, outcome.problems, outcome.num_failures) == ("interrupted", [], 0)


def test_after_the_last_minute_no_phase_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LATE_S", -60.0)  # as if the end had been long ago
    monkeypatch.setattr(measure, "supervise", Supervisor(Verdict(kind="hung", rank=0, phase="overlap")))
    outcome = measure.measure(job(tmp_path / "s.jsonl"))
    assert outcome.problems[1] == "transfers, storage: no time left"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "supervise", Supervisor())
    outcome = measure.measure(job(Path("/dev/full")))
    assert outcome.verdict == "partial"
    assert outcome.problems == ["/dev/full: No space left on device"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_disk_that_fills_up_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import signal

    monkeypatch.setattr(measure, "supervise", Supervisor(rows=[MACHINE, *(product(side) for side in range(1, 40))]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        outcome = measure.measure(job(tmp_path / "s.jsonl"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert outcome.verdict == "partial"
    assert "File too large" in outcome.problems[0]
    found = read_samples([tmp_path / "s.jsonl"])
    assert not found.faults
    assert len(found.samples) == outcome.num_samples > 5


def test_another_machines_file_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.jsonl"
    monkeypatch.setattr(measure, "supervise", Supervisor(rows=[MACHINE, product(64)]))
    measure.measure(job(out))
    before = out.read_bytes()
    monkeypatch.setattr(measure, "supervise", Supervisor(rows=[MACHINE | {"hostname": "there"}, product(64)]))
    with pytest.raises(InputError, match="another machine or setting"):
        measure.measure(job(out, resume=True))
    assert out.read_bytes() == before


def test_what_is_measured_already_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.jsonl"
    rows = [MACHINE, product(64), product(128)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ge', encoding="utf-8")
    asked: list[Any] = []

    def played(commands: Sequence[Sequence[str]], *_: object, **__: object) -> SupervisedOutcome:
        asked.append(json.loads(Path(commands[0][-1]).read_text(encoding="utf-8"))["done"])
        return SupervisedOutcome(verdict=Verdict(kind="ok"), results={}, partials={}, stderr={})

    monkeypatch.setattr(measure, "supervise", played)
    assert measure.measure(job(out, resume=True)).verdict == "complete"
    assert len(asked[0]) == 2
    assert out.read_bytes().endswith(b"}\n")  # the cut line is gone


def test_every_reason_not_to_start_is_told_at_once(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    out.write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        measure.measure(job(out, minutes=-1.0))
    assert len(caught.value.faults) == 2
    with pytest.raises(InputError, match="folder does not exist"):
        measure.measure(job(tmp_path / "no" / "s.jsonl"))


def test_only_the_phases_that_are_asked_for_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Supervisor()
    monkeypatch.setattr(measure, "supervise", played)
    assert measure.measure(job(tmp_path / "s.jsonl", only=("streams", "host"))).verdict == "complete"
    assert played.asked == [("host", "streams")]
    with pytest.raises(InputError, match="libraries is not measured here"):
        measure.measure(job(tmp_path / "other.jsonl", only=("libraries",)))
