"""Products whose operands are narrower than those of any calibration, on the curve of fp8.

FP4_SPEED, FP4_EXPONENT: NVFP4 products run FP4_SPEED (peaks / 2) ** FP4_EXPONENT times as fast as fp8's under the same power cap, `peaks` being
the ratio of the two peaks. The narrower the operands, the more do results in 16 bits, moving tiles and the cap limit: half
as many units again give an eighth more speed. Fitted on published calls of cuBLAS and CUTLASS in TensorRT-LLM (experiments/fit_narrow.py):
1.47 and 1.54 where peaks are 2 (B200; GB200, by short calls and by runs of up to a second), 1.60 and 1.72 where they are 3 (GB300, B300).
Transformer Engine's own benchmark has 1.81 on a B300 (docs/background/ops.md).

FP4_SIGMA: one sigma of that, relative: devices and shapes differ by as much.

BLOCKS: of the speed of fp8 products scaled by tensor, on Hopper, whose tensor cores know no scales: sums are scaled on CUDA
cores after every 128 products (arXiv 2412.19437, section 3.3.2). Blackwell runs such products as MXFP8. BLOCKS_SIGMA: of this prior.

ROWS_SIGMA: one sigma of fp8 products with a scale a row, which are CUTLASS's and not cuBLAS's. On H100, H200 and B200 calls of 2,048 and more a
side, casts included, take 0.8 to 1.5 times those scaled by tensor, by shape and release (github.com/ai-dynamo/aiconfigurator at 095f58a51,
aic-core/src/aiconfigurator_core/systems/data, gemm of SGLang 0.5.9 to 0.5.14 and vLLM 0.19 and 0.24 beside TensorRT-LLM 1.3.0rc20).

SPLIT: of the speed of fp8 products that stay in the tensor cores' accumulators, on Hopper, where those keep some 14 bits (arXiv
2412.19437, section 3.3.2): cuBLAS with split accumulators adds them up in fp32 registers on the way. A sweep of shapes on Hopper found
fast accumulation 1.1 to 1.2 times as fast (github.com/pytorch/ao issue 2377). Blackwell's accumulators are of full width.

MX_BLOCKS: of the same, of MXFP8 products on Blackwell: 7.16 ms where products scaled by tensor take 6.81 in Transformer Engine's benchmark.
"""

from __future__ import annotations

import math
from typing import Final

FP4_SPEED: Final = 1.5
FP4_EXPONENT: Final = 0.3
FP4_SIGMA: Final = 0.1
BLOCKS: Final = 0.85
BLOCKS_SIGMA: Final = 0.2
ROWS_SIGMA: Final = 0.15
SPLIT: Final = 1 / 1.15
MX_BLOCKS: Final = 0.95


def fp4_fraction(peaks: float) -> float:
    """Fraction of peak that fp4 products sustain, of that of fp8; `peaks`: fp4's peak over fp8's."""
    return min(1.0, FP4_SPEED * math.pow(peaks / 2, FP4_EXPONENT) / peaks)
