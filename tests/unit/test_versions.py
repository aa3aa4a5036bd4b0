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


def test_a_version_that_pip_has_not_got_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"torch": "2.13.0", "passed": 3, "skipped": 0, "failures": {}}
    monkeypatch.setattr(versions, "environment", lambda version, _: tmp_path if version == "2.13" else None)
    monkeypatch.setattr(versions, "seen", lambda *_: told)
    out = tmp_path / "seen.json"
    assert versions.main(["2.6", "2.13", "--folder", str(tmp_path), "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == {"2.13": told}
    assert capsys.readouterr().out == "2.13 (2.13.0): 3 passed, 0 failed\n"
    told["failures"] = {"test_a::wrong": "1 != 2"}
    assert versions.main(["2.13", "--folder", str(tmp_path)]) == 1
    assert versions.main(["2.6", "--folder", str(tmp_path)]) == 1  # nothing was tried


def test_what_runs_under_every_version_is_there() -> None:
    """pytest runs nothing at all where one file of many is missing."""
    assert all((versions.ROOT / check).is_file() for check in versions.CHECKS)
    assert {*versions.SPREAD, *versions.BYTES} < set(versions.CHECKS)
