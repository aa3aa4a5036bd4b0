"""From the tree of elements to a Host: its GPUs, NICs and connections."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from simulator.base.errors import ClusterError, Fault
from simulator.formats.readers.nccl_xml.tree import Element
from simulator.spec.cluster.host import Cable, Gpu, Host, Nic, Path, PcieLink

_MOST_DEVICES = 512
_MOST_FAULTS = 20
_SWITCH_CLASS, _BRIDGE_TO_CPU = "0x068000", "0x068001"
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
_NIC_CLASS: Final = "0x02"
_AWS_SLOTS: Final = {"g5.48xlarge": ("00:16", "00:1d")}  # bus ids of its GPUs, where a file gives nothing but bus ids


class Reading:
    """One file on its way to a Host."""

    def __init__(self, root: Element, comments: str, place: str) -> None:
        self.root, self.comments, self.place = root, comments, place
        self.faults: list[Fault] = []
        self.missing: list[str] = []
        self.gpus: dict[str, Element] = {}  # name -> its <pci>
        self.nics: dict[str, tuple[Element, Nic]] = {}
        self.by_bus: dict[str, str] = {}  # GPUs
        self.switched, self.links_listed, self.numbered = False, True, False

    def fault(self, element: Element, problem: str, remedy: str = "") -> None:
        if len(self.faults) < _MOST_FAULTS:
            where = f"{self.place}: line {element.line}"
            self.faults.append(Fault(place=where, problem=problem, remedy=remedy))

    def host(self) -> Host:
        devices = list(self.devices(self.root))
        if len(devices) + len(list(self.root.inside("cpu"))) > _MOST_DEVICES:
            place = f"{self.place}: line {self.root.line}"
            raise ClusterError.at(place, f"{len(devices)} devices", f"≤ {_MOST_DEVICES}")
        self.classify(devices)
        for nic in self.root_nics(self.root):
            self.add_nics(nic, "")
        direct = dict(self.direct_paths())
        paths = {**self.pcie_paths(), **direct}
        self.note_missing(devices, direct)
        cables = tuple(self.cables(direct))
        if not self.gpus:
            self.fault(self.root, "no GPU in it", "a file written on a GPU host (NCCL_TOPO_DUMP_FILE)")
        if self.faults:
            raise ClusterError(self.faults)
        return Host(
            source=self.place,
            format="NCCL topology XML",
            gpus=tuple(self.gpu(name, pci) for name, pci in self.gpus.items()),
            nics=tuple(nic for _, nic in self.nics.values()),
            paths=paths,
            switched=self.switched,
            cables=cables,
            speeds="NCCL's reading of the file: PCIe by generation and width, links by compute capability",
            links_listed=self.links_listed,
            numbered=self.numbered,
            cpu=_vendor(next(self.root.inside("cpu"), None)),
            missing=tuple(self.missing),
        )

    def devices(self, element: Element) -> Iterator[Element]:
        """The <pci> elements that hold no other, in the file's order."""
        for child in element.children:
            if child.tag == "pci" and not any(child.inside("pci")):
                yield child
            else:
                yield from self.devices(child)

    def root_nics(self, element: Element) -> Iterator[Element]:
        """<nic> elements that hang on a CPU, not on a PCI device: virtual ones."""
        for cpu in element.inside("cpu"):
            yield from cpu.inside("nic")

    def classify(self, devices: list[Element]) -> None:
        unknown, gpus = [], []
        seen: dict[str, Element] = {}
        for pci in devices:
            bus = pci.get("busid").lower()
            if not bus or bus in seen:
                self.fault(pci, f"bus id {bus!r} appears on line {seen[bus].line} too" if bus else "no busid")
            seen.setdefault(bus, pci)
            kind = pci.get("class").lower()
            if any(pci.inside("gpu")) or kind.startswith(_GPU_CLASSES):
                gpus.append(pci)
            elif any(pci.inside("nic")) or kind.startswith(_NIC_CLASS):
                self.add_nics(pci, bus)
            elif not kind:
                unknown.append(pci)
        gpus += self.by_platform(unknown)
        self.number(gpus)

    def by_platform(self, unknown: list[Element]) -> list[Element]:
        """GPUs among devices that have nothing but a bus id, if a comment names a machine whose slots are known."""
        if not unknown:
            return []
        name = next((n for n in _AWS_SLOTS if n in self.comments), None)
        if name is None:
            self.missing.append(f"classes of {len(unknown)} devices: the file gives bus ids only")
            return []
        first, last = _AWS_SLOTS[name]
        gpus = [pci for pci in unknown if first <= pci.get("busid")[5:10].lower() <= last]
        rest = [pci for pci in unknown if pci not in gpus]
        for pci in rest:
            self.add_nics(pci, pci.get("busid").lower())
        text = f"classes of the devices: taken as on {name}, which a comment names ({len(gpus)} GPUs by slot)"
        self.missing.append(text)
        return gpus

    def number(self, gpus: list[Element]) -> None:
        """Names by CUDA's number where the file states it, else in the file's order (NCCL then asks the driver)."""
        numbers = [gpu.get("dev") for pci in gpus for gpu in pci.inside("gpu")]
        self.numbered = len(numbers) == len(gpus) == len(set(numbers)) and all(map(WHOLE.fullmatch, numbers))
        if self.numbered:
            gpus = [pci for _, pci in sorted(zip(map(int, numbers), gpus, strict=True), key=lambda pair: pair[0])]
        for index, pci in enumerate(gpus):
            self.gpus[f"GPU{index}"] = pci
            self.by_bus[pci.get("busid").lower()] = f"GPU{index}"
            if self.cpu(pci) is None:
                self.fault(pci, f"GPU {pci.get('busid')} is outside every <cpu>: nothing joins it", "inside a <cpu>")

    def add_nics(self, holder: Element, bus: str) -> None:
        nics = [holder] if holder.tag == "nic" else list(holder.inside("nic"))
        nets = [net for nic in nics for net in nic.inside("net")]
        cpu = self.cpu(holder)
        numa = cpu.get("numaid") if cpu is not None else ""
        if not nets:
            name = f"NIC{len(self.nics)}"
            self.nics[name] = (holder, Nic(name=name, pci=bus, numa=numa, pcie=pcie_link(holder)))
        for net in nets:
            name = net.get("name") or f"NIC{len(self.nics)}"
            name = name if name not in self.nics else f"{name}:{net.get('port') or len(self.nics)}"
            nic = Nic(name=name, pci=bus, numa=numa, bytes_per_s=self.net_rate(net), pcie=pcie_link(holder))
            self.nics[name] = (holder, nic)

    def net_rate(self, net: Element) -> float | None:
        text = net.get("speed")
        if not text:
            return None
        if not whole(text):
            self.fault(net, f"speed {text[:20]!r}: no bandwidth", "Mb/s, above 0")
            return None
        return whole(text) * 1e6 / 8

    def cpu(self, element: Element) -> Element | None:
        return next((e for e in element.above if e.tag == "cpu"), None)

    def gpu(self, name: str, pci: Element) -> Gpu:
        inner = next(pci.inside("gpu"), None)
        cpu = self.cpu(pci)
        model = f"sm {inner.get('sm')}" if inner is not None and inner.get("sm") else ""
        if inner is not None and inner.get("gcn"):
            model = inner.get("gcn") if inner.get("gcn").startswith("gfx") else f"gfx{inner.get('gcn')}"
        numa, cpus = (cpu.get("numaid"), cpu.get("affinity")) if cpu is not None else ("", "")
        above = [element for element in pci.above[1:] if element.tag == "pci"]
        return Gpu(
            name=name,
            pci=pci.get("busid").lower(),
            numa=numa,
            cpus=cpus,
            model=model,
            pcie=pcie_link(pci),
            uplink=pcie_link(above[-1]) if above else None,
        )

    def direct_paths(self) -> Iterator[tuple[tuple[str, str], Path]]:
        """NVLink and xGMI: between two GPUs as counted, through switches as the lesser of both sides' counts."""
        counted: dict[tuple[str, str], Path] = {}
        uplinks: Counter[str] = Counter()
        for name, pci in self.gpus.items():
            for gpu in pci.inside("gpu"):
                for link in (*gpu.inside("nvlink"), *gpu.inside("xgmi")):
                    self.add_direct_link(name, link, counted, uplinks)
        for (a, b), path in counted.items():
            back = counted.get((b, a))
            if back != path:
                link = next(iter(self.gpus[a].inside("gpu")))
                problem = f"{a} has {path} to {b}, {b} has {back or 'nothing'} to {a}"
                self.fault(link, problem, "the same links both ways")
            elif self.index(a) < self.index(b):
                yield (a, b), path
        for a, b in combinations(uplinks, 2):
            yield (a, b) if self.index(a) < self.index(b) else (b, a), Path("NV", min(uplinks[a], uplinks[b]))
        self.switched = bool(uplinks)

    def add_direct_link(
        self, name: str, link: Element, counted: dict[tuple[str, str], Path], uplinks: Counter[str]
    ) -> None:
        target, text = link.get("target").lower(), link.get("count")
        if not whole(text):
            self.fault(link, f"count {text[:20]!r}: no link, so no bandwidth", "at least 1")
            return
        kind = "XGMI" if link.tag == "xgmi" else "NV"
        peer = self.by_bus.get(target)
        if peer == name:
            self.fault(link, f"{name} is linked to itself ({target})", "the bus id of another GPU or of a switch")
        elif peer is not None:
            before = counted.get((name, peer))
            counted[name, peer] = Path(kind, whole(text) + (before.count if before else 0))
        elif link.get("tclass").lower().startswith(_SWITCH_CLASS):
            uplinks[name] += whole(text)
        elif not link.get("tclass").lower().startswith(_BRIDGE_TO_CPU):
            self.missing.append(f"the device at {target} that {name} is linked to: it is not in the file")

    def index(self, name: str) -> int:
        return int(name.removeprefix("GPU"))

    def pcie_paths(self) -> dict[tuple[str, str], Path]:
        """The path type of every pair, by the element at which their paths to the root meet."""
        places = [*self.gpus.items(), *((name, element) for name, (element, _) in self.nics.items())]
        return {(a, b): self.meeting(x, y) for (a, x), (b, y) in combinations(places, 2)}

    def meeting(self, x: Element, y: Element) -> Path:
        """One switch: PIX; several: PXB; the CPU: PHB; two CPUs: SYS (NCCL knows no NODE)."""
        if x is y:
            return Path("PIX")
        ups, downs = x.above, y.above
        inside = {id(e) for e in downs}
        meet = next(i for i, e in enumerate(ups) if id(e) in inside)
        kind = ups[meet].tag
        if kind == "pci":
            switches = meet + downs.index(ups[meet]) - 1
            return Path("PIX" if switches <= 1 else "PXB")
        return Path("PHB" if kind == "cpu" else "SYS")

    def cables(self, direct: dict[tuple[str, str], Path]) -> Iterator[Cable]:
        names = {id(pci): name for name, pci in self.gpus.items()}
        yield from self.pci_cables(self.root, names)
        cpus = list(self.root.inside("cpu"))
        for x, y in combinations(cpus, 2):
            yield Cable(a=self.point(x, names), b=self.point(y, names), bytes_per_s=min(cpu_rate(x), cpu_rate(y)))
        for (a, b), path in direct.items():
            rate = path.count * link_rate(self.gpus[a], path.kind)
            if not self.switched:
                yield Cable(a=a, b=b, bytes_per_s=rate)
        if self.switched:
            for name in dict.fromkeys(n for pair in direct for n in pair):
                count = max(path.count for pair, path in direct.items() if name in pair)
                yield Cable(a=name, b="nvswitch", bytes_per_s=count * link_rate(self.gpus[name], "NV"))

    def pci_cables(self, element: Element, names: dict[int, str]) -> Iterator[Cable]:
        for child in element.children:
            if child.tag == "pci" and element.tag in ("pci", "cpu"):
                ends = self.point(child, names), self.point(element, names)
                yield Cable(a=ends[0], b=ends[1], bytes_per_s=self.pcie_rate(child))
            if child.tag in ("pci", "cpu"):
                yield from self.pci_cables(child, names)

    def point(self, element: Element, names: dict[int, str]) -> str:
        return names.get(id(element)) or f"{element.tag} at line {element.line}"

    def pcie_rate(self, pci: Element) -> float:
        """Bytes/s one way; NCCL's default where speed or width were not recorded (NCCL writes "" and 0 then)."""
        speed, width = pci.get("link_speed"), pci.get("link_width")
        if speed in ("", "Unknown speed") or (not width and not speed):
            return PCIE_UNKNOWN
        found = TRANSFERS.match(speed)
        if found is None or not float(found[1]):
            self.fault(pci, f"link_speed {speed[:20]!r}: no bandwidth", "as '16.0 GT/s PCIe'")
            return PCIE_UNKNOWN
        if not whole(width):
            self.fault(pci, f"link_width {width[:20]!r} at {speed}: no bandwidth", "1 to 16 lanes")
            return PCIE_UNKNOWN
        return pcie_rate(found[1], whole(width))

    def note_missing(self, devices: list[Element], direct: dict[tuple[str, str], Path]) -> None:
        if not direct and not any(True for pci in devices for _ in pci.inside("gpu")) and len(self.gpus) > 1:
            self.links_listed = False
            self.missing.append("NVLinks: the file lists none, and NCCL asks the driver for them when it runs")
        unnamed = sum(nic.bytes_per_s is None for _, nic in self.nics.values())
        if unnamed:
            self.missing.append(f"names and speeds of {unnamed} network card{'s' * (unnamed > 1)}")
        silent = sum(not pci.get("link_speed") for pci in devices)
        if silent:
            self.missing.append(f"PCIe speeds of {silent} devices: NCCL's default, {PCIE_UNKNOWN / 1e9:.0f} GB/s")


def _vendor(cpu: Element | None) -> str:
    if cpu is None:
        return ""
    names = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    return {"ppc64": "power", "arm64": "arm"}.get(cpu.get("arch")) or names.get(cpu.get("vendor"), "")


# Speeds that NCCL and RCCL derive from the file (NVIDIA/nccl src/graph/topo.h and topo.cc; xGMI: ROCm/rccl topo.h)
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
