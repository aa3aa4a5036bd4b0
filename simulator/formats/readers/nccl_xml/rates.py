"""Speeds that NCCL and RCCL derive from the file (NVIDIA/nccl src/graph/topo.h and topo.cc; xGMI: ROCm/rccl topo.h)."""

from __future__ import annotations

import re
from typing import Final

from simulator.formats.readers.nccl_xml.tree import Element
from simulator.spec.cluster.host import PcieLink

# 100 Mb/s a lane by transfer rate; bytes/s of a link are lanes × that / 80 × 1e9, as NCCL rounds them
_LANE: Final = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}
PCIE_UNKNOWN: Final = 12e9  # NCCL's PCI_BW
_NVLINK_BY_SM: Final = ((60, 18.0), (70, 20.0), (80, 20.0), (86, 12.0), (90, 20.6), (100, 40.1))
_XGMI_BY_GCN: Final = {"94": 48.0, "95": 48.0, "90a": 36.0, "910": 36.0}  # else Vega's
_XGMI_VEGA: Final = 24.0
_CPUS: Final = {"AuthenticAMD": 16.0, "GenuineIntel": 10.0, "CentaurHauls": 6.0, "  Shanghai  ": 6.0}
_SKYLAKE, _SAPPHIRE = 85, 143  # Intel model ids from which NCCL assumes a faster socket link
TRANSFERS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*GT/s")
WHOLE: Final = re.compile(r"[0-9]{1,9}")


def pcie_rate(transfers: str, lanes: int) -> float:
    """Bytes/s one way of a PCIe link. transfers: GT/s of a lane as the file writes it."""
    return lanes * _LANE.get(transfers.removesuffix(".0"), 60) / 80 * 1e9


def link_rate(pci: Element, kind: str) -> float:
    """Bytes/s one way of one NVLink or xGMI link of a GPU, as NCCL or RCCL assumes."""
    inner = next(pci.inside("gpu"), None)
    if kind == "XGMI":
        gcn = inner.get("gcn").removeprefix("gfx") if inner is not None else ""
        return 1e9 * next((rate for head, rate in _XGMI_BY_GCN.items() if gcn.startswith(head)), _XGMI_VEGA)
    text = inner.get("sm") if inner is not None else ""
    sm = whole(text) or 80
    return 1e9 * max((pair for pair in _NVLINK_BY_SM if pair[0] <= sm), default=_NVLINK_BY_SM[0])[1]


def cpu_rate(cpu: Element) -> float:
    """Bytes/s between sockets, as NCCL assumes by vendor and, for Intel, by model."""
    arch, vendor, model = cpu.get("arch"), cpu.attributes.get("vendor", ""), cpu.get("modelid")
    if arch in ("ppc64", "arm64"):
        return 32e9 if arch == "ppc64" else 6e9
    if vendor == "GenuineIntel" and model:
        return 22e9 if whole(model) >= _SAPPHIRE else 10e9 if whole(model) >= _SKYLAKE else 6e9
    return 1e9 * _CPUS.get(vendor, 10.0)


def pcie_link(pci: Element) -> PcieLink | None:
    """The PCIe link above a device; None where the file does not record it (what is malformed is a fault elsewhere)."""
    speed, lanes = TRANSFERS.match(pci.get("link_speed")), whole(pci.get("link_width"))
    return PcieLink(float(speed[1]), lanes) if speed is not None and float(speed[1]) and lanes else None


def whole(text: str) -> int:
    """A whole number of a sane size; 0 for anything else."""
    return int(text) if WHOLE.fullmatch(text) else 0
