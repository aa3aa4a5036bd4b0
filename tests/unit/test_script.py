"""StepScripts: what step_script writes, and a script written by hand, without a model, as time and as memory."""

import ast
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from simulator.base.kernels import Stated, Stream
from simulator.memory.history import label, moment_of, script_history, step_live_bytes
from simulator.play.engine import run
from simulator.play.lower.script import script_program
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.script import implementation_of, step_script
from simulator.work.script.instructions import (
    Communicate,
    GatherUpdated,
    Instruction,
    Launch,
    Pass,
    Reduce,
    Run,
    Storages,
    Unshard,
    Update,
)
from simulator.work.script.order import Chunk
from simulator.work.script.sums import order_sums
from tests.sources import MODULES, ROOT, nodes

GIB, MIB = 2**30, 2**20
CLUSTER = Cluster.load("hgx-h100-8")
STACK = Stack.load("torch-2.6-eager").without_host()


def copy(num_bytes: int) -> tuple[Stream, ...]:
    return (Stream(op="copy", read_bytes=num_bytes, write_bytes=num_bytes),)


# A program of nobody's framework: a gather hidden under a first kernel, and a second kernel that needs it
BY_HAND: tuple[Instruction, ...] = (
    Storages(((2, 0, 64 * MIB, 0), (2, 1, GIB, 1))),  # input, gathered
    Communicate("gather", "all_gather", "shard", GIB),
    Storages(((2, 2, 256 * MIB, 0),)),  # hidden
    Launch("first", "copies", copy(4 * GIB)),
    Storages(((3, 0),)),
    Launch("second", "copies", copy(2 * GIB), after=("gather",)),
    Storages(((3, 1), (3, 2))),
)


def played(script: tuple[Instruction, ...]) -> dict[str, tuple[float, float]]:
    plan = Plan(dp_shard=8, zero=3)
    calibration = Calibration.ideal()
    program = script_program(script, plan, CLUSTER, STACK, calibration, default_curves())
    timeline = run([program])
    return {span.label: (float(span.start_s), float(span.end_s)) for span in timeline.spans}


def test_a_script_written_by_hand_is_played_in_time() -> None:
    spans = played(BY_HAND)
    speed = CLUSTER.device.memory_bytes_per_s
    start, end = spans["second"]
    assert end - start == pytest.approx(2 * 2 * GIB / speed, rel=1e-9)  # read and written once
    assert start == pytest.approx(max(spans["first"][1], spans["gather"][1]), rel=1e-9)
    assert spans["gather"][0] == 0
    assert spans["first"][0] == 0


def test_what_passes_the_host_is_as_fast_as_the_host() -> None:
    """Over PCIe by the tier's rates; in the CPU's memory an eighth of what a node of eight ranks has."""
    tier = CLUSTER.host_tier
    assert tier is not None
    rates = {"h2d": tier.h2d_bytes_per_s, "d2h": tier.d2h_bytes_per_s, "pageable": tier.pageable_bytes_per_s}
    beside = tier.memory_bytes_per_s / 8
    script = tuple(
        Launch(way, "offload", (Stated(num_bytes=GIB, over=way),), stream=1)  # type: ignore[arg-type]
        for way in (*rates, "cpu")
    )
    spans = played(script)
    for way, (start, end) in spans.items():
        latency = 0 if way == "cpu" else tier.copy_latency_s
        assert end - start == pytest.approx(GIB / min(rates.get(way, beside), beside) + latency, rel=1e-9)


def test_what_waits_for_nothing_does_not_wait_for_the_gather() -> None:
    alone = tuple(one._replace(after=()) if isinstance(one, Launch) else one for one in BY_HAND)
    spans = played(alone)
    assert spans["second"][0] == pytest.approx(spans["first"][1], rel=1e-9)


def test_a_script_written_by_hand_is_read_as_memory() -> None:
    history = script_history(BY_HAND)
    live = step_live_bytes(history)
    size, at = live.peak
    assert size == 64 * MIB + GIB + 256 * MIB
    assert label(moment_of(history, at)).endswith("gather")
    assert live.final == 0


def test_units_cannot_stand_among_storages() -> None:
    with pytest.raises(TypeError, match="Update stands for"):
        script_history([Update()])


# -- what is written for described models


def written(plan: Plan, num_layers: int = 3, num_micro_batches: int = 1) -> list[Instruction]:
    return list(step_script(plan, STACK, [Chunk(num_layers)], num_micro_batches))


def units(one: Instruction) -> list[object]:
    assert isinstance(one, Pass)
    return [instruction for group in one.units for instruction in group]


