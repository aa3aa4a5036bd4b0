"""The devices that are fitted: how the tables call them, and who is each one's nearest relative."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.spec.cluster.device import Device


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
    def is_blackwell(self) -> bool:
        return self.device.architecture == "blackwell"

    @property
    def peak(self) -> float:
        return self.device.peak("bf16")


_DVFS = (
    "exponent: prior, rounded: of 700 W some 200 go to memory, leakage and links, and the clock follows the root of the rest "
    "(voltage and clock move together), so 500 W buy (300/500) ** 0.5 = 0.77 of the clock, an exponent of 0.76 in watts. Speed "
    "follows the clock with an exponent between 0.58 (H200: products at 0.845 of their burst speed when the cap held the "
    "clock at 1.48 of 1.98 GHz) and 1: 0.44 to 0.76, the middle. memory_draw, loop_clock: experiments/_power.py"
)
_A100 = (
    "fitted and rounded: loops on the A100-PCIe (300 W) reach 0.772 of peak where the SXM (400 W) reaches 0.815, an "
    "exponent of 0.19; over matched shapes the ratio is 1.08, an exponent of 0.27. memory_draw: the H200's"
)


def subjects() -> dict[str, Subject]:
    """The devices with microbenchmarks of their own, nearest relatives first: H200 is fitted before the others."""
    listed = (
        Subject("h200-sxm", Device.load("h200-sxm"), "H200-SXM-141GB", 1.98e9, 0.6, _DVFS),
        Subject("h100-sxm", Device.load("h100-sxm5-80gb"), "H100-SXM5-80GB", 1.98e9, 0.6, _DVFS),
        Subject("a100-sxm", Device.load("a100-sxm4-80gb"), "A100-SXM4-80GB", 1.41e9, 0.25, _A100),
        Subject("b200-sxm", Device.load("b200-sxm"), "B200-SXM", 1.965e9, 0.6, _DVFS),
        # its highest clock is not stated anywhere we read: the B200's
        Subject("gb200", Device.load("gb200"), "GB200", 1.965e9, 0.6, _DVFS),
        Subject("gb300", Device.load("gb300"), "GB300", 1.965e9, 0.6, _DVFS),
    )
    return {subject.calibration: subject for subject in listed}
