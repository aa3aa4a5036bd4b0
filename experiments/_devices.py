"""The devices that are fitted: how the tables call them, and who is each one's nearest relative."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.device import Device


@dataclass(frozen=True, slots=True)
class Subject:
    """One calibration to fit.

    gpu: its name in the tables. boost_hz: highest SM clock, for borrowing rates from a relative SM by SM.
    power_exponent: how sustained matrix speed follows the power cap, and why.
    """

    calibration: str
    device: Device
    gpu: str
    boost_hz: float
    power_exponent: float
    power_source: str

    @property
    def sm_rate(self) -> float:
        """SM clocks a second of the whole device."""
        return self.device.num_sms * self.boost_hz

    @property
    def peak(self) -> float:
        return self.device.peak("bf16")


_DVFS = (
    "prior, rounded: with some 200 of 700 W for memory, leakage and links, and speed as the root of what is left "
    "(voltage and clock move together), (500 W / 700 W) gives 0.77, an exponent of 0.76; one cluster of 500 W H100s "
    "was reported to need 0.76 +- 0.05"
)
_A100 = (
    "fitted and rounded: loops on the A100-PCIe (300 W) reach 0.772 of peak where the SXM (400 W) reaches 0.815, an "
    "exponent of 0.19; over matched shapes the ratio is 1.08, an exponent of 0.27"
)


def subjects() -> dict[str, Subject]:
    """The four devices with microbenchmarks of their own, nearest relatives first: H200 is fitted before the others."""
    listed = (
        Subject("h200-sxm", Device.load("h200-sxm"), "H200-SXM-141GB", 1.98e9, 0.75, _DVFS),
        Subject("h100-sxm", Device.load("h100-sxm5-80gb"), "H100-SXM5-80GB", 1.98e9, 0.75, _DVFS),
        Subject("a100-sxm", Device.load("a100-sxm4-80gb"), "A100-SXM4-80GB", 1.41e9, 0.25, _A100),
        Subject("b200-sxm", Device.load("b200-sxm"), "B200-SXM", 1.965e9, 0.75, _DVFS),
    )
    return {subject.calibration: subject for subject in listed}
