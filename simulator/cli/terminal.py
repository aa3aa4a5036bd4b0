"""How an answer reaches the terminal, the same for every verb."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click
from rich.console import Group, RenderableType

from simulator.formats.writers import layout
from simulator.formats.writers.text import PLAIN_WIDTH, render, render_brief, to_text
from simulator.predict import Prediction
from simulator.predict.lengths import Padding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.studies.rollout import Iteration


def show(answer: RenderableType, *, plain: bool, width: int = PLAIN_WIDTH) -> None:
    """Print to stdout, in colour where that is a terminal whose reader wants it (https://no-color.org).

    width: columns where it is no terminal.
    """
    if plain or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        click.echo(to_text(answer, width=width), nl=False)
    else:
        click.echo(to_text(answer, color=True, width=shutil.get_terminal_size().columns), nl=False, color=True)


def prediction_text(
    p: Prediction,
    padding: Padding | None = None,
    iteration: Iteration | None = None,
    further: Sequence[tuple[str, RenderableType]] = (),
    *,
    brief: bool,
) -> RenderableType:
    """A prediction's full report, or a summary for a screen followed by the optional parts."""
    if brief:
        sections = (layout.section(title, content) for title, content in further)
        return Group(render_brief(p, padding, iteration), *sections)
    return render(p, padding, iteration, further)
