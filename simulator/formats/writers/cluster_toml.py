"""A cluster as the TOML file that `Cluster.load` reads back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from simulator.spec.cluster import Cluster

_TABLES: Final = ("intra", "host", "pcie", "tier", "inter", "fabric", "sources")
_USUAL: Final = (("speed", 1.0), ("wait", 1.0), ("confirmed", False))


def cluster_toml(cluster: Cluster) -> str:
    """The file's text; a device that is a preset is named."""
    data = cluster.model_dump(exclude_none=True)
    lines = [f'name = "{cluster.name}"', f'device = "{cluster.device.name}"']
    lines += [f"{key} = {data[key]}" for key in ("num_nodes", "gpus_per_node", "nvlink_domain_size")]
    lines += [f"seats = {json.dumps(cluster.seats)}"] if cluster.seats else []
    for table in _TABLES:
        if data.get(table):
            lines += ["", f"[{table}]", *_entries(data[table])]
    for one in cluster.exceptions:
        stated = one.model_dump(exclude_none=True, exclude={"device"})
        device = {} if one.device is None else {"device": one.device.name}
        lines += ["", "[[exceptions]]", *_entries(stated | device)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if value == () or isinstance(value, dict) or (key, value) in _USUAL:  # no tier's sources, no default
            continue
        if isinstance(value, tuple) and isinstance(value[0], dict):
            yield f"{key} = ["
            yield from (f"  {{ {', '.join(_entries(_plain(edge)))} }}," for edge in value)
            yield "]"
        else:
            yield f"{key} = {_value(key, value)}"


def _plain(edge: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in edge.items() if not (key == "both_ways" and value)}


def _value(key: str, value: object) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool) or key.endswith("numel_per_s"):
        return json.dumps(value, ensure_ascii=False)
    if key.endswith("bytes_per_s"):
        return f'"{value / 1e9:.15g}GB/s"'
    if key.endswith("_bytes"):
        return f'"{value}B"'
    if key.endswith("_s"):
        return f'"{value * 1e6:.15g}us"'
    return json.dumps(value, ensure_ascii=False)
