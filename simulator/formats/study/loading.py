"""The inputs that a study names: its model, its cluster with the ranks placed, its calibration, each under its `--set`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from simulator.base.errors import ClusterError, InputError, ModelError
from simulator.base.schema import Strict
from simulator.formats.study.overrides import Override, parse_overrides, patched
from simulator.formats.study.tables import of_root
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.learned import LEARNED_SUFFIX, Learned
from simulator.spec.calibration.stored import stored_file
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.hosts import first_gpus, other_intra
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.model import Model

if TYPE_CHECKING:
    from simulator.formats.readers.plans import Draft

# Of a fabric: what joins the nodes. Its other keys say what was measured of it, what switches may do, or what if it were faster
_NETWORK: Final = ("kind", "oversubscription", "nodes_per_leaf", "nodes_used_per_leaf", "above")


def model_of(raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None = None) -> Model | None:
    """The model that a study names, or that its plan's file states; None where it names none."""
    name = raw.get("model")
    if draft is not None and isinstance(draft.model, Model) and name == draft.model.name:
        return patched(draft.model, overrides, ModelError)
    like = raw.get("like")
    loaded = Model.load(name, like if isinstance(like, str) else None) if isinstance(name, str) else None
    return None if loaded is None else patched(_with_images(loaded, raw), overrides, ModelError)


def _with_images(model: Model, raw: Mapping[str, Any]) -> Model:
    """A model whose sequences have the study's images, where it gives any. Raises ModelError."""
    asked = [
        Override(root="model", path=("tower", name), text="", flag=f"--{key}".replace("_", "-"), meant=raw[key])
        for name, key in (("images", "images"), ("side", "image_size"))
        if raw.get(key) is not None
    ]
    if model.tower is None and any(one.meant for one in asked):
        problem = f"{model.name} has no tower for images that is read"
        raise ModelError.at(asked[0].flag, problem, "leave it out, or a model that has one")
    return patched(model, asked if model.tower else (), ModelError)


def cluster_of(
    raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None, given: Mapping[str, Any]
) -> Cluster | None:
    """The cluster with its ranks placed; of as many nodes as a plan's file implies, where nothing else states their number."""
    cluster, table = _counted_cluster(raw, overrides, draft, given), raw.get("placement")
    if cluster is None or not isinstance(table, str):
        return cluster
    from simulator.formats.readers.placement import read_placement

    return cluster.with_rank_mapping(read_placement(Path(table), cluster))


def _counted_cluster(
    raw: Mapping[str, Any], overrides: Sequence[Override], draft: Draft | None, given: Mapping[str, Any]
) -> Cluster | None:
    cluster = loaded_cluster(raw, overrides)
    if cluster is None or draft is None or raw.get("nodes") is not None:
        return cluster
    from simulator.formats.study.imported import PART, part_of

    nodes, each = part_of(draft, cluster, given)
    if each is not None:
        place = draft.places.get("num_devices", draft.file)
        part = [Override(root="cluster", path=(key,), text=str(each), flag=place) for key in PART]
        overrides = [*overrides, *part]
    if nodes not in (None, cluster.num_nodes) or each is not None:
        cluster = loaded_cluster({**raw, "nodes": nodes}, overrides)
    return cluster


def loaded_cluster(raw: Mapping[str, Any], overrides: Sequence[Override]) -> Cluster | None:
    """The cluster that `cluster` and `nodes` name, under what was set of it and its device; None where none is named."""
    name, nodes = raw.get("cluster"), raw.get("nodes")
    if not isinstance(name, str):
        return None
    counted = isinstance(nodes, int) and not isinstance(nodes, bool) and 1 <= nodes <= MAX_NODES
    cluster = Cluster.load(name, nodes if counted else None)
    below = [replace(o, path=("device", *o.path)) for o in of_root(overrides, "device")]
    if any(o.path == ("device", "memory_bytes") for o in below):  # CUDA's total was that of the device as it was
        device = cluster.device.model_copy(update={"cuda_memory_bytes": None})
        cluster = cluster.model_copy(update={"device": device})
    cluster, stated = _with_first_gpus(cluster, of_root(overrides, "cluster"))
    own = [each for one in stated for each in _rewired(cluster, one)]
    return patched(patched(cluster, [*own, *below], ClusterError), _doubted(cluster, own), ClusterError)


