"""How fast the scan's products are beside FlashAttention-2's: `python experiments/fit_scan.py`.

measured/mamba_chunk_scan.csv is read off the chart of github.com/tile-ai/tilelang, benchmark/mamba2 (README.md and
mamba_benchmark_result.png), ± 1 TFLOP/s: `_chunk_scan_fwd` of mamba-ssm 2.2.6.post3 with Triton 3.5.0 on an H800 SXM, everything in 16 bits. Its
TFLOP/s count T Q I + 2 T I N. The H800 computes and reads memory as the H100 does.

A row's time is its bytes at the speed of contiguous elementwise kernels, and the products of whole tiles of 64 rows at v.
From 8,192 tokens on C and C Bᵀ of all chunks, which each head reads again, no longer stay in the 50 MB of L2; those rows are shown
and not fitted.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulator.base.kernels import Scan, Stream
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.scan import tiled_attention_curve
from simulator.spec.cluster.device import Device

ROWS = Path(__file__).parent / "measured" / "mamba_chunk_scan.csv"
L2_BYTES = 50_000_000
_TILE_ROWS, _ELEMENT = 64, 2


def work(row: dict[str, float]) -> tuple[float, Scan, bool]:
    """(measured seconds, the kernel, whether what heads share stays in L2) of a row."""
    t, n, q = row["batch"] * row["seq_len"], row["state_dim"], row["chunk_size"]
    inner = row["heads"] * row["head_dim"]
    seconds = t * inner * (q + 2 * n) / (row["tflops"] * 1e12)
    shared = _ELEMENT * t * row["groups"] * (q + n)
    own = _ELEMENT * inner * (2 * t + t / q * n)  # x and the result; states
    decays = 2 * _ELEMENT * t * row["heads"]
    kernel = Scan(
        flop=int(t * inner * (q + _TILE_ROWS + 2 * n)),
        read_bytes=int(shared + own / 2 + decays),
        write_bytes=int(own / 2),
        dtype="fp16",
        head_dim=int(row["head_dim"]),
        direction="forward",
    )
    return seconds, kernel, shared + own / row["heads"] < L2_BYTES


def main() -> None:
    """Print each row's speed and the fit."""
    device = Device.load("h100-sxm5-80gb")
    calibration = Calibration.for_device(device)
    timer = calibration.timer(device)
    fitted: list[float] = []
    with ROWS.open() as file:
        for record in csv.DictReader(file):
            seconds, kernel, held = work({name: float(value) for name, value in record.items()})
            moved = Stream(op="elementwise", read_bytes=kernel.read_bytes, write_bytes=kernel.write_bytes)
            speed = kernel.flop / (seconds - timer.kernel_s(moved))
            curve = tiled_attention_curve(calibration.attention, kernel)
            assert curve is not None
            ratio = speed / (device.peak("bf16") * curve.peak_fraction(kernel.head_dim))
            fitted += [ratio] if held else []
            print(
                f"{record['seq_len']:>6} tokens: {seconds * 1e3:6.3f} ms, bytes {timer.kernel_s(moved) * 1e3:6.3f} ms, "
                f"products {speed / 1e12:4.0f} TFLOP/s, {ratio:.2f} of FlashAttention-2"
                + ("" if held else " (what heads share is read again)")
            )
    print(f"SPEED = {mean(fitted):.2f} ± {stdev(fitted):.2f}")


if __name__ == "__main__":
    main()
