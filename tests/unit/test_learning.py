"""Learning from a handful of measured steps: what is true is found, what contradicts counts less, and a prediction is surer for it."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator import predict
from simulator.base.errors import CalibrationError, InputError
from simulator.cli import main
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LearnedLinks, default_curves
from simulator.spec.calibration.learned import NAMES, Coefficient, Learned
from simulator.spec.calibration.likeness import alike
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.rows import RunRow
from simulator.studies.learning import learn, lines
from simulator.studies.learning.observed import Observed, Step, observed
from simulator.studies.learning.posterior import Posterior, posterior, without
from simulator.studies.learning.report import learning_report
from simulator.studies.learning.traced import traced
from simulator.work.recorded.recording import RecordedOp, Recording
from validate.fit.machine import write_stack

# Sequence length, GPUs, micro-batch, recomputation: what is cheap to play, and different enough to tell kernels apart
_SIZES = [
    (2048, 8, 4, "none"),
    (8192, 8, 2, "full"),
    (4096, 16, 2, "none"),
    (2048, 32, 1, "full"),
    (16384, 8, 1, "none"),
]
_TRUTH = {"attention": math.log(1.5), "software": math.log(1.2)}


def _row(index: int, framework: str = "our own trainer", **others: Any) -> RunRow:
    seq_len, gpus, micro_batch, again = _SIZES[index]
    of_all = {
        "n_layers": 8, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192, "mlp_kind": "swiglu", "vocab": 32000,
        "gpu": "H100", "precision": "bf16", "zero_or_fsdp": "fsdp_full", "metric": "step_time_s", "value": 1.0, "compile": "n",
    }  # fmt: skip
    mine = {
        "seq_len": seq_len,
        "n_gpus": gpus,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * gpus,
        "act_ckpt": again,
    }
    return RunRow(line=index + 2, id=f"run-{index}", framework=framework, **{**of_all, **mine, **others})


@pytest.fixture(scope="module")
def runs() -> list[Observed]:
    """Five runs of unknown software whose attention takes half as long again, and everything a fifth more."""
    found, refused = observed(_row(index) for index in range(5))
    assert not refused
    return [replace(run, measured_s=run.step(_TRUTH).seconds) for run in found]


@pytest.fixture(scope="module")
def found(runs: list[Observed]) -> Posterior:
    """What the first four teach."""
    return posterior(runs[:4])


def test_what_is_true_is_predicted_of_a_run_that_did_not_teach(runs: list[Observed], found: Posterior) -> None:
    """The fifth run has four times the sequence of most: attention's factor must be told from the rest's to be right there."""
    unseen = runs[4]
    before, after = (unseen.step(values).seconds / unseen.measured_s - 1 for values in ({}, found.values))
    assert before < -0.3
    assert abs(after) < abs(before) / 3
    step = unseen.step(found.values, nodes=found.nodes)
    prior = math.sqrt(float(((step.prior * step.slopes) ** 2).sum()))
    there = found.as_file("mine", ["a"]).at(unseen.point)  # with what runs alike share, as predictions are
    assert there.sigma(dict(zip(NAMES, step.slopes.tolist(), strict=True))) < prior / 3


def test_a_coefficient_that_no_run_shows_stays_as_unknown_as_before(found: Posterior) -> None:
    """A host that keeps far ahead of the device has no share of any step."""
    at = found.names.index("attention")
    sigmas = np.sqrt(np.diag(found.covariance))
    assert sigmas[at] < 0.85 * found.prior[at]
    shown = [n for n in ("operators", "collectives") if n in found.names]
    assert all(sigmas[found.names.index(n)] > 0.95 * found.prior[found.names.index(n)] for n in shown)


def test_half_of_what_is_unknown_of_hosts_and_links_is_each_runs_own(runs: list[Observed], found: Posterior) -> None:
    whole = np.max([run.step({}).prior for run in runs[:4]], axis=0)[[NAMES.index(name) for name in found.names]]
    assert np.hypot(found.prior, found.each) == pytest.approx(whole)
    each = dict(zip(found.names, found.each / whole, strict=True))
    assert each["operators"] == each["network"] == pytest.approx(math.sqrt(0.5))
    assert not each["products"] and not each["software"]  # noqa: PT018
    slopes = np.array([float(name == "network") for name in found.names])
    assert found.beside(slopes) == pytest.approx(found.apart**2 + found.each[found.names.index("network")] ** 2)


def test_a_run_that_contradicts_counts_less_and_is_named(runs: list[Observed]) -> None:
    """It says that runs scatter more than was known, as one in five did, and not as widely as if all did."""
    found = posterior([*runs[:4], replace(runs[4], measured_s=3 * runs[4].measured_s)])
    assert found.weights[4] < 0.4 < min(found.weights[:4])
    assert posterior(runs[:4]).apart < found.apart < math.log(3) / 2
    error, sigma, _ = without(found, 4)
    assert error < -found.reach * sigma


def test_runs_that_agree_with_what_was_known_move_little() -> None:
    """Of described software, measured as predicted but for noise of 2 % to either side: another run changes by less, and is surer."""
    found, _ = observed(_row(index, stack="torch-2.6-eager") for index in range(5))
    noisy = [replace(run, measured_s=run.step({}).seconds * (1 + 0.02 * (-1) ** i)) for i, run in enumerate(found[:4])]
    learned = posterior(noisy)
    assert run_step_s(found[4], learned) == pytest.approx(found[4].step({}).seconds, rel=0.02)
    assert learned.covariance[-1, -1] < learned.prior[-1] ** 2


def test_runs_of_described_software_that_all_take_longer_move_it() -> None:
    """Three runs that take a fifth longer than their stack says: a run that did not teach is predicted longer, whatever stays unexplained."""
    found, _ = observed(_row(index, stack="torch-2.6-eager") for index in range(4))
    slow = [replace(run, measured_s=1.2 * run.step({}).seconds) for run in found]
    learned = posterior(slow[:3])
    assert run_step_s(slow[3], learned) > 1.08 * slow[3].step({}).seconds


def test_runs_that_foretell_each_other_worse_than_their_stack_does_move_nothing() -> None:
    """Equal runs that took a tenth more and less in turn: what the others say of one lies on the wrong side."""
    found, _ = observed([_row(0, stack="torch-2.6-eager")])
    run = found[0]
    turns = [replace(run, measured_s=run.step({}).seconds * 1.1 ** (-1) ** i) for i in range(6)]
    learned = posterior(turns)
    assert not learned.theta.any()
    assert not learned.shared.any()
    assert run_step_s(run, learned) == run.step({}).seconds
    assert [without(learned, i)[0] for i in (0, 1)] == pytest.approx([-math.log(1.1), math.log(1.1)])
    assert any("nothing moves" in line for line in lines(learning_report(turns, (), "mine")))
    assert learned.scatter > posterior([replace(run, measured_s=run.step({}).seconds)] * 6).scatter


class _OfNobody(Observed):
    """The same run as if its software were not described."""

    def taken(self, lowering: Any, played: Any) -> Step:
        return replace(super().taken(lowering, played), described=False)


def test_described_software_moves_by_how_probable_that_is() -> None:
    """By less than all that the runs say; by the greater part of it, the farther they all lie from what the stack says."""
    found, _ = observed(_row(index, stack="torch-2.6-eager") for index in range(4))
    parts = []
    for slower in (1.02, 2.0):
        measured = [replace(run, measured_s=slower * run.step({}).seconds) for run in found]
        free = posterior([_OfNobody(**{one.name: getattr(run, one.name) for one in fields(run)}) for run in measured])
        parts.append(float(np.linalg.norm(posterior(measured).theta) / np.linalg.norm(free.theta)))
    assert 0 < parts[0] < parts[1] < 1


def test_slopes_are_shares_of_the_step(runs: list[Observed]) -> None:
    """Kernels, host and waits for links make up the step; waits beside compute are no part of these."""
    added = {"growth", "overlap", "overhead", "software"}
    for run in runs:
        step = run.step({})
        total = sum(j for name, j in zip(NAMES, step.slopes, strict=True) if name not in added)
        assert 0.9 < total <= 1 + 1e-9
        doubled = run.step({"products": math.log(1.01)}).seconds / step.seconds - 1
        assert doubled == pytest.approx(0.01 * step.slopes[NAMES.index("products")], rel=0.2)  # clocks follow too


def test_hosts_of_stages_that_wait_follow_their_operators() -> None:
    """Between the messages of a plain pipeline the host's time is part of what a stage does, and no op's of its own."""
    small = {
        "d_model": 512,
        "d_ff": 1408,
        "n_heads": 8,
        "seq_len": 512,
        "n_gpus": 2,
        "micro_batch": 1,
        "global_batch": 8,
    }
    (run,), _ = observed([_row(0, "Megatron-LM core 0.12", pp=2, zero_or_fsdp="ddp", **small)])
    step = run.step({})
    for name in ("operators", "collectives"):
        more = math.log(run.step({name: 0.01}).seconds / step.seconds) / 0.01  # type: ignore[dict-item]
        assert more == pytest.approx(step.slopes[NAMES.index(name)], abs=0.15)


def test_learned_links_scale_bytes_by_the_count_of_nodes() -> None:
    learned = LearnedLinks(network=1.5, growth=1.1, nodes=2)
    assert learned.between(2) == pytest.approx(1.5)
    assert learned.between(8) == pytest.approx(1.5 * 1.1**2)


def test_host_times_are_learned_once_however_often_a_stack_passes() -> None:
    learned = _file({"operators": math.log(2)})
    stack = Stack.load("torch-2.6-eager")
    once = learned.of(stack)
    assert once.host.launch_s == pytest.approx(2 * stack.host.launch_s)
    assert once.host.collective_s == stack.host.collective_s
    assert learned.of(once) == once


def _file(values: dict[str, float]) -> Learned:
    coefficients = tuple(Coefficient(name=n, value=v, prior_sigma=0.3, sigma=0.1) for n, v in values.items())  # type: ignore[arg-type]
    size = len(values)
    covariance = tuple(tuple(0.01 * (i == k) for k in range(size)) for i in range(size))
    return Learned(name="mine", runs=("a",), coefficients=coefficients, covariance=covariance, scatter=0.02, reach=1.8)


def _recording(run: Observed, on_host: bool = False) -> Recording:  # noqa: FBT001, FBT002
    """A trace of the run's step as it truly is: a kernel for each category."""
    truth = _TRUTH["software"]
    factors = {"gemm": truth, "attention": truth + _TRUTH["attention"]}
    kernels = [
        (c, s * math.exp(factors.get(c, truth)))
        for c, s in run.played.breakdown.items()
        if c not in ("host", "interference")
    ]
    ops = [
        RecordedOp(name=category, category=category, stream=0, start_s=0.0, end_s=seconds)
        for category, seconds in kernels
        if not category.startswith(("exposed", "stragglers"))
    ]
    return Recording(
        name="trace", ops=ops, waits=(), step=None, step_s=run.measured_s, step_times_s={}, origin_s=0.0, host_ahead_s=0.0, host_end_s=None,
        on_host=on_host, rank=0, world_size=8, device="", peaks=None, notes=(),
    )  # fmt: skip


