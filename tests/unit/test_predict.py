"""predict(): one figure from four inputs, with its interval, its bounds and its verdict."""

import math
from dataclasses import replace

import pytest

from simulator.base.errors import PlanError, StackError
from simulator.base.fit import Fit
from simulator.memory import MemoryUse
from simulator.play.lower import lower
from simulator.predict import Prediction, predict
from simulator.predict.confidence import own_part, upward
from simulator.predict.play import play, step_seconds
from simulator.predict.verdict import cause_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.intervals import intervals
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

GIB = 2**30
PLAN = Plan(dp_shard=8, seq_len=2048)


def predicted(plan: Plan = PLAN, **kwargs: object) -> Prediction:
    cluster = Cluster.load("hgx-h100-8")
    return predict(Model.load("mpt-1b"), plan, cluster, Calibration.datasheet(cluster.device), **kwargs)  # type: ignore[arg-type]


def use(allocated: int, reserved: int, high: int, capacity: int = 80 * GIB) -> MemoryUse:
    return MemoryUse(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        low_reserved_bytes=allocated,
        high_reserved_bytes=high,
        outside_torch_bytes=2 * GIB,
        capacity_bytes=capacity,
        resident_bytes=10 * GIB,
        by_category={"activations": 30 * GIB, "parameters": 10 * GIB},
        peak_moment="backward head mb0",
    )


def test_interval_and_bounds_bracket_the_step() -> None:
    p = predicted()
    assert p.low_s < p.step_s < p.high_s
    assert p.lower_s <= p.step_s <= p.upper_s
    # errors of a time are ratios; beside what may only be slower, as loaders and logs of some milliseconds, both ends are as far
    late = sum(one**2 for name, one in p.spread.items() if upward(name))
    down, up = math.log(p.step_s / p.low_s), math.log(p.high_s / p.step_s)
    assert late > 0
    assert up**2 - down**2 == pytest.approx(1.6449**2 * late, rel=1e-9)


def test_rates_follow_from_the_step() -> None:
    p = predicted(Plan(dp_shard=8, seq_len=2048, micro_batch_size=2, num_micro_batches=3))
    assert p.tokens_per_step == 8 * 2 * 3 * 2048
    assert p.tokens_per_s == p.tokens_per_step / p.step_s
    model_flop = Model.load("mpt-1b").model_flop_per_sequence(2048) * 8 * 2 * 3
    assert p.mfu == pytest.approx(model_flop / (p.step_s * 8 * 989e12), rel=1e-12)


def test_recomputation_counts_in_hfu_only() -> None:
    none, full = predicted(), predicted(Plan(dp_shard=8, seq_len=2048, recompute="full"))
    assert full.model_flop_per_step == none.model_flop_per_step
    assert full.hardware_flop_per_step > 1.2 * none.hardware_flop_per_step
    assert full.memory.peak_allocated_bytes < none.memory.peak_allocated_bytes


def test_an_ideal_machine_meets_its_lower_bound() -> None:
    cluster = Cluster.load("hgx-h100-8")
    p = predict(Model.load("mpt-1b"), PLAN, cluster, Calibration.ideal(), curves=LinkCurves.ideal())
    assert p.step_s < predicted().step_s
    matrix_s = Model.load("mpt-1b").model_flop_per_sequence(2048) / 989e12
    assert p.step_s > matrix_s


def test_a_less_known_stack_widens_the_interval() -> None:
    stack = Stack.load(PLAN.stack)
    sure = predicted(stack=stack.copy_with(sigma=0.01))
    unsure = predicted(stack=stack.copy_with(sigma=0.2))
    assert unsure.high_s > sure.high_s
    # quadrature: the stack's spread adds to what kernels and links leave
    one, other = math.log(sure.high_s / sure.step_s), math.log(unsure.high_s / unsure.step_s)
    factor = intervals().factor(own_part(stack))
    assert other**2 - one**2 == pytest.approx((1.6449 * factor) ** 2 * (0.2**2 - 0.01**2), rel=1e-9)


def test_two_runs_are_equal() -> None:
    one, other = predicted(), predicted()
    assert replace(one, timeline=other.timeline, memory_trace=other.memory_trace) == other
    assert one.timeline.spans == other.timeline.spans


def test_unknown_stack_names_its_neighbours() -> None:
    with pytest.raises(StackError, match="torchtitan-2024-eager"):
        predicted(PLAN.copy_with(stack="torchtitan-2024-eagr"))


def test_a_mesh_of_the_wrong_size_is_an_error_with_the_equation() -> None:
    with pytest.raises(PlanError, match="8"):
        predicted(Plan(dp_shard=6, seq_len=2048))


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        (use(40 * GIB, 45 * GIB, 50 * GIB), Fit.FITS),
        (use(60 * GIB, 77 * GIB, 79 * GIB), Fit.TIGHT),  # 79 + 2 outside > 80
        (use(79 * GIB, 85 * GIB, 90 * GIB), Fit.DOES_NOT_FIT),  # 79 + 2 outside > 80 even without fragmentation
    ],
)
def test_verdict(memory: MemoryUse, verdict: Fit) -> None:
    assert memory.fit is verdict


def test_the_cause_of_an_oom_names_the_owner_and_the_moment() -> None:
    cause = cause_of(use(79 * GIB, 85 * GIB, 90 * GIB))
    assert "activations" in cause
    assert "backward head mb0" in cause


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_micro_batches": 4},
        {"num_micro_batches": 7},
        {"dp_shard": 1, "dp_replicate": 2, "pp": 4, "zero": 0, "num_micro_batches": 8},
        {"dp_shard": 1, "dp_replicate": 8, "zero": 0, "sync_every_steps": 10},
    ],
)
def test_a_step_alone_lasts_as_long_as_one_whose_parts_are_known(fields: dict[str, object]) -> None:
    plan = Plan.model_validate({"dp_shard": 8, "seq_len": 2048} | fields)
    model, cluster = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8")
    calibration = Calibration.for_device(cluster.device)
    curves = calibration.links or default_curves()
    lowering = lower(model, plan, cluster, Stack.load(plan.stack), calibration, curves)
    assert step_seconds(lowering) == play(lowering).step_s


@pytest.mark.parametrize(("seq_len", "met"), [(8192, False), (9216, True)])
def test_a_limit_that_is_never_met_changes_nothing(seq_len: int, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    inputs = Model.load("llama3-8b"), Plan(dp_shard=8, seq_len=seq_len), Cluster.load("hgx-h100-8")
    known = predict(*inputs).memory.pressure
    assert known is not None
    assert (known.num_retries > 0) is met
    monkeypatch.setattr("simulator.memory.use._never_meets", lambda *_: False)
    assert predict(*inputs).memory.pressure == known
