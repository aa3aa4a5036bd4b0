"""What is published: the wheel, built twice to the same bytes, with all its data and below 8 MB; and what installs it.

    python experiments/release.py                    build and check; dist/ gets the wheel (.ci/run does this)
    python experiments/release.py --lock             also .ci/requirements.txt: every dependency with its hashes (needs uv)
    python experiments/release.py --try              also run it by pipx and uvx, in new environments (needs both)
    python experiments/release.py --sbom             also dist/sbom.json: what a new environment has (needs cyclonedx-py)

Times in the wheel are those of the last commit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DIST, LOCK = ROOT / "dist", ROOT / ".ci" / "requirements.txt"
PACKAGES: Final = ("simulator", "validate", "topologies")
NEEDS: Final = {"--lock": ["uv"], "--try": ["pipx", "uvx"], "--sbom": ["cyclonedx-py"]}
MOST_BYTES: Final = 8_000_000


def main() -> int:
    """Build, check, and do what was asked besides. The exit code is 1 where something is not as it should be."""
    lacks = [name for flag, names in NEEDS.items() if flag in sys.argv for name in names if not shutil.which(name)]
    if lacks:
        print(f"not installed: {', '.join(lacks)}")
        return 1
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        wheels = [built(Path(first)), built(Path(second))]
        faults = [*_faults(*wheels)]
        if not faults:
            DIST.mkdir(exist_ok=True)
            shutil.copy(wheels[0], DIST)
    wheel = DIST / wheels[0].name
    if faults:
        print("\n".join(faults))
        return 1
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, sha256 {_digest(wheel)}, the same twice")
    for flag, act in {"--lock": lock, "--try": run_it, "--sbom": sbom}.items():
        if flag in sys.argv:
            act(wheel)
    return 0


def tracked() -> list[str]:
    """The files of the project, as they are now."""
    found = _output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return [name for name in found.split("\0") if name and (ROOT / name).is_file()]


def built(folder: Path) -> Path:
    """A wheel of the tracked files, copied into a new folder.

    Permissions go into a wheel: they are those of one mask, whatever the checkout's and the user's.
    """
    before = os.umask(0o022)
    try:
        for name in tracked():
            if name.startswith(tuple(f"{package}/" for package in PACKAGES)) or "/" not in name:
                target = folder / "tree" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
        epoch = {"SOURCE_DATE_EPOCH": _output("git", "log", "-1", "--format=%ct").strip()}
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "tree")]
        subprocess.run(command, check=True, env=os.environ | epoch)
    finally:
        os.umask(before)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _faults(first: Path, second: Path) -> Iterator[str]:
    """What is wrong with the wheel, a line each."""
    if first.read_bytes() != second.read_bytes():
        yield "the wheel's bytes differ from one build to the next"
    if first.stat().st_size > MOST_BYTES:
        yield f"the wheel has {first.stat().st_size:,} bytes, more than {MOST_BYTES:,}"
    names = {name for name in zipfile.ZipFile(first).namelist() if ".dist-info/" not in name}
    due = {name for name in tracked() if name.partition("/")[0] in PACKAGES and not name.endswith(".md")} | {
        "shardwise.py"
    }
    yield from (f"the wheel lacks {name} (package-data of pyproject.toml)" for name in sorted(due - names))
    yield from (f"the wheel holds {name}, which the project does not" for name in sorted(names - due))


def lock(_: Path) -> None:
    """Every dependency of the wheel at the version of constraints.txt, with the hashes of all its files."""
    options = ["-q", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
    files = ["-c", "constraints.txt", "pyproject.toml", "-o", str(LOCK)]
    subprocess.run(["uv", "pip", "compile", *options, *files], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def run_it(wheel: Path) -> None:
    """What somebody types who has the wheel alone, in a folder of nothing."""
    with TemporaryDirectory() as folder:
        own = {
            name: str(Path(folder) / name.lower())
            for name in ("PIPX_HOME", "PIPX_BIN_DIR", "UV_CACHE_DIR", "UV_TOOL_DIR")
        }
        for command in (["pipx", "run", "--no-cache", "--spec", str(wheel)], ["uvx", "--from", str(wheel)]):
            done = subprocess.run(
                [*command, "shardwise", "predict", "--brief"],
                check=True, cwd=folder, env=os.environ | own, capture_output=True, text=True,
            )  # fmt: skip
            print(f"{command[0]}: {done.stdout.splitlines()[0]}")


def sbom(wheel: Path) -> None:
    """A bill of materials in CycloneDX's words, of a new environment that has what the lock names and the wheel."""
    with TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "--require-hashes", "-r", str(LOCK)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "pip", "setuptools"], check=True)
        made = ["cyclonedx-py", "environment", "--output-reproducible", "-o", str(DIST / "sbom.json"), python]
        subprocess.run(made, check=True)
    print(f"{(DIST / 'sbom.json').relative_to(ROOT)} written")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
