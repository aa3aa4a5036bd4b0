"""Nodes and GPUs of a cluster that differ from the rest: what a file may say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from simulator.base.errors import Fault, InputError
from simulator.base.schema import Strict
from simulator.base.units import Bytes, BytesPerS, UnitError, format_bytes, parse_bytes
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_links
from simulator.spec.cluster.parts import MAX_NODES, IntraKind

_SPANS = re.compile(r"\d{1,6}(-\d{1,6})?(\s*,\s*\d{1,6}(-\d{1,6})?)*", re.ASCII)
OF_A_KIND: Final = (
    *("device", "speed", "free_bytes", "intra_kind", "intra_bytes_per_s", "num_nics", "nic_bytes_per_s"),
)
_STATES: Final = (*OF_A_KIND, "rails")
_OF_THE_NODE: Final = ("num_nics", "nic_bytes_per_s", "rails")
OLDEST_FIRST: Final = ("volta", "ampere", "ada", "hopper", "blackwell")


def device_of(value: object) -> object:
    """A device's name becomes the device; an unknown one is a fault of this field."""
    if not isinstance(value, str):
        return value
    try:
        return Device.load(value)
    except InputError as exc:
        raise ValueError(
            "; ".join(f"{f.problem} ({f.remedy})" if f.remedy else f.problem for f in exc.faults)
        ) from None


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_span(value: str) -> str:
    if not _SPANS.fullmatch(value):
        raise ValueError(f"{value!r} is not a list of numbers such as '0-3,7'")
    return value


Span = Annotated[str, BeforeValidator(_text), AfterValidator(_is_span)]


class Deviation(Strict):
    """What some nodes, or some GPUs of them, are instead. What is not stated is as everywhere.

    rails: on a rail-optimised fabric the rail of each of the node's NICs; elsewhere the n-th NIC is on the n-th rail.

    nodes, gpus: "3", "0-3,7"; gpus by their index in the node, all of them unless stated.
    device: another GPU. speed: its compute as a fraction of what the device does. free_bytes: of its memory, what others
    leave to a process; all of it unless stated. intra_kind, intra_bytes_per_s: all links
    of one GPU together; of another device unless stated those of its usual machine. num_nics, nic_bytes_per_s: of the node.
    """

    nodes: Span
    gpus: Span | None = None
    device: Annotated[Device | None, BeforeValidator(device_of)] = None
    speed: float | None = Field(ge=1e-6, le=1, default=None)
    intra_kind: IntraKind | None = None
    intra_bytes_per_s: BytesPerS | None = Field(gt=0, default=None)
    num_nics: int | None = Field(gt=0, le=1024, default=None)
    nic_bytes_per_s: BytesPerS | None = Field(gt=0, default=None)
    free_bytes: Bytes | None = Field(gt=0, default=None)
    rails: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Field(strict=False)] = None

    @property
    def words(self) -> str:
        """The nodes or GPUs and their difference, as text."""
        who = f"nodes {self.nodes}" + (f" GPUs {self.gpus}" if self.gpus is not None else "")
        stated = {name: getattr(self, name) for name in _STATES if getattr(self, name) is not None}
        return f"{who}: " + ", ".join(f"{name} = {shown(name, value)}" for name, value in stated.items())


def shown(name: str, value: object) -> str:
    """A field of an exception or of a kind, as text."""
    if isinstance(value, Device):
        return value.name
    if name == "free_bytes" and isinstance(value, int):
        return format_bytes(value) if value else "all"
    if name == "rails" and isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value / 1e9:g}GB/s" if name.endswith("bytes_per_s") and isinstance(value, float) else str(value)


def numbers_of(span: str) -> list[int]:
    """The numbers of "0-3,7", ascending, each once."""
    found: set[int] = set()
    for part in span.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), min(int(last or first), MAX_NODES) + 1))
    return sorted(found)


def exception_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """Every fault of a file's exceptions that their single fields do not show; fields that are malformed are skipped."""
    given = data.get("exceptions")
    listed = list(map(as_table, given)) if isinstance(given, list | tuple) else []
    seen: dict[tuple[str, int, int], int] = {}
    for index, one in enumerate(listed):
        where = f"{place}: exceptions[{index}]"
        if not any(one.get(name) is not None for name in _STATES):
            yield Fault(where, "does not say what is different", f"one of {', '.join(_STATES)}")
        for name in (name for name in _OF_THE_NODE if one.get("gpus") is not None and one.get(name) is not None):
            yield Fault(f"{where}.{name}", "cards are the node's, not a GPU's", "without gpus")
        yield from _reach(one, data, where)
        yield from _links(one, data, where)
        yield from _devices(one, data, where)
        yield from _memory(one, data, where)
        yield from _rails(one, data, where)
        yield from _twice(one, index, data, where, seen)


def _reach(one: Mapping[str, object], data: Mapping[str, object], where: str) -> Iterator[Fault]:
    """Nodes and GPUs that do not exist, and spans that run backwards."""
    for name, total in (("nodes", data.get("num_nodes", 1)), ("gpus", data.get("gpus_per_node"))):
        span = _text(one.get(name))
        if not isinstance(span, str) or not _SPANS.fullmatch(span) or not isinstance(total, int):
            continue
        for part in span.split(","):
            first, dash, last = part.strip().partition("-")
            if dash and int(last) < int(first):
                yield Fault(f"{where}.{name}", f"{part.strip()} ends before it begins")
            elif int(last or first) >= total:
                noun = "node" if name == "nodes" else "GPU of a node"
                problem = f"{part.strip()} is beyond the last {noun}, {total - 1}"
                yield Fault(f"{where}.{name}", problem, f"0 to {total - 1}" if total > 1 else "0")


