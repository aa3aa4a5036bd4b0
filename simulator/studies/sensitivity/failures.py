"""Which single failure hurts a plan most: each kind of part slowed, or lost, once, and the step played again.

A part that is slowed keeps a share of its rate. Parts that are alike hurt alike, so one of each is tried: a GPU, its
NVLinks, the NICs of a node at the first, middle and last pipeline stage; a NIC of every node (a rail's leaf switch);
the uplinks of leaves; the link to the host and its drives, where a plan offloads; a host; and a node that is gone, with
the replicas that still fill the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from simulator.base.units import format_seconds
from simulator.parallel.mesh import Mesh
from simulator.predict.changes import degrees_on
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.studies.sensitivity.text import plain_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What fails, and the settings that say so of a study. nodes: that are left, where one is gone."""

    part: str
    what: str
    settings: tuple[str, ...]
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """A failure and what it costs. step_s: None where it stops the run, or is not modelled, for the reason.

    lost: of the tokens a second.
    """

    failure: Failure
    step_s: float | None
    lost: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """All of them, the worst first, those that are not modelled last. left: the share of its rate that a slowed part keeps.

    fits: the plan itself, in memory.
    """

    fits: bool
    step_s: float
    tokens_per_s: float
    left: float
    found: tuple[Hurt, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {**asdict(one.failure), "step_s": one.step_s, "lost": one.lost, "reason": one.reason} for one in self.found
        ]
        return {
            "schema_version": 1,
            **{name: getattr(self, name) for name in ("fits", "step_s", "tokens_per_s", "left")},
            "failures": rows,
        }


def failures_of(plan: Plan, cluster: Cluster, left: float) -> Iterator[Failure]:
    """Every failure that the cluster can have and the plan could feel."""
    mesh, inter = Mesh(plan, cluster), cluster.inter
    for stage in sorted({0, plan.pp // 2, plan.pp - 1}):
        node, gpu = divmod(cluster.gpu_of(stage * mesh.stride("pp")), cluster.gpus_per_node)
        at = f" of stage {stage}" if plan.pp > 1 else ""
        yield _differs("GPU", f"a GPU{at} at {left:.0%} of its speed", f'nodes="{node}", gpus="{gpu}", speed={left}')
        if cluster.intra.shape == "switch" and cluster.gpus_per_node > 1:
            rate = f'intra_bytes_per_s="{left * cluster.intra.bytes_per_s:.0f}B/s"'
            yield _differs("NVLink", f"the links of a GPU{at} at {left:.0%}", f'nodes="{node}", gpus="{gpu}", {rate}')
        if inter is not None and cluster.num_nodes > 1:
            rate = f'nic_bytes_per_s="{left * inter.nic_bytes_per_s:.0f}B/s"'
            yield _differs("NIC", f"the NICs of a node{at} at {left:.0%}", f'nodes="{node}", {rate}')
            if inter.num_nics > 1 and not inter.cards:
                yield _differs("NIC", f"a NIC of a node{at} lost", f'nodes="{node}", num_nics={inter.num_nics - 1}')
    if inter is not None and cluster.num_nodes > 1:
        yield from _of_the_network(cluster, inter.num_nics, left)
    yield from _of_hosts(plan, cluster, left)
    if cluster.num_nodes > 1:
        yield _node_lost(plan, cluster)


def _differs(part: str, name: str, exception: str) -> Failure:
    return Failure(part=part, what=name, settings=(f"cluster.exceptions=[{{{exception}}}]",))


def _of_the_network(cluster: Cluster, num_nics: int, left: float) -> Iterator[Failure]:
    fabric = cluster.fabric
    if num_nics > 1 and fabric.kind == "rail_optimised" and cluster.inter is not None and not cluster.inter.cards:
        yield Failure(
            part="switch", what="a rail lost: a NIC of every node", settings=(f"cluster.inter.num_nics={num_nics - 1}",)
        )
    if cluster.num_nodes > fabric.nodes_per_leaf:
        crowd = fabric.oversubscription / left
        yield Failure(
            part="uplink",
            what=f"uplinks of a leaf at {left:.0%}",
            settings=(f"cluster.fabric.oversubscription={crowd:g}",),
        )


def _of_hosts(plan: Plan, cluster: Cluster, left: float) -> Iterator[Failure]:
    """All ranks wait for the slowest host, so one of them is as bad as all."""
    intra = cluster.intra
    if intra.shape == "pcie" and cluster.gpus_per_node > 1:
        halved = f'cluster.intra.bytes_per_s="{left * intra.bytes_per_s:.0f}B/s"'
        yield Failure(part="PCIe", what=f"the PCIe links of a node at {left:.0%}", settings=(halved,))
    yield Failure(
        part="host",
        what=f"a host's CPU at {left:.0%}",
        settings=(f"cluster.host_factor={cluster.device.host_factor / left:g}",),
    )
    tier = cluster.host_tier
    if tier is None or not plan.offload.any:
        return
    for part, names in (("PCIe", ("h2d", "d2h", "both")), ("NVMe", ("nvme_read", "nvme_write"))):
        rates = [(f"{name}_bytes_per_s", getattr(tier, f"{name}_bytes_per_s")) for name in names]
        slowed = tuple(f'cluster.tier.{key}="{left * rate:.0f}B/s"' for key, rate in rates)
        yield Failure(part=part, what=f"a node's {part} at {left:.0%}", settings=slowed)


def _node_lost(plan: Plan, cluster: Cluster) -> Failure:
    """The job continues with the data-parallel ranks on the other nodes; it stops if none remain."""
    degrees = degrees_on(plan, (cluster.num_nodes - 1) * cluster.gpus_per_node)
    settings = tuple(f"plan.{name}={size}" for name, size in degrees.items())
    title = f"a node lost, {' × '.join(f'{name} {size}' for name, size in degrees.items())} on the others"
    return Failure(part="node", what=title, settings=settings, nodes=cluster.num_nodes - 1)


def ranked(step_s: float, tokens_per_s: float, left: float, found: list[Hurt], *, fits: bool) -> Failures:
    """The worst first; equals in the order in which they were tried."""
    order = sorted(found, key=lambda one: (one.step_s is None and not one.lost, -one.lost))
    return Failures(fits=fits, step_s=step_s, tokens_per_s=tokens_per_s, left=left, found=tuple(order))


def render_failures(f: Failures) -> RenderableType:
    """The sweep for a rich console."""
    table = plain_table("", "step", "tokens/s lost", "part", "said by --set", left=(0, 3, 4))
    for one in f.found:
        step = format_seconds(one.step_s) if one.step_s is not None else "stops" if one.lost else "?"
        lost = f"{one.lost:.1%}" if one.step_s is not None or one.lost else ""
        words = one.reason or " ".join(one.failure.settings)
        table.add_row(one.failure.what, step, lost, one.failure.part, words)
    head = f"{format_seconds(f.step_s)} a step, {f.tokens_per_s:,.0f} tokens/s while nothing fails"
    head += f"; slowed parts keep {f.left:.0%}" + ("" if f.fits else "; the plan itself does not fit in memory")
    return Group(Text(head), Text(), table)