def cluster_with(name: str, settings: Sequence[str], nodes: int | None = None) -> Cluster:
    """A preset's or a file's cluster with leaves of it and of its device as --set says. Raises InputError with every fault."""
    overrides, faults = parse_overrides(settings, ("cluster", "device"))
    InputError.raise_for(faults)
    cluster = loaded_cluster({"cluster": name, "nodes": nodes}, overrides)
    assert cluster is not None
    return cluster


def _doubted(cluster: Cluster, stated: list[Override]) -> list[Override]:
    """Another network than the one that was seen to be as its data sheet says is known by its sheet alone, unless it is said not to be.

    A multiple of what the known one is asks what if.
    """
    network = [one for one in stated if one.path[0] in ("inter", "fabric")]
    if not cluster.fabric.confirmed or any(one.path[-1] in ("confirmed", "fabric") for one in network):
        return []
    other = [one for one in network if one.factor is None and (one.path[0] == "inter" or one.path[1] in _NETWORK)]
    return [
        replace(one, path=("fabric", "confirmed"), text="false", flag=f"{one.flag}={one.text}, so confirmed")
        for one in other[:1]
    ]


def _with_first_gpus(cluster: Cluster, stated: list[Override]) -> tuple[Cluster, list[Override]]:
    """The nodes' first GPUs with the links between them, where fewer were asked for; and what else was."""
    left = []
    for one in stated:
        gpus = one.value if one.factor is None else round(cluster.gpus_per_node * one.factor)
        if one.path == ("gpus_per_node",) and isinstance(gpus, int) and 0 < gpus < cluster.gpus_per_node:
            data = cluster.model_dump(exclude={"device"})
            parts = {name: value for name, value in first_gpus(data, gpus).items() if value != data[name]}
            changes = [replace(one, path=(name,), text=str(gpus), meant=part) for name, part in parts.items()]
            cluster = patched(cluster, changes, ClusterError)
        else:
            left.append(one)
    return cluster, left


def _rewired(cluster: Cluster, one: Override) -> list[Override]:
    """link.intra=nvlink5 or =off in full; any other override as it is."""
    if one.path != ("intra",) or not isinstance(one.value, str):
        return [one]
    host = cluster.host_link
    kind = other_intra(cluster.intra.model_dump(), host.model_dump() if host else None, one.value)
    found = [replace(one, meant=kind)]
    if kind["shape"] == "pcie" and cluster.nvlink_domain_size != cluster.gpus_per_node:
        found.append(replace(one, path=("nvlink_domain_size",), meant=cluster.gpus_per_node))
    # what joined the GPUs joins them to hosts
    if kind["shape"] != "pcie" and cluster.host is None and host is not None:
        found.append(replace(one, path=("host",), meant=host.model_dump()))
    return found


class KernelSpeeds(Strict):
    """`--set kernels.gemm=1.2`: kernel speeds relative to the calibration."""

    gemm: float = Field(gt=0, le=1e6, default=1.0)
    attention: float = Field(gt=0, le=1e6, default=1.0)
    elementwise: float = Field(gt=0, le=1e6, default=1.0)
    scan: float = Field(gt=0, le=1e6, default=1.0)


def calibration_of(
    raw: Mapping[str, Any], cluster: Cluster | None, overrides: Sequence[Override] = ()
) -> Calibration | None:
    """The calibration that a study names, else the one kept of its device, with the kernel speeds that were set.

    None: the shipped one of the device.
    """
    speed = patched(KernelSpeeds(), overrides, InputError)
    stored = stored_file(cluster.device.name) if cluster is not None and raw.get("calibration") is None else None
    named = calibration_named(raw.get("calibration"), cluster) if stored is None else Calibration.load(stored)
    if not overrides or cluster is None:
        return named
    return (named or Calibration.for_device(cluster.device)).with_speed(
        {"gemm": speed.gemm, "attention": speed.attention, "elementwise": speed.elementwise, "scan": speed.scan}
    )


def calibration_named(name: object, cluster: Cluster | None) -> Calibration | None:
    """A calibration by name or path, or made of the cluster's device; None: the device's own."""
    if not isinstance(name, str):
        return None
    if name == "ideal":
        return Calibration.ideal()
    if name == "datasheet":
        return Calibration.datasheet(cluster.device) if cluster is not None else None
    own = Path(name if name.endswith(LEARNED_SUFFIX) else f"{name}{LEARNED_SUFFIX}")
    if name.endswith(LEARNED_SUFFIX) or own.is_file():
        learned = Learned.load(own)
        return Calibration.for_device(cluster.device).with_learned(learned) if cluster is not None else None
    return Calibration.load(name)
