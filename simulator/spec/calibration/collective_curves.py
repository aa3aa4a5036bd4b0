"""Calibration of links: NCCL's bandwidth relative to the data sheet of a port or network, and its latency.

A call takes  base + hops × hop_s + T + fill,  with T = bytes / (data sheet × efficiency) over the slowest link and
fill = fill_s · sqrt(h · T / (T + fill_half_s)). The last term is the pipeline's fill: with the best chunk size it grows as
the square root of T and of the steps h (Thakur et al., doi 10.1177/1094342005051521, section 3, pipelined ring), until chunks
reach the communicator's buffers and it stays. Inside a node h is 1: sweeps over 2, 4 and 8 GPUs show no growth.
docs/background/collectives.md derives it and shows the fit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from simulator.base.errors import CalibrationError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, read_json

PORT_TOLERANCE = 1.15  # a port whose data sheet is within this ratio of a calibrated one counts as the same port
DEFAULT_FILE = TOPOLOGIES / "calibrations" / "links.calibration.json"
NO_COPIES = "FI_CXI_DISABLE_NON_INJECT_MSG_IDC=1"  # a setting of the network's own software, among a call's traits
# One sigma of log time for each doubling of the nodes beyond those of a fit, of rings and trees and of all-to-alls, whose
# streams crowd: what fits on fewer nodes were off, docs/scales.md
DOUBLING_SIGMA, PAIRS_DOUBLING_SIGMA = 0.035, 0.055
REFIT = "python experiments/fit_collectives.py"

Names = Annotated[tuple[str, ...], Field(strict=False)]  # lists, in JSON
Family = Literal["nvlink", "pcie", "host"]
# direct: GPU to GPU. host: both PCIe links and the memory of one socket between them. sockets: over both sockets' memory.
Transport = Literal["direct", "host", "sockets"]
# xGMI has no calibration of its own: it stands with the NVLink whose data sheet is nearest to its GPU's
_OF_ITS_GENERATION = {"cdna2": "nvlink3", "cdna3": "nvlink4", "cdna4": "nvlink4"}
# Where nobody calibrated an algorithm: the one that loads links alike
_RELATIVES = {
    "pat": "ring",
    "collnetdirect": "tree",
    "collnetchain": "tree",
    "hierarchical": "ring",
    "nvls": "nvlstree",
}


class Mode(Strict):
    """One algorithm and protocol on one class of links.

    efficiency: asymptotic bytes/s over the data sheet's. base_s: launch floor. hop_s: one step of the algorithm.
    fill_s, fill_half_s: the pipeline fill of large messages, and the transfer time at which it is 0.71 of that; over
    nodes for each square root of a step.
    drain: extra steps a loop of n−1 costs its port: a ring's last, receive-only step, an all-to-all's copy to itself.
    post_s: of a network, what the host takes to post a message: a ring's steps inside a node are no quicker, for each is a
    message on the edge that leaves it. copied_s: what it takes to copy one out of GPU memory (NetworkCurves.copied_bytes).
    crowding: how much longer pairs take among many nodes than between two, whose streams meet nobody else's.
    """

    efficiency: float = Field(gt=0, le=1.2)
    base_s: float = Field(ge=0, default=0.0)
    hop_s: float = Field(ge=0, default=0.0)
    fill_s: float = Field(ge=0, default=0.0)
    fill_half_s: float = Field(ge=0, default=0.0)
    drain: float = Field(ge=0, le=2, default=0.0)
    post_s: float = Field(ge=0, default=0.0)
    copied_s: float = Field(ge=0, default=0.0)
    crowding: float = Field(ge=0, default=0.0)


class Quality(Strict):
    """Residuals of the fit as |log(predicted / measured)|: median and 95th percentile, and over what was measured.

    between_machines: spread (standard deviation of log) of machines that were left out of the fit.
    """

    small_p50: float = Field(ge=0)
    small_p95: float = Field(ge=0)
    mid_p50: float = Field(ge=0)
    mid_p95: float = Field(ge=0)
    large_p50: float = Field(ge=0)
    large_p95: float = Field(ge=0)
    between_machines: float = Field(ge=0)
    num_samples: int = Field(ge=0)
    min_bytes: int = Field(ge=0)
    max_bytes: int = Field(ge=0)


class LinkClass(Strict):
    """Fields that ports and networks share.

    machines: who was measured -> median log error on its large messages when the fit has not seen it (None: alone).
    priors: modes that no sample shows; they hold physical values.
    """

    name: str
    modes: dict[str, Mode]  # "ring/simple", "nvls/simple", "p2p/simple", ...
    quality: Quality
    source: str
    machines: dict[str, float | None] = {}
    priors: Names = ()

    def mode(self, algorithm: str, protocol: str) -> Mode:
        """The curve of one algorithm and protocol. Raises CalibrationError naming the recipe that would supply it."""
        found = self.modes.get(f"{algorithm}/{protocol}") or self.modes.get(
            f"{_RELATIVES.get(algorithm, algorithm)}/{protocol}"
        )
        if found is None:
            place, problem = f"{self.name}: modes", f"no curve for {algorithm}/{protocol}"
            raise CalibrationError.at(place, problem, f"run {REFIT}")
        return found


class PortCurves(LinkClass):
    """A GPU's port into its node: NVLink or PCIe. bytes_per_s is the data sheet's, one way; channels are NCCL's.

    way: how bytes get from GPU to GPU; classes of other ways than direct are named kind-way.
    """

    family: Family
    way: Transport = "direct"
    bytes_per_s: float = Field(gt=0)
    num_channels: int = Field(gt=0)
    num_nvls_channels: int = Field(ge=0, default=0)

    def stands_for(self, kind: str) -> bool:
        """Whether this is the class of that kind itself, not of a similar one."""
        return self.name.partition("-")[0] == kind


class NetworkCurves(LinkClass):
    """A network between nodes. `kinds`: the values of `cluster.inter.kind` that it covers.

    when: further conditions, as `NAME=value` of the environment or `NCCL<2.19`; the class with most conditions wins.
    waiting: protocols in which a ring's message waits if all buffers of a channel are in flight; this wait is a second
    bound beside that of the bytes, and for whole chunks the steps are a third: they go on while other chunks are under
    way. In other protocols no message waits, and a ring fills as a pipeline does.
    max_nodes: the largest groups of its sweeps (0: unknown); beyond them a call is an extrapolation.
    copied_bytes: messages up to this size are copied out of GPU memory by the host, one after another (Slingshot's
    immediate data, fi_cxi(7): FI_CXI_DISABLE_NON_INJECT_MSG_IDC=1 forbids it).
    nic_bytes_per_s: of the NICs that were measured, where the host copies what they send (TCP) and not the wire limits it; 0 elsewhere.
    """

    kinds: Names
    when: Names = ()
    waiting: Names = ()
    copied_bytes: int = Field(ge=0, default=0)
    max_nodes: int = Field(ge=0, default=0)
    nic_bytes_per_s: float = Field(ge=0, default=0.0)

    def of_the_wire(self, mode: Mode, protocol: str, nic_bytes_per_s: float) -> float:
        """Bytes/s that the mode's efficiency is a fraction of, over such a NIC's: the measured NIC's where hosts copy, up to the wire."""
        if not self.nic_bytes_per_s:
            return 1.0
        return min(self.nic_bytes_per_s / nic_bytes_per_s, _OF_THE_WIRE * _PAYLOAD[protocol] / mode.efficiency)

    def holds(self, traits: frozenset[str], release: tuple[int, ...]) -> bool:
        """Every condition of `when` does."""
        return applies(self.when, traits, release)

    def beyond_sigma(self, kind: str, num_nodes: int) -> float:
        """What groups larger than any that was measured add to the interval of a collective."""
        return doubling_sigma(kind) * math.log2(max(1.0, num_nodes / self.max_nodes)) if self.max_nodes else 0.0

    def fill_depth(self, steps: int, protocol: str, *, ring: bool) -> float:
        """The fill of a call of `steps`, in units of the fill of one step."""
        return fill_depth(steps, in_flight(protocol) if self.waits(protocol, ring=ring) else 0)

    def waits(self, protocol: str, *, ring: bool) -> bool:
        """A ring's messages wait for earlier ones, so their number limits its speed, as the bytes do."""
        return ring and protocol in self.waiting

    def start_s(
        self,
        mode: Mode,
        launch_s: float,
        steps: int,
        steps_s: float,
        protocol: str,
        transfer_s: float,
        *,
        ring: bool,
        messages: float = 1.0,
    ) -> float:
        """Seconds of a call over nodes beyond its transfer: launch, steps and the pipeline's fill.

        messages: of a step, over those of a whole chunk; each waits for its own.
        """
        fill = pipeline_fill_s(mode, transfer_s, self.fill_depth(steps, protocol, ring=ring))
        if not self.waits(protocol, ring=ring):
            return launch_s + steps_s + fill
        if protocol == "simple":
            return launch_s + max(0.0, max(fill * messages, steps_s) - transfer_s)
        return launch_s + steps_s + max(0.0, fill - transfer_s)

    def copies(self, message_bytes: float, traits: frozenset[str]) -> bool:
        """Whether the host copies a message of that size out of GPU memory."""
        return message_bytes <= self.copied_bytes and NO_COPIES not in traits


