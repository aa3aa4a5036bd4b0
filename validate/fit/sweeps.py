"""Published nccl-tests sweeps as the simulator's own calls: which hardware a row ran on, and which rows are left out."""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from simulator.collectives.cost import Call, Links, Placement
from simulator.collectives.ports import INTRA
from simulator.collectives.volumes import Kind

MIN_BYTES, MID_BYTES, LARGE_BYTES = 1024, 64 * 2**10, 64 * 2**20

KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}


@dataclass(frozen=True)
class Hardware:
    """What a table's `gpu` and `intra_link` stand for. Port speed: data sheet, one way (NVLink 2 to 5, PCIe 4 x16)."""

    port: str
    bytes_per_s: float
    architecture: str


GPUS = {
    "V100-SXM3": Hardware("nvlink2", 150e9, "volta"),
    "V100-SXM2": Hardware("nvlink2", 150e9, "volta"),
    "A100-SXM4": Hardware("nvlink3", 300e9, "ampere"),
    "NVIDIA A100-SXM4": Hardware("nvlink3", 300e9, "ampere"),
    "H100-SXM5": Hardware("nvlink4", 450e9, "hopper"),
    "H100 or H200": Hardware("nvlink4", 450e9, "hopper"),
    "H200-SXM5": Hardware("nvlink4", 450e9, "hopper"),
    "B200": Hardware("nvlink5", 900e9, "blackwell"),
    "B300": Hardware("nvlink5", 900e9, "blackwell"),
    "GB200": Hardware("nvlink5", 900e9, "blackwell"),
    "L40S": Hardware("pcie4", 31.5e9, "ada"),
}

# Machines by a part of `source` or `notes`: the network, NICs a node, and bytes/s a node where the table leaves it out.
NETWORKS: tuple[tuple[str, str, int, float], ...] = (
    ("p4de", "efa", 4, 50e9),
    ("p5.48xlarge", "efa", 32, 400e9),
    ("EKS EFA test", "efa", 32, 400e9),
    ("p5en.48xlarge", "efa", 16, 400e9),
    ("P6-B200", "efa", 8, 400e9),
    ("TCPXO", "ethernet", 8, 200e9),  # GPUDirect-TCPXO over 8 × 200 Gb/s Ethernet
    ("A3 High TCPX", "tcpx", 4, 100e9),  # GPUDirect-TCPX: through the host's TCP stack
    ("OCI BM.GPU.H100.8", "roce", 8, 400e9),
    ("OCI BM.GPU.B4.8", "roce", 8, 200e9),
    ("A3 Ultra", "roce", 8, 400e9),
    ("Nebius", "infiniband", 8, 400e9),
    ("2x DGX A100", "infiniband", 8, 200e9),
    ("4x DGX A100", "infiniband", 8, 200e9),
    ("sophia", "infiniband", 8, 200e9),
    ("XE9680", "infiniband", 8, 400e9),
    ("same cluster scaling", "infiniband", 8, 400e9),
    ("H100 cluster, interconnect not named", "infiniband", 8, 400e9),
    ("Slingshot", "slingshot", 2, 50e9),
)

# What is left out, and why. Each is a part of "source location notes nccl n_gpus" as `_text` writes it.
EXCLUDED = {
    "reported as degraded": "two-node runs of NVIDIA/nccl-tests issue 290: reported as broken",
    "26285727504": "2 x 4 GPUs (dgx06): degraded",
    "Intel Arc": "not NCCL",
    "unknown (1 GPU/node)": "instance not stated",
    "env1": "TCP sockets",
    "env2": "TCP sockets with options",
    "does not say which": "A3 High or Edge: page does not say which",
    "rank count uncertain": "rank count uncertain",
    "microsoft/vidur": "few iterations, other software between the timers",
    "older stack": "EFA installer of an older release on the same hardware as two other sweeps",
    "nccl 2.28.7": "a quarter of the same cluster's speed with NCCL 2.29.2: not a working network",
    "nccl 2.5.6": "tuning tables of 2019 choose otherwise",
    "L40S gpus 4": "GPUs on two sockets without peer access: a quarter of the two-GPU speed, one machine only",
    "L40S gpus 8": "as with 4 GPUs",
}


