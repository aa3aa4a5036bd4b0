"""Slices of multi-instance GPUs: shares of a whole GPU, and what follows from them."""

from __future__ import annotations

from itertools import product

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import ClusterError
from simulator.base.kernels import Gemm, Stream
from simulator.cli import main
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.mig import MEMORY_SLICES, profile_of

WHOLE = {"h100-sxm5-80gb": (132, 7), "a100-sxm4-80gb": (108, 7)}
PROFILES = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")


@pytest.mark.parametrize(("base", "profile"), list(product(WHOLE, PROFILES)))
def test_as_many_slices_as_there_is_room_for_are_no_more_than_the_gpu(base: str, profile: str) -> None:
    """By the names: c of 7 compute slices and 10 GB of each of 8 memory slices."""
    whole, one, cut = Device.load(base), Device.load(f"{base}:{profile}"), profile_of(base, profile)
    assert cut.instances * cut.memory_slices <= MEMORY_SLICES
    assert cut.instances * one.num_sms <= whole.num_sms
    assert cut.instances * one.memory_bytes <= whole.memory_bytes
    assert one.memory_bytes == pytest.approx(int(profile[3:5]) * 10**9, rel=0.08)
    assert cut.memory_slices == int(profile[3:5]) // 10
    assert one.num_sms >= int(profile[0]) * (whole.num_sms // 8)
    assert one.memory_bytes_per_s == pytest.approx(whole.memory_bytes_per_s * cut.memory_slices / 8)


def test_kernels_take_the_time_of_their_share() -> None:
    """Of perfect kernels: a product by its SMs, a stream by its memory slices."""
    whole, part = Device.load("h100"), Device.load("h100:3g.40gb")
    clocks = [Calibration.ideal().timer(one) for one in (whole, part)]
    gemm = Gemm(dtype="bf16", m=8192, n=8192, k=8192)
    stream = Stream(op="copy", read_bytes=2**30, write_bytes=2**30)
    long, short = (clock.kernel_s(gemm) for clock in reversed(clocks))
    assert long / short == pytest.approx(132 / 60)
    long, short = (clock.kernel_s(stream) for clock in reversed(clocks))
    assert long / short == pytest.approx(8 / 4)


def test_the_whole_gpu_as_one_slice_is_as_fast() -> None:
    """7g.80gb of an H100 has all 132 SMs and all memory slices."""
    model, plan = Model.load("llama3.2-1b"), Plan(zero=0, seq_len=512)
    steps = {
        name: predict(model, plan, Cluster.load(f"1x{name}")).step_s
        for name in ("h100", "h100:7g.80gb", "h100:3g.40gb", "h100:1g.20gb")
    }
    assert steps["h100:7g.80gb"] == pytest.approx(steps["h100"], rel=1e-12)
    assert steps["h100"] < steps["h100:3g.40gb"] < steps["h100:1g.20gb"]


def test_slices_reach_each_other_through_the_host_alone() -> None:
    """Two slices share 63 GB/s of PCIe 5: no NVLink, no direct peers."""
    cluster = Cluster.load("4xh100:3g.40gb")
    assert cluster.intra.shape == "pcie"
    assert float(cluster.intra.bytes_per_s) == pytest.approx(63e9 / 2)
    assert cluster.pcie is not None
    assert cluster.pcie.p2p == "none"
    assert Cluster.load("16xh100:3g.40gb").num_nodes == 1
    assert Cluster.load("32xh100:3g.40gb").num_nodes == 2


def test_what_is_no_slice_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match=r"did you mean 3g\.40gb"):
        Device.load("h100:3g.50gb")
    assert main(["predict", "--gpus", "1xl40s:3g.40gb"]) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert "no profiles of l40s are known (slices of h100-sxm5-80gb and a100-sxm4-80gb)" in told