def test_a_trace_tells_attention_from_the_rest_in_one_run(runs: list[Observed]) -> None:
    one = runs[:1]
    alone, with_trace = posterior(one), posterior([*one, *traced(one, {"run-0": _recording(one[0])})])
    at = alone.names.index("attention")
    left = [math.sqrt(found.covariance[at, at]) / found.prior[at] for found in (alone, with_trace)]
    assert left[1] < 0.5 < left[0]
    assert with_trace.values["attention"] == pytest.approx(_TRUTH["attention"], abs=0.15)


def test_a_trace_that_cannot_stand_beside_its_row_says_why(runs: list[Observed]) -> None:
    asked = {"run-1": _recording(runs[1]), "run-0": _recording(runs[0], on_host=True), "run-9": _recording(runs[0])}
    with pytest.raises(InputError) as caught:
        list(traced(runs, asked))
    assert [(f.place, f.problem) for f in caught.value.faults] == [
        ("--traces run-1", "its recomputed kernels cannot be told from the others"),
        ("--traces run-0", "no device was recorded"),
        ("--traces run-9", "no row that teaches has this id"),
    ]


def test_what_was_learned_of_kernels_and_host_is_a_stack(runs: list[Observed], tmp_path: Path) -> None:
    """The stack alone predicts what the file of coefficients does, links apart; clocks follow the one a little, not the other."""
    run = runs[0].run
    learned = _file({**_TRUTH, "products": 0.1, "elementwise": -0.1, "operators": 0.2, "overhead": 0.002})
    write_stack(learned.as_stack(run.stack, "hopper"), tmp_path / "mine.toml")
    stack = Stack.load(tmp_path / "mine.toml")
    assert stack.fitted.calibration_runs == ("a",)
    plain = Calibration.for_device(run.cluster.device)
    by_stack = predict(run.model, run.plan, run.cluster, plain, stack)
    by_file = predict(run.model, run.plan, run.cluster, plain.with_learned(learned), run.stack)
    for category in ("gemm", "attention", "elementwise", "norm", "overhead"):
        assert by_stack.breakdown[category] == pytest.approx(by_file.breakdown[category], rel=0.03)


