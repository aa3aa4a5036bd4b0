"""The effect on a call of channels and buffers that differ from the calibrated settings.

Channels: NCCL's search fills a port with half of its channels (each is made twice for the two trees), so c of n channels
carry c/(n/2) of it; what crosses the NICs of a node is carried by the same channels. Buffers: a chunk is an eighth of
NCCL_BUFFSIZE; each costs a step of the protocol, so that its rate is t/(t + step) with t on the wire. Both are physics
without a sweep to hold them against; docs/background/collectives.md.
"""

from __future__ import annotations

import math

from simulator.spec.calibration.collective_curves import LinkCurves, Mode, PortCurves
from simulator.spec.software.nccl.environment import DEFAULT_BUFFER_BYTES
from simulator.work.collectives.call import Call, nic_share
from simulator.work.collectives.tuning import Pick

_STEPS = 8  # chunks of a buffer: NCCL_STEPS, src/include/device.h


def channels_of(call: Call, chosen: Pick, curves: LinkCurves) -> int | None:
    """Channels of the call: NCCL's own within what the environment allows, or a tuner's number. None: not NCCL's to say."""
    if curves.ideal_links or curves.library != "nccl":
        return None
    port = curves.port(call.port.kind, call.port.bytes_per_s, call.port.way, call.links.architecture)
    usual = usual_channels(port, chosen.algorithm)
    environment = call.nccl.environment
    count = chosen.channels or usual
    count = max(count, environment.min_channels or 1)
    return min(count, environment.max_channels or count)


def usual_channels(port: PortCurves, algorithm: str) -> int:
    """NCCL's own number for an algorithm."""
    return port.num_nvls_channels if algorithm.startswith("nvls") and port.num_nvls_channels else port.num_channels


def channel_weight(call: Call, chosen: Pick, port: PortCurves, curves: LinkCurves) -> float:
    """How many times longer the ports take with fewer channels than fill them; 1 for NCCL's own."""
    count = channels_of(call, chosen, curves)
    usual = usual_channels(port, chosen.algorithm)
    if count is None or count >= usual:
        return 1.0
    needed = usual if chosen.algorithm.startswith("nvls") else max(1, usual // 2)
    return max(1.0, needed / count)


def nic_channel_weight(call: Call, chosen: Pick, port: PortCurves, curves: LinkCurves, share: float) -> float:
    """The same for what crosses a node's nics, `share` a GPU: c channels carry c of the port's parts, the NICs may need fewer."""
    count = channels_of(call, chosen, curves)
    usual = usual_channels(port, chosen.algorithm)
    if count is None or count >= usual:
        return 1.0
    needed = usual if chosen.algorithm.startswith("nvls") else max(1, usual // 2)
    carried = count * call.port.bytes_per_s / needed
    return max(1.0, share * call.place.ranks_per_domain / carried)


def buffer_weight(call: Call, protocol: str, mode: Mode, bytes_per_s: float, channels: int | None) -> float:
    """How many times longer whole chunks take in buffers of another size; the protocols of lines have buffers of their own.

    A step of the usual chunk takes no more than what the calibrated call loses on its link: none is faster than the wire.
    """
    size = call.nccl.environment.buffer_bytes
    if protocol != "simple" or size == DEFAULT_BUFFER_BYTES or channels is None:
        return 1.0
    step = min(mode.hop_s * bytes_per_s / channels / (DEFAULT_BUFFER_BYTES / _STEPS), max(1 / mode.efficiency - 1, 0))
    return (1 + step * DEFAULT_BUFFER_BYTES / size) / (1 + step)


# NCCL since 2.29 gives a peer over the network a channel for each 14 GB/s of its NICs (src/graph/paths.cc), and halves
# that while a round of eight peers would need more channels than there are: four a GPU of the node. One carries 12.5
# GB/s: ten H100 nodes with one and with two GPUs each send at 25.1 and 25.2 GB/s a GPU of 50, two nodes at 43.7 to 45.8.
_CHANNELS_BY_RATE_SINCE = (2, 29)
_NCCL_CHANNEL_GB = 14
_CHANNEL_BYTES_PER_S = 12.5e9
_CHANNELS_A_GPU, _MOST_P2P_CHANNELS, _PEERS_A_ROUND = 4, 32, 8


def send_ceiling_bytes_per_s(call: Call) -> float:
    """What one GPU's channels to one peer on another node carry; infinite where NCCL does not count them so."""
    if call.kind != "send_recv" or call.nccl.release < _CHANNELS_BY_RATE_SINCE or call.network == "sockets":
        return math.inf
    nics = float(nic_share(call.links)) / 1e9
    wanted = _power_of_two(max(2, math.ceil(nics / _NCCL_CHANNEL_GB)))
    there = min(_MOST_P2P_CHANNELS, _power_of_two(_CHANNELS_A_GPU * call.place.ranks_per_domain))
    rounds = -(-call.place.num_ranks // _PEERS_A_ROUND)
    while wanted > 1 and wanted * rounds > there:
        wanted //= 2
    return wanted * _CHANNEL_BYTES_PER_S


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
