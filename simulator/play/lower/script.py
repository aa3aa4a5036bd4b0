"""A script without a described model, as a program that the engine plays: the door for captured programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from simulator.base.kernels import Kernel
from simulator.parallel.mesh import Mesh
from simulator.play.lower.builder import Builder
from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.power import clock_of
from simulator.play.lower.reader import StageReader
from simulator.play.lower.stage import Stage
from simulator.play.lower.stragglers import slowdown
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
    script = list(script)
    launches = [one.kernels for one in script if type(one) is Launch]
    each, launched = {id(kernels): kernels for kernels in launches}, Counter[Kernel]()
    for number, times in Counter(map(id, launches)).items():
        for kernel in each[number]:
            launched[kernel] += times
    clock = clock_of(Clock(cluster.device, calibration, stack), launched.items())
    StageReader(build, Stage(index=0, plan=plan, chunks=(), message_bytes=0), clock).read(script)
    program = build.program()
    return program if part is None else replace(program, name=f"rank{part[0]}", num_ranks=part[1])
