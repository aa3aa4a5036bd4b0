"""Every command of README, tutorial and guides runs on the files of docs/examples, and ends with the exit code that is stated.

A block of `sh` is run line by line, in one folder a page. A comment above the block may say otherwise: `<!-- exit 4 -->`
of all its commands, or `<!-- not run: REASON -->` with one of the reasons below. README's two `command` blocks install.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
HERE = [page for page in PAGES if page.stem != "questions"]  # that page's answers are looked at too: test_questions.py
REASONS = ("needs a GPU", "takes minutes", "measures this machine", "asks this host", "your own files")
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```sh\n(?P<body>.*?)```", re.DOTALL)
SHELL = re.compile(r"[|;<>&$`]")


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Of each block what is stated above it ("" for nothing), and its commands."""
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        lines = found["body"].replace("\\\n", " ").splitlines()
        yield found["mark"] or "", [line for line in lines if line.strip()]


def run(line: str) -> int:
    """The exit code of a line; what a shell must read is run by one that finds `shardwise`."""
    words = shlex.split(line, comments=True)
    if words[0] == "shardwise" and not SHELL.search(line.partition(" #")[0]):
        return int(main(words[1:]))
    script = Path("bin") / "shardwise"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m simulator.cli "$@"\n')
    script.chmod(0o755)
    paths = os.pathsep.join((str(script.parent.resolve()), os.environ["PATH"]))
    surroundings = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], check=False, env=surroundings).returncode  # noqa: S607


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_every_command_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.stem in ("capture", "validate"):
        request.getfixturevalue("warm_captures")
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "docs" / "examples", folder)
    monkeypatch.chdir(folder)
    for mark, lines in blocks(page):
        due = int(mark.removeprefix("exit ")) if mark.startswith("exit ") else 0
        for line in () if mark.startswith(("not run: ", "command ")) else lines:
            assert run(line) == due, line


def test_marks_are_known_and_say_why() -> None:
    marks = [mark for page in PAGES for mark, _ in blocks(page) if mark]
    known = re.compile(rf"exit \d|not run: ({'|'.join(REASONS)})|command \d")
    assert [mark for mark in marks if not known.fullmatch(mark)] == []


def test_no_command_stands_outside_a_block_that_is_looked_at() -> None:
    for page in PAGES:
        fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert [body for kind, body in fences if kind != "sh" and re.search(r"^shardwise ", body, re.MULTILINE)] == []


def test_every_example_is_used() -> None:
    named = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = [file.name for file in (ROOT / "docs" / "examples").iterdir() if file.name != "hdr-node.toml"]
    assert [name for name in files if name not in named] == []
