"""NCCL's version, variables, tuner tables and plugins: what they mean, what they change, and how faults are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.base.errors import ClusterError, InputError, PlanError, StackError
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl, assignments, efa, read_environment
from simulator.spec.software.nccl.environment import variable_groups
from simulator.spec.software.nccl.tuner import read_tuner
from simulator.spec.software.stack import Stack
from simulator.work.collectives import choose, interference, sigma
from simulator.work.collectives.constants import constants_of
from simulator.work.collectives.tuning import Group, NcclFabric, Pick, pick

GIB, MIB = 2**30, 2**20
H100 = Cluster.load("hgx-h100-8", 16)


def shape(num_ranks: int, num_nodes: int = 1) -> GroupShape:
    return GroupShape(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        ranks_per_node=num_ranks // num_nodes,
        num_groups_per_node=1,
        spans_domain=num_nodes > 1,
    )


def env(**variables: str) -> Nccl:
    return Nccl.of("", variables)


# -- reading ------------------------------------------------------------------------------------------------------------


def test_as_a_shell_sets_them() -> None:
    given = assignments(["NCCL_ALGO=Ring NCCL_PROTO='LL,Simple'", "NCCL_DEBUG=INFO"], "--env")
    assert given == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL,Simple", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("text", ["NCCL_ALGO", "=3", "NCCL_ALGO='Ring", "NCCL_ALGO=Ring NCCL_ALGO=Tree"])
def test_what_a_shell_would_not_set_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--env"):
        assignments([text], "--env")


def test_every_fault_is_told_at_once() -> None:
    bad = {
        "NCCL_ALG": "Ring",
        "NCCL_PROTO": "LL64",
        "NCCL_ALGO": "ring;scatter:tree;nvls",
        "NCCL_MAX_CTAS": "0",
        "NCCL_BUFFSIZE": "4M",
        "NCCL_NVLS_ENABLE": "yes",
        "NCCL_P2P_LEVEL": "FAR",
    }
    with pytest.raises(InputError) as caught:
        read_environment(bad, "--env")
    text = str(caught.value)
    assert "did you mean NCCL_ALGO" in text
    assert "did you mean ll" in text
    assert "'scatter' is not a collective" in text
    assert "'nvls' names no collective" in text
    assert all(name in text for name in bad)
    assert len(caught.value.faults) == 8


def test_minimum_above_maximum_and_two_names_of_one_setting() -> None:
    with pytest.raises(InputError, match="at least 8 channels and at most 4"):
        read_environment({"NCCL_MIN_CTAS": "8", "NCCL_MAX_NCHANNELS": "4"}, "")
    with pytest.raises(InputError, match="contradicts an older name"):
        read_environment({"NCCL_MIN_CTAS": "8", "NCCL_MIN_NRINGS": "4"}, "")


def test_groups_of_variables_do_not_meet_and_are_kept_apart() -> None:
    groups = variable_groups()
    assert sum(map(len, groups.values())) == len(frozenset().union(*groups.values()))
    found = read_environment({"NCCL_DEBUG": "INFO", "NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_PROTO": "^LL"}, "")
    assert found.unmodelled == ("NCCL_IB_QPS_PER_CONNECTION",)


def test_lists_by_collective() -> None:
    found = read_environment({"NCCL_ALGO": "ring;allreduce:^ring,tree;broadcast:RING"}, "")
    assert found.allows("all_gather", "ring", "ll")
    assert not found.allows("all_gather", "nvls", "simple")
    assert found.allows("all_reduce", "nvlstree", "simple")
    assert not found.allows("all_reduce", "ring", "simple")


@pytest.mark.parametrize("text", ["two", "1.9", "2.x", "2.18.", "-2.18"])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="not a version"):
        Nccl.of(text)


# -- what they change ---------------------------------------------------------------------------------------------------


def test_algorithms_and_protocols_are_restricted() -> None:
    assert choose("all_reduce", GIB, shape(8), H100).algorithm == "nvls"
    assert choose("all_reduce", GIB, shape(8), H100, nccl=env(NCCL_NVLS_ENABLE="0")).algorithm == "ring"
    assert choose("all_reduce", GIB, shape(8), H100, nccl=env(NCCL_ALGO="allreduce:tree")).algorithm == "tree"
    assert choose("all_gather", 1024, shape(8), H100, nccl=env(NCCL_PROTO="Simple")).protocol == "simple"


def test_a_restriction_that_leaves_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"leave nothing.*ring/ll"):
        choose("broadcast", GIB, shape(8), H100, nccl=env(NCCL_ALGO="Tree"))
    old = Nccl.of("2.18.3", {"NCCL_ALGO": "Tree"})  # until 2.24 rings ran all the same
    assert choose("broadcast", GIB, shape(8), H100, nccl=old).algorithm == "ring"


def test_pat_runs_where_a_node_has_one_rank_and_nccl_has_it() -> None:
    group = shape(16, 16)
    assert choose("all_gather", 64 * 1024, group, H100).algorithm == "pat"
    assert choose("all_gather", 64 * 1024, group, H100, nccl=Nccl.of("2.22.3")).algorithm == "ring"
    assert choose("all_gather", 64 * 1024, group, H100, nccl=env(NCCL_PAT_ENABLE="0")).algorithm == "ring"
    assert choose("all_gather", 64 * 1024, shape(128, 16), H100).algorithm == "ring"
    asked = env(NCCL_PAT_ENABLE="1", NCCL_ALGO="PAT")
    assert choose("all_gather", 64 * 1024, shape(128, 16), H100, nccl=asked).algorithm == "pat"
    with pytest.raises(PlanError, match="leave nothing"):  # not on its own where a node has several ranks
        choose("all_gather", 64 * 1024, shape(128, 16), H100, nccl=env(NCCL_ALGO="PAT"))


def test_switches_reduce_where_asked_to_on_infiniband() -> None:
    group, sharp = shape(128, 16), env(NCCL_COLLNET_ENABLE="1")
    chosen = choose("all_reduce", GIB, group, H100, nccl=sharp)
    assert chosen.algorithm in ("collnetdirect", "collnetchain", "nvls")
    assert float(chosen.time_s) < float(choose("all_reduce", GIB, group, H100).time_s)
    efa_cluster = Cluster.load("aws-p5", 16)
    assert choose("all_reduce", GIB, group, efa_cluster, nccl=sharp) == choose("all_reduce", GIB, group, efa_cluster)


def test_a_cluster_says_whether_its_switches_reduce() -> None:
    """As the variable asks, or without it; not where the switches cannot."""
    group, asked = shape(128, 16), env(NCCL_COLLNET_ENABLE="1")
    able, unable = (
        H100.model_copy(update={"fabric": H100.fabric.model_copy(update={"in_network": sums})})
        for sums in (True, False)
    )
    with_sums = choose("all_reduce", GIB, group, H100, nccl=asked)
    assert choose("all_reduce", GIB, group, able) == with_sums
    assert choose("all_reduce", GIB, group, unable, nccl=asked) == choose("all_reduce", GIB, group, H100)
    with pytest.raises(ClusterError, match="switches of efa do not sum"):
        Cluster.model_validate(Cluster.load("aws-p5", 2).model_dump() | {"fabric": {"in_network": True}})


def test_fewer_channels_take_longer_and_leave_more_sms_to_compute() -> None:
    few = env(NCCL_MAX_CTAS="4")
    usual, slow = (choose("all_gather", GIB, shape(8), H100, nccl=nccl) for nccl in (Nccl(), few))
    assert (usual.channels, slow.channels) == (24, 4)
    assert float(slow.time_s) == pytest.approx(
        3 * float(usual.time_s), rel=0.1
    )  # 12 channels fill a port: 4 are a third
    assert interference("all_gather", shape(8), H100, nccl=few) < interference("all_gather", shape(8), H100)
    assert sigma("all_gather", GIB, shape(8), H100, nccl=few) > sigma("all_gather", GIB, shape(8), H100)


def test_smaller_buffers_take_longer_and_larger_ones_do_not() -> None:
    times = [
        float(choose("all_gather", GIB, shape(8), H100, nccl=env(NCCL_BUFFSIZE=str(size))).time_s)
        for size in (2**18, 2**20, 2**22, 2**23)
    ]
    assert times == sorted(times, reverse=True)
    assert times[2] == float(choose("all_gather", GIB, shape(8), H100).time_s)


def test_without_peer_access_bytes_go_through_the_host() -> None:
    direct = float(choose("all_gather", GIB, shape(8), H100).time_s)
    hosted = float(choose("all_gather", GIB, shape(8), H100, nccl=env(NCCL_P2P_DISABLE="1")).time_s)
    assert hosted > 10 * direct
    assert hosted == float(choose("all_gather", GIB, shape(8), H100, nccl=env(NCCL_P2P_LEVEL="LOC")).time_s)
    assert direct == float(choose("all_gather", GIB, shape(8), H100, nccl=env(NCCL_P2P_LEVEL="NVL")).time_s)
    pcie = Cluster.load("pcie-l40s-8")
    pair, four, eight = (float(choose("all_gather", GIB, shape(n), pcie).time_s) * n / (n - 1) for n in (2, 4, 8))
    assert pair < four < eight
    reached = float(choose("all_gather", GIB, shape(4), pcie, nccl=env(NCCL_P2P_LEVEL="SYS")).time_s) * 4 / 3
    assert reached < four


def test_without_verbs_the_network_is_sockets() -> None:
    group = shape(16, 2)
    fast = float(choose("all_reduce", GIB, group, H100).time_s)
    for variables in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        assert float(choose("all_reduce", GIB, group, H100, nccl=Nccl.of("", variables)).time_s) > 5 * fast


def test_constants_change_with_the_release() -> None:
    """NVIDIA/nccl, src/graph/tuning.cc: a tree's step with whole chunks was 14 us in 2.18, 28 in 2.19 to 2.22, 14 since."""
    steps = {
        version: constants_of(Nccl.of(version).release).network_us["tree"][2]
        for version in ("2.12.7", "2.18.3", "2.19.3", "2.22.3", "2.23.4", "2.30.7")
    }
    assert steps == {"2.12.7": 28, "2.18.3": 14, "2.19.3": 28, "2.22.3": 28, "2.23.4": 14, "2.30.7": 14}
    assert constants_of((2, 20, 3)).ll[2][0] == 87.7
    assert constants_of((2, 21, 5)).ll[2][0] == 141.0


