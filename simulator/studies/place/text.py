"""A placement for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_rate, format_seconds
from simulator.parallel.pipeline import stage_layers
from simulator.predict import Prediction
from simulator.predict.difference import Difference
from simulator.studies.place.decide import GroupPath, Placement

WIDTH: Final = 130
SCHEMA: Final = 2
_MOST_NODES: Final = 16  # whose seats are printed


def render(found: Placement) -> RenderableType:
    """The answer for a rich console."""
    head = f"{found.model} on {found.cluster.name}, {counted(found.cluster.num_devices, 'GPU')}"
    parts: list[RenderableType] = [Text(head, style="bold"), Text(_verdict(found))]
    parts += [*(Text(line) for line in _of_own(found)), Text(), _paths(found)]
    parts += [Text(), *(Text(line) for line in _seats(found)), Text()]
    parts += [Text(line) for line in _notes(found)]
    return Group(*parts)


def _verdict(found: Placement) -> str:
    before = f"{format_seconds(found.default.step_s)} a step in the order of ranks"
    if found.is_default:
        return f"{before}; no placement that was tried is better"
    significant = _sure(found.against_default)
    fit = _fit(found.default, found.placed)
    return f"{before}, {format_seconds(found.placed.step_s)} placed: {_change(found.gain)}, {significant} ({fit})"


def _of_own(found: Placement) -> Iterator[str]:
    """How the given mapping compares with the answer."""
    if found.own is None:
        return
    before, against = f"{format_seconds(found.own.step_s)} as given", found.against_own
    if against is None:
        yield f"{before}, which stays: no placement that was tried is better"
        return
    passed_over = "; not kept, as it puts more traffic on PCIe" if found.own_crosses else ""
    yield f"{before}, placed: {_change(1 - against.ratio)}, {_sure(against)} ({_fit(found.own, found.placed)}){passed_over}"


def _change(gain: float) -> str:
    return f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'}"


def _sure(against: Difference) -> str:
    """The gain's interval, or that it cannot be distinguished from zero."""
    changes = (
        (abs(1 - against.high), abs(1 - against.low))
        if against.distinguishable
        else (1 - against.high, 1 - against.low)
    )
    reach = " to ".join(f"{change:.1%}" for change in sorted(changes)) + " at 90 %"
    return reach if against.distinguishable else f"not distinguishable at 90 % ({reach})"


def _fit(before: Prediction, after: Prediction) -> str:
    return "both steps played" if before.verdict == after.verdict else f"{before.verdict} becomes {after.verdict}"


def _paths(found: Placement) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for name in ("who meets", "in order", "alone, a step", "placed", "alone, a step"):
        table.add_column(name, justify="right" if "alone" in name else "left")
    for gain in found.gains:
        before, after = gain.default, gain.placed
        prices = format_seconds(before.price_s), format_seconds(after.price_s)
        table.add_row(gain.what, _group_path(before), prices[0], _group_path(after), prices[1])
    return table


def _group_path(path: GroupPath) -> str:
    nodes = f", {path.num_nodes} nodes" if path.num_nodes > 1 else ""
    return f"{path.link} {format_rate(path.bytes_per_s)}{nodes}"


def _seats(found: Placement) -> Iterator[str]:
    cluster = found.cluster
    each = cluster.gpus_per_node
    if len(cluster.seats) in (0, each):
        order = cluster.seats or range(each)
        where = "every node: GPUs" if cluster.num_nodes > 1 else "GPUs"
        yield f"{where} of ranks 0, 1, …: {' '.join(map(str, order))}"
        return
    for node in range(min(cluster.num_nodes, _MOST_NODES)):
        ranks = [cluster.rank_on(node * each + gpu) for gpu in range(each)]
        in_order = ranks == list(range(ranks[0], ranks[0] + each))
        shown = f"{ranks[0]} to {ranks[-1]}" if in_order and each > 1 else " ".join(map(str, ranks))
        yield f"node {node}: ranks of GPUs 0, 1, …: {shown}"
    if cluster.num_nodes > _MOST_NODES:
        yield f"… and {cluster.num_nodes - _MOST_NODES} nodes more: -o RANKS.tsv writes all"


def _notes(found: Placement) -> Iterator[str]:
    if found.plan != found.given:
        yield f"stage_layers = {list(found.plan.pipeline.stage_layers or ())}, by default {_layers(found)}"
    if found.rank_order and found.rank_order != found.given.rank_order:
        yield f'Nodes are filled as by rank_order = "{found.rank_order}"; ranks leave their nodes, so start a process a rank.'
    how = "every placement of a node that symmetry leaves" if found.exact else "quadratic assignment, then 2-opt"
    yield f"{how}: {found.num_priced:,} priced, {found.num_played:,} played"
    if found.passed_over_s is not None:
        yield f"{format_seconds(found.passed_over_s)} was played with more traffic on PCIe, at its data sheet's speed: not chosen."
    if found.exhausted:
        yield "No more steps were allowed: another placement may be better still."


def _layers(found: Placement) -> list[int]:
    given = found.given
    num = sum(found.plan.pipeline.stage_layers or ())
    counts = stage_layers(num, given.pp, 1, split=given.split, schedule=given.pipeline_schedule)
    return [sum(map(len, chunks)) for chunks in counts]


def as_data(found: Placement, inputs: dict[str, Any]) -> dict[str, Any]:
    """The answer as plain data (docs/reference/json-output.md)."""
    changed = {"stage_layers": list(found.plan.pipeline.stage_layers or ())} if found.plan != found.given else {}
    return {
        "schema_version": SCHEMA,
        "inputs": inputs,
        "default": _step(found.default.step_s, found.default.verdict),
        "placed": _step(found.placed.step_s, found.placed.verdict),
        "gain": found.gain,
        "against_default": None if found.is_default else _difference(found.against_default),
        "given": None if found.own is None else _step(found.own.step_s, found.own.verdict),
        "against_given": None if found.against_own is None else _difference(found.against_own),
        "seats": [found.cluster.gpu_of(rank) for rank in range(found.cluster.num_devices)],
        "gpus_per_node": found.cluster.gpus_per_node,
        "plan_changes": changed,
        "rank_order": found.rank_order or None,
        "groups": [
            {"axis": gain.what, "default": asdict(gain.default), "placed": asdict(gain.placed)} for gain in found.gains
        ],
        "exact": found.exact,
        "num_priced": found.num_priced,
        "num_played": found.num_played,
        "exhausted": found.exhausted,
        "passed_over_s": found.passed_over_s,
    }


def _difference(against: Difference) -> dict[str, Any]:
    return {**asdict(against), "distinguishable": against.distinguishable}


def _step(step_s: float, verdict: str) -> dict[str, Any]:
    return {"step_s": step_s, "verdict": verdict}
