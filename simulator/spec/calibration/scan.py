"""Seconds of a chunked scan's kernels: bytes and products one after the other.

The scan's Triton kernels (mamba_ssm, ops/triton) have no main loop to speak of. A block loads a tile of a chunk by a head's
channels, does one to four products a few dozen elements deep with exponentials between them, and stores its result. Registers and
shared memory let two such blocks stand on an SM (occupancy 12.5 %, Nsight Compute, github.com/NVIDIA/TensorRT-LLM pull 11345), so
loads of one hardly run beside products of another: the two times are added.

Products: SPEED of what FlashAttention-2 reaches on the device with heads of that size, by direction; both issue synchronous matrix
instructions with exponentials between. Fitted on _chunk_scan_fwd of mamba-ssm 2.2.6 with Triton 3.5 on an H800 SXM, by
`python experiments/fit_scan.py`: 0.64 ± 0.02. Other kernels, directions and devices were not measured. Where a calibration lacks
that kernel, FRACTION of the speed that large products sustain. Memory: the bytes at the speed of contiguous elementwise kernels.

SIGMA is one sigma, relative, of the whole: adding or hiding bytes, either fitted on that kernel, moves the scans of Nemotron-H by a
fifth, and the backward has more kernels than the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from simulator.base.kernels import Scan
from simulator.spec.calibration.curves import AttentionCurve

SPEED: Final = 0.64
FRACTION: Final = 0.3  # middle of what SPEED amounts to: 0.1 to 0.2 on Blackwell, 0.2 to 0.3 on Hopper, 0.4 on A100
SIGMA: Final = 0.3
CATEGORY: Final = "scan"
_TILED_ATTENTION: Final = "flash2"


def tiled_attention_curve(curves: Iterable[AttentionCurve], kernel: Scan) -> AttentionCurve | None:
    """The curve of the tiled attention that a scan's products run like."""
    return next((c for c in curves if c.direction == kernel.direction and _TILED_ATTENTION in c.kernels), None)
