"""The page of questions: what it quotes is what its commands say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from simulator.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "questions.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
QUOTED = re.compile(r"```sh\n(?P<commands>.*?)```\n\n```text\n(?P<said>.*?)```", re.DOTALL)


def test_there_are_eight_with_at_most_two_commands() -> None:
    assert len(SECTIONS) == 8
    for section in SECTIONS:
        commands = [line for body in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in body.splitlines()]
        assert 1 <= len(commands) <= 2


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_what_is_quoted_is_said(
    section: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "docs" / "examples")
    for found in QUOTED.finditer(section):
        capsys.readouterr()
        for command in found["commands"].splitlines():
            main([*shlex.split(command)[1:], "--plain"])
        told = capsys.readouterr()
        lines = {line.strip() for line in (told.out + told.err).splitlines()}
        assert [line for line in found["said"].splitlines() if line.strip() not in lines] == []