class LearnedLinks(Strict):
    """What a user's own steps taught of links: factors on the time that bytes and latencies take (`calibration.learned`).

    network: of bytes between nodes at `nodes` nodes, times growth for each doubling beyond. compute_share: added to the
    share of compute that is lost beside a collective.
    """

    node: float = Field(gt=0, default=1.0)
    network: float = Field(gt=0, default=1.0)
    growth: float = Field(gt=0, default=1.0)
    nodes: float = Field(ge=1, default=1.0)
    latency: float = Field(gt=0, default=1.0)
    compute_share: float = 0.0

    def between(self, num_nodes: int) -> float:
        """The factor on the time of bytes between that many nodes."""
        return float(self.network * self.growth ** math.log2(num_nodes / self.nodes))


class LinkCurves(Strict):
    """Everything calibrated about links. `ideal` means efficiency 1, latency 0 and exact arithmetic.

    library: nccl chooses algorithm and protocol by its own cost model; gloo has one way for each kind of collective, and
    its modes are named after it: "ring/all_gather", "p2p/all_to_all", "send/send_recv"; "ring/simple" is the reference.
    learned: of a user's own steps; no file of links has it.
    compute_share: measured share of compute speed lost beside a collective; None: from channels and memory traffic.
    """

    name: str
    ideal_links: bool = False
    library: Literal["nccl", "gloo"] = "nccl"
    compute_share: float | None = Field(ge=0, le=0.9, default=None)
    ports: tuple[PortCurves, ...] = Field(strict=False, default=())
    networks: tuple[NetworkCurves, ...] = Field(strict=False, default=())
    provenance: dict[str, str] = {}
    learned: LearnedLinks | None = None

    @classmethod
    def load(cls, path: str | Path = DEFAULT_FILE) -> Self:
        """From a file, all faults at once as CalibrationError."""
        return cls.parse(read_json(Path(path), CalibrationError), str(path), CalibrationError)

    @classmethod
    def ideal(cls) -> Self:
        """Perfect links: the closed forms and nothing else."""
        return cls(name="ideal", ideal_links=True)

    def port(
        self, kind: str, bytes_per_s: float, transport: Transport = "direct", architecture: str = ""
    ) -> PortCurves:
        """The port of that name and way, or the nearest calibrated one of its family by data-sheet speed.

        architecture: of the GPU. It decides for links of no calibrated family, so that a faster one keeps its latencies.
        """
        family = family_of(kind)
        kind = _OF_ITS_GENERATION.get(architecture, kind) if family == "host" else kind
        mine = [p for p in self.ports if p.family == family]
        candidates = [p for p in mine if p.way == transport] or mine or list(self.ports)
        if not candidates:
            raise CalibrationError.at(self.name, f"no port is calibrated, {kind} is needed", f"run {REFIT}")
        return min(
            candidates, key=lambda p: (not p.stands_for(kind), abs(math.log(p.bytes_per_s / bytes_per_s)), p.name)
        )

    def network(self, kind: str, traits: frozenset[str] = frozenset(), release: tuple[int, ...] = ()) -> NetworkCurves:
        """The network of `kind` under these settings; the first of the file if no network lists it."""
        if not self.networks:
            raise CalibrationError.at(self.name, f"no network is calibrated, {kind} is needed", f"run {REFIT}")
        named = [n for n in self.networks if kind.lower() in n.kinds and n.holds(traits, release)]
        return max(named, key=lambda n: len(n.when), default=self.networks[0])


