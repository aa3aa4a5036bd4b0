"""Products in pieces beside their collective (asynchronous tensor parallelism): the closed form of a two-stage pipeline."""

from __future__ import annotations

from fractions import Fraction

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Gemm
from simulator.memory import window_bytes
from simulator.play.lower import Lowering, lower
from simulator.play.lower.builder import Builder
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Op

MODEL, TP, SEQ = Model.load("llama3-8b"), 8, 8192
COMPILED = Stack.load("torchtitan-2025-compiled").copy_with(tp_overlap="symmetric_memory")
FUSED = Stack.load("megatron-core-2025")


def lowered(stack: Stack, cluster: str = "hgx-h100-8", batch: int = 1, **fields: object) -> Lowering:
    implementation = {"zero": 3} if stack is COMPILED else {"zero": 1, "data_parallel": "megatron"}
    given = {"tp": TP, "sequence_parallel": True, "seq_len": SEQ, "micro_batch_size": batch, **implementation, **fields}
    where = Cluster.load(cluster)
    plan = Plan.model_validate(given)
    return lower(MODEL, plan, where, stack, Calibration.ideal(), LinkCurves.ideal())


def seconds(lowering: Lowering, *names: str, forward: bool = True) -> float:
    """Of some ops of a layer, one way."""
    ops = [op for op in lowering.blocks.layer.ops if op.name in names]
    phase = lowering.clock.phase(ops if forward else ops[::-1], forward=forward)
    return Builder(lowering.fabric).folded(phase, synchronous=False).duration_s


def products_s(lowering: Lowering, *names: str) -> float:
    ops = [op for op in lowering.blocks.layer.ops if op.name in names]
    return sum(lowering.clock.seconds(k) for op in ops for k in op.forward if isinstance(k, Gemm))


def streams_s(lowering: Lowering, *names: str) -> float:
    """What is no product: copies into the buffer that peers read, sums of what they sent."""
    ops = [op for op in lowering.blocks.layer.ops if op.name in names]
    return sum(lowering.clock.seconds(k) for op in ops for k in op.forward if not isinstance(k, Gemm))


def fed(n: int, product_s: Fraction, copy_s: Fraction) -> Fraction:
    """One part is there; the others come one after another, and each product waits for its own."""
    end = Fraction(0)
    for part in range(n):
        end = max(end, part * copy_s) + product_s
    return end


def drained(n: int, product_s: Fraction, copy_s: Fraction) -> Fraction:
    """Each part leaves when it is ready and the one before has left; the rank's own is the last, and stays."""
    left = Fraction(0)
    for part in range(n - 1):
        left = max(left, (part + 1) * product_s) + copy_s
    return max(left, n * product_s)


@pytest.mark.parametrize("copy_s", [Fraction(1, 3), Fraction(1), Fraction(5, 2)])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_both_orders_have_the_same_closed_form(n: int, copy_s: Fraction) -> None:
    product_s = Fraction(1)
    closed = product_s + (n - 1) * max(product_s, copy_s)
    assert fed(n, product_s, copy_s) == drained(n, product_s, copy_s) == closed


def _copies_s(lowering: Lowering, num_bytes: int) -> Fraction:
    """One of n - 1 copies of a part over a port of the data sheet's speed."""
    return Fraction(num_bytes, TP) / Fraction(lowering.cluster.intra.bytes_per_s)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "names", [("attention.enter", "q", "k", "v"), ("mlp.enter", "gate", "up"), ("out",), ("down",)]
)
def test_compiled_products_and_copies_are_a_pipeline(names: tuple[str, ...], batch: int) -> None:
    lowering = lowered(COMPILED, batch=batch)
    copy_s = _copies_s(lowering, 2 * batch * SEQ * MODEL.d_model)
    product_s = Fraction(products_s(lowering, *names)) / TP
    order = fed if len(names) > 1 else drained
    expected = float(order(TP, product_s, copy_s)) + streams_s(lowering, *names)
    assert seconds(lowering, *names) == pytest.approx(expected, rel=1e-9)


