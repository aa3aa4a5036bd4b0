"""Folding changes nothing: a step played with one class of each kind of rank and few micro-batches is the step played in full."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.predict import predict
from simulator.predict.play import SimulatedStep, play
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from tests.plan_draws import DENSE, Drawn, drawn

WIDE = {"d_model": 2048, "d_ff": 5632, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 32000}
# Micro-batches that never repeat, or late: (what of the model, machine, nodes, plan)
UNSETTLED: dict[str, tuple[dict[str, Any], str, int, dict[str, Any]]] = {
    "each micro-batch's overlap is a part of the last one's": (
        WIDE,
        "mi300x-8",
        1,
        {"cp": 8, "micro_batch_size": 4, "num_micro_batches": 17, "seq_len": 256, "stack": "deepspeed-0.14"}
        | {"forward_prefetch": 1, "backward_prefetch": 2},
    ),
    "reductions that outlast a micro-batch": (
        {},
        "pcie-rtx4090-4",
        2,
        {"dp_replicate": 8, "zero": 0, "data_parallel": "ddp", "micro_batch_size": 2, "num_micro_batches": 9}
        | {"seq_len": 1024, "sync_every_micro_batch": True, "stack": "megatron-core-2025"},
    ),
    "two stages take turns": (
        {},
        "dgx-a100-80-8",
        2,
        {"dp_shard": 2, "tp": 4, "pp": 2, "zero": 1, "data_parallel": "zero_redundancy", "schedule": "1f1b"}
        | {"micro_batch_size": 2, "num_micro_batches": 17, "seq_len": 4096, "sync_every_micro_batch": True}
        | {"stack": "maxtext-2024"},
    ),
    "a host that falls behind": (
        {},
        "aws-p4d",
        2,
        {"cp": 8, "pp": 2, "data_parallel": "fsdp1", "schedule": "gpipe", "micro_batch_size": 4, "stack": "nemo-24"}
        | {"num_micro_batches": 15, "seq_len": 1024, "rank_order": "tp-pp-dp_shard-cp-dp_replicate"},
    ),
}


def assert_same(folded: SimulatedStep, full: SimulatedStep) -> None:
    slack = 1e-9 * full.step_s
    assert folded.step_s == pytest.approx(full.step_s, rel=1e-9)
    for name in {*folded.breakdown, *full.breakdown}:
        assert folded.breakdown.get(name, 0.0) == pytest.approx(full.breakdown.get(name, 0.0), rel=1e-6, abs=slack), (
            name
        )
    for kind, both in full.communication.items():
        # seconds hidden under compute are of no stretch of the step: a micro-batch may differ by less than can be seen
        assert folded.communication[kind] == pytest.approx(both, rel=1e-3, abs=slack), kind


@pytest.mark.parametrize("seed", range(16))
def test_a_drawn_plan_folds(seed: int) -> None:
    lowering = drawn(seed).lowered()
    assert_same(play(lowering), play(lowering, fold=False))


@pytest.mark.parametrize("why", UNSETTLED)
def test_micro_batches_that_do_not_repeat_are_not_folded(why: str) -> None:
    model, machine, num_nodes, plan = UNSETTLED[why]
    found = Drawn(Model.model_validate({**DENSE, **model}), Plan(**plan), Cluster.load(machine, num_nodes))
    lowering = found.lowered()
    assert_same(play(lowering), play(lowering, fold=False))


def test_memory_knows_no_folding() -> None:
    found = drawn(3)
    folded, full = (predict(found.model, found.plan, found.cluster, fold=fold) for fold in (True, False))
    assert folded.memory == full.memory
    assert folded.memory_trace == full.memory_trace


def test_micro_batches_without_end_settle_as_few_do() -> None:
    """What a repetition may miss is never below what sums of floats differ by."""
    model, machine = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8", 1)
    few, endless = (
        play(Drawn(model, Plan(dp_shard=8, num_micro_batches=count, seq_len=512), machine).lowered()).num_played
        for count in (64, 10**6)
    )
    assert endless == few < 64
