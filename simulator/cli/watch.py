"""`--watch`: repeat the command whenever one of its input files changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import parse_toml
from simulator.cli.options import print_status

_EVERY_S = 0.2  # a person who saves a file sees the answer at once; looking costs nothing


def watch_option(function: Callable[..., int]) -> Callable[..., int]:
    """--watch, of a command whose argument is a study, or several."""

    @wraps(function)
    def watching(*, watch: bool, **options: Any) -> int:  # noqa: ANN401  as the command has them
        if not watch:
            return function(**options)
        given = options.get("study") or options.get("studies") or ()
        return watched(given if isinstance(given, tuple) else (given,))

    help_text = "Answer again whenever a study changes, until Ctrl-C."
    return click.option("--watch", is_flag=True, help=help_text)(watching)


def watched(studies: tuple[Path, ...]) -> int:
    """Run the command without --watch, and again after each change until Ctrl-C; returns the last exit code.

    Watched: the studies, files they name, and files that options name. Bad input is said, and the next change awaited.
    """
    if not studies:
        raise click.UsageError("--watch needs a STUDY.toml")
    context = click.get_current_context()
    options = {**context.params, "watch": False}
    beside = {Path(str(one)) for one in options.values() if isinstance(one, str | Path)}
    seen: dict[Path, tuple[int, int]] = {}
    code = 0
    try:
        while True:
            now = _states({*studies, *(path for study in studies for path in _named(study)), *beside})
            if now != seen:
                click.clear()
                try:
                    code = int(context.invoke(context.command, **options))
                except InputError as exc:
                    print_status(f"shardwise: {exc}")
                    code = ExitCode.BAD_INPUT
                seen = now | _states(beside)  # as the answer left them: an option may name what it writes
                print_status(f"shardwise: watching {', '.join(map(str, sorted(now)))}; Ctrl-C ends")
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return code


def _states(paths: set[Path]) -> dict[Path, tuple[int, int]]:
    """Time and size of each file that is there."""
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):  # it is gone, or no path at all
            status = path.stat()
            if path.is_file():
                found[path] = status.st_mtime_ns, status.st_size
    return found


def _named(study: Path) -> Iterator[Path]:
    """Files that a study names, relative to its folder."""
    with suppress(OSError, ValueError):
        found: list[Any] = [parse_toml(study.read_text(encoding="utf-8"))]
        while found:
            match found.pop():
                case dict() as table:
                    found += table.values()
                case list() as several:
                    found += several
                case str() as text:
                    yield study.parent / text
