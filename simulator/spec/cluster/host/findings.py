"""Suspicious points of a host's topology: each finding has an observation and its possible meaning; none is certain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.spec.cluster.host.parts import Host
from simulator.spec.cluster.host.structure import Island, idle_nics, islands, nearest_nics

_BRIDGE_LINKS = 4  # of an RTX 3090's, A5000's or A6000's bridge (NVIDIA RTX A6000 data sheet: NVLink 112.5 GB/s)

_NUMBER = re.compile(r"[0-9]{1,9}")
_MANY = 4  # GPUs and NICs that no real host joins at one bridge


@dataclass(frozen=True, slots=True)
class Finding:
    """kind: nvlink_down, cards_on_one_socket, reversed_order, pci_order, hidden, idle_nics or narrow_link. text: a sentence."""

    kind: str
    text: str


def findings(host: Host, *, expects_nvlink: bool = False) -> tuple[Finding, ...]:
    """All findings. expects_nvlink: the GPUs are known to be joined by NVLink on such a host (HGX, DGX)."""
    found = islands(host)
    return (
        *_nvlink(host, found, expects_nvlink=expects_nvlink),
        *_nics_far(host),
        *_order(host),
        *_hidden(host, found),
        *_idle(host),
        *_narrow(host),
    )


def _nvlink(host: Host, found: Sequence[Island], *, expects_nvlink: bool) -> Iterator[Finding]:
    largest = max(found, key=lambda island: len(island.gpus))
    if largest.shape == "alone":
        if expects_nvlink and len(host.gpus) > 1 and host.links_listed:
            yield Finding("nvlink_down", f"none of {len(host.gpus)} GPUs has an NVLink up, and they should have")
        return
    for gpu, links in _below_the_rest(largest):
        most = max(largest.links)
        yield Finding("nvlink_down", f"{host.gpus[gpu].name} has {links} links up, its island's best has {most}")
    if largest.shape == "switch" or (expects_nvlink and largest.shape == "cube_mesh"):
        for island in found:
            if island.shape == "alone":
                name = host.gpus[island.gpus[0]].name
                yield Finding("nvlink_down", f"{name} has no NVLink up while the others meet in a switch")
    if len(host.gpus) == 2 and largest.links[0] < _BRIDGE_LINKS and next(iter(largest.pairs.values())).kind == "NV":
        count = largest.links[0]
        text = (
            f"{count} link{'s' * (count > 1)} up between 2 GPUs; a bridge of two RTX 3090 or A6000 has {_BRIDGE_LINKS}"
        )
        yield Finding("nvlink_down", text)


def _below_the_rest(island: Island) -> Iterator[tuple[int, int]]:
    """GPUs whose links are fewer than what most of the island has."""
    usual = Counter(island.links).most_common(1)[0][0]
    for gpu, links in zip(island.gpus, island.links, strict=True):
        if links < usual:
            yield gpu, links


def _nics_far(host: Host) -> Iterator[Finding]:
    """GPUs that reach every NIC through the socket's border while others do not."""
    if not host.nics:
        return
    closest = {
        gpu.name: min(path.rank for path in paths)
        for gpu in host.gpus
        if (paths := [p for nic in host.nics if (p := host.path(gpu.name, nic.name)) is not None])
    }
    far = [name for name, rank in closest.items() if rank == max(closest.values())]
    if len(far) < len(closest) and _crosses(host, far):
        nearest = {one.gpu: one.via for one in nearest_nics(host)}
        helped = all(nearest[i] is not None for i, gpu in enumerate(host.gpus) if gpu.name in far)
        end = "; over NVLink, PXN reaches a card beside a peer" if helped else ""
        text = f"{_list(far)} reach{'es' * (len(far) == 1)} no card without crossing the CPUs' interconnect (SYS){end}"
        yield Finding("cards_on_one_socket", text)


def _crosses(host: Host, names: Sequence[str]) -> bool:
    return all(
        path.kind == "SYS" for name in names for nic in host.nics if (path := host.path(name, nic.name)) is not None
    )


def _order(host: Host) -> Iterator[Finding]:
    numas = [int(gpu.numa) for gpu in host.gpus if _NUMBER.fullmatch(gpu.numa)]
    steps = [b - a for a, b in pairwise(numas)]
    if len(numas) == len(host.gpus) > 1 and all(step <= 0 for step in steps) and any(steps):
        text = f"GPUs sit on NUMA nodes in reversed order ({', '.join(map(str, numas))}): pin processes by it"
        yield Finding("reversed_order", text)
    buses = [gpu.pci for gpu in host.gpus]
    if host.numbered and all(buses) and buses != sorted(buses):
        order = ", ".join(host.gpus[i].name for i in sorted(range(len(buses)), key=lambda i: buses[i]))
        text = f"GPUs are not numbered by PCI bus; by bus they are {order} (CUDA_DEVICE_ORDER=PCI_BUS_ID)"
        yield Finding("pci_order", text)
    aliases = [nic.alias or nic.name for nic in host.nics]
    numbers = [int(tail) for name in aliases if _NUMBER.fullmatch(tail := name.rpartition("_")[2])]
    if len(numbers) == len(aliases) and numbers != sorted(numbers):
        yield Finding("pci_order", f"network cards are not listed in the order of their names: {', '.join(aliases)}")


def _hidden(host: Host, found: Sequence[Island]) -> Iterator[Finding]:
    numas = {gpu.numa for gpu in host.gpus}
    if len(numas) == 1 and len(host.gpus) > 1 and any(mark in next(iter(numas)) for mark in "-,"):
        text = f"every GPU names NUMA nodes {numas.pop()}: a virtual machine that hides where they sit"
        yield Finding("hidden", text)
    to_cards = {str(host.path(g.name, c.name)) for g in host.gpus for c in host.nics}
    if to_cards == {"PHB"} and len(host.gpus) >= _MANY <= len(host.nics):
        yield Finding("hidden", "every card is PHB from every GPU: a virtual machine that hides the PCIe tree")
    # which says the domain's size
    complete = len(found) == 1 and found[0].shape == "switch" and host.format != "cluster file"
    if complete and 1 < len(host.gpus) <= 4:
        text = f"{len(host.gpus)} GPUs on an NVSwitch: a rack's domain (72 of an NVL72) is larger than its trays show"
        yield Finding("hidden", text)


def _idle(host: Host) -> Iterator[Finding]:
    idle = idle_nics(host)
    if idle and len(idle) < len(host.nics):
        yield Finding("idle_cards", f"no GPU is nearest to {_list(idle)}: storage or management, usually")


def _narrow(host: Host) -> Iterator[Finding]:
    """GPUs and NICs whose PCIe link is slower than that of most of their kind."""
    for devices in (host.gpus, host.nics):
        links = [(device.name, device.pcie) for device in devices if device.pcie is not None]
        if len(links) < 2:
            continue
        usual = Counter(link for _, link in links).most_common(1)[0][0]
        for name, link in links:
            if link.gt_per_s * link.lanes < usual.gt_per_s * usual.lanes:
                yield Finding("narrow_link", f"{name} has a PCIe link of {link}, most of its kind {usual}")


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
