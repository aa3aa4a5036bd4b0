"""Where a command runs: closed and full streams, few characters and columns, no home, folders that take nothing, pipes for files."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest.mock import Mock

import click
import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.files import ordinary, owned_file, write_whole
from simulator.base.schema import parse_toml
from simulator.cli import WRITES, _refused, main, shardwise
from tests.campaign.seeds import ROOT
from validate.players import guard

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
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, env=variables, check=False)
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
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no path"):
            ordinary(Path(name))
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


_WITHOUT_SOCKETS = """
import sys
import time
def refuse(event, arguments):
    if event.startswith("socket.") and event != "socket.__new__" or event in ("socket.connect", "urllib.Request"):
        raise RuntimeError(event)
sys.addaudithook(refuse)
from simulator.cli import main
for command in COMMANDS:
    code = main(command.split())
    if code not in (0, 4):
        sys.exit(f"{command}: {code}")
"""
_COMMANDS = (
    "predict --model llama3.2-1b --cluster hgx-h100-8 --json",
    "serve --model llama3.2-1b --cluster hgx-h100-8 --rate 4 --requests 20",
    "collective all_reduce --nodes 2 --size 1MB:4MB",
    "compare docs/examples/fsdp.toml docs/examples/megatron.toml",
    "backtest docs/examples/runs.csv",
    "topo docs/examples/matrix.txt --device a100",
    "goodput docs/examples/a100-64.toml --tokens 5B",
    "export docs/examples/study.toml --to megatron",
)


def test_no_command_opens_a_connection() -> None:
    """A few, from the import on; the campaign denies the network to an input of every command."""
    code = f"COMMANDS = {_COMMANDS!r}\n{_WITHOUT_SOCKETS}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    denied = code.replace("from simulator.cli import main", "import socket; socket.create_connection(('127.0.0.1', 9))")
    assert (
        "RuntimeError"
        in subprocess.run([sys.executable, "-c", denied], capture_output=True, text=True, check=False).stderr
    )


def test_the_name_of_a_file_that_was_written_is_spelled_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulator.cli", *PREDICT.split(), "--trace", "bell\x07.json.gz"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=variables, check=False)
    assert done.returncode == 0
    assert b"trace written to bell\\x07.json.gz" in done.stderr
    assert (tmp_path / "bell\x07.json.gz").is_file()


@pytest.mark.parametrize("closed", ["2>&-", "2>&- 0<&-"])
def test_nobody_listens_to_stderr(tmp_path: Path, closed: str) -> None:
    """The answer comes all the same, and no file that is written has the number that stderr had."""
    command = (
        f"{shlex.join([sys.executable, '-m', 'simulator.cli', *PREDICT.split(), '--trace', 't.json.gz'])} {closed}"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, env=variables, check=False)
    assert done.returncode == 0
    assert b"step" in done.stdout
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))


def test_a_process_that_may_open_no_more_files_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for number, place in ((errno.EMFILE, "this process"), (errno.ENOSPC, "stdout")):
        assert _refused(OSError(number, os.strerror(number))) == ExitCode.RUN_FAILED
        assert capsys.readouterr().err == f"shardwise: {place}: {os.strerror(number)}\n"


def test_a_cache_that_cannot_be_written_costs_no_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is played: the library lies in the run's own folder then."""
    monkeypatch.setenv("SHARDWISE_CACHE", "/dev/null/cache")
    monkeypatch.setattr(guard, "compiler", lambda: "c++")
    monkeypatch.setattr(guard.subprocess, "run", lambda command, **_: Path(command[-1]).write_bytes(b"library"))
    assert guard._compiled(tmp_path).parent == tmp_path


@pytest.mark.parametrize(
    "command",
    ["predict --plan pipe", "replay pipe", "predict --lengths pipe", "backtest pipe", "topo pipe", "predict pipe"],
)
def test_a_pipe_in_place_of_a_file_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # nobody writes there: whoever opens it waits for ever
    assert main(command.split()) == ExitCode.BAD_INPUT
    assert "is a pipe or a device" in capsys.readouterr().err


def test_what_a_killed_process_left_beside_a_file_goes_with_the_next_write(tmp_path: Path) -> None:
    left, theirs = tmp_path / ".out.json.17.unfinished", tmp_path / ".out.json.18.unfinished"
    other = tmp_path / ".out.json.bak"
    for one in (left, other):
        one.write_text("half")
    with os.fdopen(owned_file(theirs), "wb"):  # another process is at it
        write_whole(tmp_path / "out.json", "whole")
    assert sorted(one.name for one in tmp_path.iterdir()) == [theirs.name, other.name, "out.json"]


