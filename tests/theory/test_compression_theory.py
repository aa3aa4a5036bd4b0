"""ZeRO++ (arXiv 2306.10209) and MiCS (arXiv 2205.00119): volumes between nodes, and what the second copy holds."""

from __future__ import annotations

from fractions import Fraction

import pytest

from simulator.base.errors import PlanError
from simulator.memory import MemoryUse, simulate_memory
from simulator.parallel.legality import check
from simulator.play.lower import Lowering, lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective
from simulator.work.script import communication
from simulator.work.script.sharding import pieces

NODES, GPUS = 4, 8
RANKS = NODES * GPUS
# Every matrix divides by 2 · ranks · 8000, so that no padding and no partial block hides in the figures.
MODEL = Model(
    name="even", num_layers=2, d_model=1280, num_heads=10, d_ff=5120, vocab_size=32_000, tied_embeddings=False
)
M = 2 * MODEL.num_parameters  # the paper's letter: 16-bit bytes of the model
ALL = {"quantized_weights": True, "secondary_ranks": GPUS, "quantized_gradients": True}


def plan(**fields: object) -> Plan:
    base = {"data_parallel": "deepspeed", "zero": 3, "dp_shard": RANKS, "stack": "deepspeed-0.14", "seq_len": 512}
    return Plan.model_validate({**base, **fields})


def lowering(plan: Plan) -> Lowering:
    cluster = Cluster.load("hgx-a100-80-8", NODES)
    calibration = Calibration.for_device(cluster.device)
    return lower(MODEL, plan, cluster, Stack.load(plan.stack), calibration, default_curves())


def matrices() -> tuple[int, int]:
    """Parameters in matrices, and scales of their int4: a rank's longest side each, 4 bytes."""
    shapes = [shape for _, shapes in pieces(MODEL, Plan()) for shape in shapes if len(shape) == 2]
    return sum(a * b for a, b in shapes), 4 * sum(max(a, b, RANKS) for a, b in shapes)