@dataclass(frozen=True)
class Sample:
    """One measured call: the simulator's own description of it, and how long it took."""

    machine: str
    call: Call
    network: str
    time_s: float

    @property
    def place(self) -> str:
        return f"{self.call.kind} {self.call.place.num_domains}x{self.call.place.ranks_per_domain}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a (gzipped) table, exact duplicates dropped."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = {tuple(row.items()): row for row in csv.DictReader(io.StringIO(data.decode()))}
    return list(rows.values())


def usable(row: dict[str, str]) -> str:
    """Empty, or why the row is left out."""
    text, small = _text(row), int(row["size_bytes"]) < LARGE_BYTES
    reasons = {
        "GPU without a port class": _hardware(row) is None,
        "below 1 KiB": int(row["size_bytes"]) < MIN_BYTES or not float(row["time_us"]),
        "network unknown": row["n_nodes"] != "1" and _network(row) is None,
        "timed from Python: small calls wait for the host": "stas00" in row["source"] and small,
        "half of the two-node speed of the same cluster, cause unknown": row["collective"] == "sendrecv"
        and row["n_nodes"] == "10",
        "an old nccl-tests counts these sizes otherwise": "V100" in row["gpu"]
        and row["collective"] in ("all_gather", "reduce_scatter"),
    }
    marked = (reason for mark, reason in EXCLUDED.items() if mark in text)
    return next(marked, "") or next((reason for reason, holds in reasons.items() if holds), "")


def _text(row: dict[str, str]) -> str:
    return (
        f"{row['source']} {row['location']} {row['notes']} nccl {row['nccl_version']} {row['gpu']} gpus {row['n_gpus']}"
    )


def _hardware(row: dict[str, str]) -> Hardware | None:
    return next((h for name, h in GPUS.items() if row["gpu"].startswith(name)), None)


def _network(row: dict[str, str]) -> tuple[str, int, float] | None:
    return next(((kind, nics, speed) for mark, kind, nics, speed in NETWORKS if mark in _text(row)), None)


def to_sample(row: dict[str, str]) -> Sample:
    """A row as a call on the links it ran over."""
    hardware, nodes, gpus = _hardware(row), int(row["n_nodes"]), int(row["n_gpus"])
    assert hardware is not None
    kind, nics, node_speed = (_network(row) if nodes > 1 else None) or ("", 0, 0.0)
    node = 8 if nodes == 1 or "xxrjun" in row["source"] else int(row["gpus_per_node"])
    links = Links(
        architecture=hardware.architecture,
        port_kind=hardware.port,
        port_bytes_per_s=hardware.bytes_per_s,
        port_link=INTRA,
        detour=Fraction(1),
        network_kind=kind,
        nic_bytes_per_s=node_speed / nics if nics else 0.0,
        num_nics=nics,
        oversubscription=1.0,
        nodes_per_leaf=1024,
        gpus_per_node=node,
        islands=node,
    )
    forced = tuple(text.lower() for text in (row["algo_env"], row["proto_env"]) if text)
    place = Placement(gpus, nodes, -(-gpus // nodes))
    call = Call(KINDS[row["collective"]], int(row["size_bytes"]), place, links, row["nccl_version"], forced)
    source = row["source"].split("@")[0].removeprefix("github:").removeprefix("https://github.com/")
    machine = f"{source} {row['gpu'].split(' (')[0]} {row['notes'][:40] if nodes > 1 else ''}".strip()
    return Sample(machine, call, kind, float(row["time_us"]) * 1e-6)


def band(size_bytes: int) -> str:
    """The three bands that quality is reported in."""
    return "small" if size_bytes < MID_BYTES else "mid" if size_bytes < LARGE_BYTES else "large"
