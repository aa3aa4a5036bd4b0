"""docs/accuracy/collectives.md: the published sweeps by machine, and what is predicted of scales and GPUs not fitted."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from simulator.formats.readers.measured_table import read_collectives, read_measured
from simulator.studies.backtest.collectives import (
    SIZE_CLASSES,
    CollectiveGroup,
    CollectiveOutcome,
    CollectivesReport,
    run,
)
from simulator.studies.backtest.rows import CollectiveRow
from simulator.studies.backtest.text import percent
from validate.fit.link_classes import NETWORKS, PORTS, Array, network_class, port_class
from validate.fit.nccl import errors, fit_network, fit_port, fit_ports, with_trees
from validate.fit.sweeps import Sample, band, read_samples

HERE = Path(__file__).resolve().parent
TABLE = HERE / "measured" / "collectives-plain.csv.gz"
NOTES = HERE / "collective_notes.toml"
TARGETS = dict(zip(SIZE_CLASSES, (0.20, 0.12, 0.06), strict=True))
_FEWEST_MACHINES = 2
_P90 = 2  # the 90th percentile may be twice the median's target

HEAD = """
## Collectives

Predicted against measured times of `experiments/measured/collectives-plain.csv.gz`, by [the rules](../reference/collectives-table.md),
as `shardwise backtest` prints them. A cell is n: median / 90th percentile of |predicted / measured − 1|, then the noise floor:
the same of each measurement against the median of its repeats. ~ marks runs that are not repeats, but that the model cannot
distinguish by the table (other settings, days, software with the same choice). Targets: median ≤ 20 %, 12 %, 6 %, 90th
percentile at most twice that; **bold** misses one. Ports and networks are fitted on most of these rows; results for machines,
scales and GPUs that a fit has not seen are below. `python experiments/accuracy.py --collectives` writes only this section.
"""
LEFT_OUT = """
### Machines left out

Each machine predicted by a fit of its class without it (median / 90th percentile of |log(predicted / measured)|).

| class | machines | < 64 KiB | 64 KiB – 64 MiB | ≥ 64 MiB |
|---|--:|--:|--:|--:|"""
SCALES = """
### What the fit has not seen

Each line: coefficients fitted only on the first set, errors on the second (median / 90th percentile of |log(predicted /
measured)|).

