"""A call by calibrated modes: seconds on a port, and the delay before its bytes flow."""

from __future__ import annotations

from typing import Final

from simulator.spec.calibration.collective_curves import Mode, NetworkCurves, PortCurves, pipeline_fill_s
from simulator.spec.software.nccl.environment import DEFAULT_BUFFER_BYTES
from simulator.work.collectives.call import Call, nic_share
from simulator.work.collectives.proxy_messages import ONE_MESSAGE, Messages, fabric_of, group_of
from simulator.work.collectives.volumes import Algorithm, Volume

LOOPS = ("ring", "hierarchical")  # each of their steps is a message on every edge


def port_weight(port: PortCurves, algorithm: Algorithm, protocol: str, form: Volume) -> float:
    """Seconds on a port per second at the data sheet's speed: the mode's efficiency, and a loop's cost beyond its steps."""
    mode = port.mode(algorithm, protocol)
    return (1 + mode.drain / form.loop_steps if form.loop_steps else 1) / mode.efficiency


def latency_s(
    port: PortCurves,
    network: NetworkCurves | None,
    algorithm: Algorithm,
    protocol: str,
    form: Volume,
    transfer_s: float,
    messages: Messages = ONE_MESSAGE,
) -> float:
    """Launch, steps and pipeline fill. Across nodes the network's fill decides: its chunks are the slower ones.

    Steps of rings and trees follow one another; sends to many peers are no pipeline.
    """
    local = port.mode(algorithm, protocol)
    if network is None:
        return local.base_s + form.local_steps * local.hop_s + pipeline_fill_s(local, transfer_s)
    far: Mode = network.mode(algorithm, protocol)
    near_hop_s = max(local.hop_s, messages.channels * far.post_s) if algorithm in LOOPS else local.hop_s
    far_hop_s = far.hop_s + (messages.channels - 1) * far.post_s + (far.copied_s if messages.copied else 0.0)
    steps = form.local_steps * near_hop_s + form.network_steps * far_hop_s
    launch_s = local.base_s + far.base_s
    if algorithm in ("p2p", "send"):
        return launch_s + steps + pipeline_fill_s(far, transfer_s)
    every = form.local_steps + form.network_steps
    part, ring = 1.0 if messages.sliced else 0.5, algorithm in LOOPS
    return network.start_s(far, launch_s, every, steps, protocol, transfer_s, ring=ring, messages=part)


# How long the front of a broadcast or reduction takes to the end of its chain.
_STEPS: Final = 8  # NCCL_STEPS, src/include/device.h
# a step's data: threads, words a thread, lines of which 15 of 16 are data
_LL128_BYTES: Final = 640 * 120 * 8 * 15 // 16
_CHAINS: Final = ("broadcast", "reduce")


def chain_fill_s(call: Call, protocol: str) -> float:
    """Seconds until the first chunk has passed all nodes; 0 for what is no chain, and inside a node, where it was measured."""
    if call.kind not in _CHAINS or call.place.num_domains == 1 or protocol == "ll":
        return 0.0
    channels = 2 * fabric_of(call).channels("ring", group_of(call), call.nccl.release).count  # each is made twice
    channels = min(channels, call.nccl.environment.max_channels or channels)
    step = (
        _LL128_BYTES if protocol == "ll128" else (call.nccl.environment.buffer_bytes or DEFAULT_BUFFER_BYTES) // _STEPS
    )
    front = min(step * channels, call.size_bytes)
    far_s = front / (float(nic_share(call.links)) * call.place.ranks_per_domain)
    near_s = front / float(call.port.bytes_per_s) if protocol == "simple" else 0.0
    nodes = call.place.num_domains
    return (nodes - 1) * far_s + (call.place.num_ranks - nodes) * near_s
