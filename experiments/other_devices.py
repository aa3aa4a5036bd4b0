"""How far off are a device's kernels when another device's curves price them? `OTHER_BOARD` in simulator/spec/calibration comes from here.

    python experiments/other_devices.py     # some seconds

Each device with kernel tables of its own is left out in turn and priced by each other's calibration. Products: published bursts with
all sides of at least 512, the median of log(predicted / measured) less that of the device's own curves. Attention and what streams:
fractions of peak and of memory speed that were measured on both. Prints each, and the root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations, product

import _tables
import numpy as np
from _devices import subjects

from simulator.base.kernels import Gemm
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device

EVERY = 5  # of the rows
CURRENT = {"cudnn", "flash3"}  # attention kernels written anew for each architecture; others run on all as they are


def products(rows: list[_tables.Row], calibration: Calibration, device: Device) -> float:
    """Median of log(predicted / measured) of a device's bursts by these curves."""
    curve, off = calibration.gemms["bf16"], list[float]()
    for row in rows:
        m, n, k = (int(float(row[side])) for side in "mnk")
        kernel = Gemm(m=m, n=n, k=k, dtype="bf16")
        speed = curve.efficiency(kernel.flop) * device.peak("bf16")
        seconds = curve.seconds(kernel, speed, device.memory_bytes_per_s, device.num_sms)
        off.append(math.log(seconds / (float(row["time_us"]) * 1e-6)))
    return float(np.median(off))


def fractions(calibration: Calibration) -> Iterator[tuple[str, str, float]]:
    """(category, what, measured fraction of peak or memory speed) of a calibration."""
    for one in calibration.attention:
        for kernel, width in product(set(one.kernels) & CURRENT, ("64", "128")):
            if one.quality.basis == "measured":
                yield "attention", f"{kernel} {one.direction} {width}", one.peak_fraction(int(width)) * one.sustained
    for stream in calibration.streams:
        if stream.quality.basis == "measured":
            yield "elementwise", stream.op, stream.bw_frac


def main() -> None:
    """Print each pair of devices, and the root mean squares."""
    table, devices = _tables.rows("gemm"), subjects()
    calibrations = {name: Calibration.load(name) for name in devices}
    rows = {
        name: [row for row in _tables.select(table, gpu=one.gpu, dtype="bf16") if min(float(row[c]) for c in "mnk") >= 512][::EVERY]
        for name, one in devices.items()
    }  # fmt: skip
    found: dict[str, list[float]] = {"gemm": [], "attention": [], "elementwise": []}
    own = {name: products(rows[name], calibrations[name], one.device) for name, one in devices.items()}
    for left_out, other in permutations(devices, 2):
        off = products(rows[left_out], calibrations[other], devices[left_out].device) - own[left_out]
        theirs = {(category, what): one for category, what, one in fractions(calibrations[other])}
        pair = {"gemm": [off], "attention": [], "elementwise": []}
        for category, what, one in fractions(calibrations[left_out]):
            if (category, what) in theirs:
                pair[category].append(math.log(one / theirs[category, what]))
        for category, logs in pair.items():
            found[category] += logs
        print(
            f"{left_out:9} by {other:9} "
            + "  ".join(f"{c} {float(np.median(v)):+.3f} of {len(v)}" for c, v in pair.items() if v)
        )
    print({category: round(float(np.sqrt(np.mean(np.square(logs)))), 3) for category, logs in found.items()})


if __name__ == "__main__":
    main()
