"""Placement: as cheap as brute force, and faster than the order of ranks by the steps that are played."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import predict
from simulator.base.errors import ClusterError, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import format_seconds
from simulator.cli import main
from simulator.cli.launch_kit import check_folder
from simulator.formats.readers.placement import read_placement
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.parallel.mesh import Mesh
from simulator.play.lower import lower
from simulator.predict.confidence import CARRIERS, SLOWER, upward
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster, Edge, Inter, Intra, Pcie
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.place import decide, place, place_node
from simulator.studies.place.cost import PlacementPricer, step_calls
from simulator.studies.place.local import Problem, greedy, two_opt
from simulator.studies.place.symmetry import distinct, equal_gpus, free_lines
from simulator.studies.place.text import _of_own as lines_of_own
from simulator.studies.place.trial import Choice, Trials
from simulator.studies.place.uneven import proportional
from simulator.work.collectives import collective_cost
from tests.examples import examples
from tests.machines import bridged

GB = 1e9
SMALL = Model.load("llama3.2-1b")
DGX1 = Cluster.load("dgx1-v100-8")
BY_PAIRS = {"tp": 2, "sequence_parallel": True, "micro_batch_size": 4, "seq_len": 2048}


TWO_PAIRS = bridged(4, [(0, 3), (1, 2)], sockets=((0, 1), (2, 3)))
FOUR_PAIRS = bridged(8, [(gpu, gpu + 4) for gpu in range(4)], sockets=((0, 1, 4, 5), (2, 3, 6, 7)))


def sixteen() -> Cluster:
    """Sixteen GPUs on PCIe, sockets taking turns: even ones on the first, odd ones on the second."""
    return Cluster(
        name="sixteen",
        device="a40",
        gpus_per_node=16,
        intra=Intra(kind="pcie4", shape="pcie", bytes_per_s=31 * GB),
        pcie=Pcie(sockets=(tuple(range(0, 16, 2)), tuple(range(1, 16, 2))), socket_bytes_per_s=40 * GB, p2p="SYS"),
    )


def pricer(plan: Plan, cluster: Cluster) -> PlacementPricer:
    calibration = Calibration.for_device(cluster.device)
    curves = calibration.links or default_curves()
    return PlacementPricer.of(lower(SMALL, plan, cluster, Stack.load(plan.stack), calibration, curves))


IN_FOUR = {"pp": 4, "num_micro_batches": 4}
IN_TWO = {"tp": 2, "pp": 2, "num_micro_batches": 4}


@pytest.mark.parametrize(
    ("cluster", "degrees"),
    [
        *((TWO_PAIRS, degrees) for degrees in ({"tp": 2}, IN_TWO, IN_FOUR)),
        *((FOUR_PAIRS, degrees) for degrees in ({"tp": 2}, IN_TWO, IN_FOUR)),
        *((DGX1, degrees) for degrees in ({"tp": 2}, {"tp": 4})),
    ],
    ids=lambda value: value.name if isinstance(value, Cluster) else "-".join(value),
)
def test_a_node_is_placed_as_cheaply_as_by_brute_force(cluster: Cluster, degrees: dict[str, int]) -> None:
    rest = cluster.num_devices // (degrees.get("tp", 1) * degrees.get("pp", 1))
    precision = "fp16" if cluster is DGX1 else "bf16"
    plan = Plan.model_validate({**degrees, "dp_replicate": rest, "zero": 0, "seq_len": 512, "precision": precision})
    priced = pricer(plan, cluster)
    found = place_node(priced)
    assert found.exact
    assert priced.price_s(found.orders[0]) == pytest.approx(found.price_s[0])
    # all 40,320 orders of eight GPUs where that takes a second; else every 41st catches a symmetry that is none
    step = 1 if cluster.gpus_per_node == 4 or (cluster is FOUR_PAIRS and degrees == {"tp": 2}) else 41
    cheapest = min(priced.price_s(order) for order in list(permutations(range(cluster.gpus_per_node)))[::step])
    assert found.price_s[0] <= cheapest * (1 + 1e-7)


@cache
def prices_left() -> tuple[PlacementPricer, set[tuple[str, ...]]]:
    priced = pricer(Plan(tp=2, pp=2, dp_replicate=2, zero=0, num_micro_batches=4, seq_len=512), FOUR_PAIRS)
    left = distinct(equal_gpus(FOUR_PAIRS), free_lines(priced))
    return priced, {tuple(f"{price:.9g}" for price in priced.evaluated(one).prices_s) for one in left}


@examples(30)
@given(order=st.permutations(range(8)))
def test_symmetry_leaves_one_of_every_price(order: list[int]) -> None:
    priced, left = prices_left()
    assert tuple(f"{price:.9g}" for price in priced.evaluated(order).prices_s) in left


@cache
def on_sixteen() -> PlacementPricer:
    return pricer(Plan(tp=4, dp_replicate=4, zero=0, micro_batch_size=4, seq_len=2048), sixteen())


def test_sixteen_gpus_are_placed_as_cheaply_as_by_brute_force() -> None:
    """GPUs of a socket are alike, so a placement is which eight places are on the first: 12,870 of them."""
    priced = on_sixteen()
    evens, odds = range(0, 16, 2), range(1, 16, 2)
    prices = []
    for chosen in combinations(range(16), 8):
        if 0 in chosen:  # the sockets are alike too
            gpus = dict(zip(chosen, evens, strict=True))
            gpus |= dict(zip((place for place in range(16) if place not in gpus), odds, strict=True))
            prices.append(priced.price_s([gpus[place] for place in range(16)]))
    found = place_node(priced)
    assert len(prices) == 6435
    assert found.price_s[0] == pytest.approx(min(prices))
    assert found.price_s[0] < priced.price_s(range(16))


def test_exchange_of_pairs_finds_the_same_on_sixteen() -> None:
    priced = on_sixteen()
    best = place_node(priced).price_s[0]
    problem = Problem.of(priced)
    start = greedy(problem)
    assert sorted(start) == list(range(16))
    assert priced.price_s(two_opt(priced, problem, start, equal_gpus(priced.cluster))) == pytest.approx(best)


def test_pairs_of_sixteen_are_found_where_they_are_too_many_to_try() -> None:
    """Eight bridges over four sockets' switches: 2,027,025 ways to pair sixteen GPUs, one of them by the bridges."""
    sockets = tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4))
    cluster = bridged(16, [(gpu, (gpu + 8) % 16) for gpu in range(8)], sockets=sockets)
    priced = pricer(Plan(tp=2, dp_replicate=8, zero=0, **{k: v for k, v in BY_PAIRS.items() if k != "tp"}), cluster)
    found = place_node(priced)
    assert not found.exact
    tensor = priced.moved("tp", found.orders[0])
    assert tensor == (tuple((gpu, gpu + 8) for gpu in range(8)),)


