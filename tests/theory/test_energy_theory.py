"""Energy of a step: power times time, the cap as the mean of its kernels, and the arithmetic of kWh and CO2."""

from __future__ import annotations

import json
from functools import cache

import pytest

from simulator import Calibration, Cluster, Model, Plan, predict
from simulator.cli import main
from simulator.predict.energy import COMMUNICATION_SHARE, IDLE_SHARE, Energy, EnergyUse, energy_of

LLAMA = Model.load("llama3.2-1b")
PLAN = Plan(dp_shard=8, seq_len=4096)


def drawn(asked: Energy | None = None, plan: Plan = PLAN) -> EnergyUse:
    return _drawn((asked or Energy()).model_dump_json(), plan.model_dump_json())


@cache
def _drawn(asked: str, text: str) -> EnergyUse:
    plan, cluster = Plan.model_validate_json(text), Cluster.load("hgx-h200-8")
    inputs = (LLAMA, plan, cluster)
    return energy_of(Energy.model_validate_json(asked), predict(*inputs), *inputs)


def of_kernels(found: EnergyUse) -> list[tuple[float, float]]:
    apart = ("hosts", "communication", "waiting")
    return [(part.seconds, part.watts) for part in found.parts if part.name not in apart]


@pytest.mark.parametrize("plan", [PLAN, Plan(dp_replicate=8, zero=0, sync_every_steps=4, seq_len=1024)])
def test_a_step_is_its_parts(plan: Plan) -> None:
    """Joules = watts x seconds x GPUs, and the parts of a GPU fill its step."""
    found = drawn(plan=plan)
    gpu = [part for part in found.parts if part.name != "hosts"]
    assert sum(part.seconds for part in gpu) == pytest.approx(found.step_s, rel=1e-6)
    for part in gpu:
        assert part.seconds >= 0
        assert part.joules == pytest.approx(8 * part.seconds * part.watts)
    assert found.gpu_w * 8 * found.step_s == pytest.approx(sum(part.joules for part in gpu))


def mean_w(found: EnergyUse) -> float:
    times = of_kernels(found)
    return sum(seconds * watts for seconds, watts in times) / sum(seconds for seconds, _ in times)


def test_at_the_cap_the_mean_of_the_kernels_is_the_cap() -> None:
    """The driver holds the mean at the cap (docs/background/kernels.md), by the clock, where that is not at its end."""
    for cap, found in drawn(Energy(caps_w=(500.0, 400.0))).caps:
        assert mean_w(found) == pytest.approx(cap, rel=0.02)
    assert mean_w(drawn()) <= 700
    power = Calibration.load("h200-sxm").power
    assert power is not None
    by_name = {part.name: part.watts for part in drawn().parts}
    assert by_name["waiting"] == pytest.approx(IDLE_SHARE * 700)
    assert by_name["communication"] == pytest.approx(COMMUNICATION_SHARE * 700)
    assert by_name["norm"] / by_name["gemm"] == pytest.approx(
        power.memory_draw, rel=0.01
    )  # few of its kernels are streams
    # The clock is at its end for the 1B model at 700 W: a product draws what 0.75 -> 1 of the clock takes
    assert by_name["gemm"] <= 700 * power.loop_clock ** (-1 / power.clock_exponent) * (1 + 1e-9)


def test_a_lower_cap_takes_nothing_from_hosts_and_waiting() -> None:
    """It slows the clock of kernels: what draws no power of theirs stays, and no collective draws less than waiting does."""
    own = {part.name: part.watts for part in drawn().parts}
    for _, found in drawn(Energy(caps_w=(400.0, 150.0))).caps:
        by_name = {part.name: part.watts for part in found.parts}
        assert (by_name["hosts"], by_name["waiting"]) == (own["hosts"], own["waiting"])
        assert own["waiting"] < by_name["communication"] < own["communication"]
        assert by_name["gemm"] < own["gemm"]


@pytest.mark.parametrize(("share", "part"), [("idle_share", "waiting"), ("communication_share", "communication")])
def test_what_is_said_to_draw_nothing_draws_nothing(share: str, part: str) -> None:
    """0 is a share like any other; a step that waits without power takes less energy by what waiting took."""
    usual, none = drawn(), drawn(Energy.model_validate({share: 0.0}))
    of_usual, of_none = ({one.name: one for one in found.parts} for found in (usual, none))
    assert of_none[part].watts == 0
    assert usual.gpu_joules - none.gpu_joules == pytest.approx(of_usual[part].joules)


