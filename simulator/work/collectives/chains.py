"""How long the front of a broadcast or reduction takes to the end of its chain.

NCCL passes both along a ring of all ranks (src/device/broadcast.h, reduce.h; there are no trees for them): a chunk is handed on
when it is there whole, so the last rank begins n - 1 chunks late, however many follow. In an all-gather every rank's own part
travels at once and nobody waits like this. Whole chunks are an eighth of a channel's buffer; LL128's lines go on one by one
inside a node, but the host's proxy sends a whole step of them (src/transport/net.cc, sendProxyProgress).
"""

from __future__ import annotations

from typing import Final

from simulator.spec.software.nccl.environment import DEFAULT_BUFFER_BYTES
from simulator.work.collectives.call import Call, nic_share
from simulator.work.collectives.proxy_messages import fabric_of, group_of

_STEPS: Final = 8  # NCCL_STEPS, src/include/device.h
_LL128_BYTES: Final = (
    640 * 120 * 8 * 15 // 16
)  # a step's data: threads, words a thread, lines of which 15 of 16 are data
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
