"""A little of the campaign; `python -m tests.campaign --minutes 60` is the whole."""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from simulator.base.errors import Fault, printable
from simulator.cli import shardwise
from simulator.formats.readers import PLAN_FORMATS
from simulator.formats.readers.plans import detect
from tests.campaign import same
from tests.campaign.cases import Ended, wrong
from tests.campaign.mutate import LARGE, LEFT_OUT, _large, mutated, options_of
from tests.campaign.seeds import JOURNALED, ROOT, Seed, seeds
from tests.campaign.worker import QUICK

# Options whose file is written; and such as several commands read by one function
WRITTEN = {"--out", "--export", "--launch-kit", "--save", "--draw", "--plot", "--junit", "--prometheus", "--history", "--stack-file", "--folder", "--moves", "--record"}  # fmt: skip
SHARED = {"--plan", "--prices", "--program", "--scale-with"}

CASES = 150


def test_valid_inputs_and_some_mutated_ones_end_as_they_should(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.campaign",
        "--cases",
        str(CASES),
        "--seed",
        str(QUICK),
        "--jobs",
        "1",
        "--minutes",
        "30",
    ]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES:,} cases" in done.stdout


def _commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield words
        return
    for name in command.list_commands(click.Context(command)):
        below = command.get_command(click.Context(command), name)
        assert below is not None
        yield from _commands(below, (*words, name))


def test_every_command_has_an_input_and_every_option_is_drawn_or_left_out() -> None:
    known = seeds(journals=False)
    commands = list(_commands(shardwise))
    assert [words for words in commands if not any(seed.argv[: len(words)] == words for seed in known)] == []
    drawn = {name for words in commands for one in options_of(words) for name in one.opts}
    assert {"--tensors", "--vary", "--journal", "--prices", "--failures", "--baseline", "--queue", "--port"} <= drawn
    assert LEFT_OUT - drawn <= {"--help", "--version", "--dask", "--workers"}  # click's own, and such as are gone


def test_every_file_option_and_argument_is_in_some_input() -> None:
    """An option that names a file to read is of use only with one: drawing a name is not enough."""
    known = seeds(journals=False)
    given = {(seed.argv[0], word) for seed in known for word in seed.argv} | {
        (one.split()[0], "--journal") for one in JOURNALED.values()
    }
    missing = []
    for words in _commands(shardwise):
        for one in options_of(words):
            reads = isinstance(one.type, click.Path) and not (one.metavar or "").startswith("OUT")
            shared = one.opts[-1] in SHARED and any(option == one.opts[-1] for _, option in given)
            if (
                reads
                and not shared
                and not WRITTEN & set(one.opts)
                and not any((words[0], n) in given for n in one.opts)
            ):
                missing.append((*words, one.opts[-1]))
    assert missing == []


def test_every_format_of_a_plan_is_in_some_input() -> None:
    found = {read_as(seed, name) for seed in seeds(journals=False) for name in seed.files if name in seed.argv}
    assert set(PLAN_FORMATS) - found == set()


def read_as(seed: Seed, name: str) -> str:
    """The format of a plan's file; "" of another file."""
    if "--plan-format" in seed.argv:
        return seed.argv[seed.argv.index("--plan-format") + 1]
    return detect(seed.files[name].decode(), name) if seed.argv[seed.argv.index(name) - 1] == "--plan" else ""


def test_a_valid_input_that_is_refused_is_a_fault(tmp_path: Path) -> None:
    case = seeds(journals=False)[0]
    refused = Ended(status=3, seconds=1, cpu_s=1, peak_bytes=0, stdout=b"", stderr=b"shardwise: 1 fault\n")
    for name, data in case.files.items():
        (tmp_path / name).write_bytes(data)
    assert wrong(case, refused, tmp_path).startswith("a valid input is refused")
    assert wrong(replace(case, valid=False), refused, tmp_path) == ""


def test_a_case_that_asks_the_network_is_a_fault() -> None:
    code = "from tests.campaign.cases import _without_network as w; w(); import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "asks the network: socket." in done.stderr


def test_a_case_is_the_same_every_time() -> None:
    for seed in seeds(journals=False)[:8]:
        assert mutated(seed, random.Random("1:2")) == mutated(seed, random.Random("1:2"))
    assert any(mutated(seed, random.Random("1:3")) != seed for seed in seeds(journals=False))


# What escapes a stranger's words itself; and the two places that write a terminal's own codes
_ESCAPING = {"printable", "printable_lines", "to_text", "to_json", "json_text", "dumps"}
_OWN_CODES = {"progress.py", "command.py"}


def test_whatever_is_printed_passes_by_what_escapes_it() -> None:
    for path in [
        *(ROOT / "simulator" / "cli").glob("*.py"),
        ROOT / "validate" / "command.py",
        ROOT / "validate" / "calibrate.py",
    ]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("click.echo", "print"):
                continue
            argument, text = call.args[0], ast.unparse(call)
            names = {
                ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(argument) if isinstance(one, ast.Call)
            }
            own = path.name in _OWN_CODES and ("\\x1b" in text or "live" in text)
            known = (
                path.name in ("manual.py", "ui.py", "export.py") and "err=" not in text
            )  # scripts, an address, a file
            complained = path.name == "__init__.py" and "shardwise: {text}" in text
            assert names & _ESCAPING or own or known or complained, f"{path.name}:{call.lineno}: {text}"


def test_no_words_of_a_stranger_reach_the_terminal_as_they_are() -> None:
    message = str(Fault(place="a\x1b[31m", problem="b\x07" + "c" * 70_000 + "\u202e", remedy="ü is fine"))
    assert message.startswith("a\\x1b[31m: b\\x07ccc")
    assert message.endswith("(ü is fine)")
    assert "70,0" in message
    assert len(message) < 2000
    assert printable("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_long_work_is_no_hang_where_it_says_how_long(tmp_path: Path) -> None:
    case = Seed(name="long", argv=("serve", "--requests", "1000000"))
    long = Ended(status=-signal.SIGXCPU, seconds=30, cpu_s=20, peak_bytes=0, stdout=b"", stderr=b"")
    told = replace(long, stderr=b"70,000 of 1,000,000 requests, 2,209.7/s, 421 s left\n")
    assert wrong(case, long, tmp_path).startswith("hang")
    assert wrong(case, told, tmp_path) == ""
    assert wrong(case, replace(told, status=-signal.SIGSEGV), tmp_path) == "exit status -11"


def test_an_empty_file_is_made_large_too() -> None:
    assert len(_large(b"", random.Random(1))) >= LARGE // 2


def test_an_answer_is_the_same_bytes_whatever_hashes_processes_and_locale(tmp_path: Path) -> None:
    """One of those that `python -m tests.campaign.same` asks for."""
    (study,) = (one for one in same.studies(journals=False) if one.name == "explored over illegal plans")
    answers = set()
    for run in same.RUNS[:2]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{name: one for name, one in run.items() if name != "jobs"},
        }
        command = [sys.executable, "-m", "simulator.cli", *same.with_jobs(study, run["jobs"]).argv]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
        answers.add(done.stdout)
    assert len(answers) == 1
    assert b'"illegal"' in answers.pop()
