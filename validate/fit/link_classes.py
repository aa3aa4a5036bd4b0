"""The classes of links that NCCL's sweeps are fitted by: their modes, what is known of them beforehand, and which a call is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.spec.calibration.collective_curves import NetworkCurves, Quality, applies
from simulator.work.collectives.call import Call

Array = NDArray[np.float64]

PORT_MODES = (
    *(f"{a}/{p}" for a in ("ring", "tree") for p in ("ll", "ll128", "simple")),
    *("nvls/simple", "nvlstree/simple", "p2p/ll", "p2p/simple", "send/ll", "send/simple"),
    *("pat/simple", "collnetdirect/simple", "collnetchain/simple"),
)
# A send is one pair of an all-to-all, whose sweeps begin at single bytes: launch and ramp are the pairs'
SENDS = {PORT_MODES.index(f"send/{p}"): PORT_MODES.index(f"p2p/{p}") for p in ("ll", "simple")}
CROWDING = 0.05  # of an all-to-all among many nodes: streams that share a switch's port for a while
COPIED_S = 1e-5  # a copy of a few bytes between GPU and host
NEAR_PAIRS = (0.15, *(0.02,) * 8)
FIELDS = ("efficiency", "base_s", "hop_s", "fill_s", "fill_half_s", "drain", "post_s", "copied_s", "crowding")
SPREAD = (0.15, 0.5, 0.5, 0.7, 0.7, 0.5, 0.5, 0.5, 0.7)  # standard deviation of the priors' logarithm
RINGS = [index for index, name in enumerate(PORT_MODES) if name.startswith("ring/")]
POST_S = 1.5e-6  # of a message, between NCCL's own 1 us (Intel) and 2 us (AMD); whole chunks three times (tuning.cc)

# Data sheet speed one way, NCCL's channels and those of NVLS (nccl 2.30.7: 12 graph channels doubled; nvlsChannels 16
# on sm90, 24 on sm100), and where the priors start: efficiency, launch, hop, fill, fill_half. Names end in the way that
# bytes take where it is not direct.
PORTS = {
    "nvlink2": ("nvlink", 150e9, 24, 0, (0.83, 10e-6, 1.0e-6, 2.0e-4, 1e-3)),
    "nvlink3": ("nvlink", 300e9, 24, 0, (0.80, 7e-6, 0.8e-6, 2.0e-4, 1e-3)),
    "nvlink4": ("nvlink", 450e9, 24, 16, (0.825, 5e-6, 0.8e-6, 1.5e-4, 1e-3)),
    "nvlink5": ("nvlink", 900e9, 24, 24, (0.80, 8e-6, 1.0e-6, 1.5e-4, 1e-3)),
    "pcie4": ("pcie", 31.5e9, 4, 0, (0.65, 6e-6, 2.0e-6, 5.0e-5, 1e-3)),
    "pcie4-host": ("pcie", 31.5e9, 4, 0, (0.16, 6e-6, 2.0e-6, 5.0e-5, 1e-3)),
    "pcie4-sockets": ("pcie", 31.5e9, 4, 0, (0.04, 6e-6, 2.0e-6, 5.0e-5, 1e-3)),
}


@dataclass(frozen=True)
class Network:
    """A class of networks: kinds of `cluster.inter` and conditions (NetworkCurves), and where the priors start.

    prior: efficiency, hop_s, fill_s (for each square root of a step), fill_half_s. A hop over InfiniBand is NCCL's own
    constant (2.7 us, src/graph/tuning.cc); those of plugins between their software's and what they report to NCCL.
    nic_bytes_per_s: of the NICs under the sweeps, where it is not the wire that limits them.
    """

    kinds: tuple[str, ...]
    prior: tuple[float, float, float, float]
    when: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    copied_bytes: int = 0
    nic_bytes_per_s: float = 0.0

    @property
    def structure(self) -> NetworkCurves:
        """What the simulator reads of it, without coefficients."""
        none = dict.fromkeys(Quality.model_fields, 0)
        return NetworkCurves(
            name="",
            modes={},
            quality=Quality(**none),
            source="",
            kinds=self.kinds,
            waiting=self.waiting,
            copied_bytes=self.copied_bytes,
            nic_bytes_per_s=self.nic_bytes_per_s,
        )


IMMEDIATE_BYTES = 192  # of a Cassini NIC's command with data (libfabric, prov/cxi, C_MAX_IDC_PAYLOAD_UNR)
NETWORKS = {
    "infiniband": Network(("infiniband", "omnipath"), (0.93, 2.7e-6, 3.4e-5, 3e-4)),
    "roce": Network(("roce", "ethernet"), (0.90, 2.7e-6, 3.4e-5, 3e-4)),
    "efa": Network(("efa",), (0.90, 15e-6, 9e-5, 1e-3)),
    "efa-p4d": Network(("efa",), (0.90, 30e-6, 9e-5, 1e-3), ("efa=p4d",)),
    "tcpxo": Network(("tcpxo",), (0.90, 15e-6, 9e-5, 1e-3)),
    "tcpx": Network(("tcpx",), (0.80, 15e-6, 9e-5, 1e-3)),
    "slingshot": Network(
        ("slingshot",), (0.85, 5e-6, 3e-5, 1e-3), waiting=("ll", "simple"), copied_bytes=IMMEDIATE_BYTES
    ),
    "slingshot-software": Network(
        ("slingshot",),
        (0.85, 15e-6, 3e-5, 1e-3),
        ("FI_CXI_RX_MATCH_MODE=software",),
        waiting=("simple",),
        copied_bytes=IMMEDIATE_BYTES,
    ),
    "sockets": Network(("sockets",), (0.08, 20e-6, 2.2e-4, 1e-2), nic_bytes_per_s=25e9),
    "sockets-2.18": Network(
        ("sockets",), (0.2, 20e-6, 2.2e-4, 1e-2), ("NCCL<2.19", "NCCL_CROSS_NIC=2"), nic_bytes_per_s=25e9
    ),
}


def port_class(call: Call) -> str:
    """The entry of PORTS that a call runs over."""
    port = call.port
    return port.kind if port.way == "direct" else f"{port.kind}-{port.way}"


def network_class(call: Call) -> str:
    """The entry of NETWORKS that a call runs over; "" for one that is none."""
    named = (
        (len(network.when), name)
        for name, network in NETWORKS.items()
        if call.network in network.kinds and applies(network.when, call.traits, call.nccl.release)
    )
    return max(named, default=(0, ""))[1]


def prior(
    efficiency: float,
    base_s: float,
    hop_s: float,
    fill_s: float,
    half_s: float,
    *,
    network: bool = False,
    waiting: tuple[str, ...] = (),
) -> Array:
    """Physical values of every mode from those of the ring with whole chunks.

    LL carries 8 bytes in 16 and waits for no chunk (but as others for messages in flight); LL128 120 in 128; NVLS reaches 0.85 of its port (NCCL's own factor).
    Peers of an all-to-all are served side by side by a port; over a network each is a message that the proxy posts.
    """
    rows = []
    for name in PORT_MODES:
        algorithm, protocol = name.split("/")
        multicast = 0.85 if algorithm.startswith("nvls") and not network else 1.0
        share = {"ll": 0.45, "ll128": 0.92, "simple": 1.0}[protocol] * multicast
        slow = {"ll": 1.0, "ll128": 1.5, "simple": 3.0}[protocol]
        hop = hop_s * (1.0 if network else 0.1) if algorithm == "p2p" else hop_s * slow
        fill = fill_s * (0.1 if protocol == "ll" and not (algorithm == "ring" and protocol in waiting) else 1.0)
        post = POST_S * (3 if protocol == "simple" else 1) if network else 1e-9
        rows.append(
            (
                efficiency * share,
                base_s * (1 if protocol == "ll" else 1.5),
                hop,
                fill,
                half_s,
                0.4,
                post,
                COPIED_S,
                CROWDING,
            )
        )
    return np.array(rows)


def network_prior(name: str) -> Array:
    """Where the coefficients of a network start. What it adds to a call's launch is its proxy's waking up: a step's worth."""
    efficiency, hop_s, fill_s, half_s = NETWORKS[name].prior
    return prior(efficiency, hop_s, hop_s, fill_s, half_s, network=True, waiting=NETWORKS[name].waiting)