def test_transformer_engine_gathers_by_copies_and_scatters_in_four_parts() -> None:
    lowering = lowered(FUSED)
    whole = 2 * SEQ * MODEL.d_model
    copy_s, product_s = _copies_s(lowering, whole), Fraction(products_s(lowering, "qkv")) / TP
    assert seconds(lowering, "qkv") == pytest.approx(float(fed(TP, product_s, copy_s)), rel=1e-9)
    # every part is sent, the last one after the product has ended
    part_s, product_s = Fraction(TP - 1, 4) * copy_s, Fraction(products_s(lowering, "out")) / 4
    left = Fraction(0)
    for part in range(4):
        left = max(left, (part + 1) * product_s) + part_s
    assert seconds(lowering, "out") == pytest.approx(float(left), rel=1e-9)


def test_pieces_compute_and_send_what_the_whole_does() -> None:
    plain = lowered(Stack.load("torchtitan-2025-compiled")).blocks.layer
    pieces = lowered(COMPILED).blocks.layer
    assert (pieces.forward_flop, pieces.backward_flop) == (plain.forward_flop, plain.backward_flop)
    for way in ("forward_exchanges", "backward_exchanges"):
        assert _sent(pieces.ops, way) == _sent(plain.ops, way)


def _sent(ops: tuple[Op, ...], way: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for op in ops:
        for exchange in getattr(op, way):
            found[exchange.kind] = found.get(exchange.kind, 0) + exchange.num_bytes
    return found


def test_what_peers_read_lies_outside_the_allocator() -> None:
    plan, whole = lowered(COMPILED).plan, 2 * SEQ * MODEL.d_model
    assert window_bytes(MODEL, plan, COMPILED) == 2 * whole // TP  # two parts, fetched in turn
    assert window_bytes(MODEL, plan, FUSED) == 10 * whole  # initialize_ub: ten names, each all tokens
    assert window_bytes(MODEL, plan.copy_with(sequence_parallel=False), FUSED) == 0


def test_symmetric_memory_ends_with_the_nvlink_domain() -> None:
    with pytest.raises(PlanError, match="reads its peers' memory over NVLink"):
        lower(
            Model.load("llama2-7b"),
            Plan.model_validate({"tp": 16, "sequence_parallel": True, "seq_len": SEQ, "dp_shard": 1}),
            Cluster.load("hgx-h100-8").with_nodes(2),
            COMPILED,
            Calibration.ideal(),
            LinkCurves.ideal(),
        )


@pytest.mark.parametrize(("recipe", "pieces"), [("tensorwise", TP), ("rowwise", 1)])
def test_a_cast_between_gather_and_product_keeps_them_apart(recipe: str, pieces: int) -> None:
    ops = lowered(COMPILED, precision="fp8", fp8_recipe=recipe).blocks.layer.ops
    gathers = [e for op in ops for e in (*op.forward_exchanges, *op.backward_exchanges) if e.kind == "all_gather"]
    scatters = [e for op in ops for e in op.forward_exchanges if e.kind == "reduce_scatter"]
    assert [e.pieces for e in gathers] == [pieces] * 4  # forward into both regions, backward out of both
    assert [e.pieces for e in scatters] == [TP] * 2
    read = [k.batch for op in ops if op.name in ("q", "up") for k in op.forward if isinstance(k, Gemm)]
    assert read == [pieces] * 2


def test_what_userbuffers_leave_whole_is_exposed() -> None:
    whole = Stack.model_validate({**FUSED.model_dump(exclude_unset=True), "tp_whole": ["all_gather", "reduce_scatter"]})
    lowering, cut = lowered(whole), lowered(FUSED)
    exchange_s = float((TP - 1) * _copies_s(lowering, 2 * SEQ * MODEL.d_model))
    for name in ("qkv", "out"):
        assert seconds(lowering, name) == pytest.approx(products_s(lowering, name) + exchange_s, rel=1e-9)
        assert seconds(cut, name) < seconds(lowering, name)
    assert seconds(cut, "out", forward=False) < seconds(lowering, "out", forward=False)
