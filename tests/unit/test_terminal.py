"""What a terminal gets beyond answers: a study made by questions, answers on every change, completions, manual pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest

import simulator.cli.predict as verb
from simulator.base.exit_codes import ExitCode
from simulator.cli import main, shardwise
from simulator.cli.init import QUESTIONS
from simulator.cli.manual import man_page, manuals
from simulator.predict import Prediction
from simulator.spec.plan import Plan


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, made_prediction: Prediction) -> list[Plan]:
    """The plans that predict() was asked for; it answers with a prediction written by hand."""
    asked: list[Plan] = []

    def predict(_: object, plan: Plan, *__: object, advise: bool) -> Prediction:
        assert advise
        asked.append(plan)
        return made_prediction

    monkeypatch.setattr(verb, "predict", predict)
    return asked


# --- init


def test_the_study_of_init_has_what_flags_say_and_is_predicted(plans: list[Plan]) -> None:
    assert main(["init", "mine.toml", "--model", "llama3.2-1b", "--nodes", "2", "--zero", "1", "--seq-len", "512"]) == 0
    written = tomllib.loads(Path("mine.toml").read_text(encoding="utf-8"))
    assert {key: written[key] for key in ("model", "cluster", "nodes")} == {
        "model": "llama3.2-1b",
        "cluster": "hgx-h100-8",
        "nodes": 2,
    }
    assert main(["predict", "mine.toml"]) == 0
    assert (plans[0].zero, plans[0].seq_len, plans[0].num_devices) == (1, 512, 16)


def test_what_stands_in_comments_may_be_used(plans: list[Plan]) -> None:
    main(["init"])
    text = Path("study.toml").read_text(encoding="utf-8")
    Path("more.toml").write_text(
        text.replace("# tp = 2 ", "tp = 2 ").replace("# [run]", "[run]").replace("\n# tokens", "\ntokens")
    )
    assert main(["predict", "more.toml"]) == 0
    assert plans[0].tp == 2


def test_every_line_of_it_has_a_comment() -> None:
    main(["init"])
    lines = Path("study.toml").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and "# " not in line] == []


def test_on_a_terminal_five_questions_are_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["llama3-70b", "dgx-h100-8", "4", "3", "8192"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "prompt", lambda *_, **__: next(answers))
    assert main(["init"]) == 0
    written = tomllib.loads(Path("study.toml").read_text(encoding="utf-8"))
    assert (written["model"], written["nodes"], written["plan"]["seq_len"]) == ("llama3-70b", 4, 8192)
    assert len(QUESTIONS) == 5
    assert capsys.readouterr().out == ""


def test_defaults_are_said_where_nobody_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["init", "--model", "llama3-8b"])
    said = capsys.readouterr().err
    assert [f"--{one.name.replace('_', '-')} is not given" in said for one in QUESTIONS] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_init_overwrites_nothing_and_writes_no_study_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("study.toml").write_text("mine")
    assert main(["init"]) == ExitCode.BAD_INPUT
    assert Path("study.toml").read_text() == "mine"
    assert main(["init", "other.toml", "--model", "nobodys", "--zero", "9"]) == ExitCode.BAD_INPUT
    assert not Path("other.toml").exists()
    assert "2 faults" in capsys.readouterr().err


# --- --watch


def test_a_study_is_predicted_again_when_it_changes(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times: as it is, after a change, and not while it is wrong. Then somebody presses Ctrl-C."""
    text = 'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = {}\n'
    study = Path("a.toml")
    study.write_text(text.format(512))
    changes = iter([None, text.format(1024), "wrong", None, text.format(20480)])

    def wait(_: float) -> None:
        try:
            change = next(changes)
        except StopIteration:
            raise KeyboardInterrupt from None
        if change is not None:
            study.write_text(change)  # of another size each time

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["predict", "a.toml", "--watch", "--brief"]) == ExitCode.OK
    assert [plan.seq_len for plan in plans] == [512, 1024, 20480]


def test_several_studies_are_watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        Path(f"{name}.toml").write_text("wrong")
    monkeypatch.setattr(time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["compare", "a.toml", "b.toml", "--watch"]) == ExitCode.BAD_INPUT
    assert "watching a.toml, b.toml;" in capsys.readouterr().err


def test_files_that_a_study_names_are_watched(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text('like = "llama3.2-1b"\n')
    Path("a.toml").write_text('model = "mine.toml"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 512\n')
    monkeypatch.setattr(time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    main(["predict", "a.toml", "--watch"])
    assert "watching a.toml, mine.toml;" in capsys.readouterr().err
    assert len(plans) == 1


def test_what_an_answer_writes_is_no_change(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.toml").write_text('model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 512\n')
    waits = iter(range(3))

    def wait(_: float) -> None:
        if next(waits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    main(["predict", "a.toml", "--watch", "--trace", "trace.json.gz"])
    assert Path("trace.json.gz").is_file()
    assert len(plans) == 1


def test_watch_needs_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--watch"]) == ExitCode.USAGE
    assert "--watch needs a STUDY.toml" in capsys.readouterr().err


# --- completions


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_it_reads(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", shell]) == 0
    script = capsys.readouterr().out
    assert f"_SHARDWISE_COMPLETE={shell}_complete" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script.encode(), check=True)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardwise pre", ["plain,predict"]),
        ("shardwise predict --largest", ["plain,--largest-batch"]),
        ("shardwise predict --model llama2-13", ["plain,llama2-13b", "file,llama2-13"]),
        ("shardwise serve --cluster hgx-h200", ["plain,hgx-h200-8", "file,hgx-h200"]),
        ("shardwise export --recompute sel", ["plain,selective"]),
    ],
)
def test_commands_options_presets_and_choices_are_completed(
    line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SHARDWISE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == offered


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "tcsh"]) == ExitCode.BAD_INPUT
    assert "bash, zsh, fish" in capsys.readouterr().err


# --- manual pages


def test_every_command_and_option_has_its_place_in_the_manual() -> None:
    assert main(["manual", "-o", "man"]) == 0
    pages = {file.stem: file.read_text(encoding="utf-8") for file in Path("man", "man1").iterdir()}
    assert pages["shardwise-predict"].startswith(".TH SHARDWISE\\-PREDICT 1\n.ad l\n.SH NAME\n")
    for name in shardwise.list_commands(click.Context(shardwise)):
        command = shardwise.get_command(click.Context(shardwise), name)
        assert command is not None
        for option in (one.opts[-1] for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert option.replace("-", "\\-") in pages[f"shardwise-{name}"]


def test_what_roff_would_read_as_its_own_is_escaped() -> None:
    @click.command(help=".TH forged\\fB 1\n\n'so /etc/passwd")
    def hostile() -> None: ...

    (page,) = manuals(click.Group("g", {"hostile": hostile})) and [
        man_page(one) for one in manuals(click.Group("g", {"hostile": hostile}), "g") if one.name == "g hostile"
    ]
    own = (".TH G", ".ad l", ".SH ", ".PP", ".TP")
    assert [line for line in page.splitlines() if line.startswith((".", "'")) and not line.startswith(own)] == []
    assert "forged\\efB 1" in page


def test_man_reads_the_pages() -> None:
    program = shutil.which("man")
    if program is None:
        pytest.skip("there is no man on this machine")
    main(["manual", "-o", "man"])
    file = Path("man", "man1", "shardwise-predict.1")
    done = subprocess.run([program, "--warnings", "-l", str(file)], check=True, capture_output=True, text=True)
    assert "--largest-batch" in done.stdout.replace("\u2010", "-")
    assert "warning" not in done.stderr
