"""Mixers other than Mamba-2: their FLOP by recurrence, what the scan adds, and where they cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.base.errors import InputError, ModelError, PlanError
from simulator.base.kernels import Scan
from simulator.formats.exchange import Job, export_plan
from simulator.parallel.legality import check_split
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops.build import build_blocks

SIZES = {"name": "m", "d_model": 1024, "num_heads": 8, "d_ff": 2048, "vocab_size": 1024, "positions": "none"}
MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 32, "head_dim": 64, "num_groups": 8, "state_dim": 64},
    "gated_delta": {"num_heads": 32, "head_dim": 64, "num_groups": 8, "state_dim": 64, "conv_bias": False},
    "mamba1": {"num_heads": 2048, "head_dim": 1, "num_groups": 1, "state_dim": 16, "dt_rank": 64, "norm": False},
    "lightning": {"num_heads": 32, "head_dim": 64, "num_groups": 32, "state_dim": 64},
}


def model(kind: str, pattern: str = "M", **changes: Any) -> Model:
    data = {**SIZES, "pattern": pattern, "mamba": {"kind": kind, **MIXERS[kind]}, **changes}
    return Model.parse(data, "m", ModelError)


@pytest.mark.parametrize(("kind", "products"), [("mamba2", 2), ("gated_delta", 3), ("mamba1", 2), ("lightning", 2)])
def test_a_token_passes_the_state_as_often_as_the_recurrence_says(kind: str, products: int) -> None:
    """Into the state and out of it; the delta rule also reads what the state holds for the key (arXiv 2412.06464, eq. 10)."""
    one, none = model(kind), model(kind, "M-")
    inner, state = one.mamba.inner, one.mamba.state_dim  # type: ignore[union-attr]
    matmul = 6 * one.num_matmul_parameters
    assert one.model_flop_per_sequence(512) == 512 * (matmul + 3 * 2 * products * inner * state)
    assert none.model_flop_per_sequence(512) - one.model_flop_per_sequence(512) == 512 * 6 * 3 * 1024 * 2048


def scan_flop(kind: str) -> int:
    (block,) = build_blocks(model(kind), Stack.load("torch-2.6-eager"), Plan(seq_len=2048)).body
    return sum(kernel.flop for op in block.ops for kernel in op.forward if isinstance(kernel, Scan))


def test_chunks_of_the_delta_rule_cost_more_than_those_of_mamba_2() -> None:
    assert scan_flop("gated_delta") > scan_flop("mamba2")
    assert scan_flop("mamba1") == 9 * 2048 * 2048 * 16  # T I N, nine times


@pytest.mark.parametrize("kind", ["gated_delta", "mamba1", "lightning"])
def test_only_mamba_2_is_split(kind: str) -> None:
    cluster = Cluster.load("dgx-h100-8")
    plan = Plan.parse({"data_parallel": "megatron", "tp": 8, "zero": 1}, "plan", PlanError)
    with pytest.raises(PlanError, match=r"splits no .* mixers"):
        check_split(plan, model(kind), cluster)


def test_megatron_cannot_be_told_of_another_mixer() -> None:
    fields = {"data_parallel": "megatron", "stack": "megatron-core-2025", "dp_shard": 8, "zero": 1, "seq_len": 512}
    plan, stack = Plan.parse(fields, "plan", PlanError), Stack.load("megatron-core-2025")
    job = Job(plan=plan, model=model("gated_delta", "M*"), stack=stack, gpus_per_node=8)
    with pytest.raises(InputError, match=r"model\.mamba"):
        export_plan(job, "megatron")


def test_a_mixer_beside_attention_shares_its_norm() -> None:
    """Falcon-H1 (arXiv 2507.22448, section 2.1): one norm before both, one sum behind."""
    both, apart = model("mamba2", "H"), model("mamba2", "M*")
    assert apart.num_parameters - both.num_parameters == 1024
    block = build_blocks(both, Stack.load("torch-2.6-eager"), Plan(seq_len=512)).body[0]
    names = [op.name for op in block.ops]
    assert names.count("norm_1") <= 1
    assert {"scan", "attention", "both"} <= set(names)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mamba": {"kind": "mamba1", "num_heads": 4, "num_groups": 1}}, "a mamba1 mixer has a dt_rank"),
        ({"mamba": {"num_heads": 4, "num_groups": 1, "dt_rank": 2}}, "a mamba2 mixer has no dt_rank"),
        ({"qk_norm_wide": True}, "qk_norm_wide needs qk_norm"),
        ({"norm_bias": True, "norm_weight": False}, "norm_bias needs norm_weight"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        model("mamba2", **change)
