"""How fast NVFP4 products are beside fp8's: `python experiments/fit_narrow.py`.

measured/nvfp4_gemm.csv.gz: github.com/ai-dynamo/aiconfigurator at 095f58a51,
aic-core/src/aiconfigurator_core/systems/data/*/gemm/trtllm: products of 1e12 to 1e13 FLOP with every side from 2,048 to 32,768, fp8
scaled by tensor and NVFP4, on B200, GB200, GB300 and B300. Release 1.3.0rc17 ran 0.3 to 1 s each with its power logged, 1.3.0rc20 six calls.
Both kinds quantise their first operand in the call, which is taken out; calls where that is above a tenth are left out.
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulator.calibration.narrow import fp4_fraction
from simulator.device import Device

ROWS = Path(__file__).parent / "measured" / "nvfp4_gemm.csv.gz"
DEVICES = {"B200-SXM": "b200-sxm", "GB200": "gb200", "GB300": "gb300", "B300-SXM": "b300-sxm"}
_FP8_CAST, _FP4_CAST = 3.0, 2.5625  # bytes an element, read and written
_MEMORY = 0.8  # of the data sheet's speed, as experiments/_gemm_devices.py takes fp8's
_MOST = 0.1  # of the call


def main() -> None:
    """Print what each machine says, and what narrow.py makes of it."""
    found: dict[tuple[str, str], list[float]] = {}
    with gzip.open(ROWS, "rt") as file:
        for row in csv.DictReader(file):
            device = Device.load(DEVICES[row["gpu"]])
            moved = float(row["m"]) * float(row["k"]) / (_MEMORY * device.memory_bytes_per_s)
            narrow_s = float(row["nvfp4_us"]) * 1e-6
            if _FP4_CAST * moved > _MOST * narrow_s:
                continue
            speed = (float(row["fp8_us"]) * 1e-6 - _FP8_CAST * moved) / (narrow_s - _FP4_CAST * moved)
            found.setdefault((row["gpu"], row["software"]), []).append(speed)
    for (gpu, software), speeds in found.items():
        device = Device.load(DEVICES[gpu])
        peaks = device.peak("fp4") / device.peak("fp8")
        tenths = quantiles(speeds, n=10)
        print(
            f"{gpu:9} {software:24} {len(speeds):4} products: NVFP4 {median(speeds):.2f} times fp8 ({tenths[0]:.2f} to {tenths[-1]:.2f}); "
            f"peaks {peaks:.0f}, here {fp4_fraction(peaks) * peaks:.2f}"
        )


if __name__ == "__main__":
    main()
