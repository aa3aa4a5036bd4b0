"""Laws of the 90 % intervals: they hold the step, start at no less than the data sheet allows, and say something or nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.base.units import NOTHING_NEAR, WIDE, format_interval, format_seconds
from simulator.formats.writers.text import render, to_text
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests.examples import examples

SMALL = Model(name="small", num_layers=2, d_model=1024, num_heads=8, d_ff=4096, vocab_size=1024)
CLUSTER = Cluster.load("hgx-h100-8")


@cache
def predicted(sigma: float, micro_batch_size: int, recompute: str) -> Prediction:
    """A step under a stack that is so uncertain."""
    plan = Plan(dp_shard=8, seq_len=512, micro_batch_size=micro_batch_size, recompute=recompute)  # type: ignore[arg-type]
    stack = Stack.load("torch-2.6-eager")
    stack = stack.model_copy(update={"fitted": stack.fitted.model_copy(update={"sigma": sigma})})
    return predict(SMALL, plan, CLUSTER, stack=stack)


steps = st.builds(
    predicted,
    sigma=st.sampled_from((0.0, 0.1, 0.8, 3.0)),
    micro_batch_size=st.sampled_from((1, 8)),
    recompute=st.sampled_from(("none", "full")),
)


@examples(30)
@given(step=steps)
def test_an_interval_holds_the_step_and_starts_at_no_less_than_the_data_sheet_allows(step: Prediction) -> None:
    at_peak_s = step.hardware_flop_per_step / (step.num_devices * CLUSTER.device.peak("bf16"))
    assert at_peak_s * (1 - 1e-12) <= step.low_s <= step.step_s <= step.high_s
    assert step.lower_s <= step.step_s <= step.upper_s


def test_a_stack_of_which_nothing_is_known_leaves_the_data_sheet() -> None:
    step = predicted(3.0, 8, "none")
    assert abs(step.low_s / step.floor_s - 1) < 1e-12
    assert step.floor_s < step.lower_s


@given(low=st.floats(1e-9, 1e6), factor=st.floats(1.0, 100.0))
def test_an_interval_is_told_or_that_nothing_near_was_measured(low: float, factor: float) -> None:
    assume(abs(factor - WIDE) > 1e-6)
    told = format_interval(low, low * factor), format_interval(low, low * factor, prefix="range ")
    ends = f"{format_seconds(low)} to {format_seconds(low * factor)}"
    if factor > WIDE:
        assert told == (NOTHING_NEAR, f"range {ends}: wide, {NOTHING_NEAR}")
    else:
        assert told == (ends, f"range {ends}")


@examples(30)
@given(step=steps, factor=st.floats(1.0, 3.0))
def test_the_report_says_of_a_wide_interval_that_it_is_one(step: Prediction, factor: float) -> None:
    asked = replace(step, low_s=step.step_s / factor, high_s=step.step_s * factor)
    assume(abs(factor**2 - WIDE) > 1e-6)
    (line,) = (line for line in to_text(render(asked)).splitlines() if line.startswith("  step "))
    assert " to " in line
    assert (NOTHING_NEAR in line) == (factor**2 > WIDE)
