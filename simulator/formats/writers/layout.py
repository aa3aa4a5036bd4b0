"""Building blocks of text reports: titled sections and plain tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simulator.base.units import format_seconds

if TYPE_CHECKING:
    from simulator.predict import Source

_DETAIL_WIDTH: Final = 76


def section(title: str, body: RenderableType) -> Group:
    """A body under its title, indented."""
    return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def table(rows: Iterable[tuple[str, ...]], justify: str) -> Table:
    """A borderless table; `justify` has l or r a column."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for letter in justify:
        made.add_column(justify="right" if letter == "r" else "left")
    for row in rows:
        made.add_row(*row)
    return made


def sources(found: Iterable[Source], further: Iterable[tuple[str, str, str]] = ()) -> Table:
    """A line a source, which JSON has in full; then further rows."""
    rows = ((one.what, one.kind, shorten(one.detail, _DETAIL_WIDTH, placeholder=" …")) for one in found)
    return table([*rows, *further], "lll")


def communication(found: Mapping[str, tuple[float, float]]) -> Table:
    """A row a kind of collective, with its seconds, exposed and hidden."""
    rows = (
        (kind, f"{format_seconds(exposed)} exposed", f"{format_seconds(hidden)} hidden")
        for kind, (exposed, hidden) in sorted(found.items())
    )
    return table(rows, "lrr")
