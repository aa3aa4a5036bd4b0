"""`python -m tests.versions [VERSION ...] --folder DIR`: the fake and gloo tests under each version of torch, as a table.

For nights: a version is installed once (a gigabyte or three), by pip and from the index that pip uses. The environment has this
one's other packages. Of every version a line says what came of it: tested, refused by the validator, no wheel on pip's index, or
not installed and why. Exit status 1 where a test fails, where pip fails otherwise than for want of a wheel, or where nothing was
tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from validate.torch_releases import EXACT, EXACT_STAGES, OLDEST, OLDEST_OF, release

ROOT: Final = Path(__file__).resolve().parents[2]
VERSIONS: Final = ("2.6", "2.8", "2.9", "2.11", "2.13", "newest")
CHECKS: Final = tuple(
    f"tests/validate/test_{name}.py"
    for name in ("run_fake", "run_cpu", "tensor_parallel", "spread_runs", "settled_collectives")
)
# What older releases are not asked: plans that they refuse, bytes that are not predicted of them
LEAST: Final = {
    "tests/validate/test_tensor_parallel.py": OLDEST_OF["tp"],
    "tests/validate/test_spread_runs.py": EXACT_STAGES,
    "tests/validate/test_run_fake.py": EXACT,
}
MINUTES: Final = 30.0
NO_WHEEL: Final = (
    f"no wheel for Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()} on pip's index"
)


def environment(version: str, folder: Path) -> Path | str:
    """The Python of an environment with that torch, made where it is not there; why there is none where pip fails."""
    place = folder / version
    python = place / "venv" / "bin" / "python"
    if (place / "installed").is_file():
        return python
    place.mkdir(parents=True, exist_ok=True)
    asked = "torch" if version == "newest" else f"torch=={version}.*"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--no-compile",  # minutes of a processor for modules that are mostly never loaded
        "--upgrade",
        "--target",
        str(place / "site"),
        asked,
    ]
    print(f"{version}: installing {asked} (a gigabyte or three)", file=sys.stderr, flush=True)
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        return reason(done.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    site = next((place / "venv" / "lib").iterdir()) / "site-packages"
    (site / "versions.pth").write_text(f"{place / 'site'}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    (place / "installed").write_text(asked, encoding="utf-8")
    return python


def reason(stderr: str) -> str:
    """What kept pip from installing a version: that there is none, or its first error."""
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    if any(error.startswith("No matching distribution found") for error in errors):
        return NO_WHEEL
    return (errors or stderr.strip().splitlines()[-1:] or ["pip failed and said nothing"])[0][:200]


def line_of(version: str, told: dict[str, Any]) -> str:
    """What came of a version."""
    if why := told.get("not_installed"):
        return f"{version}: {why}" if why == NO_WHEEL else f"{version}: not installed: {why}"
    what = f"{told.get('passed', 0)} passed, {told.get('skipped', 0)} skipped, {len(told['failures'])} failed"
    if told.get("refused"):
        what = f"refused, as the validator does below {OLDEST[0]}.{OLDEST[1]}"
    return f"{version} ({told['torch']}): {what}"


def seen(python: Path, checks: Sequence[str], out: Path) -> dict[str, Any]:
    """What the tests say under that Python: torch's version, counts, and the first line of each failure."""
    torch = [str(python), "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(torch, capture_output=True, text=True, check=False)
    if version.returncode:
        return {"torch": "", "failures": {"import torch": version.stderr.strip().splitlines()[-1]}}
    told = version.stdout.strip()
    if release(told) < OLDEST:
        return {"torch": told, "refused": True, "failures": {}}
    line = [str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={out}"]
    line += [one for one in checks if release(told) >= LEAST.get(one, OLDEST)]
    try:
        subprocess.run(line, cwd=ROOT, capture_output=True, check=False, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return {"torch": version.stdout.strip(), "failures": {"pytest": f"did not end in {MINUTES:g} minutes"}}
    return {"torch": version.stdout.strip(), **counted(out)}


def counted(report: Path) -> dict[str, Any]:
    """Counts of JUnit's report, and why what failed did."""
    if not report.is_file():
        return {"failures": {"pytest": "wrote no report"}}
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    failures = {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": first_line(case[0].get("message", ""))
        for case in suite.iter("testcase")
        if len(case) and case[0].tag in ("failure", "error")
    }
    told = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    return {"passed": told["tests"] - told["skipped"] - len(failures), "skipped": told["skipped"], "failures": failures}


def first_line(text: str) -> str:
    """What is said first, in a line."""
    return (text.strip().splitlines() or [""])[0][:160]


def main(arguments: Sequence[str] | None = None) -> int:
    """Every version asked for, one after another."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are kept")
    parser.add_argument("--only", nargs="+", default=CHECKS, metavar="TEST", help="other tests than the usual")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was seen")
    asked = parser.parse_args(arguments)
    folder = asked.folder.resolve()
    found: dict[str, dict[str, Any]] = {}
    for version in asked.versions:
        python = environment(version, folder)
        if isinstance(python, str):
            told = {"torch": "", "failures": {}, "not_installed": python}
        else:
            told = seen(python, asked.only, folder / version / "report.xml")
        found[version] = told
        print(
            "\n".join([line_of(version, told), *(f"  {name}: {why}" for name, why in told["failures"].items())]),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    lost = {told["not_installed"] for told in found.values() if "not_installed" in told} - {NO_WHEEL}
    tried = any("not_installed" not in told for told in found.values())
    return int(any(told["failures"] for told in found.values()) or bool(lost) or not tried)


if __name__ == "__main__":
    sys.exit(main())
