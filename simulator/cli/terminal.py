"""How an answer reaches the terminal, the same for every verb."""

from __future__ import annotations

import os
import shutil
import sys

import click
from rich.console import RenderableType

from simulator.writers.text import to_text


def show(answer: RenderableType, *, plain: bool) -> None:
    """Print to stdout, in colour where that is a terminal whose reader wants it (https://no-color.org)."""
    if plain or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        click.echo(to_text(answer), nl=False)
    else:
        click.echo(to_text(answer, color=True, width=shutil.get_terminal_size().columns), nl=False, color=True)
