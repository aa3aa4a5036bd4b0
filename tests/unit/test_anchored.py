"""A program's step by the measured step of another one: what both err by alike is taken over, the rest is not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.cli import main
from simulator.formats.readers.capture import capture_of
from simulator.predict.anchored import anchored, shared_kernels
from simulator.predict.confidence import Z90
from simulator.predict.prediction import Prediction
from simulator.predict.program import predict_program
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from tests.captures import PRODUCT, data
from validate.capture.written import write_capture


@pytest.fixture(scope="module")
def alone() -> Prediction:
    return predict_program(capture_of(data(2), "by hand"), Cluster.load("hgx-h100-8"))


def width(one: Prediction) -> tuple[float, float]:
    """Sigmas of the interval's ends."""
    return math.log(one.step_s / one.low_s) / Z90, math.log(one.high_s / one.step_s) / Z90


def test_the_same_program_takes_what_was_measured(alone: Prediction) -> None:
    found = anchored(alone, alone, 1.3 * alone.step_s, 1.0)
    assert found.step_s == pytest.approx(1.3 * alone.step_s)
    assert width(found) == pytest.approx((0, 0), abs=1e-6)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)


def test_of_other_kernels_half_is_common(alone: Prediction) -> None:
    """Equal sigmas with a correlation of a half: half of the logarithm, and three quarters of the variance."""
    one = replace(alone, spread={"gemm": 0.1}, stack_sigma=0.0)
    found = anchored(one, one, 1.21 * one.step_s, 0.0)
    assert found.step_s == pytest.approx(1.1 * one.step_s)
    assert width(found) == pytest.approx((0.1 * math.sqrt(0.75),) * 2)
    shared = anchored(one, one, 1.21 * one.step_s, 0.5)  # half of the rest are the same kernels
    assert shared.step_s == pytest.approx(1.21**0.75 * one.step_s)


def test_a_step_that_waits_for_its_host_says_nothing_of_one_that_does_not(alone: Prediction) -> None:
    host = replace(alone, spread={"host": 0.1, "uncounted host work": 0.3}, stack_sigma=0.0)
    device = replace(alone, spread={"gemm": 0.1}, stack_sigma=0.0)
    assert anchored(device, host, 3 * host.step_s, 1.0).step_s == pytest.approx(device.step_s)
    assert anchored(host, host, 3 * host.step_s, 0.0).step_s == pytest.approx(3 * host.step_s)  # one host for both


def test_what_only_lengthens_steps_is_no_reason_for_a_shorter_one(alone: Prediction) -> None:
    """By σ = 0.1 in both and 0.3 upwards in one: a longer step is mostly due to that, a shorter one never."""
    other = replace(alone, spread={"gemm": 0.1, "uncounted host work": 0.3}, stack_sigma=0.0)
    one = replace(alone, spread={"gemm": 0.1}, stack_sigma=0.0)
    assert anchored(one, other, other.step_s / 2, 1.0).step_s == pytest.approx(one.step_s / 2)
    assert anchored(one, other, other.step_s * 2, 1.0).step_s == pytest.approx(one.step_s * 2**0.1)


def test_kernels_are_shared_by_their_shapes_and_time() -> None:
    timer = Calibration.for_device(Cluster.load("hgx-h100-8").device).timer(Cluster.load("hgx-h100-8").device)
    wide = json.loads(json.dumps(PRODUCT).replace("64", "4096"))
    small, large = capture_of(data(2), "a"), capture_of({**data(2), "signatures": [wide]}, "b")
    assert shared_kernels(small, capture_of(data(3), "c"), timer) == 1
    assert shared_kernels(small, large, timer) == 0


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, layers in (("this", 2), ("other", 3)):
        write_capture(tmp_path / f"{name}.capture.gz", data(layers))
    return ["predict", "--program", str(tmp_path / "other.capture.gz"), "--of", str(tmp_path / "this.capture.gz")]


def test_the_command_takes_seconds_or_a_recording(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*more: str) -> dict[str, float]:
        assert main([*files, *more, "--json"]) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    one = asked("--measured", "1.5ms")
    (source,) = (each for each in one["sources"] if each["what"] == "step")  # type: ignore[attr-defined]
    assert source["detail"].startswith("1.50 ms measured, ")
    recorded = "docs/examples/step.json.gz"  # whose step 3 took 1.48 ms
    two = asked("--measured", recorded, "--recorded-on", "hgx-h100-8")
    assert two["step_s"] < one["step_s"]


def test_what_was_measured_ran_on_a_part_of_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path / "one.capture.gz", {**data(2), "world_size": 1, "groups": [[0]]})
    write_capture(tmp_path / "eight.capture.gz", data(2))
    asked = ["--program", str(tmp_path / "eight.capture.gz"), "--of", str(tmp_path / "one.capture.gz")]
    assert main(["predict", *asked, "--measured", "1ms", "--cluster", "hgx-h100-8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][1]["what"] == "step"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--measured", "0s"], "a step takes longer than 0 s"),
        (["--measured", "soon"], "--measured"),
        (["--measured", "3"], "--measured"),
        ([], "--measured and --of go together"),
    ],
)
def test_bad_input(files: list[str], capsys: pytest.CaptureFixture[str], more: list[str], says: str) -> None:
    assert main([*files, *more]) in (2, 3)
    assert says in capsys.readouterr().err
