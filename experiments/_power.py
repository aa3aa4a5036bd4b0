"""What the board's power cap leaves products inside a step: coefficients of `Power`, from loops, logged clocks and steps.

The H200's clock was logged during loops of products and its kernels were profiled inside steps; other devices take the
H200's laws with the drop of speed that their own products show between bursts and loops. The B200's long loops of
attention, whose speed goes as the clock, tell its clock themselves.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping

import _tables
import numpy as np
from _devices import Subject
from _in_steps import Ops, joined

from simulator.base.kernels import Direction
from simulator.spec.calibration import Calibration, GemmCurve, Power
from simulator.spec.calibration.datasheet import datasheet
from validate.fit.attention import LONG_S, Calls, flop
from validate.fit.robust import Fitted, rounded

Loops = Mapping[Direction, tuple[Calls, Fitted]]

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
    return power_of(device, loop_clock(device), above / below, gemms["bf16"])


def loop_clock(device: Subject) -> float:
    """Median SM clock at the cap while the H200 ran loops of products, over its highest clock."""
    with (_tables.H200_RUNS / "clocks-kernels.csv").open(newline="", encoding="utf-8") as file:
        rows = [[cell.split()[0] for cell in row[1:4]] for row in list(csv.reader(file))[1:]]
    clocks = [1e6 * float(clock) for clock, _, watts in rows if float(watts) >= AT_THE_CAP_W]
    return statistics.median(clocks) / device.boost_hz


def attention_clock(product: GemmCurve, loops: Loops, h200: Power) -> float:
    """Clock in loops of products, by what long loops of attention lose and by what they draw. Mean, by standard errors."""
    flop_per_s = product.e_sust * product.peak_flop_per_s
    above = below = 0.0
    for direction, (x, found) in loops.items():
        long = x.where(x.time_s > LONG_S)
        use = min(1.0, float(np.median(flop(long, direction) / long.time_s)) / flop_per_s)
        drawn = use + h200.memory_draw * (1 - use)
        weight = found.errors["sustained"] ** -2
        above += weight * found.values["sustained"] * drawn**h200.clock_exponent
        below += weight
    return above / below


def power_of(device: Subject, h200_loop: float, draw: float, h200: GemmCurve, *, loop: float | None = None) -> Power:
    """The H200's laws around this device's clock in loops of products.

    loop: that clock. None: the H200's, which is right for Hopper: the same chip under the same cap, and nobody ran loops.
    """
    speed_over_clock = math.log(h200.e_sust / h200.e_burst) / math.log(h200_loop)
    return Power(
        reference_w=device.device.power_w,
        exponent=device.power_exponent,
        loop_clock=rounded(min(1.0, h200_loop if loop is None else loop), 3),
        clock_exponent=rounded(device.power_exponent / speed_over_clock, 3),
        memory_draw=rounded(draw, 2),
        source=device.power_source,
    )


def by_products(own: GemmCurve, relative: GemmCurve, relative_loop: float) -> float:
    """Clock in loops of products where nothing tells it: the drop of their speed does, as on the nearest relative."""
    speed_over_clock = math.log(relative.e_sust / relative.e_burst) / math.log(relative_loop)
    return float((own.e_sust / own.e_burst) ** (1 / speed_over_clock))
