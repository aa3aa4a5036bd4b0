"""A script without a described model, as a program that the engine plays: the door for captured programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from simulator.base.kernels import Kernel, Stated
from simulator.parallel.mesh import Mesh
from simulator.play.lower.builder import Builder
from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.power import clock_of
from simulator.play.lower.rank_classes import slowdown
from simulator.play.lower.reader import StageReader
from simulator.play.lower.stage import Stage
from simulator.play.lower.work import Clock
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Program
from simulator.work.script.instructions import Instruction, Launch


def script_program(
    script: Iterable[Instruction],
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    calibration: Calibration,
    curves: LinkCurves,
    *,
    part: tuple[int, int] | None = None,
) -> Program:
    """The program of all ranks, which are equal. plan: its degrees say who meets whom in a collective's role.

    part: of scripts that are played together, which this is, and how many ranks play it; its links are its own.
    """
    fabric = MeshFabric(
        cluster=cluster,
        mesh=Mesh(plan, cluster),
        stack=stack,
        curves=curves,
        memory_weight=calibration.interference.hbm_weight,
        slowdown=0.0 if calibration.kind == "ideal" else slowdown(plan.num_devices),
        nccl=stack.software(),
    )
    build = Builder(fabric, stage=None if part is None else part[0])
    script = _by_its_host(list(script), cluster)
    launches = [one.kernels for one in script if type(one) is Launch]
    each, launched = {id(kernels): kernels for kernels in launches}, Counter[Kernel]()
    for number, times in Counter(map(id, launches)).items():
        for kernel in each[number]:
            launched[kernel] += times
    clock = clock_of(Clock(cluster.device, calibration, stack), launched.items())
    StageReader(build, Stage(index=0, plan=plan, chunks=(), message_bytes=0), clock).read(script)
    program = build.program()
    return program if part is None else replace(program, name=f"rank{part[0]}", num_ranks=part[1])


def _by_its_host(script: list[Instruction], cluster: Cluster) -> list[Instruction]:
    """The script with what passes the host's link or memory in seconds; a node's ranks share its memory."""
    launches = {id(one.kernels): one.kernels for one in script if type(one) is Launch}
    passing = {
        number: tuple(_timed(one, cluster) if isinstance(one, Stated) and one.over else one for one in kernels)
        for number, kernels in launches.items()
        if any(isinstance(one, Stated) and one.over for one in kernels)
    }
    if not passing:
        return script
    return [
        one._replace(kernels=passing[id(one.kernels)]) if type(one) is Launch and id(one.kernels) in passing else one
        for one in script
    ]


def _timed(one: Stated, cluster: Cluster) -> Stated:
    tier = cluster.host_tier
    if tier is None:
        return Stated()  # a cluster that has no host: nothing is known of it
    beside = tier.memory_bytes_per_s / min(cluster.gpus_per_node, cluster.num_devices)
    own = {"h2d": tier.h2d_bytes_per_s, "d2h": tier.d2h_bytes_per_s, "pageable": tier.pageable_bytes_per_s}
    seconds = one.num_bytes / min(beside, own.get(one.over, beside))
    return Stated(seconds=seconds + (0.0 if one.over == "cpu" else tier.copy_latency_s))
