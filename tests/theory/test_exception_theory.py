"""Clusters whose GPUs differ, against closed forms on ideal links: who is slowed, by how much, and who is not."""

from typing import Any

import pytest

from simulator.base.errors import ClusterError
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective, Compute, Number

MODEL = Model.load("llama3.2-1b")


NO_HOST = dict.fromkeys(
    ("host_launch_s", "host_module_s", "host_kernel_s", "host_collective_s", "step_overhead_s"), 0.0
)


def lowered(num_nodes: int, *exceptions: dict[str, Any], **fields: Any) -> Lowering:
    cluster = Cluster.load("hgx-h100-8", num_nodes)
    data = {name: getattr(cluster, name) for name in Cluster.model_fields}
    cluster = Cluster.parse(data | {"exceptions": list(exceptions)}, "test", ClusterError)
    plan = Plan.model_validate({"seq_len": 2048, "zero": 0, "data_parallel": "megatron"} | fields)
    stack = Stack.load("megatron-core-2025-exposed")  # nothing runs beside communication
    stack = stack.copy_with(**NO_HOST)
    return lower(MODEL, plan, cluster, stack, Calibration.ideal(), LinkCurves.ideal())


def seconds_a_byte(lowering: Lowering, rank: int, role: str) -> Number:
    """Seconds alone of a rank's collectives over a role's groups, per byte: the same for all of them on ideal links."""
    played = play(lowering, fold=False)
    ops = {op.id: op for op in lowering.program(1, rank).ops if isinstance(op, Collective)}
    spans = (span for span in played.timeline.of(f"rank{rank}") if span.stream == f"nccl:{role}")
    (found,) = {span.nominal_s / ops[span.id].size_bytes for span in spans}
    return found


def test_a_step_waits_for_its_slowest_gpu() -> None:
    # Without overlap a step is C + X, compute and communication; with one GPU at a fraction f all others wait in every
    # collective: C/f + X
    even, slow = lowered(2, dp_replicate=16), lowered(2, {"nodes": "1", "gpus": "3", "speed": 0.8}, dp_replicate=16)
    compute = sum(float(op.duration_s) for op in even.program(1).ops if isinstance(op, Compute))
    played = play(slow)
    assert played.step_s - play(even).step_s == pytest.approx(compute / 0.8 - compute, rel=1e-9)
    waits = sum(seconds for name, seconds in played.breakdown.items() if name.startswith("wait:") or name == "idle")
    assert waits == pytest.approx(compute / 0.8 - compute, rel=1e-9)  # of the fifteen others, which are reported
    assert played.kinds[1]["slow_gpu"] == pytest.approx(compute / 0.8 - compute, rel=1e-9)


def test_groups_on_slow_cards_run_at_their_pace_and_others_do_not() -> None:
    # tp 8 fills a node, so 4 nodes are 2 stages of 2 replicas each. Node 3 has half of the cards: the replica groups of
    # stage 1 take twice as long, those of stage 0 as before; products inside nodes do not change.
    fields = {"tp": 8, "pp": 2, "dp_replicate": 2}
    even, slow = lowered(4, **fields), lowered(4, {"nodes": "3", "num_nics": 4}, **fields)
    for rank, factor in ((0, 1), (8, 1), (16, 2), (24, 2)):
        before, after = (seconds_a_byte(one, rank, "replicate") for one in (even, slow))
        assert after == factor * before


def test_messages_into_slow_cards_take_as_long_as_out_of_them() -> None:
    # Stages on nodes 0 and 1. A link is as slow as its slower end, whichever sends: forwards go to node 1, gradients back.
    fields = {"tp": 8, "pp": 2, "num_micro_batches": 1}
    plain = lowered(2, **fields)
    found = {}
    for name, lowering in {
        "even": plain,
        **{n: lowered(2, {"nodes": n, "num_nics": 2}, **fields) for n in "01"},
    }.items():
        spans = play(lowering, fold=False).timeline.of("rank0")
        found[name] = [float(span.nominal_s) for span in spans if span.category == "send_recv"]
    assert found["0"] == found["1"] == pytest.approx([4 * seconds for seconds in found["even"]], rel=1e-9)


def test_links_of_a_node_slow_the_groups_inside_it_alone() -> None:
    # Two nodes of one shard group each (HSDP). Every ring on node 1 has GPU 5's half of the NVLinks.
    fields = {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "data_parallel": "fsdp2"}
    slow = lowered(2, {"nodes": "1", "gpus": "5", "intra_bytes_per_s": 225e9}, **fields)
    assert seconds_a_byte(slow, 8, "shard") == 2 * seconds_a_byte(slow, 0, "shard")
    # replicas have one rank a node: GPU 5 and its peer meet over the NICs
    assert seconds_a_byte(slow, 13, "replicate") == seconds_a_byte(slow, 0, "replicate")


@pytest.mark.parametrize(
    ("fields", "exception", "classes"),
    [
        # everyone in one group: those that are slow, and those that are not
        ({"dp_shard": 512, "zero": 3, "data_parallel": "fsdp2"}, {"nodes": "9"}, 2),
        # slow, their shard mates, their replicas, and the rest
        ({"dp_shard": 16, "dp_replicate": 32, "zero": 3, "data_parallel": "fsdp2"}, {"nodes": "9"}, 4),
        # tp 8 · dp 16 · pp 4: the slow node is a tensor-parallel group, so in its stage there are it and its replicas; in
        # the others its pipeline and the rest
        ({"tp": 8, "dp_replicate": 16, "pp": 4}, {"nodes": "9"}, 8),
        # one GPU of it: also its seven peers, whose replicas wait for them, not for it
        ({"tp": 8, "dp_replicate": 16, "pp": 4}, {"nodes": "9", "gpus": "2"}, 16),
    ],
)
def test_one_slow_node_makes_a_handful_of_classes(
    fields: dict[str, Any], exception: dict[str, Any], classes: int
) -> None:
    lowering = lowered(64, exception | {"speed": 0.9}, **fields)
    assert lowering.rank_classes is not None
    assert len(lowering.rank_classes.classes) == classes
    assert sum(rank_class.num_ranks for rank_class in lowering.rank_classes.classes) == 512
