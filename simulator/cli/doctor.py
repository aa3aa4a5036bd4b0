"""`shardwise doctor`: which versions run here, and whether something else shadows the project's packages."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import printable_lines
from simulator.base.exit_codes import ExitCode
from simulator.base.presets import TOPOLOGIES

_PACKAGES = ("simulator", "validate", "topologies")
_LIBRARIES = ("click", "networkx", "numpy", "pydantic", "rich", "scipy", "simpy", "torch", "matplotlib", "dask")


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def command(*, as_json: bool) -> int:
    """Print versions and problems of this environment; exit 3 if there is a problem."""
    findings = examine()
    click.echo(json.dumps(findings, indent=2) if as_json else printable_lines(_text(findings)))
    return ExitCode.BAD_INPUT if findings["problems"] else ExitCode.OK


def examine() -> dict[str, Any]:
    """Versions by name (null: not installed), where our packages load from, and what is wrong with that."""
    folders = {name: _folder(name) for name in _PACKAGES}
    problems = [*_scattered(folders), *_claimed()]
    return {
        "schema_version": 1,
        "shardwise": _version("shardwise"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "packages": {name: str(folder) if folder else None for name, folder in folders.items()},
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin else None


def _scattered(folders: dict[str, Path | None]) -> list[str]:
    """Our packages are in one folder; one loaded from elsewhere belongs to another distribution."""
    home = TOPOLOGIES.parent
    problems = []
    for name, folder in folders.items():
        if folder is None:
            problems.append(f"package {name!r} cannot be found: reinstall shardwise")
        elif folder.parent != home:
            problems.append(f"package {name!r} loads from {folder}, not from {home}: something shadows it")
    return problems


def _claimed() -> list[str]:
    """Other distributions that install packages with our names into this environment."""
    owners = metadata.packages_distributions()
    return [
        f"distribution {other!r} also installs a package {name!r}: uninstall it or use a fresh environment"
        for name in _PACKAGES
        for other in sorted(set(owners.get(name, [])) - {"shardwise"})
    ]


def _text(findings: dict[str, Any]) -> str:
    versions = {"shardwise": findings["shardwise"], "python": findings["python"], **findings["libraries"]}
    lines = [f"{name:<12}{version or 'not installed'}" for name, version in versions.items()]
    lines += [f"{name:<12}{folder or 'not found'}" for name, folder in findings["packages"].items()]
    lines += [f"problem     {problem}" for problem in findings["problems"]] or ["no problems found"]
    return "\n".join(lines)
