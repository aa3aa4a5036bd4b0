"""Multi-instance GPUs: slices of a GPU as devices of their own, named `h100:3g.40gb`. The profiles are in topologies/mig.

A slice has its SMs, its memory and, by eighths, its share of the memory's bandwidth. Slices reach each other, also those of one GPU,
through host memory alone, and those of one GPU share its link to the host. The power cap stays the whole GPU's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from pydantic import Field

from simulator.base.errors import ClusterError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, nearest, read_toml
from simulator.base.units import Bytes

FILE: Final = TOPOLOGIES / "mig" / "profiles.toml"
MEMORY_SLICES: Final = 8  # of a whole GPU


class Profile(Strict):
    """One slice. instances: how many of them a GPU has room for."""

    sms: int = Field(gt=0)
    memory_bytes: Bytes = Field(gt=0)
    memory_slices: int = Field(ge=1, le=MEMORY_SLICES)
    instances: int = Field(ge=1, le=7)


@cache
def _profiles() -> Mapping[str, Mapping[str, Profile]]:
    tables = read_toml(FILE, ClusterError)["profiles"]
    return {
        device: {
            name: Profile.parse(data, f"{FILE}: {device}.{name}", ClusterError, from_file=True)
            for name, data in own.items()
        }
        for device, own in tables.items()
    }


def profile_of(device: str, name: str) -> Profile:
    """A profile of a device by both names. Raises ClusterError with those that there are."""
    known = _profiles().get(device)
    if known is None:
        problem, remedy = f"no profiles of {device} are known", f"slices of {' and '.join(_profiles())}"
        raise ClusterError.at(f"device {device}:{name}", problem, remedy)
    if name not in known:
        problem = f"{device} has no profile {name!r}"
        raise ClusterError.at("device", problem, nearest(name, known) or f"known: {', '.join(known)}")
    return known[name]


def sliced(device: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A device's data as those of a slice of it."""
    profile = profile_of(device["name"], name)
    share = profile.sms / device["num_sms"]
    return {
        **device,
        "name": f"{device['name']}:{name}",
        "memory_bytes": profile.memory_bytes,
        "cuda_memory_bytes": None,
        "memory_bytes_per_s": device["memory_bytes_per_s"] * profile.memory_slices / MEMORY_SLICES,
        "peak_flop_per_s": {dtype: peak * share for dtype, peak in device["peak_flop_per_s"].items()},
        "num_sms": profile.sms,
        "aliases": (),
        "sources": {**device["sources"], **dict.fromkeys(("memory_bytes", "num_sms"), f"{FILE.name}: {name}")},
    }


def sliced_host(node: Mapping[str, Any], base: str, name: str) -> dict[str, Any]:
    """A machine's data where each of its GPUs is cut into as many such slices as it has room for."""
    count = profile_of(base, name).instances
    link = node["host"] or node["intra"]
    rate = link["bytes_per_s"] / count
    wired = {"kind": link["kind"], "shape": "pcie", "bytes_per_s": rate, "latency_s": link["latency_s"]}
    gpus = node["gpus_per_node"] * count
    return {
        **node,
        "gpus_per_node": gpus,
        "nvlink_domain_size": gpus,
        "idle_gpus": 0,
        "intra": {**node["intra"], **wired, "edges": ()},
        "host": None,
        "pcie": {**(node["pcie"] or {}), "sockets": (), "switches": (), "p2p": "none"},
        "sources": {
            **node["sources"],
            "intra": f"{count} slices share a GPU's link to the host, and reach each other through its memory",
        },
    }
