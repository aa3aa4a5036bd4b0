"""DDP's communication hooks: PowerSGD's factors (arXiv 1905.13727, algorithm 1 and section 3) and 16-bit buckets."""

from __future__ import annotations

from math import prod

import pytest

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.play.lower import lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective, Compute, Program
from simulator.work.script import communication, resident_tensors
from simulator.work.script.hooks import compressed
from simulator.work.script.sharding import pieces

MODEL = Model(name="small", num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=4096)
SHAPES = [shape for _, shapes in pieces(MODEL, Plan()) for shape in shapes]
FP32 = 4


def plan(**hook: object) -> Plan:
    return Plan.model_validate({"zero": 0, "dp_replicate": 8, "seq_len": 256, "comm_hook": hook})


def program(plan: Plan) -> Program:
    cluster = Cluster.load("hgx-a100-80-8")
    calibration = Calibration.for_device(cluster.device)
    return lower(MODEL, plan, cluster, Stack.load(plan.stack), calibration, default_curves()).program(1)


def reduced(plan: Plan) -> int:
    return sum(op.size_bytes for op in program(plan).ops if isinstance(op, Collective))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_sends_n_plus_m_times_r_of_each_matrix(rank: int) -> None:
    """Section 3: the factors of an n x m gradient are r (n + m) numbers; vectors travel whole."""
    factors = sum((n + m) * rank for n, m in (s for s in SHAPES if len(s) == 2))
    vectors = sum(prod(s) for s in SHAPES if len(s) == 1)
    assert reduced(plan(kind="powersgd", rank=rank)) == FP32 * (factors + vectors)


def test_a_matrix_that_saves_too_little_travels_whole() -> None:
    """256 x 256 with r = 32: (n + m) r = 16,384 is a quarter of n m, no saving of more than 4."""
    sent = compressed([(256, 256), (256,), (1024, 256)], plan(kind="powersgd", rank=32, min_compression_rate=4))
    assert (sent.matrices, sent.whole_numel) == (((1024, 256, 32),), 256 * 256 + 256)


def test_a_rank_is_at_most_the_shorter_side() -> None:
    assert compressed([(4096, 8)], plan(kind="powersgd", rank=64, min_compression_rate=0.5)).matrices == ((4096, 8, 8),)


def test_error_feedback_holds_every_gradient_once_more_and_a_warm_start_the_factors() -> None:
    def held(**hook: object) -> int:
        return sum(resident_tensors(MODEL, plan(kind="powersgd", rank=2, **hook))["buckets"])

    neither = held(error_feedback=False, warm_start=False)
    assert neither == FP32 * MODEL.num_parameters  # DDP's own buckets
    assert held(warm_start=False) - neither == FP32 * MODEL.num_parameters
    assert held(error_feedback=False) - neither == FP32 * 2 * sum(sum(s) for s in SHAPES if len(s) == 2)


def test_powersgd_takes_three_reductions_of_a_bucket_in_turn_while_the_backward_waits() -> None:
    """The hook ends in a synchronisation of the device (torch 2.13 `decompress`)."""
    ops = program(plan(kind="powersgd")).ops
    sent = [op for op in ops if isinstance(op, Collective) and "embedding" in op.label]
    assert len(sent) == 3  # vectors, P, Q
    ends = [op for op in ops if isinstance(op, Compute) and "passes of" in op.label and sent[-1].id in op.after]
    assert [op.blocking for op in ends] == [True]
    assert all(any(before.id < op.id and before.id in op.after for op in ops) for before in sent)


def test_matrix_products_read_the_gradient_twice_and_write_it_once() -> None:
    """P = M Q and Q = Mᵀ P read M, M = P Qᵀ writes it; 2 n m r FLOP each, from 32 columns on as products."""
    narrow = communication(MODEL, plan(kind="powersgd", error_feedback=False))
    sizes = [prod(s) * FP32 for s in SHAPES if len(s) == 2]
    moved = sum(k.num_bytes for c in narrow for hop in c.hops for k in hop.kernels)
    assert 3 * sum(sizes) < moved < 3.2 * sum(sizes)
    wide = plan(kind="powersgd", rank=64, min_compression_rate=1)
    flop = sum(k.flop for c in communication(MODEL, wide) for hop in c.hops for k in hop.kernels)
    assert flop == sum(3 * 2 * n * m * 64 for n, m in (s for s in SHAPES if len(s) == 2))


@pytest.mark.parametrize("kind", ["fp16_compress", "bf16_compress"])
def test_16_bit_hooks_halve_the_bytes_and_add_their_casts(kind: str) -> None:
    """Cast 4 + 2 bytes, divide 2 + 2, cast back 2 + 4: 16 bytes an element (default_hooks.py)."""
    assert reduced(plan(kind=kind)) == reduced(plan()) // 2
    casts = sum(k.num_bytes for c in communication(MODEL, plan(kind=kind)) for hop in c.hops for k in hop.kernels)
    assert casts == 16 * MODEL.num_parameters


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero": 3, "dp_shard": 8, "dp_replicate": 1}, "communication hooks are DDP's, not fsdp2's"),
        ({"reduce_dtype": "bf16"}, "powersgd sends fp32, and reduce_dtype = bf16"),
        ({"comm_hook": {"kind": "powersgd", "start_step": 1}}, "start_step = 2 or more"),
    ],
)
def test_bad_input(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        check(Plan.model_validate({"zero": 0, "dp_replicate": 8, "comm_hook": {"kind": "powersgd"}, **fields}))