def confirmed(plan: Plan, cluster: Cluster) -> float:
    """What the placement gains; its steps are those that predict gives for both."""
    found = place(SMALL, plan, cluster)
    assert found.default.step_s == predict(SMALL, plan, cluster).step_s
    assert found.placed.step_s == predict(SMALL, found.plan, found.cluster).step_s
    assert found.gain == 1 - found.placed.step_s / found.default.step_s
    assert 1 - found.against_default.ratio == pytest.approx(found.gain)
    return found.gain


def test_crossed_pairs_beat_the_order_of_ranks() -> None:
    plan = Plan(dp_replicate=2, zero=0, **BY_PAIRS)
    assert confirmed(plan, TWO_PAIRS) > 0.1
    assert place(SMALL, plan, TWO_PAIRS).cluster.seats in {(0, 3, 1, 2), (0, 3, 2, 1)}


def test_a_cube_mesh_beats_the_order_of_ranks() -> None:
    assert confirmed(Plan(tp=2, dp_shard=4, seq_len=2048, precision="fp16"), DGX1) > 0.05


def test_errors_of_links_count_for_both_orders_and_those_of_kernels_cancel() -> None:
    """σ² = (a − b)² of each kind of kernel, a² + b² of links, and what is left of the stack's own; slower links lengthen their step."""
    found = place(SMALL, Plan(dp_replicate=2, zero=0, **BY_PAIRS), TWO_PAIRS)
    before, after = found.default.spread, found.placed.spread
    variance = (found.default.stack_sigma * found.gain) ** 2
    for name in {*before, *after}:
        one, other = before.get(name, 0.0), after.get(name, 0.0)
        sent = name.removeprefix(SLOWER) in CARRIERS
        if upward(name):
            variance += other**2 if sent else max(0.0, other - one) ** 2
        else:
            variance += one**2 + other**2 if sent else (one - other) ** 2
    against = found.against_default
    assert before["node links"] > 0
    assert math.log(against.high / against.ratio) == pytest.approx(1.6449 * math.sqrt(variance))
    assert against.low < against.ratio < against.high


