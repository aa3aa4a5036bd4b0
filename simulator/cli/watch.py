"""`--watch`: an answer is given again whenever a file that it was made of changes."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli.options import say

_EVERY_S = 0.2  # a person who saves a file sees the answer at once; looking costs nothing


def watch_option(function: Callable[..., int]) -> Callable[..., int]:
    """--watch, of a command whose argument is a study."""

    @wraps(function)
    def watching(study: Path | None, *, watch: bool, **options: Any) -> int:  # noqa: ANN401  as the command has them
        return watched(study) if watch else function(study, **options)

    help_text = "Answer again whenever STUDY.toml changes, until Ctrl-C."
    return click.option("--watch", is_flag=True, help=help_text)(watching)


def watched(study: Path | None) -> int:
    """The present command without --watch, and again after each change until Ctrl-C. The exit code is the last answer's.

    Watched: the study, files it names, and files that options name. Bad input is said, and the next change awaited.
    """
    if study is None:
        raise click.UsageError("--watch needs a STUDY.toml")
    context = click.get_current_context()
    options = {**context.params, "watch": False}
    seen: dict[Path, tuple[int, int]] = {}
    code = 0
    try:
        while True:
            now = dict(_states(study, options))
            if now != seen:
                seen = now
                click.clear()
                code = _told(lambda: int(context.invoke(context.command, **options)))
                say(f"shardwise: watching {', '.join(map(str, sorted(now)))}; Ctrl-C ends")
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return code


def _told(once: Callable[[], int]) -> int:
    try:
        return once()
    except InputError as exc:
        say(f"shardwise: {exc}")
        return ExitCode.BAD_INPUT


def _states(study: Path, options: Mapping[str, Any]) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Each file that is there, with its time and size."""
    for path in {study, *_named(study), *(Path(str(one)) for one in options.values() if isinstance(one, str | Path))}:
        with suppress(OSError, ValueError):  # it is gone, or no path at all
            status = path.stat()
            if path.is_file():
                yield path, (status.st_mtime_ns, status.st_size)


def _named(study: Path) -> Iterator[Path]:
    """Files that a study's texts may name, beside it."""
    with suppress(OSError, ValueError):
        found: list[Any] = [tomllib.loads(study.read_text(encoding="utf-8"))]
        while found:
            match found.pop():
                case dict() as table:
                    found += table.values()
                case list() as several:
                    found += several
                case str() as text:
                    yield study.parent / text
