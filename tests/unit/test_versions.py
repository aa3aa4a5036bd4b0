"""What the nightly run under several versions of torch makes of pytest's reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.versions import __main__ as versions

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="tests.validate.test_a" name="fine"/>
<testcase classname="tests.validate.test_a" name="left[out]"><skipped message="no compiler"/></testcase>
<testcase classname="tests.validate.test_a" name="wrong"><failure message="AssertionError: 1 != 2&#10;more"/></testcase>
<testcase classname="tests.validate.test_b" name="raised"><error message="ModuleNotFoundError: torch has it otherwise"/></testcase>
</testsuite></testsuites>"""


def test_failures_are_told_by_name_and_first_line(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    found = versions.counted(file)
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert found["failures"] == {
        "test_a::wrong": "AssertionError: 1 != 2",
        "test_b::raised": "ModuleNotFoundError: torch has it otherwise",
    }
    assert versions.counted(tmp_path / "none")["failures"] == {"pytest": "wrote no report"}


def test_pip_has_no_wheel_or_another_trouble() -> None:
    """As pip 25 and 26 write them, behind their warnings."""
    missing = (
        "ERROR: Could not find a version that satisfies the requirement torch==2.8.* (from versions: 2.6.0, 2.13.0)"
    )
    assert (
        versions.reason(f"WARNING: x\n{missing}\nERROR: No matching distribution found for torch==2.8.*\n")
        == versions.NO_WHEEL
    )
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert versions.reason(f"{full}\n\n") == full.removeprefix("ERROR: ")
    assert versions.reason("") == "pip failed and said nothing"


def test_of_every_version_a_line_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "2.6": {"torch": "2.6.0", "refused": True, "failures": {}},
        "2.13": {"torch": "2.13.0", "passed": 3, "skipped": 1, "failures": {}},
    }
    made = {"2.8": versions.NO_WHEEL, "2.9": "No space left on device"}
    monkeypatch.setattr(versions, "environment", lambda version, _: made.get(version, tmp_path / version))
    monkeypatch.setattr(versions, "seen", lambda python, *_: told[python.name])
    out = tmp_path / "seen.json"
    assert versions.main(["2.6", "2.8", "2.13", "--folder", str(tmp_path), "--json", str(out)]) == 0
    absent = {"torch": "", "failures": {}, "not_installed": versions.NO_WHEEL}
    assert json.loads(out.read_text()) == {**told, "2.8": absent}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2.6 (2.6.0): refused, as the validator does below 2.8"
    assert lines[1].startswith("2.8: no wheel for Python 3.")
    assert lines[2] == "2.13 (2.13.0): 3 passed, 1 skipped, 0 failed"
    assert versions.main(["2.9", "2.13", "--folder", str(tmp_path)]) == 1  # nobody knows what it would have done
    assert capsys.readouterr().out.startswith("2.9: not installed: No space left on device\n")
    told["2.13"]["failures"] = {"test_a::wrong": "1 != 2"}
    assert versions.main(["2.13", "--folder", str(tmp_path)]) == 1
    assert versions.main(["2.8", "--folder", str(tmp_path)]) == 1  # nothing was tried


def test_what_runs_under_every_version_is_there() -> None:
    """pytest runs nothing at all where one file of many is missing."""
    assert all((versions.ROOT / check).is_file() for check in versions.CHECKS)
    assert set(versions.LEAST) < set(versions.CHECKS)