def test_what_is_even_keeps_its_order() -> None:
    found = place(SMALL, Plan(tp=2, dp_shard=4, seq_len=2048), Cluster.load("hgx-h100-8"))
    assert found.is_default
    assert found.gain == 0
    assert found.num_priced == 1


def test_the_placement_is_the_fastest_of_all_of_four_gpus() -> None:
    plan = Plan(dp_replicate=2, zero=0, **BY_PAIRS)
    inputs = {"cluster": TWO_PAIRS, "stack": Stack.load(plan.stack)}
    trials = Trials(model=SMALL, calibration=Calibration.for_device(TWO_PAIRS.device), **inputs)
    played = [trials.score(Choice(plan, order))[1] for order in permutations(range(4))]
    assert place(SMALL, plan, TWO_PAIRS).placed.step_s == pytest.approx(min(played), rel=1e-6)


def test_ranks_may_leave_their_nodes() -> None:
    """Stages side by side in a node, where by default a node is a stage's: messages then need no network."""
    inter = Inter(kind="infiniband", num_nics=1, nic_bytes_per_s=1 * GB)
    cluster = TWO_PAIRS.model_copy(update={"inter": inter}).with_nodes(2)
    plan = Plan(tp=2, pp=4, zero=0, num_micro_batches=4, seq_len=1024, rank_order="pp-tp")
    found = place(SMALL, plan, cluster, across_nodes=True)
    assert found.placed.step_s < found.default.step_s
    assert place(SMALL, plan, cluster).placed.step_s >= found.placed.step_s


def test_slow_gpus_get_the_stage_that_they_hold_up_least() -> None:
    data = Cluster.load("hgx-h100-8", 2).model_dump(exclude={"device", "exceptions"}) | {"device": "h100-sxm5-80gb"}
    cluster = Cluster.model_validate({**data, "exceptions": ({"nodes": "0", "speed": 0.6},)})
    plan = Plan(dp_replicate=8, pp=2, zero=0, num_micro_batches=2, seq_len=4096, stage_layers=(12, 4))
    seats = place(SMALL, plan, cluster)
    dealt = place(SMALL, plan, cluster, deal_layers=True)
    assert seats.placed.step_s < seats.default.step_s
    assert dealt.placed.step_s < seats.placed.step_s
    layers = dealt.plan.pipeline.stage_layers
    assert layers is not None
    assert sum(layers) == 16
    assert predict(SMALL, dealt.plan, dealt.cluster).step_s == dealt.placed.step_s


