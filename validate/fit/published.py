"""Fits that are not of one machine's samples: nccl-tests logs of a cluster, and tables of published sweeps."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.base.errors import CalibrationError, Fault, InputError, listed
from simulator.base.files import ordinary, write_whole
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves, family_of
from simulator.spec.calibration.document import SUFFIX
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives.call import Links
from simulator.work.collectives.cost import call_of
from validate.fit.line import refuse_few
from validate.fit.link_classes import PORTS, network_class, port_class
from validate.fit.nccl import errors, fit_all, fit_network, fit_port, network_entry, port_entry, table_rows
from validate.fit.nccl_tests import read_logs
from validate.fit.robust import kept
from validate.fit.sweeps import Sample
from validate.fit.sweeps import read_samples as read_table
from validate.samples import SampleFile

if TYPE_CHECKING:
    from validate.fit.link_classes import Array

_TABLE_COLUMNS = ("collective", "n_gpus", "n_nodes", "size_bytes", "time_us")
_HEAD_BYTES = 4096


def kind_of(path: Path) -> str:
    """samples, log or table, by the file's name and its first bytes. Raises CalibrationError if it cannot be read."""
    try:
        with ordinary(path).open("rb") as raw:
            head = raw.read(2)
        with gzip.open(path) if head == b"\x1f\x8b" else path.open("rb") as file:
            text = file.read(_HEAD_BYTES).decode("utf-8", "replace").lstrip()
    except (OSError, EOFError, zlib.error) as exc:
        raise CalibrationError(Fault(place=str(path), problem=f"cannot be read: {exc}")) from None
    if all(column in text.partition("\n")[0] for column in _TABLE_COLUMNS):
        return "table"
    if ".jsonl" in path.name or '"kind"' in text.partition("\n")[0]:
        return "samples"
    return "log"


def fit_tables(paths: Sequence[Path], out: Path) -> list[str]:
    """Links of every port and network that the tables measure, as `topologies/calibrations/links` ships them."""
    rows = [row for path in paths for row in read_table(path)]
    reasons = Counter(reason for _, reason in rows if reason)
    samples = [sample for sample, _ in rows if sample is not None]
    if not samples:
        raise CalibrationError(Fault(place=", ".join(map(str, paths)), problem="no usable row", remedy=str(reasons)))
    ports, networks, _, _ = fit_all(samples)
    provenance = {
        "recipe": "shardwise calibrate fit " + " ".join(path.name for path in paths),
        "sha256": " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths),
    }
    content = {"name": out.name.removesuffix(SUFFIX), "ports": ports, "networks": networks, "provenance": provenance}
    write_whole(out, json.dumps(content, indent=1) + "\n", "-o")
    lines = [f"left out: {count} rows: {reason}" for reason, count in reasons.most_common()]
    lines += [f"{item['name']}: {item['quality']}" for item in (*ports, *networks)]
    return [*lines, str(out)]


def fit_logs(paths: Sequence[Path], out: Path, cluster_name: str | None) -> list[str]:
    """The cluster's own calibration with its links fitted on its own logs; what they do not show stays as shipped."""
    if cluster_name is None:
        problem, remedy = "nccl-tests logs do not say what the links are", "--cluster NAME|FILE"
        raise CalibrationError(Fault(place="inputs", problem=problem, remedy=remedy))
    cluster, found = Cluster.load(cluster_name), read_logs(list(paths))
    links, lines = links_of(found, cluster, ", ".join(path.name for path in paths))
    Calibration.for_device(cluster.device).model_copy(update={"links": links}).save(out)
    return [*(f"left out: {fault}" for fault in listed(found.faults)), *lines, str(out)]


