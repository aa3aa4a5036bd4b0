from collections import Counter
from itertools import pairwise, permutations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import InputError, PlanError
from simulator.parallel.legality import check, check_split
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.plan import AXES, Plan
from simulator.work.collectives.ports import local_groups
from tests.examples import examples

HGX = Cluster.load("hgx-h100-8")


LLAMA = Model.load("llama3-8b")


def mesh_of(cluster: Cluster, rank_order: str = "tp-cp-dp-pp", **degrees: int) -> Mesh:
    return Mesh(Plan(**degrees, rank_order=rank_order), cluster)


def brute_shape(mesh: Mesh, axis: str) -> GroupShape:
    """The definition, over all groups and nodes."""
    gpus, domain = mesh.cluster.gpus_per_node, mesh.cluster.nvlink_domain_size
    groups = list(mesh.groups(axis))
    nodes = [Counter(rank // gpus for rank in group) for group in groups]
    return GroupShape(
        num_ranks=len(groups[0]),
        num_nodes=max(map(len, nodes)),
        ranks_per_node=max(max(count.values()) for count in nodes),
        num_groups_per_node=max(Counter(node for count in nodes for node in count).values()),
        spans_domain=any(len({rank // domain for rank in group}) > 1 for group in groups),
        local_stride=groups[0][1] - groups[0][0] if any(max(count.values()) > 1 for count in nodes) else 1,
        node_stride=min((b - a for count in nodes for a, b in pairwise(sorted(count))), default=1),
        local_blocks=mesh.group_shape(axis).local_blocks,  # judged by the groups they make
    )


def test_hsdp_8_by_8_on_8_nodes() -> None:
    """Shards fill a node each; a replica group takes one GPU of each node, and eight of them share a node's NICs."""
    mesh = mesh_of(HGX.with_nodes(8), dp_replicate=8, dp_shard=8)
    assert mesh.group_shape("dp_shard") == GroupShape(
        num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False
    )
    assert mesh.group_shape("dp_replicate") == GroupShape(
        num_ranks=8, num_nodes=8, ranks_per_node=1, num_groups_per_node=8, spans_domain=True
    )
    assert next(mesh.groups("dp_replicate")) == range(0, 64, 8)


def test_fsdp_over_64_gpus_of_a_rack() -> None:
    """16 trays of four are one NVLink domain; two racks are not."""
    rack = Cluster.load("gb200-nvl72", num_nodes=16)
    assert mesh_of(rack, dp_shard=64).group_shape("dp_shard") == GroupShape(
        num_ranks=64, num_nodes=16, ranks_per_node=4, num_groups_per_node=1, spans_domain=False
    )
    assert mesh_of(rack.with_nodes(32), dp_shard=128).group_shape("dp_shard").spans_domain


def test_fused_axes() -> None:
    mesh = mesh_of(HGX.with_nodes(4), dp_replicate=2, dp_shard=4, cp=2, tp=2)
    assert mesh.group_of("dp_shard_cp", 1) == range(1, 16, 2)
    assert mesh.group_shape("dp_shard_cp").num_ranks == 8
    assert mesh.group_shape("dp_cp").num_ranks == 16
    assert list(mesh.groups("world")) == [range(32)]
    assert mesh_of(HGX, dp_replicate=4, cp=2, zero=0).group_shape("dp_replicate_cp").num_ranks == 8
    assert mesh.group_of("dp_shard_cp/4", 11) == range(9, 16, 2)  # the second four of 1, 3 .. 15
    assert [list(group) for group in mesh.groups("dp_shard_cp/8")] == [list(g) for g in mesh.groups("dp_shard_cp")]
    assert mesh.group_of("dp_replicate_cp", 1) == (1, 3, 17, 19)  # dp_shard stands between
    for axis in ("cp_dp_shard", "rows", "", "dp_shard_cp/3", "dp_shard_cp/0", "dp_shard_cp/x"):
        with pytest.raises(PlanError):
            mesh.group_shape(axis)


def test_torch_order() -> None:
    """tp innermost, pp outermost: rank = ((((pp·R + r)·S + s)·C + c)·T + t."""
    mesh = mesh_of(HGX.with_nodes(6), pp=2, dp_replicate=1, dp_shard=3, cp=2, tp=4)
    assert mesh.rank({"pp": 1, "dp_shard": 2, "cp": 1, "tp": 3}) == (((1 * 3) + 2) * 2 + 1) * 4 + 3
    assert list(mesh.coordinates(0)) == list(AXES)
    with pytest.raises(IndexError):
        mesh.coordinates(48)
    with pytest.raises(IndexError):
        mesh.rank({"tp": 4})


DEGREES = st.fixed_dictionaries(
    {axis: st.integers(1, 4) for axis in AXES},
)


ORDERS = st.permutations(["tp", "cp", "dp_shard", "dp_replicate", "pp"]).map("-".join)


@examples(60)
@given(degrees=DEGREES, order=st.one_of(st.just("tp-cp-ep-dp-pp"), ORDERS), data=st.data())
def test_ranks_and_coordinates_are_a_bijection_and_groups_partition(
    degrees: dict[str, int], order: str, data: st.DataObject
) -> None:
    ranks = prod(degrees.values())
    gpus = data.draw(st.sampled_from([n for n in range(1, 9) if ranks % n == 0]))
    mesh = Mesh(Plan(**degrees, rank_order=order), Cluster.synthesise("H100", ranks, gpus))
    for rank in range(ranks):
        assert mesh.rank(mesh.coordinates(rank)) == rank
    for axis in (*AXES, "dp", "dp_shard_cp", "dp_cp", "world"):
        groups = list(mesh.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(range(ranks))
        assert all(mesh.group_of(axis, rank) == group for group in groups for rank in group)
        assert mesh.group_shape(axis) == brute_shape(mesh, axis)
    for axis in AXES:
        for group in mesh.groups(axis):
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(degrees[axis]))


@examples(30)
@given(degrees=DEGREES, order=st.one_of(st.just("tp-cp-ep-dp-pp"), ORDERS), trays=st.integers(1, 4))
def test_shapes_on_ragged_domains(degrees: dict[str, int], order: str, trays: int) -> None:
    """Domains of 4, 8, 12 or 16 GPUs on trays of four, under any degrees."""
    ranks = prod(degrees.values())
    if ranks % 4:
        degrees = {**degrees, "pp": 4}
        ranks = prod(degrees.values())
    cluster = Cluster.synthesise("GB200", ranks, 4).model_copy(update={"nvlink_domain_size": 4 * trays})
    mesh = Mesh(Plan(**degrees, rank_order=order), cluster)
    for axis in (*AXES, "dp", "dp_shard_cp", "dp_cp", "world"):
        assert mesh.group_shape(axis) == brute_shape(mesh, axis)


@examples(60)
@given(degrees=DEGREES, order=ORDERS)
def test_groups_on_a_node_are_those_of_its_first_gpus(degrees: dict[str, int], order: str) -> None:
    """What a wired node is told of a shape: which of its GPUs form groups. Nodes of 16 hold every axis whole or in halves."""
    degrees = {axis: 2 if size < 3 else 4 for axis, size in degrees.items()}
    mesh = Mesh(Plan(**degrees, rank_order=order), Cluster.synthesise("H100", prod(degrees.values()), 16))
    for axis in (*AXES, "dp_shard_cp", "dp_cp", "dp_replicate_cp"):
        on_first = (tuple(rank for rank in group if rank < 16) for group in mesh.groups(axis))
        assert local_groups(mesh.group_shape(axis), 16) == tuple(group for group in on_first if group)


@examples(60)
@given(degrees=DEGREES, order=ORDERS, stages=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_stages_meet_rank_by_rank(degrees: dict[str, int], order: str, stages: tuple[int, int]) -> None:
    """The shape of two stages is that of all pairs of ranks that differ in the stage alone."""
    degrees = {axis: 2 if size < 3 else 4 for axis, size in degrees.items()} | {"pp": 4}
    mesh = Mesh(Plan(**degrees, rank_order=order), Cluster.synthesise("H100", prod(degrees.values()), 8))
    source, target = stages
    if source == target:
        return
    pairs = [(group[source], group[target]) for group in mesh.groups("pp")]
    assert all(mesh.coordinates(a) | {"pp": target} == mesh.coordinates(b) for a, b in pairs)
    apart = [pair for pair in pairs if pair[0] // 8 != pair[1] // 8]
    found = mesh.pair_shape(source, target)
    assert found.num_nodes == (2 if apart else 1)
    assert found.num_groups_per_node == max(Counter(a // 8 for a, _ in apart or pairs).values())


def test_every_order_of_the_same_degrees_is_another_placement() -> None:
    """tp 2 · pp 2 · dp 2: each of the six orders of the axes gives other groups, and each its own neighbours."""
    found = {}
    for order in permutations(("tp", "pp", "dp")):
        mesh = mesh_of(HGX, "-".join(order), tp=2, pp=2, dp_shard=2)
        found[order] = tuple(tuple(mesh.group_of(axis, 0)) for axis in ("tp", "pp", "dp_shard"))
        assert [mesh.stride({"dp": "dp_shard"}.get(axis, axis)) for axis in order] == [1, 2, 4]
    assert len(set(found.values())) == 6


@pytest.mark.parametrize(
    ("order", "degrees", "wrong"),
    [
        ("tp-xp", {}, "'xp' is not an axis"),
        ("tp-tp-dp", {}, "tp in two places"),
        ("tp-dp_shard-dp", {}, "dp_shard in two places"),
        ("", {}, "is not an axis"),
    ],
)
def test_orders_that_are_none(order: str, degrees: dict[str, int], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        Plan(**degrees, rank_order=order)


def test_orders_that_do_not_fit_the_degrees() -> None:
    with pytest.raises(PlanError, match="does not say where cp = 2, pp = 4 stands"):
        check(Plan(pp=4, cp=2, dp_shard=2, rank_order="tp-dp"))
    with pytest.raises(PlanError, match="puts experts outside dp_shard"):
        check(Plan(ep=4, dp_shard=8, rank_order="tp-dp-ep-pp"))
    with pytest.raises(PlanError, match="puts experts inside tp"):
        check(Plan(ep=4, dp_shard=8, tp=2, rank_order="ep-tp-dp-pp"))
    check(Plan(ep=4, dp_shard=8, rank_order="tp-cp-ep-pp-dp"))
    check(Plan(dp_shard=8, rank_order="dp"))


def test_sixteen_thousand_gpus_build_no_rank_list() -> None:
    mesh = mesh_of(HGX.with_nodes(2048), dp_replicate=16, dp_shard=128, cp=1, tp=8)
    assert mesh.group_shape("dp_shard") == GroupShape(
        num_ranks=128, num_nodes=128, ranks_per_node=1, num_groups_per_node=8, spans_domain=True
    )
    assert isinstance(mesh.group_of("world", 5), range)


def test_degrees_that_do_not_fill_the_cluster() -> None:
    with pytest.raises(PlanError) as caught:
        mesh_of(HGX.with_nodes(2), dp_shard=8)
    (fault,) = caught.value.faults
    assert "pp 1 × dp_replicate 1 × dp_shard 8 × cp 1 × tp 1 = 8" in fault.problem
    assert "16 devices (2 × 8 of hgx-h100-8)" in fault.problem
    assert fault.remedy == "dp_shard = 16, or num_nodes = 1"


def test_every_misfit_at_once() -> None:
    plan = Plan(dp_shard=3, tp=3, pp=2, ep=2)
    with pytest.raises(PlanError) as caught:
        check_split(plan, LLAMA.model_copy(update={"num_layers": 1}), HGX)
    problems = {fault.place: fault for fault in caught.value.faults}
    assert [fault.place for fault in caught.value.faults] == [
        "plan: degrees",
        "plan: tp",
        "plan: tp",
        "plan: tp",
        "plan: ep",
        "plan: pp",
    ]
    assert problems["plan: degrees"].remedy == "dp_shard = 1 fills 6 devices"
    assert problems["plan: tp"].remedy == "tp = 2"
    assert problems["plan: ep"].remedy == "ep = 1"


def test_heads_are_dealt_out_evenly_by_an_all_to_all() -> None:
    plan = Plan(cp=8, seq_len=2048, cp_exchange="all_to_all", zero=0)
    with pytest.raises(PlanError, match="cp_exchange"):
        check_split(plan, LLAMA.model_copy(update={"num_kv_heads": 4}), HGX)
    check_split(plan, LLAMA, HGX)


def test_a_fitting_plan_passes() -> None:
    check_split(Plan(dp_shard=4, tp=2), LLAMA, HGX)
    check_split(Plan(dp_shard=8, ep=4), LLAMA.model_copy(update={"experts": Experts(num_experts=8, top_k=2)}), HGX)


def test_experts_that_do_not_fit_are_refused_with_every_reason() -> None:
    model = LLAMA.model_copy(update={"experts": Experts(num_experts=8, top_k=2, d_ff=100)})
    plan = Plan(dp_shard=4, tp=2, ep=3, seq_len=2048, zero=1, data_parallel="megatron")
    with pytest.raises(PlanError) as caught:
        check_split(plan, model, HGX)
    text = str(caught.value)
    assert "ep = 3 does not divide the model's 8 experts" in text
    assert "etp = 1 keeps experts whole, and all tp = 2 ranks hold the same tokens" in text
    assert [fault.remedy for fault in caught.value.faults] == ["ep = 2", "sequence_parallel = true, or etp = 2"]


def test_expert_degrees_divide_the_ranks_of_a_stage() -> None:
    with pytest.raises(PlanError) as caught:
        check(Plan(dp_shard=6, ep=4, etp=2, zero=1, data_parallel="megatron"))
    text = str(caught.value)
    assert "ep × etp = 4 × 2 does not divide dp_shard × cp × tp = 6" in text
    assert "etp = 2 is neither 1 nor tp = 1" in text
    with pytest.raises(PlanError, match="same rows on every rank"):
        check(Plan(dp_shard=4, expert_capacity_factor=1.0, expert_imbalance=1.2))
    with pytest.raises(PlanError, match="no expert parallelism here"):
        check(Plan(dp_shard=4, ep=2, zero=3, data_parallel="fsdp1"))


def test_groups_of_experts_follow_the_order_of_ranks() -> None:
    """With pipelines inside data parallelism, an expert's group crosses the stages' ranks."""
    plan = Plan(dp_shard=4, tp=2, pp=2, ep=4, zero=1, data_parallel="megatron", sequence_parallel=True)
    plan = plan.copy_with(rank_order="tp-cp-ep-pp-dp")
    mesh = Mesh(plan, HGX.with_nodes(2))
    assert list(mesh.group_of("ep", 0)) == [0, 1, 4, 5]
    assert list(mesh.group_of("expert_dp", 0)) == [0, 8]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp_shard-tp-cp-dp_replicate"])
def test_the_first_ranks_of_groups_are_their_own(order: str) -> None:
    plan = Plan(tp=2, cp=3, pp=5, dp_shard=2, dp_replicate=2, rank_order=order)
    mesh = Mesh(plan, Cluster.load("hgx-h100-8", 15))
    for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate", "dp"):
        groups = list(mesh.groups(axis))
        assert [group[0] for group in groups] == [r for r in range(120) if mesh.group_of(axis, r)[0] == r]
        assert sorted(rank for group in groups for rank in group) == list(range(120))
