"""What is published agrees with itself. `experiments/release.py` builds and checks the wheel, in .ci/run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(file: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_lock_has_every_dependency_at_the_pinned_version_with_hashes() -> None:
    lock, pinned = ROOT / ".ci" / "requirements.txt", pins(ROOT / "constraints.txt")
    locked = pins(lock)
    needed = {re.sub(r"[-_.]+", "-", re.split(r"[<>=]", one)[0]).lower() for one in PROJECT["dependencies"]}
    assert needed <= locked.keys()
    assert locked == {name: pinned[name] for name in locked}
    entries = re.split(r"^(?=[\w.-]+==)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_version_has_its_place_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]]


def test_all_has_every_extra_of_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (every,) = extras["all"]
    for_others = {"all", "dev", "docs", "programs"}  # who works on the project itself
    assert set(re.findall(r"\w+", every.partition("[")[2])) == extras.keys() - for_others


def test_every_extra_for_development_is_pinned() -> None:
    pinned = pins(ROOT / "constraints.txt")
    asked = [one for extra in ("dev", "docs", "validate") for one in PROJECT["optional-dependencies"][extra]]
    names = [re.split(r"[<>=\[]", one)[0].lower().replace("_", "-") for one in asked]
    assert [name for name in names if name not in pinned and name != "shardwise"] == []