def test_the_file_is_read_back_and_equal_bytes_are_written(tmp_path: Path) -> None:
    learned = _file(_TRUTH)
    learned.save(tmp_path / "a.learned.json")
    Learned.load(tmp_path / "a.learned.json").save(tmp_path / "b.learned.json")
    assert Learned.load(tmp_path / "b.learned.json") == learned
    assert (tmp_path / "a.learned.json").read_bytes() == (tmp_path / "b.learned.json").read_bytes()


def test_a_command_that_needs_a_device_s_calibration_says_what_the_file_is(tmp_path: Path) -> None:
    _file(_TRUTH).save(tmp_path / "mine.learned.json")
    with pytest.raises(CalibrationError, match="holds what runs taught, and no calibration of a device"):
        Calibration.load(tmp_path / "mine.learned.json")


def test_a_covariance_of_other_coefficients_is_refused(tmp_path: Path) -> None:
    data = _file(_TRUTH).model_dump(mode="json") | {"covariance": [[0.1]]}
    (tmp_path / "a.learned.json").write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match="covariance must have 2 rows of 2 numbers"):
        Learned.load(tmp_path / "a.learned.json")


@pytest.mark.parametrize("key", ["scatter", "reach"])
def test_a_width_that_no_interval_has_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.learned.json").write_text(json.dumps(_file(_TRUTH).model_dump(mode="json") | {key: 1e30}))
    with pytest.raises(CalibrationError, match=f"{key}: must be at most"):
        Learned.load(tmp_path / "a.learned.json")


