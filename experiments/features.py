"""What there is: one line a feature, with the command that shows it, the test that holds it and the page that tells of it.

    python experiments/features.py            checks docs/features.toml, and writes docs/features.md
    python experiments/features.py --check    writes nothing; exit code 1 where something would change
    python experiments/features.py --run [N]  also runs the commands (those that take no longer than N seconds, 60)

A command must be one that the command line takes, a test one that stands in its file, a page one that exists.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click

from simulator.base.files import write_whole
from simulator.cli import shardwise

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE, PAGE = ROOT / "docs" / "features.toml", ROOT / "docs" / "features.md"
EXAMPLES: Final = ROOT / "docs" / "examples"
HEAD: Final = """# Features

What there is, with a command that shows each (the files are those of [examples](examples)) and the test that holds it. `python experiments/features.py` checks `docs/features.toml` and writes this page.
"""


@dataclass(frozen=True)
class Feature:
    """A line of the table. command: without `shardwise`; test: `path::name`; page: relative to docs.

    exit_code: where the command shows what is refused; own_files: it reads what the reader made before.
    """

    group: str
    feature: str
    command: str
    test: str
    page: str
    exit_code: int = 0
    own_files: bool = False


def features() -> list[Feature]:
    """All lines, in the file's order."""
    groups = tomllib.loads(TABLE.read_text(encoding="utf-8"))["group"]
    return [Feature(group=group["name"], **line) for group in groups for line in group["features"]]


def faults(line: Feature) -> Iterator[str]:
    """What is wrong with a line."""
    yield from (f"{line.feature}: {problem}" for problem in (_command(line), _test(line), _page(line)) if problem)


def _command(line: Feature) -> str:
    """Whether click takes the words; nothing is run. Files that a command reads are those of the examples."""
    words = shlex.split(line.command)
    with chdir(EXAMPLES):
        try:
            context = shardwise.make_context("shardwise", list(words))
            command: click.Command = shardwise
            while isinstance(command, click.Group):
                name, found, words = command.resolve_command(context, words)
                assert found is not None
                command, context = found, found.make_context(name, list(words), parent=context)
        except click.ClickException as exc:
            return f"shardwise {line.command}: {exc.format_message()}"
    return ""


def _test(line: Feature) -> str:
    path, _, name = line.test.partition("::")
    file = ROOT / path
    known = file.is_file() and re.search(
        rf"^ *def {name.rpartition('::')[2]}\(", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    return "" if known else f"no such test: {line.test}"


def _page(line: Feature) -> str:
    return "" if (ROOT / "docs" / line.page.partition("#")[0]).is_file() else f"no such page: docs/{line.page}"


def page(lines: list[Feature]) -> str:
    """The whole page."""
    text, group = [HEAD], ""
    for line in lines:
        if line.group != group:
            group = line.group
            text += [f"\n## {group}\n\n| feature | command | test |\n| --- | --- | --- |\n"]
        name = line.test.partition("::")[2].removeprefix("test_").replace("_", " ")
        command = line.command.replace("|", "\\|")
        text.append(
            f"| [{line.feature}]({line.page}) | `shardwise {command}` | [{name}](../{line.test.partition('::')[0]}) |\n"
        )
    return "".join(text)


def failed(lines: list[Feature], seconds: float) -> Iterator[str]:
    """Commands that end in an error, each in a copy of the examples; those that take longer are named on stderr."""
    for command, expected in {line.command: line.exit_code for line in lines if not line.own_files}.items():
        with TemporaryDirectory() as folder:
            here = shutil.copytree(EXAMPLES, Path(folder) / "examples")
            words = [sys.executable, "-m", "simulator.cli", *shlex.split(command)]
            try:
                done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603
            except subprocess.TimeoutExpired:
                print(f"not ended: shardwise {command}", file=sys.stderr, flush=True)
                continue
        if done.returncode not in ({expected} if expected else {0, 4}):
            yield f"shardwise {command}: exit code {done.returncode}\n{done.stderr.strip()}"


def main() -> int:
    """Check, and write unless told not to. The exit code is returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", nargs="?", type=float, const=60.0, metavar="SECONDS")
    options = parser.parse_args()
    lines = features()
    found = [fault for line in lines for fault in faults(line)]
    if options.run and not found:
        found = list(failed(lines, options.run))
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page(lines))
    write_whole(PAGE, page(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
