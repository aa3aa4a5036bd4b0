"""A sensitivity as text: the decision first, then what it depends on."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.studies.sensitivity.answer import Index, Sensitivity

WIDTH = 150


def render(s: Sensitivity) -> RenderableType:
    """The answer for a rich console."""
    letters = [chr(ord("A") + number) for number in range(len(s.alternatives))]
    parts: list[RenderableType] = [
        *(Text(f"{letter}  {name}") for letter, name in zip(letters, s.alternatives, strict=True)),
        *(Text(f"{letter} pays {price}") for letter, price in zip(letters, s.pays, strict=False)),
        Text(),
        _figures(s, letters),
        Text(),
        Text(_decision(s, letters), style="bold"),
        Text(),
        Text("What explains it: Sobol indices, alone / with interactions, ± half their 90 % interval", style="bold"),
        _indices(s, letters),
        Text(),
        Text("One input at an end of its range, all else as it is", style="bold"),
        _ends(s, letters),
    ]
    return Group(*parts)


def plain_table(*headings: str, left: tuple[int, ...] = (0,)) -> Table:
    """A table under headings. left: columns that are words."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right")
    return table


def _figures(s: Sensitivity, letters: list[str]) -> Table:
    table = plain_table(s.figure, *letters)
    table.add_row("now", *map(_number, s.now))
    for name, place in (("5 % of the points below", 0), ("half below", 1), ("95 % below", 2)):
        table.add_row(name, *(_number(each[place]) for each in s.spread))
    if len(letters) > 1:
        table.add_row("best in", *(f"{share:.1%}" for share in s.wins))
    if any(s.not_fitting):
        table.add_row("does not fit in", *(f"{count / s.num_points:.1%}" for count in s.not_fitting))
    return table


def _number(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else "does not fit"


def _decision(s: Sensitivity, letters: list[str]) -> str:
    points = f"{s.num_points:,} points of these ranges"
    if len(letters) == 1:
        low, _, high = s.spread[0]
        return f"{_number(low)} to {_number(high)} in 90 % of {points}."
    best = letters[s.best]
    if s.flips == 0:
        return f"{best} is best now, and in all of {points}."
    others = ", ".join(
        f"{letter} in {share:.1%}"
        for number, (letter, share) in enumerate(zip(letters, s.wins, strict=True))
        if share and number != s.best
    )
    return f"{best} is best now. The decision flips in {s.flips:.1%} of {points}: {others}."


def _indices(s: Sensitivity, letters: list[str]) -> RenderableType:
    if not s.indices:
        return Text("nothing varies, or an alternative does not fit at some points")
    names = {name: letter for name, letter in zip(s.alternatives, letters, strict=True) if name in s.indices}
    names |= {name: name for name in ("margin", "decision") if name in s.indices}
    deciding = next((name for name in ("margin", "decision") if name in s.indices), next(iter(names)))
    table = plain_table("", "range", *names.values())
    order = sorted(range(len(s.inputs)), key=lambda one: (-s.indices[deciding][one].total, s.inputs[one].key))
    for one in order:
        table.add_row(s.inputs[one].key, s.inputs[one].words, *(_index(s.indices[name][one]) for name in names))
    return table


def _index(index: Index) -> str:
    reach = max(index.first_high - index.first_low, index.total_high - index.total_low) / 2
    return f"{_share(index.first)} / {_share(index.total)} ± {_share(reach)}"


def _share(value: float) -> str:
    """Sampling leaves small indices a little below 0."""
    return f"{max(value, 0.0):.2f}"


def _ends(s: Sensitivity, letters: list[str]) -> Table:
    table = plain_table("", "low end", "high end")
    for one, ends in zip(s.inputs, s.ends, strict=True):
        table.add_row(one.key, *(_side(s, letters, side) for side in (ends.low, ends.high)))
    return table


def _side(s: Sensitivity, letters: list[str], figures: tuple[float, ...]) -> str:
    best = min(range(len(figures)), key=lambda one: (figures[one], one))
    flips = f"  {letters[best]} wins" if best != s.best else ""
    changes = (
        f"{letter} {value / now - 1:+.1%}" if math.isfinite(value / now) else f"{letter} does not fit"
        for letter, value, now in zip(letters, figures, s.now, strict=True)
    )
    return ", ".join(changes) + flips