def test_quantised_weights_halve_the_gathers() -> None:
    """qwZ: M becomes M/2, and 4 bytes of scale for at most 8,000 elements of a rank's part of a unit."""
    for before, after in zip(
        communication(MODEL, plan()), communication(MODEL, plan(zeropp={"quantized_weights": True})), strict=True
    ):
        part = before.all_gather_forward_bytes // 2 // RANKS
        scales = 4 * RANKS * -(-part // 8000)
        assert after.all_gather_forward_bytes == before.all_gather_forward_bytes // 2 + scales
        assert after.all_gather_backward_bytes == after.all_gather_forward_bytes
        assert after.reduce_scatter_bytes == before.reduce_scatter_bytes


def test_volume_between_nodes_falls_from_3m_to_three_quarters_of_m() -> None:
    """Table 1: M/2 to gather for the forward, nothing for the backward, M/4 of gradients, per node. Scales apart.

    ZeRO-3 crosses the nodes with M for each of its three collectives. Of qgZ's second exchange each GPU of a node sends
    a node's part of the int4, M/4 divided by the GPUs of a node: together M/4.
    """
    plain = communication(MODEL, plan(), GPUS)
    whole = sum(c.all_gather_forward_bytes + c.all_gather_backward_bytes + c.reduce_scatter_bytes for c in plain)
    padding = sum(c.reduce_scatter_bytes for c in plain) - M
    assert whole == 3 * (M + padding)
    comms = communication(MODEL, plan(zeropp=ALL), GPUS)
    forward = sum(c.all_gather_forward_bytes for c in comms)
    assert M / 2 <= forward <= Fraction(M, 2) * (1 + Fraction(4, 1000)) + padding
    assert {c.backward_gather_ranks for c in comms} == {GPUS}  # a node's own ranks: nothing crosses
    numel, scales = matrices()
    far = GPUS * sum(hop.size_bytes for c in comms for hop in c.hops if hop.role == "shard_far")
    assert far == pytest.approx(numel // 2 + scales, abs=GPUS * len(comms))  # whole bytes a unit
    assert numel // 2 == pytest.approx(M / 4, rel=0.001)  # norms, 0.1 %, are scattered as before
    assert forward + far < Fraction(3, 4) * M * (1 + Fraction(1, 100))


def test_gradients_take_two_exchanges() -> None:
    """The first inside nodes with all int4 (M/4), the second between them with an eighth, each matrix on its own."""
    comm = next(c for c in communication(MODEL, plan(zeropp=ALL), GPUS) if c.unit == "layer0")
    near, far, rest = comm.hops
    shapes = [shape for shape in dict(pieces(MODEL, Plan()))["layer0"] if len(shape) == 2]
    numel = sum(a * b for a, b in shapes)
    assert near.size_bytes == numel // 2 + 4 * sum(max(shape) for shape in shapes)
    assert far.size_bytes == near.size_bytes // GPUS
    assert (near.count, far.count) == (2 * len(shapes),) * 2  # values and scales
    assert rest.size_bytes == 2 * 2 * 1280  # two norms, in 16 bits
    assert near.kernels[0].num_bytes == 2 * numel + near.size_bytes


def test_backward_and_later_forwards_gather_in_the_node() -> None:
    program = lowering(plan(zeropp={"secondary_ranks": GPUS}, num_micro_batches=2)).program(2)
    gathers = [op for op in program.ops if isinstance(op, Collective) and op.kind == "all_gather"]
    roles = {(op.label.split()[2], "backward" in op.label): op.stream.removeprefix("nccl:") for op in gathers}
    assert roles == {
        ("mb0", False): "shard",
        ("mb0", True): "reshard",
        ("mb1", False): "reshard",
        ("mb1", True): "reshard",
    }


def used(plan: Plan) -> MemoryUse:
    it = lowering(plan)
    return simulate_memory(MODEL, plan, it.stack, it.blocks, it.device)[0]


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_the_second_copy_costs_its_part_of_the_parameters(ranks: int) -> None:
    """2Ψ / ranks bytes from the forward on; to a few blocks of the allocator's 512 bytes."""
    more = used(plan(zeropp={"secondary_ranks": ranks})).peak_allocated_bytes - used(plan()).peak_allocated_bytes
    assert more == pytest.approx(M / ranks, abs=1024 * (MODEL.num_layers + 2))


def test_mics_sums_between_groups_with_the_last_micro_batch_alone() -> None:
    """Two-hop gradient synchronisation: reduce-scatter in the group each time, the shards' all-reduce once."""
    mics = plan(dp_shard=GPUS, dp_replicate=NODES, num_micro_batches=3)
    ops = [op for op in lowering(mics).program(3).ops if isinstance(op, Collective)]
    scattered = sum(op.size_bytes for op in ops if op.kind == "reduce_scatter")
    summed = sum(op.size_bytes for op in ops if op.kind == "all_reduce")
    assert scattered == pytest.approx(3 * M, rel=1e-4)
    assert summed * GPUS == pytest.approx(M, rel=1e-4)


def test_mics_gathers_between_nodes_first() -> None:
    """Hierarchical all-gather of a group of p ranks on nodes of k: M k-ths between nodes, then all inside (section 3.3)."""
    mics = plan(dp_shard=2 * GPUS, dp_replicate=2, hierarchical_gather=True)
    ops = [op for op in lowering(mics).program(1).ops if isinstance(op, Collective) and op.kind == "all_gather"]
    far = sum(op.size_bytes for op in ops if op.stream == "nccl:shard_far")
    near = sum(op.size_bytes for op in ops if op.stream == "nccl:shard_near")
    assert far * GPUS == near == pytest.approx(2 * M, rel=1e-4)
    shape = lowering(mics).fabric.shape("shard_far")
    assert (shape.num_ranks, shape.ranks_per_node) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero": 2, "zeropp": ALL}, ["stage 3"]),
        ({"data_parallel": "fsdp2", "zeropp": ALL}, ["stage 3"]),
        ({"zeropp": {"secondary_ranks": 5}}, ["5 does not divide", "secondary_ranks = 4"]),
        (
            {"zeropp": ALL, "dp_shard": 16, "dp_replicate": 2, "precision": "fp32"},
            ["dp_shard = 32", "quantise 16-bit values"],
        ),
        ({"zeropp": ALL, "tp": 2}, ["tp = 1"]),
        ({"hierarchical_gather": True}, ["dp_replicate = the number of groups"]),
    ],
)
def test_what_has_no_meaning_is_told_at_once(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanError) as told:
        check(plan(**fields))
    for word in words:
        assert word in str(told.value)