@pytest.mark.parametrize("line", ["\n", "x = 1\n", "GPU0 X\n", "- topology: x\n"])
def test_megabytes_of_anything_are_no_topology_in_time_that_grows_with_them(line: str, tmp_path: Path) -> None:
    """Sixteen times as much of it takes at most sixty-four times as long; what grows with the square takes 256."""
    from simulator.base.errors import ClusterError
    from simulator.formats.readers.topology_source import read_source

    def seconds(num_bytes: int) -> float:
        file = tmp_path / f"{num_bytes}.txt"
        file.write_text(line * (num_bytes // len(line)))
        before_s = time.process_time()
        with pytest.raises(ClusterError):
            read_source(str(file))
        return time.process_time() - before_s

    few_s = max(1e-3, *(seconds(6 * 2**16) for _ in range(3)))
    assert seconds(6 * 2**20) < 64 * few_s


@pytest.mark.parametrize("words", [["--html", "study.toml"], ["--html=./study.toml"], ["--trace", "link.toml"]])
def test_what_is_read_is_not_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'model = "gpt2"\ncluster = "hgx-h100-8"\n'
    Path("study.toml").write_text(text)
    Path("link.toml").symlink_to("study.toml")
    assert main(["predict", "study.toml", *words]) == 3
    assert "is also read (another name)" in capfd.readouterr().err
    assert Path("study.toml").read_text() == text


def test_a_file_that_is_written_has_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind -- it is a program's own matter."""
    for words in (["calibrate", "learn", "x.csv", "-o", ""], [*PREDICT.split(), "--trace="]):
        assert main(words) == ExitCode.BAD_INPUT
        assert "is empty (the name of a file or folder to write)" in capsys.readouterr().err
    assert main(["capture", str(tmp_path / "none.py"), "-o", "x.capture.gz", "--", "--out", ""]) == ExitCode.BAD_INPUT
    assert "is empty" not in capsys.readouterr().err


@pytest.mark.parametrize("there", ["", "x.gz"])
def test_what_is_written_is_not_written_over(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two outputs of one name: the first would be lost, and both be called written."""
    monkeypatch.chdir(tmp_path)
    if there:
        Path(there).touch()
    assert main([*PREDICT.split(), "--trace", "x.gz", "--html", "./x.gz"]) == 3
    assert "--trace x.gz: is also written (another name)" in capfd.readouterr().err


def test_a_page_takes_no_other_files_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who takes --html for a flag gives it their study."""
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text("model = 'gpt2'\n")
    assert main(["predict", "--html", "study.toml"]) == 3
    assert "is a file, and no page" in capfd.readouterr().err
    assert Path("study.toml").read_text() == "model = 'gpt2'\n"


MODEL = "num_layers = 1\nd_model = 512\nnum_heads = 8\nd_ff = 1408\nvocab_size = 1024\n"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        ("predict --plan run.args --cluster hgx-h100-8 --trace run.yaml", {"run.args": "--yaml-cfg run.yaml --vocab-size 32000 --micro-batch-size 1", "run.yaml": None}),
        ("predict --plan tune.sh --model llama3.2-1b --gpus 1xa100 --trace axolotl.yml", {"tune.sh": None, "axolotl.yml": None}),
        ("predict study.toml --trace mine.toml", {"study.toml": 'model = "mine.toml"\ncluster = "hgx-h100-8"\n', "mine.toml": MODEL}),
    ],
)  # fmt: skip
def test_what_another_file_names_is_not_written(
    words: str, files: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    from tests.campaign.seeds import seeds

    known = {name: data for one in seeds(journals=False) for name, data in one.files.items()}
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_bytes(known[name] if text is None else text.encode())
    before = {name: Path(name).read_bytes() for name in files}
    assert main(words.split()) == 3
    assert "is also read (another name)" in capfd.readouterr().err
    assert {name: Path(name).read_bytes() for name in files} == before


def _options(group: click.Group) -> Iterator[click.Option]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from _options(command)
        elif command is not None:
            yield from (one for one in command.params if isinstance(one, click.Option))


def test_every_option_that_writes_a_file_is_known() -> None:
    written = {flag for one in _options(shardwise) if (one.metavar or "").startswith("OUT") for flag in one.opts}
    assert written <= WRITES
    assert len(written) > 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_job_or_a_terminal_is_ctrl_c(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that journals are closed and temporary folders gone; what a command has forked ends as always."""

    def ends(*_: object, **__: object) -> None:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            time.sleep(60)
            os._exit(1)
        os.read(read, 1)  # what a fork is sent before it runs is lost
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except KeyboardInterrupt as exc:
            raise ValueError("as pydantic has it") from exc

    monkeypatch.setattr(shardwise, "main", ends)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main([]) == ExitCode.INTERRUPTED
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("mebibytes", [200, 350])
def test_a_limit_that_leaves_no_room_is_told_at_once(mebibytes: int, tmp_path: Path) -> None:
    """OpenBLAS, which numpy and scipy bring, asks for ever for memory that it cannot have."""
    command = f"ulimit -v {mebibytes * 1024}; exec {sys.executable} -m simulator.cli sensitivity --jobs 2"
    done = subprocess.run(
        ["/bin/bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False
    )
    assert done.returncode == ExitCode.RUN_FAILED
    assert done.stderr == f"shardwise: the limit of {mebibytes} MiB a process (ulimit -v) is too low: 400 MiB or more\n"


def test_memory_and_processes_that_end_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, words in ((MemoryError(), "this machine's memory is used up"), (BrokenProcessPool("x"), "fewer --jobs")):
        monkeypatch.setattr("simulator.cli.predict.read_study", Mock(side_effect=error))
        assert main(["predict"]) == ExitCode.RUN_FAILED
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