def test_far_cards_have_no_ll128_between_nodes() -> None:
    near, far = NcclFabric("nvlink", "ampere", 300.0, 50.0), NcclFabric("nvlink", "ampere", 300.0, 50.0, far_nics=True)
    protocols = [
        {pick("all_gather", 2**p, Group(16, 2), f, Nccl()).protocol for p in range(10, 31)} for f in (near, far)
    ]
    assert "ll128" in protocols[0]
    assert "ll128" not in protocols[1]


def test_a_send_has_as_many_channels_as_its_cards_need_since_2_29() -> None:
    """Ten H100 nodes with one GPU each send at 25.1 GB/s of 50 (NCCL 2.29.2), two at 43.7: two and four channels."""
    cluster = Cluster.load("hgx-h100-8", 16)
    ten, two = (GIB / float(choose("send_recv", GIB, shape(n, n), cluster).time_s) for n in (10, 2))
    assert ten == pytest.approx(25e9, rel=0.05)
    assert two == pytest.approx(44e9, rel=0.05)
    assert GIB / float(choose("send_recv", GIB, shape(10, 10), cluster, nccl=Nccl.of("2.27.3")).time_s) > 40e9


# -- tuners -------------------------------------------------------------------------------------------------------------

TABLE = """# collective,min,max,algorithm,protocol,channels,nodes,ranks,pipe_ops,registered
allreduce, 0, 65536, tree, simple, 2, 1, -1
allreduce,65537,1073741824,ring,ll128,-1,-1,8,1,0

broadcast,0,1000,tree,simple,-1,1,-1,-1,1
"""


