"""A little of the campaign; `python -m tests.campaign --minutes 60` is the whole."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

from simulator.base.errors import Fault, printable
from tests.campaign.mutate import mutated
from tests.campaign.seeds import ROOT, seeds

CASES = 130


def test_valid_inputs_and_some_mutated_ones_end_as_they_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--cases", str(CASES), "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES:,} cases" in done.stdout


def test_a_case_is_the_same_every_time() -> None:
    for seed in seeds(journals=False)[:8]:
        assert mutated(seed, random.Random("1:2")) == mutated(seed, random.Random("1:2"))
    assert any(mutated(seed, random.Random("1:3")) != seed for seed in seeds(journals=False))


# What escapes a stranger's words itself; and the two places that write a terminal's own codes
_ESCAPING = {"printable", "printable_lines", "to_text", "to_json", "as_json_text", "json_text", "dumps"}
_OWN_CODES = {"progress.py", "place.py", "command.py"}


def test_whatever_is_printed_passes_by_what_escapes_it() -> None:
    for path in [
        *(ROOT / "simulator" / "cli").glob("*.py"),
        ROOT / "validate" / "command.py",
        ROOT / "validate" / "calibrate.py",
    ]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("click.echo", "print"):
                continue
            said, text = call.args[0], ast.unparse(call)
            names = {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(said) if isinstance(one, ast.Call)}
            own = path.name in _OWN_CODES and ("\\x1b" in text or "live" in text)
            known = (
                path.name in ("manual.py", "ui.py", "export.py") and "err=" not in text
            )  # scripts, an address, a file
            complained = path.name == "__init__.py" and "shardwise: {text}" in text
            assert names & _ESCAPING or own or known or complained, f"{path.name}:{call.lineno}: {text}"


def test_no_words_of_a_stranger_reach_the_terminal_as_they_are() -> None:
    told = str(Fault(place="a\x1b[31m", problem="b\x07" + "c" * 70_000 + "\u202e", remedy="ü is fine"))
    assert told.startswith("a\\x1b[31m: b\\x07ccc")
    assert told.endswith("(ü is fine)")
    assert "70,0" in told
    assert len(told) < 2000
    assert printable("two\nlines\tand a tab") == "two\nlines\tand a tab"
