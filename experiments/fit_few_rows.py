"""Products that only read weights, as decoding has them: `python experiments/fit_few_rows.py` writes `few_rows` of calibrations.

measured/kernels/gemm.csv.gz and measured/few_rows.csv.gz (github.com/microsoft/vidur at 7d47513): products of 1 to 64 rows, matrices of
1,024 or more to a side and 12 MB or more, in 16 bits. bytes / (bandwidth · bw_frac) + t0_s is fitted on half of the shapes by least absolute logarithms over a grid, and judged
on the other half. fp8 gets the same numbers: its tables time the cast of the activations with the product, which is a kernel of
its own here. Decoding attention reads its cache as well as they read weights: no table of it is at hand. Run behind fit_kernels.py, which writes the files anew.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulator.base.presets import TOPOLOGIES
from simulator.spec.cluster.device import Device

FOLDER = Path(__file__).parent / "measured"
ROWS = (FOLDER / "kernels" / "gemm.csv.gz", FOLDER / "few_rows.csv.gz")
DEVICES = {"a100-sxm4-80gb": ("A100-SXM4-80GB", "A100-80GB (vidur)"), "h100-sxm5-80gb": ("H100-SXM5-80GB", "H100-80GB (vidur)"),
           "h200-sxm": ("H200-SXM-141GB",), "b200-sxm": ("B200-SXM",), "gb200": ("GB200",), "gb300": ("GB300",)}  # fmt: skip
MOST_ROWS, SHORTEST, FEWEST_BYTES = 64, 1024, 12e6
_UNFILLED = "vLLM 0"  # its collector leaves 16-bit weights unfilled


def _rows() -> Iterator[dict[str, str]]:
    for name in ROWS:
        with gzip.open(name, "rt") as file:
            yield from csv.DictReader(file)


def samples(gpus: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, seconds, and whether a shape is fitted on."""
    found = []
    for row in _rows():
        m, n, k = (int(row[name]) for name in "mnk")
        num_bytes = 2 * (n * k + m * k + m * n)
        wide = m <= MOST_ROWS and min(n, k) >= SHORTEST and num_bytes >= FEWEST_BYTES
        known = row["gpu"] in gpus and row["dtype"] in ("bf16", "fp16") and row["layout"] == "TN"
        if known and wide and _UNFILLED not in row["software"]:
            found.append((num_bytes, float(row["time_us"]) * 1e-6, crc32(f"{n} {k}".encode()) % 2 == 0))
    moved, seconds, fitted = (np.array(column) for column in zip(*found, strict=True))
    return moved, seconds, fitted.astype(bool)


def fit(moved: np.ndarray, seconds: np.ndarray, bytes_per_s: float) -> tuple[float, float]:
    """(bw_frac, t0_s), in steps of 0.01 and 0.25 us."""

    def off(share: float, start_s: float) -> float:
        return float(np.abs(np.log((moved / (bytes_per_s * share) + start_s) / seconds)).mean())

    grid = ((share / 100, start * 2.5e-7) for share in range(50, 100) for start in range(60))
    return min(grid, key=lambda pair: off(*pair))


def main() -> None:
    """Fit, judge, write."""
    for name, gpus in DEVICES.items():
        device = Device.load(name)
        moved, seconds, fitted = samples(gpus)
        share, start_s = fit(moved[fitted], seconds[fitted], device.memory_bytes_per_s)
        errors = np.abs(np.log((moved / (device.memory_bytes_per_s * share) + start_s) / seconds)[~fitted])
        p50, p95 = (round(float(np.percentile(errors, q)), 3) for q in (50, 95))
        quality = {
            "basis": "measured",
            "num_samples": int(fitted.sum()),
            "held_out": len(errors),
            "p50": p50,
            "p95": p95,
        }
        found = {"rows": MOST_ROWS, "bw_frac": share, "t0_s": float(f"{start_s:.3g}"), "quality": quality}
        file = TOPOLOGIES / "calibrations" / f"{device.calibration}.calibration.json"
        data = json.loads(file.read_text())
        for dtype in ("bf16", "fp8"):
            if dtype in data["gemms"]:
                borrowed = {"quality": {"basis": "borrowed", "notes": ["bf16's"]}} if dtype == "fp8" else {}
                data["gemms"][dtype]["few_rows"] = found | borrowed
        for curve in data["attention"]:
            if curve["direction"] == "forward":
                curve["cache_bw_frac"] = share
        file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        print(
            f"{name}: {share} of bandwidth and {start_s * 1e6:.2f} us; others {p50:.1%} in the median, {p95:.1%} at p95"
        )


if __name__ == "__main__":
    main()