| fitted on | predicted | < 64 KiB | 64 KiB – 64 MiB | ≥ 64 MiB |
|---|---|--:|--:|--:|"""


def section() -> Iterator[str]:
    """Lines of the page."""
    report = run(read_measured(TABLE))
    assert isinstance(report, CollectivesReport)
    yield HEAD
    yield "| size | rows | median | p90 | bias | repeats |"
    yield "|---|--:|--:|--:|--:|--:|"
    for group in report.totals:
        s = group.score
        cells = (str(s.n), percent(s.median_abs_error), percent(s.p90_abs_error), percent(s.bias, signed=True))
        yield f"| {group.size_class} | {' | '.join(cells)} | {percent(group.noise_floor)} |"
    reached = sum(not _missed(group) for group in report.groups)
    yield f"\n{reached} of {len(report.groups)} groups reach both targets.\n"
    yield from _machines(report, _floors(report))
    yield from _flagged(report)
    yield from _explained(report)
    samples = [sample for sample, _ in read_samples(TABLE) if sample is not None]
    yield LEFT_OUT
    yield from _machines_left_out(samples)
    yield SCALES
    yield from _unseen(samples)


def _missed(group: CollectiveGroup) -> bool:
    limit = TARGETS[group.size_class]  # type: ignore[index]  # a group's class is one of them
    return (group.score.median_abs_error or 0) > limit or (group.score.p90_abs_error or 0) > _P90 * limit


Key = tuple[str, str, str, str]  # source, machine, collective, size class


def _key(item: CollectiveGroup | CollectiveOutcome) -> Key:
    return item.source, item.machine, item.collective, str(item.size_class)


def _floors(report: CollectivesReport) -> dict[Key, str]:
    """Noise of each group as text: of repeats where there are some, else of runs with equal predictions."""
    places = {row.line: row.in_place for row in read_collectives(TABLE) if isinstance(row, CollectiveRow)}
    alike: dict[tuple[object, ...], list[CollectiveOutcome]] = {}
    for o in report.outcomes:
        if o.scored:
            alike.setdefault((*_key(o), o.size_bytes, places.get(o.line), o.predicted_time_s), []).append(o)
    repeats: dict[Key, list[float]] = {}
    others: dict[Key, list[float]] = {}
    for members in alike.values():
        for o in members:
            rest = [m.measured_time_s for m in members if m is not o and m.measured_time_s]
            if rest and o.measured_time_s:
                others.setdefault(_key(o), []).append(abs(o.measured_time_s / float(np.median(rest)) - 1))
            if o.noise is not None:
                repeats.setdefault(_key(o), []).append(abs(o.noise))
    return {key: _floor(repeats.get(key), others.get(key)) for key in {*repeats, *others}}


def _floor(repeats: list[float] | None, others: list[float] | None) -> str:
    noise, mark = (repeats, "") if repeats else (others or [], "~")
    return f"({mark}{percent(float(np.median(noise)))} / {percent(float(np.percentile(noise, 90)))})"


def _machines(report: CollectivesReport, floors: dict[Key, str]) -> Iterator[str]:
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for group in report.groups:
        s = group.score
        text = (
            f"{s.n}: {percent(s.median_abs_error)} / {percent(s.p90_abs_error)} {floors.get(_key(group), '')}".strip()
        )
        cell = f"**{text}**" if _missed(group) else text
        rows.setdefault((_source(group), group.machine, group.collective), {})[group.size_class] = cell
    yield f"| source | machine | collective | {' | '.join(SIZE_CLASSES)} |"
    yield "|---|---|---|--:|--:|--:|"
    for key, cells in rows.items():
        yield f"| {' | '.join(key)} | {' | '.join(cells.get(name, '') for name in SIZE_CLASSES)} |"


def _source(group: CollectiveGroup) -> str:
    return group.source.split("@")[0].removeprefix("github:").removeprefix("https://github.com/")


def _flagged(report: CollectivesReport) -> Iterator[str]:
    logged, agree = report.logged
    yield f"\nThe algorithm agrees with the log in {agree} of the {logged} rows whose log names it.\n"
    flagged: dict[str, int] = {}
    for outcome in report.outcomes:
        if outcome.degraded:
            flagged[outcome.degraded] = flagged.get(outcome.degraded, 0) + 1
    yield "Flagged as problems of the measurement, neither fitted nor scored:\n"
    yield from (f"- {count} rows: {reason}." for reason, count in flagged.items())


def _explained(report: CollectivesReport) -> Iterator[str]:
    """Every group that misses, under the note that its source, machine, collective and size match first."""
    notes: list[dict[str, str]] = tomllib.loads(NOTES.read_text(encoding="utf-8"))["note"]
    under: dict[int, list[str]] = {}
    for group in report.groups:
        if _missed(group):
            text = f"{_source(group)}, {group.machine}, {group.collective}, {group.size_class}"
            first = next((i for i, note in enumerate(notes) if re.search(note["groups"], text)), -1)
            under.setdefault(first, []).append(text)
    yield "\nWhat misses, and why (groups that each reason covers):\n"
    for index, note in enumerate(notes):
        if index in under:
            yield f"- **{note['what']}** ({len(under[index])}): {note['why']}"
    open_groups = under.get(-1, [])
    yield f"- **Not explained** ({len(open_groups)})" + "".join(f"; {text}" for text in open_groups) + "."


def _machines_left_out(samples: Sequence[Sample]) -> Iterator[str]:
    ports = {n: [s for s in samples if _port(s, n)] for n in PORTS}
    tables = fit_ports(ports)
    for name, part in {**ports, **{n: [s for s in samples if _net(s, n)] for n in NETWORKS}}.items():
        machines = sorted({s.machine for s in part})
        if len(machines) < _FEWEST_MACHINES:
            continue
        error, tested = [], []
        for machine in machines:
            rest, own = [s for s in part if s.machine != machine], [s for s in part if s.machine == machine]
            if name in PORTS:
                error.append(errors(own, fit_port(rest, name)))
            else:
                near = with_trees(tables, [s for s in samples if s.machine != machine])
                error.append(errors(own, fit_network(rest, name, near), near))
            tested += own
        yield f"| {name} | {len(machines)} {_bands(np.concatenate(error), tested)}"


Pick = Callable[[Sample], bool]


def _unseen(samples: Sequence[Sample]) -> Iterator[str]:
    for fitted, predicted, train, test in _splits():
        seen, unseen = [s for s in samples if train(s)], [s for s in samples if test(s)]
        yield _line(fitted, predicted, _errors(samples, seen, unseen), unseen)
    parts = {n: [s for s in samples if not s.network and port_class(s.call) == n] for n in PORTS}
    for name, relative in (("nvlink4", "nvlink3 and nvlink5"), ("nvlink5", "nvlink4")):
        tables = fit_ports({n: part if n != name else [] for n, part in parts.items()})
        yield _line(f"{relative}, scaled by the data sheet", name, errors(parts[name], tables[name]), parts[name])


def _splits() -> Iterator[tuple[str, str, Pick, Pick]]:
    """(fitted on, predicted, who is fitted, who is predicted)."""
    alone = "one node of H100 and H200"
    yield (
        f"{alone}, 2 and 4 GPUs",
        "8 GPUs",
        lambda s: _port(s, "nvlink4") and s.call.place.num_ranks < 8,
        lambda s: _port(s, "nvlink4") and s.call.place.num_ranks == 8,
    )
    for first, second, port in (("H100", "H200", "nvlink4"), ("B200", "B300", "nvlink5"), ("B200", "GB200", "nvlink5")):
        yield (
            f"{first}, one node",
            second,
            lambda s, g=first, p=port: _port(s, p) and s.gpu.startswith(g),  # type: ignore[misc]
            lambda s, g=second, p=port: _port(s, p) and s.gpu.startswith(g),  # type: ignore[misc]
        )
    for name in ("infiniband", "efa", "slingshot", "slingshot-software", "sockets"):
        yield (
            f"{name}, 2 nodes",
            "4 to 16 nodes",
            lambda s, n=name: _net(s, n) and s.call.place.num_domains == 2,  # type: ignore[misc]
            lambda s, n=name: _net(s, n) and s.call.place.num_domains > 2,  # type: ignore[misc]
        )


def _port(sample: Sample, name: str) -> bool:
    return not sample.network and port_class(sample.call) == name


def _net(sample: Sample, name: str) -> bool:
    return bool(sample.network) and network_class(sample.call) == name


def _errors(every: Sequence[Sample], seen: Sequence[Sample], unseen: Sequence[Sample]) -> Array:
    """Of `unseen`, by a fit on `seen`; a network's fit holds the ports, which all single nodes give."""
    if not seen[0].network:
        return errors(unseen, fit_port(seen, port_class(seen[0].call)))
    ports = with_trees(fit_ports({n: [s for s in every if _port(s, n)] for n in PORTS}), seen)
    name = network_class(seen[0].call)
    assert name in NETWORKS
    return errors(unseen, fit_network(seen, name, ports), ports)


def _line(fitted: str, predicted: str, error: Array, samples: Sequence[Sample]) -> str:
    return f"| {fitted} | {predicted} {_bands(error, samples)}"


def _bands(error: Array, samples: Sequence[Sample]) -> str:
    cells = []
    for name in ("small", "mid", "large"):
        part = np.abs([e for e, s in zip(error, samples, strict=True) if band(s.call.size_bytes) == name])
        n = part.size
        cells.append(f"{percent(float(np.median(part)))} / {percent(float(np.percentile(part, 90)))}" if n else "")
    return f"| {' | '.join(cells)} |"
