"""What the host of a group posts to its NICs, message by message: for how many channels, copied by itself or not, among whom."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from simulator.spec.calibration.collective_curves import NetworkCurves, family_of
from simulator.spec.software.nccl import efa
from simulator.spec.software.nccl.environment import DEFAULT_BUFFER_BYTES
from simulator.work.collectives.call import Call, nic_share
from simulator.work.collectives.tuning import Group, NcclFabric
from simulator.work.collectives.volumes import POINT_TO_POINT

# Steps of a slice and of a buffer, and the least part of a slice (src/include/device.h, collectives.h: ALLGATHER_SLICESTEPS)
_SLICE_STEPS, _STEPS, _LEAST_OF_A_SLICE = 2, 8, 32
_CROWD_A_DOUBLING = (1 - 2 / 8) / 2
_LL_THREADS, _LL_BYTES = 512, 8  # of a channel, and of a thread before there is another


class Messages(NamedTuple):
    """What a host posts at a step: a message for each of so many channels, copied by itself; whole chunks in two, if sliced."""

    channels: int = 1
    copied: bool = False
    sliced: bool = True


ONE_MESSAGE = Messages()


def messages_of(call: Call, network: NetworkCurves | None, algorithm: str, protocol: str) -> Messages:
    """Those of a call."""
    if network is None:
        return ONE_MESSAGE
    posted = posted_channels(call, algorithm, protocol)
    return Messages(posted, copied(call, network), sliced(call, algorithm, protocol))


def group_of(call: Call) -> Group:
    """Ranks and nodes as NCCL counts them: a rack-wide NVLink domain is one node."""
    return Group(call.place.num_ranks, call.place.num_domains)


def fabric_of(call: Call) -> NcclFabric:
    """What NCCL's search sees of the call's links."""
    links, port = call.links, call.port
    in_network = bool(call.nccl.environment.collnet) if links.in_network is None else links.in_network
    return NcclFabric(
        family_of(port.kind),
        links.architecture,
        float(port.bytes_per_s / links.detour) / 1e9,
        (links.nics.bytes_per_s if links.nics else float(nic_share(links)) * links.islands) / 1e9,
        far_nics=call.far_nics,
        sharp=call.network == "infiniband" and in_network,
        efa=efa.instance_of(links.architecture, links.num_nics) if call.network.startswith("efa") else None,
        num_nics=max(1, links.num_nics * links.islands // links.gpus_per_node),
        host_gb_per_s=links.host_bytes_per_s / 1e9,
        amd=links.amd,
    )


def posted_channels(call: Call, algorithm: str, protocol: str) -> int:
    """Channels of a ring's LL over nodes: NCCL takes another for each 8 bytes a thread and rank (src/enqueue.cc).

    Other protocols have all of theirs long before their messages matter.
    """
    if call.place.num_domains == 1 or (algorithm, protocol) != ("ring", "ll"):
        return 1
    most = 2 * fabric_of(call).channels("ring", group_of(call), call.nccl.release).count  # each is made twice
    most = min(most, call.nccl.environment.max_channels or most)
    return int(min(most, max(1, call.size_bytes // (_LL_THREADS * _LL_BYTES * call.place.num_ranks))))


def copied(call: Call, network: NetworkCurves) -> bool:
    """Whether the host copies the call's messages out of GPU memory, one by one."""
    if call.kind not in POINT_TO_POINT:
        return False
    message_bytes = call.size_bytes / (call.place.num_ranks if call.kind == "all_to_all" else 1)
    return network.copies(message_bytes, call.traits)


def sliced(call: Call, algorithm: str, protocol: str) -> bool:
    """A ring's whole chunk goes out in two messages, but in one where a rank's part of a channel is a 32nd of a slice or less.

    NCCL cuts no slice smaller (src/device/prims_simple.h, genericOp: sliceSize is at least stepSize * StepPerSlice / 32).
    """
    if protocol != "simple" or algorithm not in ("ring", "hierarchical"):
        return True
    channels = 2 * fabric_of(call).channels("ring", group_of(call), call.nccl.release).count  # each is made twice
    channels = min(channels, call.nccl.environment.max_channels or channels)
    buffer_bytes = call.nccl.environment.buffer_bytes or DEFAULT_BUFFER_BYTES
    return (
        call.size_bytes > call.place.num_ranks * channels * buffer_bytes // _STEPS * _SLICE_STEPS // _LEAST_OF_A_SLICE
    )


def crowd(call: Call) -> float:
    """How many streams of others a pair of nodes meets in the switches of an all-to-all: none between two.

    With the levels of switches that it crosses, so with the logarithm of the nodes; in units of what it is among very many by
    1 - 2/N, to which it is equal for eight nodes, the most that sweeps of all-to-alls were fitted on.
    """
    nodes = call.place.num_domains
    return _CROWD_A_DOUBLING * log2(nodes / 2) if call.kind == "all_to_all" and nodes > 1 else 0.0
