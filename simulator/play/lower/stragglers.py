"""Stragglers: a synchronous step runs at the pace of its slowest GPU.

GPUs of one model differ in speed, most of all at the power cap: leakage and cooling decide the clock that the watts buy.
Over 400 to 27,648 GPUs of five clusters the same matrix product varied by 8 % on average within a cluster, outliers
excluded (Sinha et al., SC22, doi 10.1109/SC41404.2022.00070). Taken as normal with a standard deviation of 1.5 %
(8 % is then the range from the 0.4th to the 99.6th percentile), the slowest of n is expected at

    E[max of n] = Phi^-1((n - 3/8) / (n + 1/4))  standard deviations          (Blom 1958)

above the mean: 2.1 % with 8 GPUs, 3.9 % with 128. The growth, 0.45 % a doubling, is what scaling tables of four frameworks
show between 8 and 128 GPUs (0.4-0.7 %).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

SPEED_SPREAD = 0.015  # prior: one standard deviation of GPUs' speed within a cluster


@cache
def slowdown(num_devices: int, spread: float = SPEED_SPREAD) -> float:
    """Expected extra compute time of the slowest of `num_devices`, as a fraction of the mean device's."""
    if num_devices == 1:
        return 0.0
    quantile = (num_devices - 3 / 8) / (num_devices + 1 / 4)
    return spread * NormalDist().inv_cdf(quantile)