def test_a_prediction_moves_with_what_was_learned_and_says_so(runs: list[Observed], found: Posterior) -> None:
    run = runs[0].run
    plain = Calibration.for_device(run.cluster.device)
    taught = plain.with_learned(found.as_file("mine", ["a", "b"]))
    before, after = (predict(run.model, run.plan, run.cluster, one, run.stack) for one in (plain, taught))
    assert after.step_s == pytest.approx(run_step_s(runs[0], found))
    assert after.high_s / after.low_s < before.high_s / before.low_s
    assert after.spread.keys() != before.spread.keys()
    assert "as 2 runs of your own taught (mine)" in next(s.detail for s in after.sources if s.what == "kernels")
    assert default_curves().learned is None


def run_step_s(run: Observed, found: Posterior) -> float:
    """As learning itself predicts it: by the same road."""
    return run.step(found.as_file("mine", ["a"]).at(run.point).values, nodes=found.nodes).seconds


# -- what runs alike share


@pytest.fixture(scope="module")
def lopsided(runs: list[Observed]) -> Posterior:
    """Recomputing runs take half as long again, which no coefficient says."""
    again = [one.run.plan.recompute.mode == "full" for one in runs[:4]]
    odd = zip(runs[:4], again, strict=True)
    return posterior([replace(one, measured_s=one.measured_s * (1.5 if slow else 1.0)) for one, slow in odd])


def test_a_run_follows_those_like_it_the_more_the_nearer(runs: list[Observed], lopsided: Posterior) -> None:
    learned = lopsided.as_file("mine", ["a"])
    assert learned.likeness is not None
    recomputes, keeps = (runs[at].point for at in (1, 0))
    assert learned.at(recomputes).here > learned.at(keeps).here + 0.1
    far = tuple(100.0 + one for one in keeps)
    assert learned.at(far).here == pytest.approx(0.0, abs=1e-6)
    sigmas = [_of(learned.at(point), "software") for point in (keeps, tuple(1.0 + one for one in keeps), far)]
    assert sigmas == sorted(sigmas)
    assert sigmas[2] == pytest.approx(math.hypot(_of(learned, "software"), learned.likeness.sigma), rel=1e-3)


def _of(learned: Learned, name: str) -> float:
    return next(one.sigma for one in learned.coefficients if one.name == name)


def test_without_likeness_what_runs_share_scatters(lopsided: Posterior) -> None:
    learned = lopsided.as_file("mine", ["a"])
    assert learned.alone.likeness is None
    assert learned.alone.scatter == pytest.approx(lopsided.apart, rel=1e-5)
    assert learned.alone.values == learned.values


def test_the_posterior_is_that_of_a_gaussian_process(lopsided: Posterior) -> None:
    """By the textbook: all runs and one more in one covariance, without shortcuts."""
    j, prior, found = lopsided.slopes, np.diag(lopsided.prior**2), lopsided.found
    more = [*lopsided.points, tuple(0.5 + one for one in lopsided.points[0])]
    target = lopsided.residuals + j @ lopsided.theta
    shared = found.shared**2 * alike(more, more)
    seen = j @ prior @ j.T + found.covariance
    k = shared[-1, :-1]
    gain = np.linalg.solve(seen, np.vstack([k, prior @ j.T]).T).T
    error, variance, cross = lopsided.as_file("mine", ["a"]).likeness.near(more[-1])  # type: ignore[union-attr]
    assert error == pytest.approx(gain[0] @ target, rel=1e-4)
    assert variance == pytest.approx(shared[-1, -1] - gain[0] @ k, rel=1e-4)
    assert cross == pytest.approx(-gain[1:] @ k, rel=1e-4, abs=1e-5)
    assert lopsided.covariance == pytest.approx(prior - gain[1:] @ j @ prior, abs=1e-9)


