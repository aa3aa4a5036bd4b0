"""Histories of steps: what stands for the micro-batches that are not written one by one."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.memory import MemoryUse, history, simulate_memory
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks

DEVICE = Cluster.load("hgx-h100-8").device
SMALL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, d_ff=2816, vocab_size=4096)
PLAN = {"pp": 2, "dp_shard": 2, "seq_len": 1024, "schedule": "gpipe", "num_micro_batches": 24}


def _use(**fields: Any) -> MemoryUse:
    plan = Plan.model_validate(PLAN | fields)
    stack = Stack.of(plan)
    return simulate_memory(SMALL, plan, stack, build_blocks(SMALL, stack, plan), DEVICE, quick=True)[0]


@pytest.mark.parametrize(
    ("fields", "apart"),
    [
        ({}, 0.03),
        ({"virtual_stages": 2}, 0.03),
        ({"recompute": "full"}, 0.03),
        ({"data_parallel": "deepspeed", "zero": 1}, 0.03),
        ({"data_parallel": "megatron"}, 0.03),
        ({"offload": {"activations": "host"}}, 0.03),
        ({"memory_policy": "expandable"}, 0.03),
        ({"memory_policy": "first_fit"}, 0.03),
        ({"memory_policy": "defrag"}, 0.03),
        ({"memory_policy": "slab"}, 0.06),
    ],
    ids=str,
)
def test_micro_batches_of_gpipe_that_are_not_written_hold_as_much(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], apart: float
) -> None:
    """Live bytes are the same to the byte; what is reserved for them is rounded otherwise."""
    whole = _use(**fields)
    monkeypatch.setattr(history, "_MOST_WRITTEN", 1)
    folded = _use(**fields)
    assert folded.peak_allocated_bytes == whole.peak_allocated_bytes
    assert folded.by_category == whole.by_category
    assert folded.peak_reserved_bytes == pytest.approx(whole.peak_reserved_bytes, rel=apart)


def test_a_thousand_micro_batches_of_gpipe_are_few_events() -> None:
    plan = Plan.model_validate(PLAN | {"num_micro_batches": 10_000})
    stack = Stack.of(plan)
    one = history.write_history(SMALL, plan, stack, build_blocks(SMALL, stack, plan), ())
    assert len(one.events) < 1_000 * history._MOST_WRITTEN
