"""Readers of SLURM's `topology.conf` and `topology.yaml`: the switches, or blocks, above the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from simulator.base.errors import ClusterError, Fault
from simulator.base.schema import nearest
from simulator.formats.readers.hostlist import MOST_NAMES, expand
from simulator.formats.readers.yaml_document import yaml_document
from simulator.spec.cluster.host import NodeTree, Switch

_SWITCH_KEYS: Final = ("switchname", "switches", "nodes", "linkspeed")
_BLOCK_KEYS: Final = ("blockname", "nodes", "blocksizes")
# Tried once a word: a line may be one word of a megabyte
_PAIR = re.compile(r"(?<![A-Za-z])([A-Za-z]++)\s*+=\s*+(\S++)")
_MOST_FAULTS = 20


@dataclass(slots=True)
class _Entry:
    place: str
    name: str
    nodes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    speed: str = ""


def read_conf(text: str, source: str) -> NodeTree:
    """`topology.conf`. Raises ClusterError with every fault, as `read_yaml` does."""
    reading = _Reading(source)
    sizes: tuple[int, ...] = ()
    kinds = set()
    for number, line in _logical_lines(text):
        pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
        place = f"{source}: line {number}"
        if len(reading.faults) >= _MOST_FAULTS:
            reading.faults.append(Fault(place, "this line and those behind it were not read"))
            break
        if len(_PAIR.sub("", line).strip()) or not pairs:
            reading.fault(place, f"{line[:60]!r} is not KEY=VALUE", "SwitchName=s0 Nodes=node[0-15]")
            continue
        kind = "tree" if "switchname" in pairs else "block"
        keys = _SWITCH_KEYS if kind == "tree" else _BLOCK_KEYS
        kinds.add(kind)
        for key in pairs:
            if key not in keys:
                reading.fault(place, f"unknown key {key!r}", nearest(key, keys))
        if "blocksizes" in pairs:
            sizes = reading.sizes(pairs["blocksizes"].split(","), place)
        if name := pairs.get("switchname") or pairs.get("blockname"):
            reading.add(place, name, pairs.get("nodes", ""), pairs.get("switches", ""), pairs.get("linkspeed", ""))
    if len(kinds) > 1:
        reading.fault(source, "switches and blocks in one file", "one of them: SLURM reads one by TopologyPlugin")
    return reading.tree("block" if kinds == {"block"} else "tree", sizes)


def read_yaml(text: str, source: str) -> NodeTree:
    """`topology.yaml` (SLURM 25.05): the cluster's default topology, else the first.

    Raises ClusterError with every fault: aliases and tags (they can blow up), hostlists of more than 65,536 names,
    a switch below itself or below two, a node below two leaves.
    """
    data = yaml_document(text, source, ClusterError)
    if not isinstance(data, list) or not data or not all(isinstance(one, dict) for one in data):
        raise ClusterError.at(source, "is not a list of topologies", "- topology: name\n  tree: {switches: […]}")
    default = [one for one in data if one.get("cluster_default") is True]
    chosen = (default or data)[0]
    reading = _Reading(source)
    place = f"{source}: {chosen.get('topology', 'topology')}"
    kind = next((k for k in ("tree", "block", "flat") if chosen.get(k)), "")
    if not kind:
        reading.fault(place, "is neither tree, block nor flat")
    body = chosen.get(kind) if isinstance(chosen.get(kind), dict) else {}
    entries, key = (body.get("switches"), "switch") if kind == "tree" else (body.get("blocks"), "block")
    for index, one in enumerate(entries if isinstance(entries, list) else []):
        where = f"{place}: {kind}[{index}]"
        if not isinstance(one, dict) or not isinstance(one.get(key), str):
            reading.fault(where, f"names no {key}", f"{key}: NAME")
            continue
        reading.add(where, one[key], str(one.get("nodes") or ""), str(one.get("children") or ""), "")
    sizes = body.get("block_sizes")
    return reading.tree(kind, reading.sizes(sizes if isinstance(sizes, list) else [], f"{place}: block_sizes"))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, those that end in a backslash joined, with the number of the first."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        body = line.split("#", 1)[0].rstrip()
        start = start if joined else number
        if body.endswith("\\"):
            joined += body[:-1] + " "
            continue
        if (joined + body).strip():
            yield start, (joined + body).strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


class _Reading:
    """Entries on their way to a tree."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.entries: dict[str, _Entry] = {}
        self.faults: list[Fault] = []
        self.num_names = 0

    def fault(self, place: str, problem: str, remedy: str = "") -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(Fault(place=place, problem=problem, remedy=remedy))

    def add(self, place: str, name: str, nodes: str, children: str, speed: str) -> None:
        if name in self.entries:
            self.fault(place, f"{name} appears at {self.entries[name].place} too", "one entry a switch")
            return
        if bool(nodes) == bool(children):
            content = "both nodes and switches" if nodes else "neither nodes nor switches"
            self.fault(place, f"{name} has {content}", "nodes for a leaf, switches above them")
            return
        self.entries[name] = _Entry(place, name, self.names(nodes, place), self.names(children, place), speed)

    def names(self, text: str, place: str) -> tuple[str, ...]:
        """A hostlist's names; none once the whole file has had too many."""
        if not text or self.num_names > MOST_NAMES:
            return ()
        try:
            names = expand(text, place)
        except ClusterError as exc:
            self.faults += exc.faults[: _MOST_FAULTS - len(self.faults)]
            return ()
        self.num_names += len(names)
        if self.num_names > MOST_NAMES:
            self.fault(place, f"makes it {self.num_names:,} nodes and switches", f"at most {MOST_NAMES:,}")
        return names

    def sizes(self, values: Iterable[object], place: str) -> tuple[int, ...]:
        texts = [str(value).strip() for value in values]
        if not all(re.fullmatch(r"[1-9][0-9]{0,5}", text) for text in texts):
            self.fault(place, f"block sizes {', '.join(texts)[:60]!r}", "whole numbers of at least 1")
            return ()
        return tuple(map(int, texts))

    def tree(self, kind: str, sizes: tuple[int, ...]) -> NodeTree:
        """Checked and levelled. Raises ClusterError with every fault."""
        parents: dict[str, str] = {}
        for entry in self.entries.values():
            self.claim(entry, entry.children, parents, "switch")
        leaves: dict[str, str] = {}
        for entry in self.entries.values():
            self.claim(entry, entry.nodes, leaves, "node")
        levels = {} if self.faults else self.levels()
        if not self.entries and not self.faults and kind != "flat":
            self.fault(self.source, "no switch or block in it", "SwitchName=s0 Nodes=node[0-15]")
        if self.faults:
            raise ClusterError(self.faults)
        below = self.below(levels)
        switches = tuple(
            Switch(
                name=e.name,
                level=levels[e.name],
                nodes=e.nodes,
                switches=e.children,
                num_nodes=below[e.name],
                link_speed=e.speed,
            )
            for e in self.entries.values()
        )
        roots = tuple(name for name in self.entries if name not in parents)
        total = len(leaves)
        return NodeTree(
            source=self.source, kind=kind, switches=switches, roots=roots, num_nodes=total, block_sizes=sizes
        )

    def claim(self, entry: _Entry, names: Iterable[str], owners: dict[str, str], noun: str) -> None:
        """Each node or switch has one parent, and every named switch an entry."""
        for name in names:
            if noun == "switch" and name not in self.entries:
                near = nearest(name, self.entries) if len(self.faults) < _MOST_FAULTS else ""  # which takes its time
                self.fault(entry.place, f"switch {name!r} has no entry", near)
            elif name in owners:
                text = f"{noun} {name} is below {owners[name]} and below {entry.name}"
                self.fault(entry.place, text, "one above each")
            owners.setdefault(name, entry.name)

    def levels(self) -> dict[str, int]:
        """0 for a leaf, else one above its highest child; a switch below itself is a fault."""
        found: dict[str, int] = {name: 0 for name, entry in self.entries.items() if not entry.children}
        open_names = [name for name in self.entries if name not in found]
        while open_names:
            done = [n for n in open_names if all(c in found for c in self.entries[n].children)]
            if not done:
                text = f"{open_names[0]} is below itself, by way of its switches"
                self.fault(self.entries[open_names[0]].place, text, "a tree")
                break
            found |= {n: 1 + max(found[c] for c in self.entries[n].children) for n in done}
            open_names = [name for name in open_names if name not in found]
        return found

    def below(self, levels: Mapping[str, int]) -> dict[str, int]:
        """Nodes below each switch."""
        counts: dict[str, int] = {}
        for name in sorted(levels, key=lambda n: levels[n]):
            entry = self.entries[name]
            counts[name] = len(entry.nodes) + sum(counts[child] for child in entry.children)
        return counts
