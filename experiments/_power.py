"""What the board's power cap leaves products inside a step: coefficients of `Power`, from loops, logged clocks and steps.

The H200's clock was logged during loops of products and its kernels were profiled inside steps; other devices take the
H200's laws with the drop of speed that their own products show between bursts and loops.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping

import _tables
from _devices import Subject
from _in_steps import Ops, joined

from simulator.calibration import Calibration, GemmCurve, Power
from simulator.calibration.datasheet import datasheet
from validate.fit.robust import rounded

AT_THE_CAP_W = 685.0  # of 700: samples of the log that loops of products fill


def h200_steps(device: Subject, gemms: Mapping[str, GemmCurve]) -> dict[str, Ops]:
    """The profiled steps that fits may see, joined with our bill; only products are priced by more than a data sheet."""
    calibration = Calibration(**datasheet(device.device) | {"gemms": gemms, "power": None})
    return dict(joined("|".join(f"^{re.escape(name)}-spans" for name in _tables.SEEN), calibration))


def tensor_use(ops: Ops, product: GemmCurve) -> float:
    """Mean use of the tensor cores over a step: all of it in products, in attention as far as it is as fast as they."""
    flop_per_s = product.e_sust * product.peak_flop_per_s
    used_s = 0.0
    for name, (seconds, bill) in ops.items():
        if name.startswith("product"):
            used_s += seconds
        elif name.startswith("attention"):
            used_s += min(seconds, bill.amount / flop_per_s)
    return used_s / sum(seconds for seconds, _ in ops.values())


def fit_h200(device: Subject, gemms: Mapping[str, GemmCurve], steps: Mapping[str, Ops]) -> Power:
    """loop_clock from the log; memory_draw from how much faster products ran inside the steps than in loops."""
    above = below = 0.0
    for ops in steps.values():
        products = [pair for name, pair in ops.items() if name.startswith("product ") and pair[1].seconds]
        faster = sum(bill.seconds for _, bill in products) / sum(seconds for seconds, _ in products)
        p = tensor_use(ops, gemms["bf16"])
        drawn = faster ** (-1 / device.power_exponent)  # = p + memory_draw (1 - p): least squares over the steps
        above += (1 - p) * (drawn - p)
        below += (1 - p) ** 2
    return power_of(device, gemms["bf16"], loop_clock(device), above / below, gemms["bf16"])


def loop_clock(device: Subject) -> float:
    """Median SM clock at the cap while the H200 ran loops of products, over its highest clock."""
    with (_tables.H200_RUNS / "clocks-kernels.csv").open(newline="", encoding="utf-8") as file:
        rows = [[cell.split()[0] for cell in row[1:4]] for row in list(csv.reader(file))[1:]]
    clocks = [1e6 * float(clock) for clock, _, watts in rows if float(watts) >= AT_THE_CAP_W]
    return statistics.median(clocks) / device.boost_hz


def power_of(device: Subject, own: GemmCurve, h200_loop: float, draw: float, h200: GemmCurve) -> Power:
    """Speed follows the clock as on the H200: by this exponent, a drop of speed tells a drop of clock.

    Hopper's other products are the same chip under the same cap, and nobody ran loops on them: they take the clock itself.
    """
    speed_over_clock = math.log(h200.e_sust / h200.e_burst) / math.log(h200_loop)
    hopper = device.device.architecture == "hopper"
    loop = h200_loop if hopper else (own.e_sust / own.e_burst) ** (1 / speed_over_clock)
    return Power(
        reference_w=device.device.power_w,
        exponent=device.power_exponent,
        loop_clock=rounded(min(1.0, loop), 3),
        clock_exponent=rounded(device.power_exponent / speed_over_clock, 3),
        memory_draw=rounded(draw, 2),
        source=device.power_source,
    )