def test_a_run_left_out_is_what_the_others_say_of_it(lopsided: Posterior) -> None:
    """The closed form is the same as solving without the run."""
    index, rest = 2, [0, 1, 3]
    j, prior, found = lopsided.slopes, np.diag(lopsided.prior**2), lopsided.found
    whole = j @ prior @ j.T + found.covariance
    target = lopsided.residuals + j @ lopsided.theta
    gain = np.linalg.solve(whole[np.ix_(rest, rest)], whole[rest, index])
    error, sigma, _ = without(lopsided, index)
    assert error == pytest.approx(gain @ target[rest] - target[index])
    added = (found.own**2 + found.shared**2) * (1 / found.weights[index] - 1)
    assert sigma**2 == pytest.approx(whole[index, index] - added - gain @ whole[rest, index])


def test_a_likeness_of_other_runs_is_refused(tmp_path: Path, lopsided: Posterior) -> None:
    data = lopsided.as_file("mine", ["a"]).model_dump(mode="json")
    data["likeness"]["errors"] = [0.1]
    (tmp_path / "a.learned.json").write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match="likeness: inverse, errors and cross must have 4 numbers a row"):
        Learned.load(tmp_path / "a.learned.json")


def test_the_command_writes_what_predict_takes(
    tmp_path: Path, runs: list[Observed], capsys: pytest.CaptureFixture[str]
) -> None:
    table, mine = tmp_path / "runs.csv", tmp_path / "mine"
    rows = [{**_cells(index), "value": f"{run.measured_s:.6g}"} for index, run in enumerate(runs[:2])]
    rows.append({**_cells(2), "id": "no-number", "micro_batch": "nonsense"})
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert main(["calibrate", "learn", str(table), "-o", str(mine)]) == 0
    text = capsys.readouterr().out
    assert "2 runs taught" in text
    assert "no run: as unknown as before" in text
    assert "not used: no-number: " in text
    assert "Measure next: run-" in text
    assert f"--calibration {mine}.learned.json" in text
    study = ("predict", "--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--calibration")
    before, after = (_answer(capsys, *study, name) for name in ("h100-sxm", str(mine)))
    assert after["step_s"] > 1.1 * before["step_s"]
    assert "learned" in after["uncertainty"]


def test_the_report_names_teachers_contradictions_and_the_next_run(runs: list[Observed]) -> None:
    odd = [*runs[:3], replace(runs[3], measured_s=3 * runs[3].measured_s)]
    row = replace(odd[0].run.row, mem_metric="peak_allocated_gib", mem_value=8.0)
    odd[0] = replace(odd[0], run=replace(odd[0].run, row=row))
    told = learning_report(odd, [], "mine")
    assert [(one.id, one.measured_bytes) for one in told.memory] == [("run-0", 8 * 2**30)]
    assert (
        told.memory[0].predicted_bytes
        == predict(
            runs[0].run.model, runs[0].run.plan, runs[0].run.cluster, stack=runs[0].run.stack
        ).memory.peak_allocated_bytes
    )
    data = told.as_json()
    assert [run["id"] for run in data["runs"] if run["contradicts"]] == ["run-3"]
    assert data["next"]["mean_after"] < data["next"]["mean_before"]
    parts = next(one["by"] for one in data["coefficients"] if one["name"] == "attention")
    assert "run-1" in parts  # the only one with four times the others' sequence length
    assert any("run-3 contradicts the others: +" in line for line in lines(told))


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def _cells(index: int) -> dict[str, str]:
    row = _row(index)
    names = ("id", "framework", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "mlp_kind", "vocab", "seq_len", "gpu", "n_gpus",
             "zero_or_fsdp", "micro_batch", "global_batch", "precision", "act_ckpt", "metric", "value")  # fmt: skip
    return {name: str(getattr(row, name)) for name in names}


def test_a_table_that_teaches_nothing_says_why_of_each_row() -> None:
    with pytest.raises(InputError) as caught:
        learn([_row(0, gpu="H900"), _row(1, d_ff=None)], "mine")
    assert [fault.place for fault in caught.value.faults] == ["run-0", "run-1"]
