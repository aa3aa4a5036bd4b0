"""Seconds of a chunked scan's kernels, by a stated prior: no measurement of them is at hand.

Compute: FRACTION of the speed that the device's large products sustain. The scan's Triton kernels hold tiles of a chunk by a
head's 64 or 80 channels with exponentials between two small products, as tiled attention of that head_dim does, which
reaches 0.3 to 0.6 of the products' speed on the devices that are calibrated (docs/background/hybrids.md). Memory: the
bytes at the speed of contiguous elementwise kernels. The longer of the two.

SIGMA is one sigma, relative, of the whole: it covers half and twice the speed by some two sigma.
"""

from __future__ import annotations

from typing import Final

FRACTION: Final = 0.4
SIGMA: Final = 0.4
CATEGORY: Final = "scan"
