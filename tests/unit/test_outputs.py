"""What a command writes beside its answer never costs the answer: it is refused before the work, or fails behind the print."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole
from simulator.cli import main

SMALL = ("predict", "--model", "llama3.2-1b")
STUDY = 'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[plan]\nzero = 3\nseq_len = 1024\n'
PRICES = (
    'currency = "USD"\n[[price]]\ncluster = "hgx-h100-8"\nkind = "on-demand"\nper_gpu_hour = 2.5\n'
    'date = "2026-01-01"\nsource = "made up"\n'
)
SEARCH = (
    *("search", "--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--global-batch", "8", "--seq-len", "1024"),
    *(f"--fix={name}={value}" for name, value in (("zero", 3), ("tp", 1), ("pp", 1), ("cp", 1))),
    *("--fix=data_parallel=fsdp2", "--fix=recompute=none", "--jobs", "1"),
)
FRONT = (*SEARCH, "--front", "--nodes", "1", "--prices", "prices.toml")
PICTURES = [
    (SMALL, "--memory", ".png"),
    (SMALL, "--links", ".svg"),
    (("topo", "hgx-h100-8"), "--draw", ".png"),
    (("collective", "all_reduce", "--size", "1MiB:4MiB"), "--plot", ".pdf"),
    (("compare", "a.toml", "--what-if", "plan.zero=2", "--no-ablations", "--prices", "prices.toml"), "--plot", ".svg"),
    (FRONT, "--plot", ".svg"),
]
FILES = [
    (SMALL, "--trace", ".json.gz"),
    (SMALL, "--snapshot", ".pickle"),
    (SEARCH, "--export", ".csv"),
    (("place", "a.toml"), "-o", ".tsv"),
]


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(STUDY)
    Path("prices.toml").write_text(PRICES)


_ALONE: dict[tuple[str, ...], str] = {}


def alone(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """What a command prints that writes nothing beside it: asked once for all tests."""
    known = tuple(arguments)
    if known not in _ALONE:
        _ALONE[known] = answered(capsys, arguments)[1]
    return _ALONE[known]


def answered(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = main([*arguments, "--plain"])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(("arguments", "flag", "ending"), PICTURES)
@pytest.mark.parametrize("error", [ImportError("no module"), AttributeError("_ARRAY_API not found")])
def test_without_a_matplotlib_that_loads_the_answer_is_printed(
    arguments: Sequence[str],
    flag: str,
    ending: str,
    error: Exception,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = builtins.__import__

    def broken(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise error
        return find(name, *rest)  # type: ignore[arg-type]

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", broken)
    code, out, err = answered(capsys, [*arguments, flag, f"x{ending}"])
    assert (code, out) == (ExitCode.BAD_INPUT, alone(capsys, arguments))
    assert f"{flag} x{ending}: matplotlib cannot be loaded: {error}" in err
    assert not Path(f"x{ending}").exists()


@pytest.mark.parametrize(("arguments", "flag", "ending"), [*PICTURES, *FILES])
def test_a_disk_that_is_full_by_then_costs_the_file_only(
    arguments: Sequence[str],
    flag: str,
    ending: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    Path(f"x{ending}").write_text("old")
    expected = alone(capsys, arguments)
    monkeypatch.setattr(Path, "replace", full)
    code, out, err = answered(capsys, [*arguments, flag, f"x{ending}"])
    assert (code, out) == (ExitCode.BAD_INPUT, expected)
    assert f"{flag} x{ending}: cannot be written: No space left on device" in err
    assert Path(f"x{ending}").read_text() == "old"
    assert sorted(path.name for path in Path().iterdir()) == sorted(["a.toml", "prices.toml", f"x{ending}"])


@pytest.mark.parametrize(("arguments", "flag", "ending"), [*PICTURES, *FILES])
def test_a_folder_that_is_not_there_is_told_before_the_work(
    arguments: Sequence[str], flag: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answered(capsys, [*arguments, flag, f"absent/x{ending}"])
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert f"{flag} absent/x{ending}: there is no folder absent" in err


@pytest.mark.parametrize(("arguments", "flag"), [(arguments, flag) for arguments, flag, _ in PICTURES])
def test_an_ending_that_is_no_pictures_is_told_before_the_work(
    arguments: Sequence[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answered(capsys, [*arguments, flag, "x.gif"])
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert f"{flag} x.gif: is not a picture format" in err


def test_a_file_is_written_through_a_link_and_keeps_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        write_whole(tmp_path, b"")
