"""Uneven shards of FSDP: bytes of each rank by arithmetic, equal GPUs as before, and what it takes and saves."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.parallel.model_shard import shard_shares
from simulator.spec.cluster.gpu_kinds import GpuKinds
from simulator.work.script import communication, resident_tensors, units

A100 = Cluster.load("hgx-a100-80-8")
# Every tensor is a multiple of 8 ranks, so that no padding hides in the figures
MODEL = Model(name="even", num_layers=3, d_model=256, num_heads=4, d_ff=1024, vocab_size=2048)
PLAN = Plan(dp_shard=8, seq_len=512, shard_sizes="by_memory")


def cluster(*exceptions: dict[str, object]) -> Cluster:
    return Cluster.model_validate({**A100.model_dump(), "device": A100.device, "exceptions": list(exceptions)})


SMALL = cluster({"nodes": "0", "gpus": "6-7", "device": "a100-sxm4-40gb"})
FRAGMENTED = cluster(
    {"nodes": "0", "gpus": "0", "free_bytes": 20 * 2**30}, {"nodes": "0", "gpus": "1", "free_bytes": 40 * 2**30}
)


def free_bytes(name: str) -> int:
    device = Cluster.load(name).device
    return device.usable_bytes - device.hypervisor_bytes


def test_shares_are_free_memory_over_the_mean() -> None:
    large, small = free_bytes("hgx-a100-80-8"), free_bytes("hgx-a100-40-8")
    found = shard_shares(PLAN, GpuKinds.of(SMALL))
    mean = (6 * large + 2 * small) / 8
    assert list(found.values()) == [pytest.approx(large / mean), pytest.approx(small / mean)]
    kept = shard_shares(PLAN.copy_with(shard_reserve_bytes=10 * 2**30), GpuKinds.of(FRAGMENTED))
    rest = [large / 2**30 - 10, 20 - 10, 40 - 10]
    mean = (6 * rest[0] + rest[1] + rest[2]) / 8
    assert list(kept.values()) == [pytest.approx(one / mean, rel=1e-6) for one in rest]


@pytest.mark.parametrize("implementation", ["fsdp1", "fsdp2"])
def test_bytes_of_each_rank_are_its_share_and_all_of_them_the_model(implementation: str) -> None:
    """Parameters in fp32 and Adam's two moments: 12 bytes a parameter, of which each rank has its share of an eighth."""
    shares = list(shard_shares(PLAN, GpuKinds.of(SMALL)).values())
    total = 0.0
    for share, count in zip(shares, (6, 2), strict=True):
        plan = PLAN.copy_with(data_parallel=implementation, shard_share=share)
        held = resident_tensors(MODEL, plan)
        size = sum(held["parameters"]) + sum(held["optimizer_state"])
        assert size == pytest.approx(12 * MODEL.num_parameters / 8 * share, rel=2e-3)
        assert [unit.padded_numel for unit in units(MODEL, plan)] == [unit.padded_numel for unit in units(MODEL, PLAN)]
        total += count * size
    assert total == pytest.approx(12 * MODEL.num_parameters, rel=2e-3)


def test_equal_gpus_hold_and_take_what_they_did() -> None:
    equal = predict(MODEL, PLAN.copy_with(shard_sizes="equal"), A100)
    found = predict(MODEL, PLAN, A100)
    assert (found.step_s, found.breakdown) == (equal.step_s, equal.breakdown)
    assert asdict(found.memory) == asdict(equal.memory)


def test_each_part_is_broadcast() -> None:
    """n broadcasts of all parts send S over every link, where a ring's gather sends (n - 1) / n of it."""
    bare = communication(MODEL, PLAN.copy_with(shard_sizes="equal"))
    for one, other in zip(communication(MODEL, PLAN), bare, strict=True):
        assert one.all_gather_forward_bytes == pytest.approx(other.all_gather_forward_bytes * 8 / 7, abs=1)
        assert one.reduce_scatter_bytes == pytest.approx(other.reduce_scatter_bytes * 8 / 7, abs=4)


def test_a_model_fits_that_equal_shards_do_not_let_fit() -> None:
    """13 billion parameters under Adam: 16 bytes each, 26 GB a rank if equal; a third of that where 20 GiB are free."""
    model = Model.load("llama2-13b")
    uneven = Plan(dp_shard=8, seq_len=1024, recompute="full", shard_sizes="by_memory")
    found = predict(model, uneven, FRAGMENTED)
    assert not predict(model, uneven.copy_with(shard_sizes="equal"), FRAGMENTED).fits
    assert found.fits
    used = {kind.kind: kind.memory.resident_bytes for kind in found.kinds}
    ratio = next(size for kind, size in used.items() if "20.0GiB" in kind or "20 GiB" in kind or "20.0 GiB" in kind)
    assert ratio / used["all others"] == pytest.approx(20 * 2**30 / free_bytes("hgx-a100-80-8"), rel=0.01)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data_parallel": "deepspeed"}, "deepspeed with zero = [0-9] cuts its states into equal parts"),
        ({"zero": 1, "data_parallel": "zero_redundancy"}, "zero_redundancy with zero = 1 cuts"),
        ({"tp": 2}, "other parallelism"),
        ({"dp_replicate": 2}, "beside replicas"),
        ({"shard_sizes": "equal", "shard_share": 2.0}, "a rank's part is an equal one"),
    ],
)
def test_combinations_that_are_not_modelled(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check(PLAN.copy_with(**fields))


def test_a_reserve_that_leaves_nothing() -> None:
    with pytest.raises(PlanError, match=r"leaves .* nothing to hold"):
        predict(MODEL, PLAN.copy_with(shard_reserve_bytes=30 * 2**30), FRAGMENTED)
