from __future__ import annotations

from math import prod
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import WAITED_LAUNCHES
from simulator.work.script import (
    communication,
    gradient_tensors,
    optimizer_tensors,
    pieces,
    resident_bytes,
    resident_tensors,
    stepped_numels,
    units,
)

LLAMA = Model(name="small", num_layers=4, d_model=512, num_heads=8, num_kv_heads=2, d_ff=1408, vocab_size=32_000)


def test_fsdp2_pads_each_parameter_on_dim_0() -> None:
    ranks = 96
    odd = LLAMA.model_copy(update={"vocab_size": 32_003})
    for unit in units(odd, Plan(dp_shard=ranks)):
        expected = [-(-shape[0] // ranks) * prod(shape[1:]) for shape in unit.shapes]
        assert list(unit.local_numels) == expected
        assert unit.padded_numel == ranks * sum(expected)


def test_fsdp1_pads_the_flat_parameter_only() -> None:
    for unit in units(LLAMA, Plan(dp_shard=96, sharding_strategy="FULL_SHARD")):
        assert 0 <= unit.padded_numel - unit.numel < 96


def test_fsdp_units_are_the_root_and_the_blocks() -> None:
    names = [unit.name for unit in units(LLAMA, Plan(dp_shard=8))]
    assert names == ["root", "layer0", "layer1", "layer2", "layer3"]


def test_ddp_buckets_close_at_their_cap_in_backward_order() -> None:
    buckets = units(LLAMA, Plan(zero=0, dp_replicate=8))
    assert sum(bucket.numel for bucket in buckets) == LLAMA.num_parameters
    assert buckets[0].shapes == ((32_000, 512),)  # the head's matrix alone exceeds the first cap of 1 MiB
    for bucket, cap in zip(buckets[:-1], [2**20] + [25 * 2**20] * len(buckets), strict=False):
        *others, last = bucket.shapes
        assert 4 * sum(map(prod, others)) < cap <= 4 * (sum(map(prod, others)) + prod(last))


def test_an_own_bucket_cap_applies_from_the_first() -> None:
    small = units(LLAMA, Plan(zero=0, dp_replicate=8, bucket_bytes=2**27))
    assert small[0].shapes[0] == (32_000, 512)
    assert len(small[0].shapes) > 1


def test_zero_redundancy_shares_whole_parameters() -> None:
    plan = Plan(zero=1, dp_shard=4, optimizer_impl="loop")
    held = resident_bytes(LLAMA, plan)["optimizer_state"] // 8
    assert held >= 32_000 * 512  # nobody has less than the largest matrix it was given
    assert -(-LLAMA.num_parameters // 4) <= held <= LLAMA.num_parameters // 4 + 32_000 * 512


@pytest.mark.parametrize(
    ("reshard", "again"), [(None, ("layer1",)), (True, ("layer1", "head")), (False, ())], ids=["default", "all", "none"]
)
def test_fsdp2_gathers_again_what_was_resharded(reshard: object, again: tuple[str, ...]) -> None:
    comms = {
        c.unit: c for c in communication(LLAMA, Plan.model_validate({"dp_shard": 8, "reshard_after_forward": reshard}))
    }
    assert [name for name in ("layer1", "head") if comms[name].all_gather_backward_bytes] == list(again)
    assert comms["embedding"].all_gather_forward_bytes > 0
    assert comms["head"].all_gather_forward_bytes == 0  # the root is one unit, gathered before the embedding


def test_resharding_to_a_smaller_group_gathers_there() -> None:
    comms = {c.unit: c for c in communication(LLAMA, Plan(dp_shard=64, reshard_after_forward=8))}
    assert comms["layer0"].backward_gather_ranks == 8


def test_full_size_passes_of_fsdp() -> None:
    """FSDP2: copy-out 2+2 and chunk_cat 2+4 bytes a parameter; FSDP1: cat 4, cast 6, pre-division 8."""
    for name, gather, reduce in (("fsdp2", 4, 6), ("fsdp1", 0, 18)):
        plan = Plan(dp_shard=8, data_parallel=name, reduce_dtype="fp32")
        layer = next(c for c in communication(LLAMA, plan) if c.unit == "layer0")
        numel = layer.reduce_scatter_bytes // 4
        assert sum(k.num_bytes for k in layer.gradient_kernels) == reduce * numel
        copies = [k for k in layer.gather_forward_kernels if k.op == "copy"]
        assert sum(k.num_bytes for k in copies) == gather * numel


def test_hsdp_reduces_shards_between_replicas() -> None:
    layer = next(c for c in communication(LLAMA, Plan(dp_shard=8, dp_replicate=4)) if c.unit == "layer0")
    assert layer.all_reduce_bytes * 8 == layer.reduce_scatter_bytes


def test_ddp_sends_every_gradient_once() -> None:
    comms = communication(LLAMA, Plan(zero=0, dp_replicate=8))
    assert sum(c.all_reduce_bytes for c in comms) == 4 * LLAMA.num_parameters
    assert [c.unit for c in comms] == ["embedding", "layer0", "layer1", "layer2", "layer3", "head"]


def test_shard_grad_op_keeps_parameters_between_forward_and_backward() -> None:
    comms = communication(LLAMA, Plan(dp_shard=8, sharding_strategy="SHARD_GRAD_OP"))
    assert not any(c.all_gather_backward_bytes for c in comms)
    assert sum(c.all_gather_forward_bytes for c in comms) >= 2 * LLAMA.num_parameters


def test_gradients_as_bucket_views_are_no_tensors_of_their_own() -> None:
    assert gradient_tensors(LLAMA, Plan(zero=0, dp_replicate=8, gradient_as_bucket_view=True)) == []


def test_adam8bit_state() -> None:
    # bitsandbytes: a byte an element and one fp32 scale in 256, twice; fp32 below 4096 elements
    plan = Plan(optimizer="adam8bit")
    assert sum(optimizer_tensors(2**20, plan)) == 2 * (2**20 + 4 * 2**20 // 256)
    assert sum(optimizer_tensors(1024, plan)) == 2 * 4 * 1024


@pytest.mark.parametrize(("kind", "wide"), [("adam8bit", 4), ("paged_adam8bit", 0), ("lion8bit", 4)])
def test_an_embedding_s_states_stay_wide(kind: str, wide: int) -> None:
    """As transformers' Trainer asks: fp32 in place of a byte an element and its scales; paged ones lie in unified memory."""
    model = Model.load("llama3.2-1b")
    table, moments = model.vocab_size * model.d_model, 1 if kind == "lion8bit" else 2
    plan = Plan(zero=0, data_parallel="ddp", optimizer=kind)
    before, after = (
        sum(resident_tensors(model, one)["optimizer_state"]) for one in (plan, plan.copy_with(wide_embedding=True))
    )
    narrow = (0 if kind.startswith("paged") else table) + 4 * table // 256  # scales are never paged
    assert after - before == moments * (wide * table - narrow)


def test_bitsandbytes_waits_for_each_tensor() -> None:
    """Its step synchronises behind every parameter: the device stands still while Python comes to the next one."""
    model, one = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 1})
    plan = Plan(zero=0, data_parallel="ddp", optimizer="torchao_adam8bit", stack="transformers-2024")
    queued, waiting = (predict(model, each, one) for each in (plan, plan.copy_with(optimizer="adam8bit")))
    tensors = 16 * 9 + 2  # seven matrices and two norms a layer; the table is the head's, too
    assert waiting.step_s - queued.step_s == pytest.approx(tensors * WAITED_LAUNCHES * 17e-6, rel=0.01)


def test_states_of_other_optimizers() -> None:
    """torchao: half a byte, an fp32 scale in 128 and 16 levels, twice; bitsandbytes' Lion: one state; a wide one if small."""
    size = 2**20
    assert sum(optimizer_tensors(size, Plan(optimizer="adam4bit"))) == 2 * (size // 2 + 4 * size // 128 + 64)
    assert sum(optimizer_tensors(1024, Plan(optimizer="adam4bit"))) == 2 * 4 * 1024
    assert sum(optimizer_tensors(size, Plan(optimizer="lion8bit"))) == size + 4 * size // 256
    assert sum(optimizer_tensors(size, Plan(optimizer="lion"))) == 4 * size
    assert sum(optimizer_tensors(size, Plan(optimizer="adafactor", data_parallel="fsdp1"))) == 4 * size  # a flat vector


def test_states_by_shape() -> None:
    model = Model.load("gpt2")
    alone: dict[str, Any] = {"zero": 0, "data_parallel": "ddp", "optimizer_impl": "foreach"}
    shapes = [(name, shape) for name, found in pieces(model, Plan(**alone)) for shape in found]
    inner = [shape for name, shape in shapes if len(shape) > 1 and name.startswith("layer")]
    rest = sum(prod(shape) for _, shape in shapes) - sum(map(prod, inner))

    def states(**fields: Any) -> int:
        return sum(resident_tensors(model, Plan(**{**alone, **fields}))["optimizer_state"])

    # a mean a row and a column in fp32; vectors are not factored
    rows = sum(4 * sum(shape) if len(shape) > 1 else 4 * shape[0] for _, shape in shapes)
    assert states(optimizer="adafactor") == rows
    assert states(optimizer="muon") == 4 * sum(map(prod, inner)) + 8 * rest
    low = sum(2 * 64 * max(shape) + 64 * min(shape) for shape in inner)  # two moments, and the projection
    assert states(optimizer="galore", galore_rank=64) == 4 * low + 8 * rest


def test_whole_matrices_are_asked_for() -> None:
    for fields in ({"dp_shard": 8}, {"zero": 0, "tp": 2}, {"zero": 0, "peft": "lora"}):
        with pytest.raises(PlanError, match="muon steps whole matrices"):
            check(Plan.model_validate({"optimizer": "muon", **fields}))
    with pytest.raises(PlanError, match="rows and columns"):
        check(Plan(optimizer="adafactor", dp_shard=8))
    check(Plan(optimizer="adafactor", dp_shard=8, data_parallel="fsdp1"))


@pytest.mark.parametrize(("optimizer", "momenta"), [("adamw", 2), ("sgd_momentum", 1), ("sgd", 0)])
def test_momenta(optimizer: str, momenta: int) -> None:
    plan = Plan.model_validate({"optimizer": optimizer, "optimizer_impl": "foreach"})
    assert sum(optimizer_tensors(1000, plan)) == momenta * 4000


def test_zero_redundancy_steps_only_its_part() -> None:
    """torch hands out whole parameters, largest first, to the rank that holds least: no rank exceeds half by more than one."""
    model = Model.load("gpt2")
    everything = stepped_numels(model, Plan(zero=0, dp_replicate=2, seq_len=128))
    part = stepped_numels(model, Plan(zero=1, dp_shard=2, seq_len=128))
    assert sum(everything) == model.num_parameters
    assert sum(everything) / 2 <= sum(part) <= sum(everything) / 2 + max(everything)
