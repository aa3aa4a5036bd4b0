"""The parts of a calibration that are not curves: overheads, interference, memory outside the allocator, provenance."""

from __future__ import annotations

from pydantic import Field

from simulator.base.schema import Strict


class DriverCall(Strict):
    """What one call of the driver's allocator costs the host: a part for the call, and one for the bytes."""

    call_s: float = Field(ge=0)
    s_per_byte: float = Field(ge=0)

    def seconds(self, num_calls: int, num_bytes: int) -> float:
        """Seconds of `num_calls` calls over `num_bytes` together."""
        return num_calls * self.call_s + num_bytes * self.s_per_byte


class Overheads(Strict):
    """Costs a launch, whatever it computes.

    launch_s: gap on the device between two kernels of one stream. host_op_s: host time of one eager operator.
    cuda_malloc, cuda_free: of a segment taken from the driver, and given back; None where nobody measured them.
    """

    launch_s: float = Field(ge=0)
    host_op_s: float = Field(ge=0)
    cuda_malloc: DriverCall | None = None
    cuda_free: DriverCall | None = None
    sources: dict[str, str] = {}


class Interference(Strict):
    """What a running collective takes from compute: SMs for its channels, and a share of the memory's speed.

    sms_per_channel: SMs one NCCL channel occupies. num_channels: channels of a collective inside a node.
    hbm_weight: seconds that compute loses per second of memory fully taken by somebody else.
    memory_passes: bytes read and written in memory per byte that crosses the link.
    """

    sms_per_channel: float = Field(ge=0, default=1.0)
    num_channels: int = Field(ge=0)
    hbm_weight: float = Field(ge=0)
    memory_passes: float = Field(ge=0, default=2.0)
    sources: dict[str, str] = {}


class MemoryOverheads(Strict):
    """Bytes that the device loses outside PyTorch's allocator, and libraries' own buffers.

    context_bytes: CUDA context and loaded kernels. nccl_communicator_bytes: buffers of one communicator.
    cublas_workspace_bytes: per handle and stream; allocated through PyTorch's allocator.
    """

    context_bytes: int = Field(ge=0)
    nccl_communicator_bytes: int = Field(ge=0)
    cublas_workspace_bytes: int = Field(ge=0)
    sources: dict[str, str] = {}


class Provenance(Strict):
    """Where the numbers come from. tables: file -> sha256 of its bytes. borrowed: what was taken from a relative.

    reference_s: seconds of the reference product while it was measured (CPU), the pace that the numbers hold for.
    """

    machine: str
    driver: str = ""
    torch: str = ""
    date: str = ""
    recipe: str = ""
    reference_s: float | None = Field(gt=0, default=None)
    tables: dict[str, str] = {}
    borrowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
