"""What leaves HBM, and how it travels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from simulator.base.schema import Strict
from simulator.spec.plan.order import MAX_COUNT, MAX_SIZE


class Offload(Strict):
    """`[plan.offload]`: what leaves HBM, and how it travels."""

    optimizer: Literal["none", "host", "nvme"] = Field(
        default="none", description="master weights, moments and fp32 gradients; CPU Adam updates them"
    )
    parameters: Literal["none", "host", "nvme"] = Field(
        default="none", description="the shards that blocks are gathered from"
    )
    activations: Literal["none", "peer", "host"] = Field(
        default="none",
        description="what a block saves for its backward; `peer`: to the node's `idle_gpus`, over NVLink",
    )
    prefetch: NonNegativeInt = Field(
        le=MAX_COUNT,
        default=1,
        description="blocks that NVMe reads and activations come ahead of use; 0: on demand, parameters too",
    )
    pinned: bool = Field(
        default=True, description="host memory is page-locked; else copies are staged, and nothing runs beside them"
    )
    sub_group_numel: PositiveInt = Field(
        le=MAX_SIZE,
        default=10**9,
        description="DeepSpeed stage 3: elements that one round of the optimizer updates",
    )
    buffer_count: int = Field(
        ge=4, le=64, default=4, description="fp32 buffers of a sub-group in host memory, with states on NVMe"
    )
    overlap: bool = Field(
        default=True, description="sub-groups are read, updated and written at the same time, in three sets of buffers"
    )
    delayed: bool = Field(
        default=False,
        description="CPU Adam uses the gradients of the step before, beside this step's forward and backward (DeepSpeed, "
        "optimizer on the host; ZeRO-Offload's one-step delay); training sees one stale update",
    )
    migration: Literal["copy", "fault", "prefetch"] = Field(
        default="copy", description="explicit copies, or unified memory by faults or by prefetch"
    )

    @property
    def any(self) -> bool:
        return {self.optimizer, self.parameters, self.activations} != {"none"}


NOTHING_OFFLOADED = Offload()
