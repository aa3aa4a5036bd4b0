"""Products whose operands are narrower than any that were measured: stated priors on the curve of fp8.

FP4: of the fraction of peak that fp8 products sustain on the same device. The narrower the operands, the more do results in 16
bits, moving tiles and the power cap limit: on GB200, GB300 and B300 fp8 sustains 0.87 of the fraction that bf16 does (1.74
times its speed at twice its peak), and fp4 is taken to lose as much once more.

BLOCKS: of the speed of fp8 products scaled by tensor, on Hopper, whose tensor cores know no scales: sums are scaled on CUDA
cores after every 128 products (arXiv 2412.19437, section 3.3.2). Blackwell runs such products as MXFP8.

SIGMA: one sigma of such products, relative, beside the calibration's own.
"""

from __future__ import annotations

from typing import Final

FP4: Final = 0.87
BLOCKS: Final = 0.85
SIGMA: Final = 0.2
