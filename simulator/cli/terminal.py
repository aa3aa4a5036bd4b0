"""How an answer reaches the terminal, the same for every verb."""

from __future__ import annotations

import os
import shutil
import sys

import click
from rich.console import RenderableType

from simulator.formats.writers.text import PLAIN_WIDTH, to_text


def show(answer: RenderableType, *, plain: bool, width: int = PLAIN_WIDTH) -> None:
    """Print to stdout, in colour where that is a terminal whose reader wants it (https://no-color.org).

    width: columns where it is no terminal.
    """
    if plain or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        click.echo(to_text(answer, width=width), nl=False)
    else:
        click.echo(to_text(answer, color=True, width=shutil.get_terminal_size().columns), nl=False, color=True)
