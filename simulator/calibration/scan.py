"""Seconds of a chunked scan's kernels, by a stated prior: no measurement of them is at hand.

Compute: the scan's Triton kernels hold tiles of a chunk by the channels of a head, with exponentials between two small
products, and issue synchronous matrix instructions, as FlashAttention-2 does with heads of that size. Its products are
shorter: a chunk's tokens deep, where attention runs over a whole row. SHORTER of that kernel's calibrated speed; where a
calibration lacks it, FRACTION of the speed that large products sustain. Memory: the bytes at the speed of contiguous
elementwise kernels. The longer of the two.

SIGMA is one sigma, relative, of the whole: half to twice the speed lies within some two of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from simulator.calibration.curves import AttentionCurve
from simulator.kernels import Scan

SHORTER: Final = 0.75
FRACTION: Final = (
    0.35  # middle of what SHORTER amounts to: 0.1 to 0.2 on Blackwell, 0.2 to 0.3 on Hopper, 0.4 to 0.5 on A100
)
SIGMA: Final = 0.4
CATEGORY: Final = "scan"
_KIN: Final = "flash2"


def kin(curves: Iterable[AttentionCurve], kernel: Scan) -> AttentionCurve | None:
    """The curve of the tiled attention that a scan's products run like."""
    return next((c for c in curves if c.direction == kernel.direction and _KIN in c.kernels), None)
