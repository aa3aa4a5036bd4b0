"""Laws of the verdict: what the word follows from, that nothing told contradicts it, and that memory never harms."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simulator.base.fit import Fit, fit_of
from simulator.base.units import format_bytes
from simulator.formats.writers.json_report import to_json
from simulator.formats.writers.text import render, to_text
from simulator.memory import MemoryUse, Pressure, simulate_memory
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import build_blocks
from tests.examples import examples

MIB = 2**20
SMALL = Model(name="small", num_layers=3, d_model=256, num_heads=4, d_ff=704, vocab_size=1024)
STACK = Stack(name="s", framework="f", date="2026", attention=AttentionBackend(kernel="flash2"), blocks="eager")

plans = st.builds(
    Plan,
    dp_shard=st.sampled_from((1, 2, 8)),
    zero=st.just(3),
    micro_batch_size=st.integers(2, 12),
    num_micro_batches=st.integers(1, 3),
    seq_len=st.sampled_from((64, 256)),
    recompute=st.sampled_from(("none", "selective", "full")),
    optimizer_impl=st.sampled_from(("foreach", "fused", "loop")),
)


@st.composite
def uses(draw: st.DrawFn) -> MemoryUse:
    """Any memory that a step may be found to need: live ≤ low end ≤ reserved ≤ upper end, played again where that may not fit."""
    allocated, low, reserved, high = sorted(draw(st.tuples(*[st.integers(1, 1000)] * 4)))
    outside, capacity = draw(st.integers(0, 200)), draw(st.integers(1, 1200))
    host, drives = draw(st.integers(0, 10)), draw(st.none() | st.integers(0, 10))
    pressure = None
    limit = capacity - outside
    if allocated <= limit < high:
        fails = draw(st.booleans()) and reserved > limit
        pressure = Pressure(
            peak_reserved_bytes=draw(st.integers(limit + 1, limit + 100) if fails else st.integers(allocated, min(limit, reserved))),
            num_retries=draw(st.integers(0, 3)) if reserved > limit else 0,
            malloc_calls=1, malloc_bytes=1, free_calls=1, free_bytes=1, fails=fails,
        )  # fmt: skip
    return MemoryUse(
        peak_allocated_bytes=allocated, peak_reserved_bytes=reserved, low_reserved_bytes=low, high_reserved_bytes=high,
        outside_torch_bytes=outside, capacity_bytes=capacity, resident_bytes=0, by_category={"activations": allocated},
        peak_moment="somewhere", pressure=pressure, host_bytes=host, host_capacity_bytes=drives and 5,
    )  # fmt: skip


def device(memory_bytes: int) -> Device:
    peak = PeakFlop(fp32=2e13, bf16=3e14)
    return Device(
        name="gpu", architecture="ampere", memory_bytes=memory_bytes, memory_bytes_per_s=2e12,
        peak_flop_per_s=peak, num_sms=108, power_w=400,
    )  # fmt: skip


def used(plan: Plan, memory_bytes: int) -> MemoryUse:
    return simulate_memory(SMALL, plan, STACK, build_blocks(SMALL, STACK, plan), device(memory_bytes))[0]


@functools.cache
def predicted() -> Prediction:
    """Any prediction, to be given another memory."""
    return predict(SMALL, Plan(dp_shard=8, seq_len=64), Cluster.load("hgx-h100-8"))


def word_of(memory: MemoryUse) -> str:
    """The definitions of docs/guides/memory.md, written down once more."""
    limit = memory.capacity_bytes - memory.outside_torch_bytes
    too_low = memory.host_capacity_bytes is not None and memory.host_bytes > memory.host_capacity_bytes
    live_too_large = memory.peak_allocated_bytes > limit
    best_too_large = memory.pressure.fails if memory.pressure else memory.peak_reserved_bytes > limit
    if too_low or live_too_large or best_too_large:
        return "does not fit"
    return "fits" if memory.high_reserved_bytes <= limit else "tight"


@given(memory=uses())
def test_the_word_follows_from_live_bytes_best_estimate_upper_end_and_capacity(memory: MemoryUse) -> None:
    assert memory.fit == word_of(memory)
    again = fit_of(
        live_bytes=memory.peak_allocated_bytes + memory.outside_torch_bytes,
        best_bytes=memory.used_bytes,
        upper_bytes=memory.high_reserved_bytes + memory.outside_torch_bytes,
        capacity_bytes=memory.capacity_bytes,
    )
    assert memory.binding.name or again is memory.fit


@given(memory=uses())
def test_no_number_beside_the_word_contradicts_it(memory: MemoryUse) -> None:
    told = replace(predicted(), memory=memory)
    needed, there = memory.binding[1:]
    assert (needed <= there) == told.fits
    assert told.needs.startswith(f"{format_bytes(needed)} of {format_bytes(there)}")
    assert ("too much" in told.needs) == (told.verdict is Fit.DOES_NOT_FIT)
    assert ("used after" in told.needs) == memory.retries
    assert not (memory.retries and told.verdict is not Fit.TIGHT)
    count = memory.pressure.num_retries if memory.retries and memory.pressure else 0
    assert not count or f"after {count} retr" in told.needs
    first, second, *_ = to_text(render(told), width=500).splitlines()
    assert first.split("  ")[0] == told.verdict.upper()
    assert told.needs in first
    assert second.strip() == told.cause


@given(memory=uses())
def test_programs_are_told_what_people_are(memory: MemoryUse) -> None:
    told = replace(predicted(), memory=memory)
    data = json.loads(to_json(told))
    assert data["verdict"] == memory.fit == told.verdict
    assert data["fits"] == told.fits == (memory.fit != "does not fit")
    assert told.verdict.exit_code == (0 if told.fits else 4)
    asked = data["memory"]
    assert asked["used_bytes"] == memory.used_bytes == asked["reserved_bytes"] + asked["outside_torch_bytes"]
    assert (asked["used_bytes"] > asked["capacity_bytes"]) <= (data["verdict"] == "does not fit")


@given(memory=uses(), more=st.integers(0, 1000))
def test_more_memory_never_turns_fits_into_less(memory: MemoryUse, more: int) -> None:
    """What fits without retries is not played where memory ends; with more of it neither."""
    larger = replace(memory, capacity_bytes=memory.capacity_bytes + more, pressure=None)
    if memory.fit is Fit.FITS:
        assert larger.fit is Fit.FITS


@examples(20)
@given(plan=plans, memory_mib=st.integers(850, 1000), more_mib=st.integers(0, 200))
def test_more_memory_never_makes_a_step_fit_less(plan: Plan, memory_mib: int, more_mib: int) -> None:
    before, after = (used(plan, mib * MIB) for mib in (memory_mib, memory_mib + more_mib))
    assert after.fit.rank <= before.fit.rank


@examples(30)
@given(plan=plans, memory_mib=st.integers(850, 1000))
def test_a_simulated_step_holds_no_more_than_the_word_allows(plan: Plan, memory_mib: int) -> None:
    memory, trace = simulate_memory(SMALL, plan, STACK, build_blocks(SMALL, STACK, plan), device(memory_mib * MIB))
    held = max(sample.reserved_bytes for sample in trace.samples) + memory.outside_torch_bytes
    assert memory.fit == word_of(memory)
    assert (held <= memory.capacity_bytes) or memory.fit is Fit.DOES_NOT_FIT
    assert (memory.used_bytes <= memory.capacity_bytes) == memory.fit.runs
    assert held <= memory.used_bytes


@examples(20)
@given(plan=plans, data=st.data())
def test_a_smaller_micro_batch_never_raises_the_peak(plan: Plan, data: st.DataObject) -> None:
    smaller = data.draw(st.integers(1, plan.micro_batch_size - 1))
    peaks = [
        used(plan.copy_with(micro_batch_size=size), 80 * 2**30).peak_allocated_bytes
        for size in (smaller, plan.micro_batch_size)
    ]
    assert peaks[0] <= peaks[1]
