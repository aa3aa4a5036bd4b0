"""Cluster: equal nodes of equal devices but for named exceptions, the links inside a node, the network between nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from pydantic import ValidationError, ValidationInfo, model_validator
from typing_extensions import override

from simulator.base.errors import ClusterError, InputError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import faults_of, read_toml, unknown_name
from simulator.spec.cluster import hosts, links
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.exceptions import numbers_of
from simulator.spec.cluster.mig import sliced_host
from simulator.spec.cluster.parts import HostKind
from simulator.spec.cluster.routing import Link
from simulator.spec.cluster.structure import structure_faults
from simulator.spec.cluster.tiers import usual_tier
from simulator.spec.cluster.topology import Topology

if TYPE_CHECKING:
    import networkx as nx


class Cluster(Topology):
    """A topology that has been checked, its presets, and the ways between its GPUs."""

    @model_validator(mode="before")
    @classmethod
    def _domain_is_a_node(cls, data: object) -> object:
        if isinstance(data, dict) and "nvlink_domain_size" not in data and isinstance(data.get("gpus_per_node"), int):
            return {**data, "nvlink_domain_size": data["gpus_per_node"]}
        return data

    @model_validator(mode="before")
    @classmethod
    def _tier_is_completed(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(data.get("tier"), dict):
            return data
        link = data.get("host") or data.get("intra")
        kind = link.get("kind") if isinstance(link, dict) else getattr(link, "kind", "")
        known, given = usual_tier(kind) if kind in get_args(HostKind) else {}, data["tier"]
        sources = {**known.get("sources", {}), **dict.fromkeys(given, "given"), **given.get("sources", {})}
        return {**data, "tier": {**known, **given, "sources": sources}}

    @model_validator(mode="after")
    def _host_is_as_stated(self) -> Self:
        if self.host_factor not in (None, self.device.host_factor):
            device = self.device.model_copy(update={"host_factor": self.host_factor})
            object.__setattr__(self, "device", device)
        return self

    @model_validator(mode="after")
    def _structure(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get("structure_checked"):
            plain = self.model_dump(exclude={"device", "sources", "exceptions"})
            faults = structure_faults(plain | {"device": self.device, "exceptions": self.exceptions}, self.name)
            ClusterError.raise_for(faults)
        return self

    @override
    @classmethod
    def parse(cls, data: object, place: str, error: type[InputError], *, from_file: bool = False) -> Self:
        """As Strict.parse, with the faults of the structure (islands, ranges) beside those of the fields."""
        faults = structure_faults(data, place) if isinstance(data, dict) else []
        try:
            cluster = cls.model_validate(data, context={"from_file": from_file, "structure_checked": True})
        except ValidationError as exc:
            raise error([*faults_of(exc, place, cls), *faults]) from None
        error.raise_for(faults)
        return cluster

    @classmethod
    def load(cls, name_or_path: str | Path, num_nodes: int | None = None) -> Cluster:
        """A preset by its name or the one it is sold under, a TOML file, or `8xh100`: so many GPUs of their usual machine.

        Raises ClusterError with every fault.
        """
        text = str(name_or_path)
        text = _sold_as().get(re.sub(r"[\s_]+", "-", text.casefold()), text)
        if (counted := hosts.counted(text)) is not None:
            cluster = cls.synthesise(counted[1], counted[0])
            return cluster if num_nodes is None else cluster.with_nodes(num_nodes)
        is_path = isinstance(name_or_path, Path) or text.endswith(".toml")
        if not is_path and text not in cluster_names():
            fault = unknown_name("cluster", text, cluster_names(), "a cluster's .toml")
            if Path(text).is_file() and not text.endswith(".py"):
                known = f"a matrix or XML becomes one by `shardwise topo {text} --device GPU --save node.toml`"
                fault = replace(fault, remedy=known)
            raise ClusterError(fault)
        return _read(Path(text), num_nodes) if is_path else _shipped(text, num_nodes)

    @classmethod
    def synthesise(
        cls,
        device: str,
        num_devices: int,
        gpus_per_node: int | None = None,
        intra_kind: str | None = None,
        inter_bytes_per_s_per_node: float | None = None,
    ) -> Self:
        """The usual machine for a GPU, for tables that state little else (rules: docs/reference/cluster-file.md).

        gpus_per_node: the usual host's if None. inter_bytes_per_s_per_node: all NICs of a node, one way.
        Raises ClusterError: unknown device or kind, devices that do not fill whole nodes.
        """
        base, _, profile = Device.resolve(device).partition(":")
        node = cls.load(hosts.usual_host(base)).model_dump()
        made = hosts.adapt(
            (sliced_host(node, base, profile) if profile else node) | {"device": Device.load(device)},
            num_devices,
            gpus_per_node,
            intra_kind,
            inter_bytes_per_s_per_node,
        )
        if node["device"]["name"] != base or made["gpus_per_node"] > node["gpus_per_node"]:
            made["name"] = f"{num_devices}x{base}"  # the preset of that name is another machine
        return cls.parse(made, f"{device} × {num_devices}", ClusterError)

    def with_nodes(self, num_nodes: int) -> Self:
        """The same nodes, `num_nodes` of them. Raises ClusterError."""
        return self._changed(self.name, num_nodes=num_nodes)

    def with_measured(self, found: Sequence[object], place: str) -> Self:
        """The same with these bandwidths as what its links were seen to give (measured.Bandwidth). Raises ClusterError."""
        return self._changed(place, fabric=self.fabric.model_dump() | {"measured": tuple(found)})

    def _changed(self, place: str, **fields: object) -> Self:
        """The same with other fields, judged anew. Raises ClusterError."""
        own = {field: getattr(self, field) for field in type(self).model_fields}
        return self.parse({**own, **fields}, place, ClusterError)

    @property
    def usual(self) -> Self:
        """The cluster without its exceptions."""
        return self.model_copy(update={"exceptions": ()}) if self.exceptions else self

    def with_rank_mapping(self, seats: Sequence[int]) -> Self:
        """The same GPUs with ranks on other ones of them; none: rank r on GPU r. Raises ClusterError."""
        return self._changed(self.name, seats=tuple(seats))

    @property
    def rails(self) -> Mapping[int, tuple[int, ...]]:
        """Node -> the rail of each of its NICs, where that is not the NIC's own number."""
        stated = [one for one in self.exceptions if one.rails is not None]
        return {node: one.rails for one in stated for node in numbers_of(one.nodes) if one.rails is not None}

    def must_be_in_order(self, purpose: str) -> None:
        """Raise ClusterError if there is a rank mapping, for `purpose`, which does not support one."""
        if self.seats:
            problem = f"{purpose} takes rank r on GPU r, and these have seats"
            raise ClusterError.at(f"{self.name}: seats", problem, "a cluster without seats")

    def must_be_even(self, purpose: str) -> None:
        """Raise ClusterError if nodes differ, for `purpose`, which assumes equal nodes."""
        if self.exceptions:
            problem = f"{purpose} takes all nodes as equal, and these differ ({self.exceptions[0].words})"
            raise ClusterError.at(f"{self.name}: exceptions", problem, "a cluster without exceptions")

    @property
    def lent_bytes(self) -> int:
        """Memory that a node's idle GPUs lend over NVLink; 0 if they are reached only through the host."""
        if self.intra.shape == "pcie":
            return 0
        return self.idle_gpus * (self.device.usable_bytes - self.device.hypervisor_bytes)

    def network_bytes_per_s(self, num_nodes: int) -> float:
        """What a node sends one way in a group of `num_nodes` nodes: past a switch, its oversubscription takes its part.

        A leaf's uplinks serve its whole size, so nodes that fill it in part have more of them each.
        """
        tapers = [taper * used / nodes for used, nodes, taper in self.fabric.levels if num_nodes > used]
        return self.node_bytes_per_s / max([1.0, *tapers])

    def route(self, src_rank: int, dst_rank: int) -> tuple[Link, ...]:
        """The directed links from one rank to another; none from a rank to itself. Raises ClusterError out of range."""
        self.must_be_even("a route")
        return links.route(self, self.gpu_of(src_rank), self.gpu_of(dst_rank))

    def islands(self) -> tuple[Sequence[int], ...]:
        """Ranks that reach each other without PCIe or network, by NVLink (or xGMI): the sets, by first rank."""
        self.must_be_even("a search for islands")
        found = links.islands(self)
        return tuple(sorted(tuple(sorted(map(self.rank_on, each))) for each in found)) if self.seats else found

    def graph(self) -> nx.DiGraph[str]:
        """One node's GPUs, switches, host and NICs; edges carry kind, bytes_per_s and latency_s."""
        self.must_be_even("a graph")
        return links.graph(self)


@cache
def _sold_as() -> dict[str, str]:
    """Names of machines and of clouds' instance types -> presets."""
    return dict(read_toml(TOPOLOGIES / "names" / "clusters.toml", ClusterError)["preset"])


def _read(path: Path, num_nodes: int | None) -> Cluster:
    changes = {} if num_nodes is None else {"num_nodes": num_nodes}  # exceptions name nodes of these
    return Cluster.parse({**read_toml(path, ClusterError), **changes}, str(path), ClusterError, from_file=True)


@lru_cache(maxsize=64)  # what ships does not change while a process runs
def _shipped(name: str, num_nodes: int | None) -> Cluster:
    return _read(TOPOLOGIES / f"{name}.toml", num_nodes)


@cache
def cluster_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(path.stem for path in TOPOLOGIES.glob("*.toml")))
