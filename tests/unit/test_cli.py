"""The command line: exit codes, what goes to stdout and to stderr, and how faults are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import VERBS, doctor, main, shardwise

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_verb_and_loads_none() -> None:
    code = "import sys; from simulator.cli import main; main(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in VERBS)
    loaded = done.stderr.split()
    assert not {"pydantic", "numpy", "simpy", "rich", "networkx", "validate"} & set(loaded)
    ours = {name for name in loaded if name.startswith("simulator")}
    assert {name for name in ours if not name.startswith("simulator.base")} == {"simulator", "simulator.cli"}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([verb], *([verb, name] for name in getattr(shardwise.get_command(None, verb), "commands", {}))):  # type: ignore[arg-type]
        assert main([*words, "--help"]) == ExitCode.OK
        out = capsys.readouterr().out
        assert f"shardwise {' '.join(words)}" in out
        assert all(line.isprintable() for line in out.splitlines())
    assert f"## `shardwise {verb}" in (ROOT / "docs/reference/cli.md").read_text()


@pytest.mark.parametrize(
    "command",
    [
        *("predict", "serve", "explore", "place", "goodput", "compare", "sensitivity", "export --to deepspeed"),
        *("collective all_reduce", "capture train.py", "search --model gpt2 --global-batch 8 --seq-len 128"),
    ],
)
def test_a_count_of_gpus_may_stand_for_the_cluster(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--gpus", "8xh100", "--cluster", "dgx-h100-8"]) == ExitCode.BAD_INPUT
    assert "--gpus: --cluster is given too" in capsys.readouterr().err
    assert main([*command.split(), "--gpus", "h100"]) == ExitCode.BAD_INPUT
    assert "'h100' is no COUNTxGPU (for example 8xh100)" in capsys.readouterr().err


def test_a_count_of_gpus_is_their_usual_machine(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for machine in (["--gpus", "8xa100"], ["--cluster", "8xa100"]):
        assert main(["collective", "all_reduce", *machine, "--size", "1MB", "--json"]) == ExitCode.OK
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert "a100" in answers[0]


@pytest.mark.parametrize("arguments", [["predct"], ["predict", "--no-such-flag"], ["backtest"]])
def test_a_wrong_command_line_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert not out
    assert "Error" in err


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert main(["doctor"]) == ExitCode.INTERRUPTED
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "")


def test_a_signal_while_an_error_is_told_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Exception) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulator.cli._refused", interrupted)
    assert main(["ui", "--port", "x"]) == ExitCode.INTERRUPTED


def test_a_reader_that_leaves_is_told_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "simulator.cli", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.READER_LEFT, "")


def test_doctor_reports_versions(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert findings["python"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["packages"]["simulator"] == str(ROOT / "simulator")


def test_doctor_finds_a_package_that_shadows_ours(tmp_path: Path) -> None:
    (tmp_path / "validate").mkdir()
    (tmp_path / "validate" / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from simulator.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"package 'validate' loads from {tmp_path / 'validate'}" in done.stdout


def test_doctor_finds_a_distribution_that_claims_our_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor.metadata, "packages_distributions", lambda: {"simulator": ["shardwise", "qiskit-simulator"]}
    )
    assert main(["doctor"]) == ExitCode.BAD_INPUT
    assert "'qiskit-simulator' also installs a package 'simulator'" in capsys.readouterr().out
