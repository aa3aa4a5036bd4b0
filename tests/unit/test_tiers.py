from __future__ import annotations

from pathlib import Path

import pytest

from simulator.base.errors import ClusterError
from simulator.base.fit import Fit
from simulator.base.presets import TOPOLOGIES
from simulator.play.lower.pool_moves import transfers_between
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.cluster import cluster_names
from simulator.spec.cluster.tiers import BOTH, D2H, H2D, HostTier
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.memory import MemoryPlan
from simulator.work.offload import Object, Tier, hierarchy, place


@pytest.mark.parametrize("kind", ["pcie3", "pcie4", "pcie5", "c2c"])
def test_every_number_of_a_tier_names_its_source(kind: str) -> None:
    tier = HostTier.of_kind(kind)
    numbers = set(HostTier.model_fields) - {"name", "sources"}
    assert set(tier.sources) == numbers
    assert all(tier.sources.values())


@pytest.mark.parametrize("kind", ["pcie3", "pcie4", "pcie5", "c2c"])
def test_both_directions_carry_more_than_one_and_at_most_two(kind: str) -> None:
    links = HostTier.of_kind(kind).links()
    assert max(links[H2D], links[D2H]) <= links[BOTH] <= links[H2D] + links[D2H]


@pytest.mark.parametrize("name", cluster_names())
def test_every_preset_reaches_a_host(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.host_tier is not None
    assert cluster.host_link is not None
    assert cluster.host_tier.h2d_bytes_per_s <= cluster.host_link.bytes_per_s


def with_tier(cluster: Cluster, **given: object) -> Cluster:
    data = {field: getattr(cluster, field) for field in Cluster.model_fields}
    return Cluster.parse({**data, "tier": given}, "test", ClusterError)


def test_what_a_stated_tier_leaves_out_is_the_usual_hosts() -> None:
    tier = with_tier(Cluster.load("dgx1-v100-8"), memory_bytes=1500 * 10**9).host_tier
    usual = HostTier.of_kind("pcie3")
    assert tier is not None
    assert (tier.memory_bytes, tier.nvme_bytes) == (1500 * 10**9, usual.nvme_bytes)
    assert tier.sources["memory_bytes"] == "given"


def test_a_wrong_tier_is_told_with_its_place() -> None:
    with pytest.raises(ClusterError, match=r"tier\.memory_bytes.*\n?.*|tier\.bogus"):
        with_tier(Cluster.load("hgx-h100-8"), memory_bytes=-1, bogus=1)


def test_faults_migrate_slower_than_copies() -> None:
    tier = HostTier.of_kind("pcie5")
    # a round moves `fault_bytes` in its latency and the time of the link
    round_s = tier.fault_latency_s + tier.fault_bytes / min(tier.h2d_bytes_per_s, tier.d2h_bytes_per_s)
    assert tier.fault_bytes_per_s() == pytest.approx(tier.fault_bytes / round_s)
    assert tier.fault_bytes_per_s() < tier.d2h_bytes_per_s / 2


def test_the_hierarchy_gets_larger_and_slower() -> None:
    tiers = hierarchy(Cluster.load("hgx-h100-8"), 2)
    assert [tier.name for tier in tiers] == ["hbm", "peer", "host", "nvme"]
    rates = [tier.read_bytes_per_s for tier in tiers]
    assert rates == sorted(rates, reverse=True)
    # six idle GPUs for two ranks
    assert tiers[1].num_bytes == 3 * tiers[0].num_bytes


def test_no_peers_where_all_gpus_work_or_only_pcie_joins_them() -> None:
    assert hierarchy(Cluster.load("hgx-h100-8"), 8)[1].num_bytes == 0
    assert hierarchy(Cluster.load("pcie-h100-8"), 1)[1].num_bytes == 0


FAST = Tier(name="fast", num_bytes=100, read_bytes_per_s=1000.0, write_bytes_per_s=1000.0)
SLOW = Tier(name="slow", num_bytes=1000, read_bytes_per_s=10.0, write_bytes_per_s=5.0)


def test_the_hottest_objects_take_the_fastest_tier() -> None:
    hot = Object(name="hot", num_bytes=80, read_bytes=800, write_bytes=0)
    cold = Object(name="cold", num_bytes=40, read_bytes=40, write_bytes=20)
    where, seconds = place([cold, hot], (FAST, SLOW))
    assert where == {"hot": {"fast": 80}, "cold": {"fast": 20, "slow": 20}}
    # half of the cold object's traffic crosses the slow link: 20 B read at 10 B/s, 10 B written at 5 B/s
    assert seconds == pytest.approx(20 / 10 + 10 / 5)


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ClusterError, match="left over"):
        place([Object(name="huge", num_bytes=1101, read_bytes=1, write_bytes=0)], (FAST, SLOW))


@pytest.mark.parametrize("preset", ["dgx1-v100-8", "dgx-a100-80-8", "dgx-h100-8", "gb200-nvl72", "pcie-l40s-8"])
def test_a_cluster_file_states_one_number_of_its_tier(preset: str, tmp_path: Path) -> None:
    """What a person leaves out of `[tier]` comes from the usual host's file, where numbers have units as well."""
    file = tmp_path / "cluster.toml"
    file.write_text((TOPOLOGIES / f"{preset}.toml").read_text() + '\n[tier]\nmemory_bytes = "3TB"\n')
    stated, usual = Cluster.load(file).host_tier, Cluster.load(preset).host_tier
    assert stated is not None
    assert usual is not None
    assert stated.model_copy(update={"memory_bytes": usual.memory_bytes, "sources": usual.sources}) == usual
    assert stated.memory_bytes == 3 * 10**12
    assert stated.sources == {**usual.sources, "memory_bytes": "given"}


def test_a_number_without_a_unit_in_a_tier_is_one_fault(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text((TOPOLOGIES / "dgx-h100-8.toml").read_text() + "\n[tier]\nmemory_bytes = 3\n")
    with pytest.raises(ClusterError, match=r"tier\.memory_bytes") as caught:
        Cluster.load(file)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    ("tier", "other", "kinds"),
    [
        ("nvme", "host", ("nvme_read",)),
        ("host", "nvme", ("nvme_write",)),
        ("peer", "host", ("from_peer", "d2h")),
        ("host", "peer", ("h2d", "to_peer")),
        ("peer", "nvme", ("from_peer", "d2h", "nvme_write")),
        ("nvme", "hbm", ("nvme_read", "h2d")),
        ("hbm", "peer", ("to_peer",)),
    ],
)
def test_what_moves_between_two_tiers_takes_the_links_between_them(
    tier: str, other: str, kinds: tuple[str, ...]
) -> None:
    assert transfers_between(tier, other) == kinds


def test_what_no_tier_holds_moves_over_no_link_that_is_not_there() -> None:
    """Weights of more than a GPU and its host hold, on GPUs that no peer lends memory: they go from drives to the host."""
    memory = MemoryPlan(policy="unified")
    plan = Plan(seq_len=512, dp_replicate=12, zero=0, data_parallel="ddp", memory=memory)
    found = predict(Model.load("mixtral-8x7b"), plan, Cluster.load("pcie-rtx4090-4", 3))
    assert found.verdict is Fit.DOES_NOT_FIT
