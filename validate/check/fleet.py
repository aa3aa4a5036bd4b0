"""Nodes of one kind against each other: each part of a node beside the same part of the others, from the newest run of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulator.base.units import counted
from validate.check.components import Component, Measured, of, worker_of
from validate.check.findings import THRESHOLD, Finding, failures, slow
from validate.samples import SampleFile

FEWEST: Final = 3  # nodes of a kind: of two that differ nobody knows which is the slow one


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the fleet. runs: how many are known; date: of the newest, which is judged."""

    name: str
    device: str
    runs: int
    date: str
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Finding | None:
        """What is bad, and of that what is slowest; None where nothing is."""
        bad = [one for one in self.findings if one.bad]
        return max(bad, key=lambda one: one.judged.ratio if one.judged is not None else math.inf, default=None)

    @property
    def word(self) -> str:
        """What is said of it."""
        return "worse" if self.worst is not None else "ok" if self.findings else "not compared"

    def as_json(self) -> dict[str, Any]:
        data = {"node": self.name, "device": self.device, "runs": self.runs, "date": self.date}
        data |= {"worse": self.worst is not None, "compared": bool(self.findings)}
        return {**data, "findings": [one.as_json() for one in self.findings]}


def fleet(runs: Sequence[SampleFile], threshold: float = THRESHOLD) -> list[Node]:
    """Every node by name, judged beside those with the same device."""
    newest: dict[str, SampleFile] = {}
    count: dict[str, int] = {}
    for run in sorted(runs, key=lambda one: one.machine.text("date")):
        for name in nodes_of(run):
            newest[name], count[name] = run, count.get(name, 0) + 1
    devices: dict[str, list[str]] = {}
    for name in sorted(newest):
        devices.setdefault(newest[name].machine.text("device"), []).append(name)
    found = [node for device, names in devices.items() for node in _of_kind(device, names, newest, count, threshold)]
    return sorted(found, key=lambda one: one.name)


def nodes_of(run: SampleFile) -> list[str]:
    """The machines that a run's samples are of."""
    own = run.machine.text("hostname") or run.machine.id
    return sorted({sample.host or own for sample in run.samples})


def _of_kind(
    device: str, names: Sequence[str], newest: Mapping[str, SampleFile], count: Mapping[str, int], threshold: float
) -> list[Node]:
    keys_of_part = {part: keys for name in names for part, keys in _measured(name, newest[name]).items()}
    judged: dict[str, list[Finding]] = {name: [] for name in names}
    for finding in slow(keys_of_part, threshold) if len(names) >= FEWEST else ():
        judged[finding.component.who].append(finding)
    return [
        Node(
            name=name, device=device, runs=count[name], date=newest[name].machine.text("date"),
            findings=(*judged[name], *_own_failures(newest[name])),
        )
        for name in names
    ]  # fmt: skip


def _own_failures(run: SampleFile) -> list[Finding]:
    return failures(run) if len(nodes_of(run)) == 1 else []  # of several nodes it is not written whose they are


def _measured(node: str, run: SampleFile) -> Measured:
    """A node's log times by what was measured, the median of its ranks."""
    own = run.machine.text("hostname") or run.machine.id
    times: dict[Component, dict[str, list[float]]] = {}
    for sample in run.samples:
        if (sample.host or own) == node:
            part = of(sample, worker_of(run))
            category = f"{part.who}: {part.category}" if part.what == "link" else part.category
            times.setdefault(Component(worker_of(run), node, category), {}).setdefault(sample.key, []).append(
                math.log(sample.time_s)
            )
    return {part: {key: statistics.median(logs) for key, logs in keys.items()} for part, keys in times.items()}


def text(nodes: Sequence[Node]) -> str:
    """A line a node, what is bad with it below; one line says how many are."""
    lines = []
    for node in nodes:
        lines.append(
            f"{node.name}  {node.device}  {counted(node.runs, 'run')}, newest {node.date or 'undated'}  {node.word}"
        )
        lines += [f"  {one.line}" for one in node.findings if one.bad]
    lines += [f"note: {line}" for line in alone(nodes)]
    bad, compared = (sum(found) for found in ((n.worst is not None for n in nodes), (bool(n.findings) for n in nodes)))
    return "\n".join([*lines, f"{bad} of {len(nodes)} nodes are worse" if bad else f"ok: {counted(compared, 'node')}"])


def alone(nodes: Sequence[Node]) -> list[str]:
    """What is said of devices that too few nodes have."""
    few = sorted({n.device for n in nodes if sum(o.device == n.device for o in nodes) < FEWEST})
    return [f"fewer than {FEWEST} nodes have {device or 'an unnamed device'}, so none is compared" for device in few]