def test_fsdp2_gathers_each_unit_before_it_runs_and_a_layer_ahead_in_the_backward() -> None:
    forward, backward, *_ = written(Plan(dp_shard=8, zero=3))
    gathers = [one.gathers for one in units(forward) if isinstance(one, Unshard)]
    assert gathers == [((0, None),), ((1, None),), ((2, None),), ((3, 0),), ((4, 1),)]
    gathers = [one.gathers for one in units(backward) if isinstance(one, Unshard)]
    assert gathers == [((4, None), (3, None)), ((2, 4),), ((1, 3),), ((0, 2),), ()]


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_every_unit_is_gathered_once_a_pass_before_it_runs(depth: int) -> None:
    plan = Plan(dp_shard=8, zero=3, backward_prefetch=depth, forward_prefetch=depth)
    for one in written(plan, num_layers=5)[:2]:
        seen: list[int] = []
        for instruction in units(one):
            if isinstance(instruction, Unshard):
                seen += [unit for unit, _ in instruction.gathers]
            if isinstance(instruction, Run) and instruction.phase in ("forward", "backward"):
                assert instruction.unit in seen
        assert sorted(seen) == list(range(7))


def test_gradients_are_reduced_in_the_last_micro_batch_where_they_add_up() -> None:
    passes_of = [one for one in written(Plan(dp_replicate=8, zero=0), num_micro_batches=3) if isinstance(one, Pass)]
    backwards = [one for one in passes_of if one.direction == "backward"]
    assert [sum(isinstance(i, Reduce) for i in units(one)) for one in backwards] == [0, 0, 5]
    assert passes_of[0].units is passes_of[2].units or passes_of[2].units is passes_of[4].units  # written once


def test_who_gathers_updated_parameters_before_their_use_does_not_after_the_update() -> None:
    megatron = written(Plan(dp_shard=8, zero=1, data_parallel="megatron"))
    assert sum(isinstance(one, GatherUpdated) for one in units(megatron[0])) == 5
    assert not any(isinstance(one, GatherUpdated) for one in megatron)
    deepspeed = written(Plan(dp_shard=8, zero=1, data_parallel="deepspeed"))
    assert not any(isinstance(one, GatherUpdated) for one in units(deepspeed[0]))
    assert sum(isinstance(one, GatherUpdated) for one in deepspeed[deepspeed.index(Update()) :]) == 5


# -- names


def _names_compared(path: Path) -> list[str]:
    """Places that compare something with an implementation's name."""
    names = {"ddp", "fsdp1", "fsdp2", "zero_redundancy", "deepspeed", "megatron"}
    found = []
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            texts = {c.value for part in parts for c in ast.walk(part) if isinstance(c, ast.Constant)}
            if texts & names and re.search("implementation|data_parallel", " ".join(map(ast.unparse, parts))):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        if isinstance(node, ast.Match) and "implementation" in ast.unparse(node.subject):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_nobody_asks_for_an_implementation_by_name() -> None:
    """But readers and writers of their own formats. Ask for a trait (`simulator.spec.plan.traits`) instead."""
    own = ("formats/readers/plans", "formats/writers")
    asked = [
        place for file in MODULES if not any(part in file.as_posix() for part in own) for place in _names_compared(file)
    ]
    assert asked == []


def test_a_plan_names_its_implementation_or_gets_the_usual_one_of_its_stage() -> None:
    assert [Plan(zero=stage).implementation for stage in range(4)] == ["ddp", "zero_redundancy", "fsdp2", "fsdp2"]
    for name in ("ddp", "fsdp1", "fsdp2", "zero_redundancy", "deepspeed", "megatron"):
        assert implementation_of(Plan(data_parallel=name)).traits.name == name


@pytest.mark.parametrize(
    ("plan", "holds"),
    [
        (Plan(dp_shard=8, zero=3), {"gathers", "updated_last", "waits_for_gather"}),
        (Plan(dp_replicate=8, zero=0), {"updated_last"}),
        (Plan(dp_shard=8, zero=1, data_parallel="megatron"), {"waits_for_updated"}),
        (Plan(dp_shard=8, zero=1, data_parallel="megatron", pp=2), {"waits_for_updated"}),
        (Plan(dp_shard=8, zero=1, data_parallel="deepspeed"), {"updated_last"}),
    ],
)
def test_what_an_order_comes_to(plan: Plan, holds: set[str]) -> None:
    assert {name for name, held in asdict(order_sums(plan, STACK)).items() if held} == holds
