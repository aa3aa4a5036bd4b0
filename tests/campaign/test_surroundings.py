"""Where a command runs: closed and full streams, few characters and columns, no home, folders that take nothing, pipes for files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.files import ordinary
from simulator.base.schema import parse_toml
from tests.campaign.seeds import ROOT

PREDICT = "predict --model llama3.2-1b --cluster hgx-h100-8"
CASES = {
    "stdout is full": (f"{PREDICT} > /dev/full", {}, ExitCode.RUN_FAILED, "stdout: No space left on device"),
    "stdout is closed": (f"{PREDICT} >&-", {}, ExitCode.RUN_FAILED, "stdout is closed"),
    "stderr is full": ("predict --model nosuch 2> /dev/full", {}, ExitCode.BAD_INPUT, ""),
    "stdout takes few characters": (f"{PREDICT} | cat", {"PYTHONIOENCODING": "latin-1"}, ExitCode.OK, ""),
    "no home, no locale, 20 columns": (f"{PREDICT} | cat", {"HOME": "", "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "20"}, ExitCode.OK, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_where_it_runs(name: str) -> None:
    rest, environment, code, words = CASES[name]
    command = f"set -o pipefail; {sys.executable} -m simulator.cli {rest}"
    told = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, env=told, check=False)
    assert done.returncode == code
    assert words.encode() in done.stderr
    assert b"Traceback" not in done.stderr


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(link)
    for path in (pipe, link, tmp_path, Path("/dev/zero"), tmp_path / ("a" * 300)):
        with pytest.raises(OSError, match=r"pipe or a device|levels of symbolic links|directory|too long"):
            ordinary(path)
    large = tmp_path / "large"
    large.write_bytes(b"12345")
    with pytest.raises(OSError, match="larger than 4 bytes"):
        ordinary(large, 4)
    assert ordinary(large, 5) == large


def test_keys_of_many_parts_are_refused_before_they_are_parsed() -> None:
    assert parse_toml("a.b.c = 1\n[d.e]\nf = 'x.y.z'")["a"] == {"b": {"c": 1}}
    for text in ("a." * 20_000 + "b = 1", "[" + "a." * 20_000 + "b]", "c = { " + "a . " * 40 + "b = 1 }"):
        with pytest.raises(ValueError, match="more than 32 parts"):
            parse_toml(text)