def test_layers_in_proportion() -> None:
    assert proportional(32, [1.0, 1.0, 1.0, 1.0]) == (8, 8, 8, 8)
    assert proportional(10, [1.0, 3.0]) == (3, 7)
    assert proportional(5, [1.0, 1e-9, 1.0]) == (2, 1, 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.toml").write_text(cluster_toml(TWO_PAIRS))
    flags = ["--cluster", str(tmp_path / "pairs.toml"), "--model", "llama3.2-1b", "--tp", "2", "--zero", "0"]
    flags += ["--sequence-parallel", "true", "--micro-batch-size", "4", "--seq-len", "2048"]
    table, kit = tmp_path / "ranks.tsv", tmp_path / "kit"
    out = ["-o", str(table), "--launch-kit", str(kit)]
    assert main(["place", *flags, "--json", *out]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["seats"] == [0, 3, 1, 2]
    assert told["exact"]
    assert 0 < told["gain"] == 1 - told["placed"]["step_s"] / told["default"]["step_s"]
    assert told["against_default"]["ratio"] == pytest.approx(1 - told["gain"])
    assert [group["placed"]["link"] for group in told["groups"] if group["axis"] == "tp"] == ["nvlink3"]
    assert read_placement(table, TWO_PAIRS) == read_placement(kit / "ranks.tsv", TWO_PAIRS) == (0, 3, 1, 2)
    assert "CUDA_VISIBLE_DEVICES=0,3,1,2" in (kit / "launch.sh").read_text()
    assert main(["predict", *flags, "--json", "--placement", str(table)]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["step_s"] == told["placed"]["step_s"]
    assert main(["place", *flags]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "GPUs of ranks 0, 1, …: 0 3 1 2" in text
    assert main(["place", *flags, "--hosts", "a"]) == ExitCode.USAGE
    for wrong in (
        ["--launch-kit", str(kit)],
        ["--launch-kit", str(tmp_path / "b"), "--hosts", "a,b"],
        ["--dp-replicate", "3"],
    ):
        assert main(["place", *flags, *wrong]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    for words in ("is not empty", "2 hosts for 1 node (", "= 6, the cluster has 4 devices"):
        assert words in err
    assert main(["place", *flags, "-o", str(tmp_path / "no" / "where.tsv")]) == ExitCode.BAD_INPUT


def test_a_placement_that_is_given_is_told_beside_the_one_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two bridges, 0-3 and 1-2, and pairs that sit on none."""
    (tmp_path / "pairs.toml").write_text(cluster_toml(TWO_PAIRS))
    ranks = tmp_path / "ranks.tsv"
    ranks.write_text("rank\tnode\tgpu\n0\t0\t0\n1\t0\t2\n2\t0\t1\n3\t0\t3\n")
    flags = ["--cluster", str(tmp_path / "pairs.toml"), "--model", "llama3.2-1b", "--tp", "2", "--zero", "0"]
    flags += ["--sequence-parallel", "true", "--micro-batch-size", "4", "--seq-len", "2048", "--placement", str(ranks)]
    assert main(["predict", *flags, "--json"]) == ExitCode.OK
    step_s = json.loads(capsys.readouterr().out)["step_s"]
    assert main(["place", *flags, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["given"]["step_s"] == step_s > told["placed"]["step_s"]
    assert told["against_given"]["ratio"] == pytest.approx(told["placed"]["step_s"] / step_s)
    assert main(["place", *flags]) == ExitCode.OK
    assert f"{format_seconds(step_s)} as given, placed: " in capsys.readouterr().out
    ranks.write_text("rank\tnode\tgpu\n0\t0\t0\n")
    assert main(["place", *flags, "--precision", "fp7"]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    assert f"{ranks}: rank 1, 2, 3" in err
    assert "--precision" in err


@pytest.mark.parametrize("seats", [(0, 3, 1, 2), (1, 2, 0, 3)])
def test_a_placement_that_nothing_beats_stays(seats: tuple[int, ...]) -> None:
    """The one that is found, and another that symmetry makes as good."""
    found = place(
        SMALL, Plan.model_validate({**BY_PAIRS, "dp_replicate": 2, "zero": 0}), TWO_PAIRS.with_rank_mapping(seats)
    )
    assert found.cluster.seats == seats
    assert found.own is found.placed
    assert found.against_own is None
    assert found.gain > 0
    assert "which stays" in next(iter(lines_of_own(found)))


def test_a_placement_that_crosses_pcie_more_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.model_validate({**BY_PAIRS, "dp_replicate": 2, "zero": 0})
    on_bridges = bridged(4, [(0, 1), (2, 3)], sockets=((0, 1), (2, 3)))
    for seats, more in (((0, 2, 1, 3), True), ((1, 0, 3, 2), False)):
        trials = Trials(
            model=SMALL,
            cluster=on_bridges,
            stack=Stack.load(plan.stack),
            calibration=Calibration.for_device(on_bridges.device),
        )
        start = Choice(plan, ())
        assert decide._crosses_more(trials, start, Choice(plan, seats), step_calls(trials.lowering(start))) == more
    monkeypatch.setattr(decide, "_crosses_more", lambda *_: True)
    found = place(SMALL, plan, TWO_PAIRS.with_rank_mapping((1, 2, 0, 3)))
    assert found.own_crosses
    assert found.cluster.seats == (0, 3, 1, 2)
    assert "not kept, as it puts more traffic on PCIe" in next(iter(lines_of_own(found)))


def test_where_a_kit_cannot_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check_folder(tmp_path / "new" / "kit")
    with pytest.raises(InputError, match="is not a folder"):
        check_folder(file / "kit")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="cannot be written"):
        check_folder(tmp_path / "new" / "kit")


@pytest.mark.parametrize("cluster", [FOUR_PAIRS, DGX1, sixteen()], ids=lambda c: c.name)
def test_assignment_and_exchanges_find_what_trying_all_finds(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = "fp16" if cluster is DGX1 else "bf16"
    rest = cluster.num_devices // 4
    plan = Plan(tp=4, dp_replicate=rest, zero=0, micro_batch_size=4, seq_len=2048, precision=precision)
    priced = on_sixteen() if cluster.name == "sixteen" else pricer(plan, cluster)
    exact = place_node(priced)
    monkeypatch.setattr("simulator.studies.place.local.MOST_EXACT", 0)
    found = place_node(priced)
    assert (exact.exact, found.exact) == (True, False)
    assert found.price_s[0] == pytest.approx(exact.price_s[0])


def racked(exceptions: tuple[dict[str, object], ...], num_nodes: int = 2) -> Cluster:
    """HGX nodes on rails of leaves for two nodes, four downlinks an uplink."""
    data = Cluster.load("hgx-h100-8").model_dump(exclude={"device", "exceptions"})
    fabric = {"kind": "rail_optimised", "nodes_per_leaf": 2, "oversubscription": 4.0}
    data |= {"device": "h100-sxm5-80gb", "num_nodes": num_nodes, "fabric": fabric, "exceptions": exceptions}
    return Cluster.parse(data, "racked", ClusterError)


REVERSED = {"nodes": "1", "rails": [7, 6, 5, 4, 3, 2, 1, 0]}


def test_a_node_with_reversed_cards_beats_the_order_of_ranks() -> None:
    plan = Plan(
        tp=8, dp_shard=2, sequence_parallel=True, seq_len=4096, stack="torch-2.11-compiled"
    )  # no DTensor's host
    assert confirmed(plan, racked((REVERSED,))) > 0.3
    found = place(SMALL, plan, racked((REVERSED,)))
    assert found.cluster.seats == (*range(8), *range(15, 7, -1))
    assert found.placed.step_s == pytest.approx(predict(SMALL, plan, racked(())).step_s)


def test_what_changes_rails_crosses_the_spine() -> None:
    """Each of two nodes sends all it has to a NIC of another rail: over uplinks four times slower than the NICs."""
    plan = Plan(tp=8, dp_shard=2, seq_len=1024)
    straight, crossed = (Mesh(plan, racked(each)).group_shape("dp_shard") for each in ((), (REVERSED,)))
    assert (straight.off_rail, crossed.off_rail) == (0.0, 1.0)
    curves, usual = LinkCurves.ideal(), racked(())
    sent = [
        collective_cost("all_gather", 2**30, shape, usual, curves=curves).link_bytes["inter"]
        for shape in (straight, crossed)
    ]
    assert sent[1] == 4 * sent[0]
    assert Mesh(plan, racked((REVERSED,))).group_shape("tp").off_rail == 0
    # a group with a GPU on every rail keeps them all
    assert Mesh(Plan(dp_shard=16), racked((REVERSED,))).group_shape("dp_shard").off_rail == 0


def test_gpus_with_little_free_memory_hold_fewer_layers() -> None:
    cluster = racked(({"nodes": "0", "free_bytes": 19 * 2**30},))
    plan = Plan(dp_replicate=8, pp=2, zero=0, num_micro_batches=4, seq_len=2048)
    found = place(SMALL, plan, cluster, deal_layers=True)
    assert (found.default.verdict, found.placed.fits) == ("does not fit", True)
    full = [stage for stage in range(2) if found.cluster.gpu_of(8 * stage) >= 8]
    layers = found.plan.pipeline.stage_layers
    assert layers is not None
    assert layers[full[0]] == max(layers)


def test_faults_of_rails_and_free_memory() -> None:
    with pytest.raises(ClusterError) as told:
        racked(({"nodes": "1", "rails": [0, 0, 1]}, {"nodes": "0", "free_bytes": 2**40}))
    for words in ("[0, 0, 1] are not the rails of 8 cards", "1.00 TiB free of 79.1 GiB"):
        assert words in str(told.value)
    with pytest.raises(ClusterError, match="cards are the node's, not a GPU's"):
        racked(({**REVERSED, "gpus": "1"},))


SEARCH = ["search", "--model", "llama3.2-1b", "--global-batch", "8", "--seq-len", "1024", "--jobs", "1"]
SEARCH += [
    f"--fix={one}" for one in ("zero=0", "cp=1", "micro_batch_size=2", "recompute=none", "sequence_parallel=true")
]


def test_a_search_starts_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.toml").write_text(cluster_toml(TWO_PAIRS))
    flags = [*SEARCH, "--cluster", str(tmp_path / "pairs.toml"), "--fix", "tp=2", "--fix", "pp=1"]
    assert main([*flags, "--launch-kit", str(tmp_path / "kit")]) == ExitCode.OK
    assert "launch kit of" in capsys.readouterr().err
    assert len(read_placement(tmp_path / "kit" / "ranks.tsv", TWO_PAIRS)) in (0, 4)
    assert main([*flags, "--hosts", "a"]) == ExitCode.USAGE


def test_a_search_plays_uneven_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.toml").write_text(cluster_toml(racked(({"nodes": "1", "speed": 0.5},))))
    flags = [*SEARCH, "--cluster", str(tmp_path / "slow.toml"), "--fix", "tp=8", "--fix", "pp=1", "--json"]
    assert main([*flags, "--stack", "torch-2.6-eager"]) == ExitCode.OK
    (best,) = json.loads(capsys.readouterr().out)["plans"]
    plan = Plan(
        tp=8, dp_replicate=2, zero=0, micro_batch_size=2, num_micro_batches=2, seq_len=1024, sequence_parallel=True
    )
    assert best["step_s"] == predict(SMALL, plan, racked(({"nodes": "1", "speed": 0.5},))).step_s


def test_the_loudest_stay_on_their_cables() -> None:
    """One NVLink 2 is slower than PCIe 4 by data sheets, and still what tensor parallelism gets, as nothing forces it off."""
    edges = tuple(Edge(src=a, dst=b, bytes_per_s=25 * GB) for a, b in ((0, 2), (1, 3)))
    cluster = TWO_PAIRS.model_copy(
        update={
            "intra": Intra(kind="nvlink2", shape="pairs", bytes_per_s=25 * GB, edges=edges),
            "pcie": Pcie(sockets=((0, 1), (2, 3)), p2p="SYS"),
        }
    )
    plan = Plan(dp_replicate=2, zero=0, **BY_PAIRS)
    found = place_node(pricer(plan, cluster))
    assert found.orders[0] == (0, 2, 1, 3)
    assert found.price_s[0] > min(found.price_s)
    # a step on it is longer than in order, where replicas have the cables; nobody on them would be shorter, and is no answer
    answer = place(SMALL, plan, cluster)
    assert answer.is_default
    assert answer.passed_over_s is not None
    assert answer.passed_over_s < answer.default.step_s
