"""What leaves HBM, and how it travels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simulator.base.schema import Strict
from simulator.spec.plan.order import MAX_COUNT, MAX_SIZE


class Offload(Strict):
    """What leaves HBM, and how it travels.

    optimizer: master weights, moments and fp32 gradients, updated by CPU Adam. parameters: the shards that the blocks
    are gathered from. activations: what a block saves for its backward; peer: to the memory of the node's idle GPUs.
    prefetch: blocks that NVMe reads and activations come ahead of use; 0: on demand, parameters too. pinned: host
    memory that copies reach directly; otherwise they are staged and nothing runs beside them. sub_group_numel: elements
    that one round of stage 3's optimizer updates. buffer_count: fp32 buffers of a sub-group in host memory, where the
    states are on NVMe; overlap keeps three sets of them, to read, update and write at once.
    delayed: the CPU updates with the gradients of the step before, beside this step's forward and backward (ZeRO-Offload's
    one-step delay); training differs by one stale update.
    migration: how pages move: copies, or unified memory by faults or by prefetch.
    """

    optimizer: Literal["none", "host", "nvme"] = "none"
    parameters: Literal["none", "host", "nvme"] = "none"
    activations: Literal["none", "peer", "host"] = "none"
    prefetch: int = Field(ge=0, le=MAX_COUNT, default=1)
    pinned: bool = True
    sub_group_numel: int = Field(gt=0, le=MAX_SIZE, default=10**9)
    buffer_count: int = Field(ge=4, le=64, default=4)
    overlap: bool = True
    delayed: bool = False
    migration: Literal["copy", "fault", "prefetch"] = "copy"

    @property
    def any(self) -> bool:
        return {self.optimizer, self.parameters, self.activations} != {"none"}


NOTHING_OFFLOADED = Offload()
