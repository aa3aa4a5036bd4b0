"""How good samples are: idle machines pass, those that do something else are refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from validate.benches.load import Load
from validate.command import nearest_stack
from validate.fit.grade import grade
from validate.samples import read_samples

MEASURED = Path(__file__).resolve().parents[2] / "experiments" / "measured"
CALM = MEASURED / "cpu-loop-2026-11-21" / "samples-1.jsonl.gz"


def test_what_was_measured_on_idle_machines_is_good_and_under_load_is_not() -> None:
    """The repetitions of real files; the same with every second one disturbed."""
    gpu, cpu = (read_samples([path]) for path in (MEASURED / "h200-2026-11-20" / "kernels.jsonl.gz", CALM))
    fitted = Calibration.load("h100-sxm")
    assert "1.02" in " ".join(grade(gpu, fitted).reasons)
    assert grade(cpu, Calibration.ideal()).letter == "B"
    loaded = replace(cpu, samples=tuple(replace(s, p90_s=(s.p90_s or s.time_s) * 2) for s in cpu.samples))
    assert grade(loaded, Calibration.ideal()).letter == "F"


@pytest.mark.parametrize(
    ("steal", "others", "letter"), [(0.0, 0.0, "A"), (0.01, 0.0, "B"), (0.0, 0.2, "C"), (0.3, 0.0, "F"), (0, 0.5, "F")]
)
def test_what_else_the_cores_did_counts(steal: float, others: float, letter: str) -> None:
    found = read_samples([CALM])
    quiet = tuple(replace(s, p10_s=None) for s in found.samples)
    sections = ({"kind": "section", "steal_share": steal, "others_share": others},)
    assert grade(replace(found, samples=quiet, sections=sections), Calibration.ideal()).letter == letter


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_another_process_is_seen() -> None:
    alone: Any = SimpleNamespace(control=None)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        before, until = Load.now(), time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.05)
        told = before.since(alone)
        other.kill()
    assert told["others_share"] > 0.01  # a core of as many as there are, which others may hold too
    assert set(told) == {"steal_share", "others_share"}


def test_fit_refuses_noisy_samples_unless_told_otherwise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noisy, out = tmp_path / "noisy.jsonl", tmp_path / "here.calibration.json"
    lines = gzip.decompress(CALM.read_bytes()).splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] in ("machine", "gemm") or row.get("op") == "clone"]
    rows.append({"kind": "section", "state": "ends", "name": "gemm", "others_share": 0.6, "steal_share": 0.0})
    noisy.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["calibrate", "fit", str(noisy), "-o", str(out)]) == ExitCode.BAD_INPUT
    assert "other processes took 60.0 % of the cores (F)" in capfd.readouterr().err
    assert not out.exists()
    assert main(["calibrate", "fit", str(noisy), "--noisy", "-o", str(out)]) == ExitCode.OK
    assert any(note.startswith("grade F") for note in Calibration.load(out).provenance.notes)


def test_a_kept_calibration_is_taken_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Cluster.load("hgx-h100-8").device.name
    Calibration.load("a100-sxm").save(tmp_path / f"{device}.calibration.json")
    asked = ["predict", "--json", "--cluster", "hgx-h100-8"]
    told = {}
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("SHARDWISE_CALIBRATIONS", folder)
        main(asked)
        told[folder] = json.loads(capsys.readouterr().out)
    steps = [one["time"]["step_s"] if "time" in one else one["step_s"] for one in told.values()]
    assert steps[0] != steps[1]
    assert f"{device}.calibration.json, kept of this device" in json.dumps(told[str(tmp_path)])
    assert "kept of this device" not in json.dumps(told[""])
    main([*asked, "--calibration", "h100-sxm"])  # what is named comes first
    assert "kept of this device" not in capsys.readouterr().out


def test_fit_keeps_where_predictions_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row
        for row in map(json.loads, gzip.decompress(CALM.read_bytes()).splitlines())
        if row["kind"] in ("machine", "gemm") or row.get("op") == "clone"
    ]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv("SHARDWISE_CALIBRATIONS", str(tmp_path / "kept"))
    out = tmp_path / "here.calibration.json"
    assert main(["calibrate", "fit", str(tmp_path / "s.jsonl"), "--noisy", "--keep", "-o", str(out)]) == ExitCode.OK
    (kept,) = (tmp_path / "kept").iterdir()
    assert str(kept) in capfd.readouterr().out
    assert kept.read_bytes() == out.read_bytes()


def test_the_stack_is_that_of_the_installed_torch() -> None:
    assert nearest_stack("2.13.0+cpu", "fake-cpu") == "torch-2.13-fake-cpu"
    assert nearest_stack("2.12.1", "eager") == "torch-2.11-eager"
    assert nearest_stack("2.5.0", "eager") == "torch-2.4-eager"
    assert nearest_stack("2.1.0", "eager") == "torch-2.4-eager"  # older than all: the oldest
