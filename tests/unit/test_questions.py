"""The page of questions: every command runs, and what it quotes is what its commands say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from simulator.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "questions.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
ASKED = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```sh\n(?P<commands>.*?)```(?:\n\n```text\n(?P<said>.*?)```)?", re.DOTALL
)


def test_there_are_eight_with_at_most_two_commands() -> None:
    assert len(SECTIONS) == 8
    for section in SECTIONS:
        commands = [line for found in ASKED.finditer(section) for line in found["commands"].splitlines()]
        assert 1 <= len(commands) <= 2


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_what_is_quoted_is_said(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each command ends with the exit code that its block is marked with; marks: tests/unit/test_guides.py."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "docs" / "examples", folder)
    monkeypatch.chdir(folder)
    for found in ASKED.finditer(section):
        mark = found["mark"] or "exit 0"
        if mark.startswith("not run: "):
            assert found["said"] is None
            continue
        capsys.readouterr()
        for command in found["commands"].splitlines():
            program, *words = shlex.split(command, comments=True)
            assert (program, main([*words, "--plain"])) == ("shardwise", int(mark.removeprefix("exit "))), command
        told = capsys.readouterr()
        lines = {line.strip() for line in (told.out + told.err).splitlines()}
        assert [line for line in (found["said"] or "").splitlines() if line.strip() not in lines] == []