def _links(one: Mapping[str, object], data: Mapping[str, object], where: str) -> Iterator[Fault]:
    """Links that a shape cannot have different on one node."""
    intra, inter = as_table(data.get("intra")), as_table(data.get("inter"))
    shape = intra.get("shape")
    near = [name for name in ("intra_kind", "intra_bytes_per_s") if one.get(name) is not None]
    kind = one.get("intra_kind")
    if isinstance(kind, str) and not kind.startswith(("nvlink", "xgmi")):
        problem = f"GPUs on {kind} beside others on a switch are not modelled"
        yield Fault(f"{where}.intra_kind", problem, "nvlink2 to nvlink5, xgmi")
    if near and shape not in (None, "switch"):
        problem = f"links that differ on one node are not modelled on shape {shape!r}"
        yield Fault(f"{where}.{near[0]}", problem, "shape 'switch', or all nodes as that one is")
    far = [name for name in _OF_THE_NODE if one.get(name) is not None]
    if far and not inter:
        yield Fault(f"{where}.{far[0]}", "the cluster has no network", "add [inter]")
    if "num_nics" in far and inter.get("cards"):
        problem = "which of the cards in inter.cards are left is not modelled"
        yield Fault(f"{where}.num_nics", problem, "nic_bytes_per_s, or no inter.cards")


def _devices(one: Mapping[str, object], data: Mapping[str, object], where: str) -> Iterator[Fault]:
    """Another vendor's GPU, one whose links are unknown, and two devices of one name."""
    device, usual = _device(one.get("device")), _device(data.get("device"))
    if device is None or usual is None:
        return
    if (device.architecture in OLDEST_FIRST) != (usual.architecture in OLDEST_FIRST):
        problem = f"{device.name} and {usual.name} have no collectives in common"
        yield Fault(f"{where}.device", problem, "GPUs of one vendor")
    links = usual_links(device.name)
    stated = one.get("intra_kind") is not None and one.get("intra_bytes_per_s") is not None
    if as_table(data.get("intra")).get("shape") == "switch" and links is None and not stated:
        problem = f"no rule says by which links a {device.name} hangs on a switch"
        yield Fault(f"{where}.device", problem, "intra_kind and intra_bytes_per_s with it")
    if device.name == usual.name and device != usual:
        yield Fault(f"{where}.device", f"two different devices are called {device.name}", "a name for each")


def _memory(one: Mapping[str, object], data: Mapping[str, object], where: str) -> Iterator[Fault]:
    """More free memory than there is."""
    device = _device(one.get("device") if one.get("device") is not None else data.get("device"))
    try:
        free = parse_bytes(free) if isinstance(free := one.get("free_bytes"), str) else free
    except UnitError:
        return  # its own field says so
    if isinstance(free, int) and device is not None and free > device.usable_bytes:
        problem = f"{format_bytes(free)} free of {format_bytes(device.usable_bytes)}"
        yield Fault(f"{where}.free_bytes", problem, "what other processes leave of the GPU's memory")


def _rails(one: Mapping[str, object], data: Mapping[str, object], where: str) -> Iterator[Fault]:
    """Rails that are not a permutation of the NICs, and fabrics without rails."""
    rails, inter, fabric = one.get("rails"), as_table(data.get("inter")), as_table(data.get("fabric"))
    if not isinstance(rails, list | tuple):
        return
    if fabric.get("kind", "rail_optimised") != "rail_optimised":
        yield Fault(f"{where}.rails", "a fat tree has no rails", "a rail-optimised fabric")
    nics = inter.get("num_nics")
    if isinstance(nics, int) and sorted(map(str, rails)) != sorted(map(str, range(nics))):
        problem = f"{list(rails)} are not the rails of {nics} cards"
        yield Fault(f"{where}.rails", problem, f"each of 0 to {nics - 1} once")


def _twice(
    one: Mapping[str, object], index: int, data: Mapping[str, object], where: str, seen: dict[tuple[str, int, int], int]
) -> Iterator[Fault]:
    """Two exceptions that set the same key of one GPU."""
    gpus_per_node = data.get("gpus_per_node")
    nodes, gpus = _text(one.get("nodes")), _text(one.get("gpus"))
    if not isinstance(nodes, str) or not _SPANS.fullmatch(nodes) or not isinstance(gpus_per_node, int):
        return
    if gpus is not None and not (isinstance(gpus, str) and _SPANS.fullmatch(gpus)):
        return
    local = numbers_of(gpus) if gpus is not None else range(min(gpus_per_node, 1024))
    for name in (name for name in _STATES if one.get(name) is not None):
        others = {seen.setdefault((name, node, gpu), index) for node in numbers_of(nodes) for gpu in local} - {index}
        if others:
            problem = f"exceptions[{min(others)}] says it of some of these GPUs too"
            yield Fault(f"{where}.{name}", problem, "one of them")


def _device(value: object) -> Device | None:
    try:
        value = device_of(value)
        return value if isinstance(value, Device) else Device.model_validate(value)
    except ValueError:
        return None  # its own field says so


def as_table(value: object) -> Mapping[str, object]:
    """A table of a file, or the fields of what it became; nothing for anything else, which is a fault of its own field."""
    if isinstance(value, Mapping):
        return value
    return value.__dict__ if isinstance(value, Strict) else {}
