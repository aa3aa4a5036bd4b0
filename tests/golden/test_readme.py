"""The README shows what its first command prints. These are the run's own digits: refresh the README when they move."""

import re
from pathlib import Path

import pytest

from simulator.cli import main

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_what_the_first_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["predict", "--plain"])
    shown = re.search(r"The first one prints:\n\n```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == capsys.readouterr().out