def links_of(found: SampleFile, cluster: Cluster, source: str) -> tuple[LinkCurves, list[str]]:
    """NCCL's links of a cluster from its own collectives, and what to say of the fit; the rest stays as shipped."""
    nccl, lines = nccl_of(found)
    samples, shipped = _calls(found, cluster, nccl), default_curves()
    data = shipped.model_dump(mode="json")
    near, far = [s for s in samples if not s.network], [s for s in samples if s.network]
    tables = table_rows(shipped)
    for kind in dict.fromkeys(port_class(s.call) for s in near):
        part, dropped = _trimmed([s for s in near if port_class(s.call) == kind], kind)
        tables[kind] = fit_port(part, kind)
        made = port_entry(kind, tables[kind], part, errors(part, tables[kind]), {})
        data["ports"] = [made | {"source": source}, *(p for p in data["ports"] if p["name"] != kind)]
        lines += [*dropped, f"{kind}: {made['quality']}"]
    if far:
        name = network_class(far[0].call) or "infiniband"
        table = fit_network(far, name, tables)
        made = network_entry(name, table, far, errors(far, table, tables), {})
        others = [n for n in data["networks"] if n["name"] != name]
        data["networks"] = [made | {"source": source}, *others]
        lines.append(f"{name}: {made['quality']}")
    recipe = f"shardwise calibrate fit {source} --cluster {cluster.name}"
    versions = {"nccl": ".".join(map(str, nccl.version))} if nccl.version else {}
    data |= {"name": cluster.name, "provenance": {"recipe": recipe, **versions}}
    return LinkCurves.model_validate_json(json.dumps(data)), lines


def nccl_of(found: SampleFile) -> tuple[Nccl, list[str]]:
    """NCCL as the samples' machine states it, whose choices the times are of; and what to say where it states none."""
    version, settings = found.machine.text("nccl"), found.machine.facts.get("settings")
    variables = {k: v for k, v in settings.items() if k.startswith("NCCL_")} if isinstance(settings, dict) else {}
    try:
        nccl = Nccl.of(version, variables, place="the samples' machine: nccl")
    except InputError as exc:
        return _nccl_without(version), [f"left out: {fault}" for fault in listed(exc.faults)]
    return nccl, [] if version else ["the samples do not say which NCCL they are of; its newest choices are assumed"]


def _nccl_without(version: str) -> Nccl:
    """NCCL with no setting, and with no version if that is what cannot be read."""
    try:
        return Nccl.of(version)
    except InputError:
        return Nccl()


def _calls(found: SampleFile, cluster: Cluster, nccl: Nccl) -> list[Sample]:
    """Log rows as the simulator's calls on this cluster. Raises CalibrationError where they cannot have run there."""
    links, samples = Links.of(cluster), []
    if links.port_kind not in PORTS:
        problem = f"no prior for ports of kind {links.port_kind}"
        raise CalibrationError(Fault(place=cluster.name, problem=problem, remedy=f"one of {', '.join(PORTS)}"))
    for s in found.of("collective"):
        nodes, ranks = int(s["num_nodes"]), int(s["num_ranks"])
        local = -(-ranks // nodes)
        if local > links.gpus_per_node or (nodes > 1 and not links.num_nics):
            problem = f"{ranks} ranks on {nodes} nodes do not fit {cluster.name}"
            raise CalibrationError(Fault(place=f"line {s.line}", problem=problem, remedy="--cluster of the log"))
        shape = GroupShape(
            num_ranks=ranks,
            num_nodes=nodes,
            ranks_per_node=local,
            num_groups_per_node=1,
            spans_domain=nodes * links.gpus_per_node > cluster.nvlink_domain_size,
        )
        call = call_of(s["op"], int(s["size_bytes"]), shape, cluster, nccl)
        samples.append(Sample("log", call, s.time_s))
    for network in {s.network for s in samples}:
        sizes = np.array([float(s.call.size_bytes) for s in samples if s.network == network])
        refuse_few(sizes, network or f"{links.port_kind} ({family_of(links.port_kind)})")
    return samples


def _trimmed(samples: Sequence[Sample], port: str) -> tuple[list[Sample], list[str]]:
    """Single iterations that were disturbed are dropped and counted."""
    log: Array = errors(samples, fit_port(samples, port))
    use = kept(log)
    part = [s for s, inside in zip(samples, use, strict=True) if inside]
    dropped = len(samples) - len(part)
    return part, [f"dropped: {dropped} of {len(samples)} times far from the others"] if dropped else []
