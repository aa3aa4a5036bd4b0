"""Laws of the verdict: memory never harms, and smaller micro-batches never need more of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simulator.memory import MemoryUse, Pressure, simulate_memory
from simulator.predict.verdict import verdict_of
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import build_blocks
from tests.examples import examples

MIB = 2**20
SMALL = Model(name="small", num_layers=3, d_model=256, num_heads=4, d_ff=704, vocab_size=1024)
STACK = Stack(name="s", framework="f", date="2026", attention=AttentionBackend(kernel="flash2"), blocks="eager")
ORDER = ("OOM", "TIGHT", "FITS")

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
pressures = st.none() | st.builds(
    Pressure,
    num_retries=st.integers(0, 3),
    malloc_calls=st.just(0),
    malloc_bytes=st.just(0),
    free_calls=st.just(0),
    free_bytes=st.just(0),
    fails=st.booleans(),
)


def device(memory_bytes: int) -> Device:
    peak = PeakFlop(fp32=2e13, bf16=3e14)
    return Device(
        name="gpu", architecture="ampere", memory_bytes=memory_bytes, memory_bytes_per_s=2e12,
        peak_flop_per_s=peak, num_sms=108, power_w=400,
    )  # fmt: skip


def used(plan: Plan, memory_bytes: int) -> MemoryUse:
    return simulate_memory(SMALL, plan, STACK, build_blocks(SMALL, STACK, plan), device(memory_bytes))[0]


@given(
    sizes=st.tuples(*[st.integers(0, 1000)] * 4),
    pressure=pressures,
    more=st.integers(0, 1000),
    later=pressures,
)
def test_more_memory_never_turns_fits_into_less(
    sizes: tuple[int, int, int, int], pressure: Pressure | None, more: int, later: Pressure | None
) -> None:
    allocated, reserved, outside, capacity = sizes
    memory = MemoryUse(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=allocated + reserved,
        low_reserved_bytes=allocated + reserved // 2,
        high_reserved_bytes=allocated + 2 * reserved,
        outside_torch_bytes=outside,
        capacity_bytes=capacity,
        resident_bytes=0,
        by_category={"activations": allocated},
        peak_moment="somewhere",
        pressure=pressure,
    )
    before = verdict_of(memory)[0]
    after = verdict_of(replace(memory, capacity_bytes=capacity + more, pressure=later))[0]
    if before == "FITS":
        assert after == "FITS"
    if after == "OOM" and before == "TIGHT":  # only how the allocator happens to fragment may say so
        assert later is not None
        assert later.fails


@examples(20)
@given(plan=plans, memory_mib=st.integers(850, 1000), more_mib=st.integers(0, 200))
def test_more_memory_never_makes_a_step_fit_less(plan: Plan, memory_mib: int, more_mib: int) -> None:
    before, after = (used(plan, mib * MIB) for mib in (memory_mib, memory_mib + more_mib))
    assert ORDER.index(verdict_of(before)[0]) <= ORDER.index(verdict_of(after)[0])


@examples(20)
@given(plan=plans, data=st.data())
def test_a_smaller_micro_batch_never_raises_the_peak(plan: Plan, data: st.DataObject) -> None:
    smaller = data.draw(st.integers(1, plan.micro_batch_size - 1))
    peaks = [
        used(plan.copy_with(micro_batch_size=size), 80 * 2**30).peak_allocated_bytes
        for size in (smaller, plan.micro_batch_size)
    ]
    assert peaks[0] <= peaks[1]
