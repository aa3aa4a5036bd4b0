"""Shards of routed experts: what a GPU holds of every preset mixture, under every stack, on 8 to 4,096 GPUs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, Stack, predict
from simulator.base.errors import PlanError
from simulator.spec.model import ModelPart
from simulator.spec.model.files import preset_names
from simulator.work.script import resident_bytes, units

ANY = Stack.load("torch-2.6-eager")
SIZES = tuple(2**power for power in range(3, 13))
MIXTURES = tuple(name for name in preset_names() if Model.load(name).experts is not None)
FLAT: tuple[dict[str, Any], ...] = (
    {"data_parallel": "fsdp1", "zero": 3},
    {"data_parallel": "deepspeed", "zero": 3},
    {"zero": 1, "data_parallel": "megatron"},
)


def parts(*shape: int, into: int) -> int:
    """Elements of the first of equal parts of dimension 0."""
    return -(-shape[0] // into) * prod(shape[1:])


def held(model: Model, how: str, ranks: int) -> int:
    """Parameters on the fullest GPU, from the shapes alone. how: `rows`, `experts`, or as `rows_beyond` chooses."""
    assert model.experts is not None
    by_rows = how == "rows" or (how == "rows_beyond" and ranks > model.experts.num_experts)
    total = 0
    parts_of_model: tuple[ModelPart, ...] = ("embedding", *model.body, "head")
    for kind in parts_of_model:
        for name, shape in model.parameter_shapes(kind):
            if name.startswith("experts.") and by_rows:
                total += shape[0] * parts(*shape[1:], into=ranks)
            else:
                total += parts(*shape, into=ranks)
    return total


@pytest.mark.parametrize("name", MIXTURES)
def test_more_gpus_hold_less_each(name: str) -> None:
    """Whatever the stack: exactly what its way of cutting leaves, and never more on more GPUs."""
    model = Model.load(name)
    for how in ("rows", "rows_beyond", "rows_with_ep", "experts"):
        expected = "experts" if how == "rows_with_ep" else how  # without ep
        stored, before = ANY.copy_with(expert_shards=how).stored(model), model.num_parameters
        for ranks in SIZES:
            cut = units(stored, Plan(dp_shard=ranks))
            now = sum(unit.shard_numel for unit in cut)
            assert now == held(model, expected, ranks) <= before, (how, ranks)
            assert sum(unit.padded_numel for unit in cut) == now * ranks
            before = now


@pytest.mark.parametrize("name", MIXTURES)
def test_flat_shards_pad_less_than_a_rank_a_unit(name: str) -> None:
    """FSDP1, DeepSpeed and Megatron cut one vector a unit: padding stays below one element a rank and unit."""
    model = Model.load(name)
    for ranks in SIZES:
        for fields in FLAT:
            cut = units(model, Plan(dp_shard=ranks, **fields))
            padding = sum(unit.padded_numel for unit in cut) - model.num_parameters
            assert 0 <= padding < ranks * len(cut)


@pytest.mark.parametrize("stack", Stack.names())
def test_every_stack_holds_a_part_or_says_so(stack: str) -> None:
    """Mixtral 8x7B on 512 GPUs, FSDP2: states are 1/512 of the parameters, or the report tells how much is padding."""
    software = Stack.load(stack)
    model = software.stored(Model.load("mixtral-8x7b"))
    plan = Plan(dp_shard=512, stack=stack)
    states = resident_bytes(model, plan)
    fair = 12 * model.num_parameters / 512  # fp32 parameters and two moments
    padded = (states["parameters"] + states["optimizer_state"]) / fair
    assert padded == pytest.approx(1, rel=0.01) or software.kernels.expert_shards in ("experts", "rows_with_ep")
    assert padded <= 64  # 512 shards of 8 experts


MIXTRAL, NODES = Model.load("mixtral-8x7b"), Cluster.load("dgx-h100-8", num_nodes=64)


def stated(stack: str, **fields: Any) -> list[str]:
    found = predict(MIXTRAL, Plan(dp_shard=512, stack=stack, **fields), NODES).sources
    return [source.detail for source in found if source.what == "padded shards"]


def test_padding_is_told_where_there_is_some() -> None:
    factor = 512 * held(MIXTRAL, "experts", 512) / MIXTRAL.num_parameters
    assert stated("torch-2.6-eager") == []
    assert stated("torchtitan-2025-compiled", ep=8) == []
    (told,) = stated("torchtitan-2025-compiled")
    assert told.startswith(f"{factor:.1f} x")
    assert "whole experts" in told


def test_peak_follows_the_units() -> None:
    """64 nodes: beside activations, a GPU holds its part of the states and one unit whole: not of each shard an expert."""
    plan = Plan(dp_shard=512)
    memory = predict(MIXTRAL, plan, NODES).memory
    root, layer = sorted({unit.padded_numel for unit in units(MIXTRAL, plan)})
    # parameters of a layer and of the next one in bf16, its gradients in bf16 and, to be reduced, in fp32; the root's too
    unit = layer * (2 + 2 + 2 + 4) + root * (2 + 2)
    states = 16 * MIXTRAL.num_parameters / 512
    assert sum(memory.by_category.values()) - memory.by_category["activations"] < states + unit + 2**30


def test_uneven_rows_of_stacked_weights_are_refused() -> None:
    """768 columns of Qwen3's experts over 512 shards: torch shards evenly on any dimension but 0."""
    qwen, stack = Model.load("qwen3-30b-a3b"), Stack.load("torchtitan-2025-compiled")
    rows = stack.copy_with(expert_shards="rows_beyond")
    with pytest.raises(PlanError, match=r"dp_shard: .*768 and 2,048 rows of experts into 512 shards"):
        predict(qwen, Plan(dp_shard=512), NODES, stack=rows)
    assert predict(qwen, Plan(dp_shard=256, dp_replicate=2), NODES, stack=rows).memory.peak_allocated_bytes < 80e9
