"""How fast NVFP4 products are beside fp8's: `python experiments/fit_narrow.py`.

measured/nvfp4_gemm.csv.gz: github.com/ai-dynamo/aiconfigurator at 095f58a51,
aic-core/src/aiconfigurator_core/systems/data/*/gemm/trtllm: products of 1e12 to 1e13 FLOP with every side from 2,048 to 32,768, fp8
scaled by tensor and NVFP4, on B200, GB200, GB300 and B300. Release 1.3.0rc17 ran 0.3 to 1 s each with its power logged, 1.3.0rc20 six calls.
Both kinds narrow their first operand in the call. What that takes is fitted on calls of 128 and 256 columns, which do little else, and
taken out; calls where it is above a fifth are left out.
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _gemm import CAST_COLUMNS, cast_line, products

from simulator.spec.calibration.narrow import fp4_fraction
from simulator.spec.cluster.device import Device
from validate.fit.gemm import Products

ROWS = Path(__file__).parent / "measured" / "nvfp4_gemm.csv.gz"
DEVICES = {"B200-SXM": "b200-sxm", "GB200": "gb200", "GB300": "gb300", "B300-SXM": "b300-sxm"}
_BYTES = {"fp8": 1.0, "nvfp4": 0.5625}
_MOST = 0.2  # of the call


def _calls(rows: list[dict[str, str]], dtype: str) -> Products:
    return products([row | {"time_us": row[f"{dtype}_us"]} for row in rows], unit_s=1e-6)


def main() -> None:
    """Print what each machine says, and what narrow.py makes of it."""
    machines: dict[tuple[str, str], list[dict[str, str]]] = {}
    with gzip.open(ROWS, "rt") as file:
        for row in csv.DictReader(file):
            machines.setdefault((row["gpu"], row["software"]), []).append(row)
    for (gpu, software), rows in machines.items():
        device = Device.load(DEVICES[gpu])
        seconds, keep, casts = {}, np.ones(len(rows), dtype=bool), ""
        for dtype, size in _BYTES.items():
            calls = _calls(rows, dtype)
            floor, slope = cast_line(device, calls, size)
            cast_s = floor + slope * calls.m * calls.k
            keep &= (cast_s < _MOST * calls.time_s) & (calls.n > CAST_COLUMNS)
            seconds[dtype] = calls.time_s - cast_s
            casts += f", {dtype} cast in {floor * 1e6:.0f} us and {slope * 1e12:.2f} ps an element"
        speeds = (seconds["fp8"] / seconds["nvfp4"])[keep]
        peaks = device.peak("fp4") / device.peak("fp8")
        low, mid, high = np.percentile(speeds, [10, 50, 90])
        print(
            f"{gpu:9} {software:24} {len(speeds):4} products: NVFP4 {mid:.2f} times fp8 ({low:.2f} to {high:.2f}); "
            f"peaks {peaks:.0f}, here {fp4_fraction(peaks) * peaks:.2f}{casts}"
        )


if __name__ == "__main__":
    main()
