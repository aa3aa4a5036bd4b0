"""Rank order: Megatron-LM's own lists of groups, and what an order does to the links that a step loads."""

from collections import Counter
from typing import Any

import pytest

from simulator.parallel.mesh import Mesh
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective

HGX = Cluster.load("hgx-h100-8")
MAPPED = "tp-cp-ep-pp-dp"  # --use-tp-pp-dp-mapping


def groups(axis: str, num_nodes: int, **fields: Any) -> list[list[int]]:
    mesh = Mesh(Plan.model_validate({"zero": 1, "data_parallel": "megatron"} | fields), HGX.with_nodes(num_nodes))
    return [list(group) for group in mesh.groups(axis)]


def test_the_sixteen_gpus_of_megatrons_documentation() -> None:
    # megatron/core/parallel_state.py, initialize_model_parallel: "2 GPUs to parallelize the model tensor, and 4 GPUs to
    # parallelize the model pipeline": 8 data-parallel, 8 tensor-parallel, 4 pipeline groups of g0 ... g15
    degrees = {"tp": 2, "pp": 4, "dp_shard": 2}
    assert groups("dp_shard", 2, **degrees) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups("tp", 2, **degrees) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert groups("pp", 2, **degrees) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_groups_of_megatrons_other_examples() -> None:
    # the same file, generate_masked_orthogonal_rank_groups: order tp-pp-dp, sizes 2-2-2; order tp-dp-pp, sizes 2-3-4
    assert groups("dp_shard", 1, tp=2, pp=2, dp_shard=2, rank_order="tp-pp-dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    of_three = groups("dp_shard", 3, tp=2, dp_shard=3, pp=4, rank_order="tp-dp-pp")
    assert (of_three[0], of_three[1], of_three[7]) == ([0, 2, 4], [1, 3, 5], [19, 21, 23])


def test_both_of_megatrons_mappings_of_eight_gpus() -> None:
    # rank = tp + 2 dp + 4 pp, and with --use-tp-pp-dp-mapping tp + 2 pp + 4 dp
    degrees = {"tp": 2, "pp": 2, "dp_shard": 2}
    assert groups("pp", 1, **degrees) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups("dp_shard", 1, **degrees) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("pp", 1, **degrees, rank_order=MAPPED) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("dp_shard", 1, **degrees, rank_order=MAPPED) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_replicas_and_context_with_stages_between() -> None:
    # rank = tp + 2 cp + 4 pp + 8 dp: who differs in cp and dp alone is 2 and 8 apart
    degrees = {"tp": 2, "cp": 2, "pp": 2, "dp_shard": 2}
    assert groups("dp_shard_cp", 2, **degrees, rank_order=MAPPED) == [
        [first, first + 2, first + 8, first + 10] for first in (0, 1, 4, 5)
    ]


def lowered(**fields: Any) -> Lowering:
    plan = Plan.model_validate({"seq_len": 2048, "zero": 1, "data_parallel": "megatron"} | fields)
    cluster = HGX.with_nodes(plan.num_devices // 8)
    stack = Stack.load("megatron-core-2025-exposed")
    return lower(Model.load("llama3-8b"), plan, cluster, stack, Calibration.ideal(), LinkCurves.ideal())


def traffic(lowering: Lowering, stage: int) -> Counter[tuple[str, str]]:
    """Bytes of a stage's program by kind and class of link."""
    found: Counter[tuple[str, str]] = Counter()
    for op in lowering.program(4, stage=stage).ops:
        if isinstance(op, Collective):
            for link, size in op.cost.link_bytes.items():
                found[op.kind, link.partition(":")[0]] += int(size)
    return found


@pytest.mark.parametrize(("order", "messages", "gradients"), [("", "inter", "intra"), (MAPPED, "intra", "inter")])
def test_what_crosses_the_network_is_the_outermost_axis(order: str, messages: str, gradients: str) -> None:
    # pp 4 · dp 8 on nodes of 8. Stages outside: eight replicas share a node, and stages talk over the NICs. Stages inside:
    # two pipelines of four stages a node, and a replica group has two ranks on each of its four nodes.
    found = traffic(lowered(pp=4, dp_shard=8, num_micro_batches=4, **({"rank_order": order} if order else {})), 1)
    assert {link for kind, link in found if kind == "send_recv"} == {messages}
    assert gradients in {link for kind, link in found if kind == "reduce_scatter"}
    inside = lowered(pp=4, dp_shard=8, rank_order=MAPPED).mesh.group_shape("dp_shard")
    assert (inside.num_nodes, inside.ranks_per_node, inside.num_groups_per_node) == (4, 2, 4)


def test_bytes_of_messages_are_the_same_wherever_stages_stand() -> None:
    outside, inside = (
        traffic(lowered(pp=4, dp_shard=8, num_micro_batches=4, rank_order=order), 1)
        for order in ("tp-cp-dp-pp", MAPPED)
    )
    assert outside["send_recv", "inter"] == inside["send_recv", "intra"] > 0


def test_orders_of_axes_of_one_rank_are_one() -> None:
    plan = {"dp_shard": 16, "num_micro_batches": 2}
    steps = {play(lowered(**plan, rank_order=order)).step_s for order in ("dp", "pp-dp-tp", "dp_replicate-dp_shard-cp")}
    assert len(steps) == 1