def doubling_sigma(kind: str) -> float:
    """What each doubling of a collective's nodes beyond those that were measured adds to its interval."""
    return PAIRS_DOUBLING_SIGMA if kind == "all_to_all" else DOUBLING_SIGMA


_RELEASE = "NCCL<"
_OF_THE_WIRE = 1448 / 1538  # TCP with time stamps in Ethernet's frames of 1,500 bytes (RFC 894, RFC 7323)
_PAYLOAD = {"ll": 8 / 16, "ll128": 120 / 128, "simple": 1.0}  # data a byte sent (NCCL, src/include/device.h)


def applies(when: tuple[str, ...], traits: frozenset[str], release: tuple[int, ...]) -> bool:
    """Every condition holds: `NAME=value` is among the traits, `NCCL<2.19` is above the release."""
    return all(_before(c, release) if c.startswith(_RELEASE) else c in traits for c in when)


def _before(condition: str, release: tuple[int, ...]) -> bool:
    """`NCCL<2.19` of a known release."""
    return bool(release) and release < tuple(int(part) for part in condition.removeprefix(_RELEASE).split("."))


def family_of(kind: str) -> Family:
    """nvlink4, nvswitch -> nvlink; pcie5 -> pcie; anything else is host memory."""
    lowered = kind.lower()
    if lowered.startswith("nv"):
        return "nvlink"
    return "pcie" if lowered.startswith("pci") else "host"


# A channel has eight buffers (NCCL_STEPS); a message of lines takes one, a ring's whole chunk four (collectives.h: CHUNKSTEPS)
_STEPS, _CHUNK_STEPS = 8, 4


def in_flight(protocol: str) -> int:
    """Messages of a channel that can be in flight before the first must have arrived."""
    return _STEPS // _CHUNK_STEPS if protocol == "simple" else _STEPS


def fill_depth(steps: int, on_the_way: int) -> float:
    """With the best chunks the square root of the steps; otherwise the steps beyond those already in flight."""
    return math.sqrt(steps) if not on_the_way else max(1.0, steps - on_the_way + 1.0)


def pipeline_fill_s(mode: Mode, transfer_s: float, depth: float = 1.0) -> float:
    """Seconds that a call of `transfer_s` on the wire spends filling its pipeline, `depth` times those of one step."""
    if not mode.fill_s:
        return 0.0
    return mode.fill_s * depth * math.sqrt(transfer_s / (transfer_s + mode.fill_half_s))


@lru_cache(maxsize=1)
def default_curves() -> LinkCurves:
    """The curves shipped with the project."""
    return LinkCurves.load()
