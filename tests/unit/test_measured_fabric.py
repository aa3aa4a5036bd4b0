"""Numbers of a fabric seen together: hosts that wait for each rank, steps that wait, bytes."""

import pytest

from simulator.cli.fabric import with_fabric
from simulator.parallel.mesh import GroupShape
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.measured import Bandwidth, bus_factor
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.collectives import collective_cost, collective_s, rank_wait_s, ranks_heard

H100 = Cluster.load("hgx-h100-8", 16)
SIZE = 2**30
HEARD = 120 + 7 * 0.70 + 0.65  # of 128 ranks on 16 nodes: those of other nodes, of its own, and the check
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def stating(nodes: int, seconds: dict[str, float]) -> Cluster:
    ranks = 8 * nodes
    numbers = [
        Bandwidth(
            collective=kind,  # type: ignore[arg-type]  # one of KINDS
            nodes=nodes,
            size_bytes=SIZE,
            bus_bytes_per_s=float(bus_factor(kind, ranks)) * SIZE / time_s,
        )
        for kind, time_s in seconds.items()
    ]
    return H100.with_measured(numbers, "test")


def group(nodes: int) -> GroupShape:
    return GroupShape(
        num_ranks=8 * nodes, num_nodes=nodes, ranks_per_node=8, num_groups_per_node=1, spans_domain=nodes > 1
    )


def checked(nodes: int = 16) -> Cluster:
    """Each call takes 0.3 ms for each rank, whatever it is."""
    return stating(nodes, dict.fromkeys(KINDS, 0.3e-3 * 8 * nodes))


def test_equal_times_of_all_kinds_are_hosts_that_wait_for_ranks() -> None:
    assert rank_wait_s(checked()) == pytest.approx(0.295e-3)
    assert rank_wait_s(H100) == 0


@pytest.mark.parametrize(
    "times_ms",
    [
        {
            "all_reduce": 100,
            "all_gather": 50,
            "reduce_scatter": 50,
        },  # a narrow network: an all-reduce moves twice the bytes
        {"all_reduce": 12, "all_gather": 12, "reduce_scatter": 12},  # 0.09 ms a rank: a network's steps
        {"all_reduce": 40},  # one kind alone does not say
        {"all_gather": 40, "reduce_scatter": 40},  # nor do two that move the same bytes
    ],
)
def test_what_a_network_may_do_is_a_networks(times_ms: dict[str, float]) -> None:
    stated = stating(16, {kind: time * 1e-3 for kind, time in times_ms.items()})
    assert rank_wait_s(stated) == 0
    for kind, time in times_ms.items():
        assert float(collective_s(kind, SIZE, group(16), stated)) == pytest.approx(time * 1e-3, rel=1e-6)


def test_a_disturbed_all_reduce_does_not_hide_the_wait() -> None:
    """Slower than twice a gather: no network makes it so, and nothing follows its number."""
    disturbed = stating(16, {"all_reduce": 0.1, "all_gather": 0.038, "reduce_scatter": 0.038})
    assert rank_wait_s(disturbed) > 0
    for kind in ("all_reduce", "send_recv", "all_to_all"):
        assert collective_cost(kind, SIZE, group(16), disturbed) == collective_cost(kind, SIZE, group(16), H100)


def test_gathers_as_long_as_waits_take_show_them_beside_any_all_reduce() -> None:
    """37 ms for 128 ranks, and 3 for 1 GiB at what eight NICs give: a network of that speed would be a coincidence."""
    disturbed = stating(16, {"all_reduce": 0.08, "all_gather": 0.04, "reduce_scatter": 0.04})
    assert rank_wait_s(disturbed) == pytest.approx(0.295e-3)


def test_a_rank_of_the_same_node_answers_sooner() -> None:
    assert ranks_heard(1, 8) == 0
    assert ranks_heard(16, 8) == pytest.approx(ranks_heard(8, 8) + 8)
    waits_ms = {2: 0.391, 4: 0.859, 8: 1.578}  # that make the pace of nanotron-2025's three calibration runs over nodes
    for ranks, wait_ms in waits_ms.items():
        assert 0.295 * ranks_heard(ranks, 8) == pytest.approx(wait_ms, rel=0.06)


def test_links_behind_waiting_hosts_stay_the_models() -> None:
    for kind in KINDS:
        assert collective_cost(kind, SIZE, group(16), checked()) == collective_cost(kind, SIZE, group(16), H100)
        alone = collective_s(kind, SIZE, group(16), checked())
        assert alone == pytest.approx(HEARD * 0.295e-3)  # the host's wait shows


def test_a_step_waits_for_the_ranks_of_each_group_inside_nodes_too() -> None:
    model = Model.load("llama3-8b")
    plan = Plan(tp=8, dp_shard=16, micro_batch_size=1, seq_len=1024, sequence_parallel=True)
    slow, usual = (predict(model, plan, one).step_s for one in (checked(), H100))
    exchanges = 32 * 8  # two gathers and two scatters a layer each way, at the least
    assert slow - usual > 0.5 * exchanges * 7 * 0.295e-3
    stated_off = H100.model_copy(update={"fabric": checked().fabric.model_copy(update={"call_rank_s": 0.0})})
    assert rank_wait_s(stated_off) == 0


def test_who_states_the_wait_needs_no_numbers() -> None:
    fabric = H100.fabric.model_copy(update={"call_rank_s": 1e-3})
    assert rank_wait_s(H100.model_copy(update={"fabric": fabric})) == 1e-3


def test_an_all_reduce_takes_no_longer_than_its_halves() -> None:
    stated = stating(16, {"all_reduce": 0.05, "all_gather": 0.012, "reduce_scatter": 0.016})
    assert float(collective_s("all_reduce", SIZE, group(16), stated)) == pytest.approx(0.032, rel=1e-6)


def test_a_slower_network_waits_at_each_step_before_its_bytes_are_slower() -> None:
    """An eighth of the message: half of what the large call loses to steps is lost again, not an eighth."""
    usual = float(collective_s("all_gather", SIZE, group(16), H100))
    stated = stating(16, {"all_gather": usual + 4e-3})
    lost = float(collective_s("all_gather", SIZE // 8, group(16), stated)) - float(
        collective_s("all_gather", SIZE // 8, group(16), H100)
    )
    assert 2e-3 < lost < 4e-3
    tiny = [float(collective_s("all_gather", 2**14, group(16), one)) for one in (stated, H100)]
    assert tiny[0] < 1.5 * tiny[1]  # other protocols, other steps


def test_flags_state_it_too() -> None:
    """256 MiB over 128 ranks: 21.1 ms each, 0.17 ms a rank."""
    found = rank_wait_s(with_fabric(H100, ["allreduce=25.2@16", "allgather=12.6@16"]))
    assert found == pytest.approx(21.14e-3 / HEARD, rel=0.01)