def test_products_under_a_lower_cap_take_less_energy_by_the_laws_exponent() -> None:
    """Speed goes as cap ** e, so energy of products goes as cap ** (1 - e): slower, and cheaper in joules."""
    (_, at_500), (_, at_250) = drawn(Energy(caps_w=(500.0, 250.0))).caps
    power = Calibration.load("h200-sxm").power
    assert power is not None
    gemm = {one.step_s: next(part for part in one.parts if part.name == "gemm") for one in (at_500, at_250)}
    slow, fast = gemm[at_250.step_s], gemm[at_500.step_s]
    ratio = slow.seconds / fast.seconds
    assert ratio == pytest.approx(2**power.exponent, rel=0.1)  # large ones; small ones wait for memory
    assert slow.joules / fast.joules == pytest.approx(
        ratio / 2, rel=0.05
    )  # half the watts, but for what the mix of kernels changes
    assert at_250.step_s > at_500.step_s
    assert at_250.gpu_joules < at_500.gpu_joules


def test_waiting_ranks_of_a_pipeline_draw_less() -> None:
    """A bubble of (p - 1) / (m + p - 1) = 3 / 7 of the step (arXiv 2104.04473, section 2.2) is no time at the cap."""
    plan = Plan(pp=4, dp_shard=2, zero=1, data_parallel="megatron", seq_len=4096, num_micro_batches=4)
    found = drawn(plan=plan)
    waiting = sum(part.seconds for part in found.parts if part.name in ("waiting", "communication"))
    assert waiting / found.step_s > 0.95 * 3 / 7  # more, as the last stage has the head
    assert found.gpu_w < 0.8 * 700


def test_kwh_and_co2_are_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["pue=1.25", 'tokens="2B"', "co2_g_per_kwh=400", "host_w=1000"]
    words = [
        "predict",
        "--model",
        "llama3.2-1b",
        "--energy",
        *(word for one in asked for word in ("--set", f"energy.{one}")),
    ]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found, step_s = answer["energy"], answer["step_s"]
    step_j = 1.25 * (8 * found["gpu_w"] * step_s + 1000 * step_s)
    assert found["step_joules"] == pytest.approx(step_j)
    assert found["joules_per_token"] == pytest.approx(step_j / answer["tokens_per_step"])
    kwh = 2e9 * found["joules_per_token"] / 3.6e6
    assert (found["run_kwh"], found["run_co2_kg"]) == (pytest.approx(kwh), pytest.approx(0.4 * kwh))
    assert found["low_joules_per_token"] < found["joules_per_token"] < found["high_joules_per_token"]
    kinds = {source["what"]: source["kind"] for source in found["sources"]}
    assert kinds["power of hosts"] == "given"
    assert kinds["power of communication"] == "assumed"


def test_a_run_draws_its_steps_and_waits_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3.2-1b", "--set", "energy.host_w=1000", "--set", "energy.co2_g_per_kwh=500", "--json"]
    assert main(["predict", *words]) == 0
    step = json.loads(capsys.readouterr().out)
    assert main(["goodput", *words, "--steps", "2M", "--replicas", "10"]) == 0
    run = json.loads(capsys.readouterr().out)
    training = 2e6 * step["energy"]["step_joules"] / 3.6e6
    rest_s = sum(part["seconds"] for part in run["parts"]) - 2e6 * step["step_s"]
    assert rest_s > 0
    waiting = rest_s * (8 * IDLE_SHARE * 700 + 1000) / 3.6e6
    assert run["energy"]["training_kwh"] == pytest.approx(training)
    assert run["energy"]["kwh"] == pytest.approx(training + waiting)
    assert run["energy"]["co2_kg"] == pytest.approx(0.5 * (training + waiting))


def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--set", "energy.caps_w=[900, 500, -1]"]) == 3
    told = capsys.readouterr().err
    assert "energy.caps_w[0]" in told
    assert "energy.caps_w[2]" in told
    assert main(["predict", "--set", "energy.pue=0.5", "--set", "energy.idle_share=2"]) == 3
    told = capsys.readouterr().err
    assert "energy.pue: must be at least 1" in told
    assert "energy.idle_share" in told
