"""A faster link never makes anything slower, where NCCL does the same on it.

What NCCL does is its own: it reads the speed of links and picks an algorithm, a protocol and channels by constants of its
own, which need not be the quickest. So the law of one call holds with NCCL_ALGO and NCCL_PROTO set. Without, a call may
lose what NCCL's pick loses against the quickest one, and no more.

A step may lose more where several streams share a link. Fair shares of a link are not monotone: a copy that gets quicker
takes more of the next link from a collective that the step waits for. It loses at most the seconds for which the shared
links are busy, and what collectives take of compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest

from simulator.base.errors import ClusterError, PlanError
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.play.lower import Lowering
from simulator.predict.play import SimulatedStep, play
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives import choose, collective_s
from simulator.work.program import Collective, Program
from tests.plan_draws import drawn

LINKS = ("intra", "inter", "host")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
AXES = ("tp", "cp", "dp_shard_cp", "dp_replicate", "pp")
SAME = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
ROUNDING = 1 + 1e-9


def faster(cluster: Cluster, link: str, factor: float) -> Cluster | None:
    """The cluster with one kind of link sped up; None where it has none."""
    part = getattr(cluster, link)
    if part is None:
        return None
    speed = "nic_bytes_per_s" if link == "inter" else "bytes_per_s"
    changed = part.model_dump() | {speed: factor * getattr(part, speed)}
    for edge in changed.get("edges", ()):
        edge["bytes_per_s"] *= factor
    data = {name: getattr(cluster, name) for name in Cluster.model_fields} | {link: changed}
    return Cluster.parse(data, cluster.name, ClusterError)


def calls(seed: int) -> Iterator[tuple[str, int, GroupShape, Cluster, Cluster]]:
    """A drawn plan's groups: (kind, bytes, group, cluster, the same with a faster link)."""
    random, found = Random(seed), drawn(seed)  # noqa: S311  no secrets
    mesh = Mesh(found.plan, found.cluster)
    for axis in AXES:
        shape = mesh.group_shape(axis)
        quicker = faster(found.cluster, random.choice(LINKS), random.choice((1.1, 2.0, 4.0)))
        if shape.num_ranks > 1 and quicker is not None:
            yield from (
                (kind, 1 << random.randint(8, 30), shape, found.cluster, quicker) for kind in random.sample(KINDS, 3)
            )


@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
def test_a_faster_link_never_slows_a_call_that_runs_alike(algorithm: str, protocol: str) -> None:
    # LL posts more messages on more channels, which a faster link has: one of them
    nccl = Nccl.of("", {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol, "NCCL_MAX_NCHANNELS": "1"})
    for kind, size, shape, cluster, quicker in (call for seed in range(30) for call in calls(seed)):
        try:
            slow = collective_s(kind, size, shape, cluster, nccl=nccl)
            fast = collective_s(kind, size, shape, quicker, nccl=nccl)
        except PlanError:  # an algorithm that this collective has not, or a protocol that the machine has not
            continue
        assert fast <= slow * ROUNDING, (kind, size, shape, cluster.name)


def test_what_nccl_picked_is_no_slower_on_a_faster_link() -> None:
    """So a call loses at most what NCCL's new pick loses against its old one."""
    one_channel = {"NCCL_MAX_NCHANNELS": "1"}
    for kind, size, shape, cluster, quicker in (call for seed in range(60) for call in calls(seed)):
        slow = choose(kind, size, shape, cluster, nccl=Nccl.of("", one_channel))
        held = one_channel | {"NCCL_ALGO": slow.algorithm, "NCCL_PROTO": slow.protocol}
        if slow.algorithm in ("p2p", "send"):
            held = one_channel
        fast = collective_s(kind, size, shape, quicker, nccl=Nccl.of("", held))
        assert fast <= slow.time_s * ROUNDING, (kind, size, shape, cluster.name, slow)


@pytest.mark.parametrize("seed", range(24))
def test_a_faster_link_never_slows_a_step_but_by_its_shared_links(seed: int) -> None:
    found = drawn(seed, **SAME)
    lowering = found.lowered()
    slow = play(lowering)
    for link in LINKS:
        cluster = faster(found.cluster, link, 2.0)
        if cluster is not None:
            quicker = replace(found, cluster=cluster).lowered()
            fast = play(quicker)
            assert fast.step_s <= slow.step_s * ROUNDING + allowed_s(quicker, fast), (link, found)


def allowed_s(lowering: Lowering, fast: SimulatedStep) -> float:
    """Seconds for which links of several streams are busy, and what collectives take of compute; none where each has its own."""
    count = lowering.plan.num_micro_batches
    shared_s = sum(map(_shared_s, lowering.programs(count)))
    return shared_s + fast.breakdown.get("interference", 0.0) if shared_s else 0.0


def _shared_s(program: Program) -> float:
    streams: dict[str, set[str]] = {}
    busy_s: dict[str, float] = {}
    for op in program.ops:
        for link, size in _loads(op).items():
            streams.setdefault(link, set()).add(op.stream)
            busy_s[link] = busy_s.get(link, 0.0) + size / float(program.links[link])
    return sum(busy_s[link] for link, users in streams.items() if len(users) > 1)


def _loads(op: object) -> Mapping[str, float]:
    return {link: float(size) for link, size in op.cost.link_bytes.items()} if isinstance(op, Collective) else {}