def test_the_first_matching_rule_decides(tmp_path: Path) -> None:
    file = tmp_path / "tuner.conf"
    file.write_text(TABLE)
    assert len(read_tuner(file)) == 3
    tuned = env(NCCL_TUNER_CONFIG_FILE=str(file))
    small = choose("all_reduce", 65536, shape(8), H100, nccl=tuned)
    assert (small.algorithm, small.protocol, small.channels) == ("tree", "simple", 2)
    assert choose("all_reduce", MIB, shape(8), H100, nccl=tuned).protocol == "ll128"
    assert choose("all_reduce", MIB, shape(4), H100, nccl=tuned) == choose("all_reduce", MIB, shape(4), H100)
    # a rule for what cannot run is passed over, as the plugin does
    assert choose("broadcast", 1000, shape(8), H100, nccl=tuned).algorithm == "ring"


def test_faulty_lines_are_told_by_number(tmp_path: Path) -> None:
    file = tmp_path / "tuner.conf"
    file.write_text(
        "allreduce,0,10,ring,ll\n"
        "# fine\n"
        "sum,0,ten,star,ll64,0,1,1\n"
        "allreduce,10,0,ring,ll,-1,-1,-1\n"
        "allreduce,0,1,ring,ll,-2,1,1,1,2\n"
    )
    with pytest.raises(InputError) as caught:
        read_tuner(file)
    places = [fault.place.removeprefix(f"{file}: ") for fault in caught.value.faults]
    assert places == [
        "line 1",
        *(f"line 3: {name}" for name in ("collective", "algorithm", "protocol", "max_bytes", "channels")),
        "line 4",
        "line 5: channels",
        "line 5: registered",
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", None])
def test_a_table_without_rules_or_no_file(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tuner.conf"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=r"tuner\.conf"):
        read_tuner(file)


def test_awss_plugin_has_a_tuner_of_its_own() -> None:
    """aws-ofi-nccl's regions: on two p5 a tree with LL128 up to 30 MiB, then NVLS trees."""
    fabric = NcclFabric("nvlink", "hopper", 450.0, 400.0, efa="p5")
    assert pick("all_reduce", 30 * MIB, Group(16, 2), fabric, Nccl()) == Pick("tree", "ll128")
    assert pick("all_reduce", 30 * MIB + 1, Group(16, 2), fabric, Nccl()) == Pick("nvlstree", "simple")
    assert efa.choice("p5", "all_reduce", GIB, 12, 2) is None
    other = env(NCCL_TUNER_PLUGIN="libnccl-tuner-mine.so")  # then NCCL chooses, and changes over elsewhere
    sizes = range(16 * MIB, 64 * MIB, MIB)
    assert any(
        pick("all_reduce", size, Group(16, 2), fabric, other) != pick("all_reduce", size, Group(16, 2), fabric, Nccl())
        for size in sizes
    )
    assert (efa.instance_of("hopper", 32), efa.instance_of("hopper", 16)) == ("p5", "p5en")


# -- stacks -------------------------------------------------------------------------------------------------------------


def stack_file(folder: Path, extra: str) -> Path:
    file = folder / "mine.toml"
    head = 'name = "mine"\nframework = "torch"\ndate = "2026"\nblocks = "eager"\n'
    file.write_text(f'{head}{extra}\n[attention]\nkernel = "flash2"\n')
    return file


def test_a_stack_sets_nccl_up(tmp_path: Path) -> None:
    (tmp_path / "tuner.conf").write_text(TABLE)
    extra = 'nccl = "2.27.3"\nnccl_env = {NCCL_MAX_CTAS = "8", NCCL_TUNER_CONFIG_FILE = "tuner.conf"}'
    nccl = Stack.load(stack_file(tmp_path, extra)).software()
    assert (nccl.version, nccl.environment.max_channels, len(nccl.tuner)) == ((2, 27, 3), 8, 3)


def test_a_stacks_faults_are_all_told(tmp_path: Path) -> None:
    with pytest.raises(StackError) as caught:
        Stack.load(stack_file(tmp_path, 'nccl = "new"\nnccl_env = {NCCL_ALGO = "Star", NCCL_FOO = "1"}'))
    text = str(caught.value)
    assert all(part in text for part in ("'new' is not a version", "'Star' is not one", "NCCL_FOO"))
