"""How long the engine takes, beside what SimPy itself needs for as many timeouts. Run: python tests/bench/bench_engine.py

Timings depend on the machine, so the ratio to bare SimPy is what to compare; nothing here asserts on them.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event

from simulator.play.engine import run
from simulator.play.fold import refine_partitions
from simulator.work.program import Collective, CollectiveCost, Compute, Program, ProgramOp

_COST = CollectiveCost(latency_s=20e-6, link_bytes={"intra": 4.0e8})
_KERNELS = 8  # compute ops a layer, forward


def sharded_step(num_layers: int, num_micro_batches: int, *, interference: float) -> Program:
    """Forward passes of layers with one gather each, prefetched by one layer, ten ops or so a layer."""
    ops: list[ProgramOp] = []
    for micro_batch in range(num_micro_batches):
        gate: tuple[int, ...] = ()
        for layer in range(num_layers):
            name = f"layer {layer} mb {micro_batch}"
            gather = len(ops)
            ops.append(
                Collective(
                    id=gather,
                    stream="gather",
                    after=gate,
                    label=f"gather {name}",
                    kind="all_gather",
                    key=f"gather {name}",
                    cost=_COST,
                    size_bytes=400_000_000,
                    host_s=20e-6,
                    interference=interference,
                )
            )
            for kernel in range(_KERNELS):
                ops.append(
                    Compute(
                        id=len(ops),
                        stream="compute",
                        after=(gather,) if kernel == 0 else (),
                        label=f"kernel {kernel} {name}",
                        duration_s=200e-6,
                        parts=(("gemm", 150e-6), ("elementwise", 50e-6)),
                        host_s=8e-6,
                    )
                )
            gate = (len(ops) - _KERNELS,)
    return Program(name="rank", num_ranks=8, ops=tuple(ops), links={"intra": 3.0e11})


def bare_timeouts(count: int) -> None:
    """What SimPy needs for `count` timeouts of one process."""
    env = Environment()

    def process() -> Iterator[Event]:
        for _ in range(count):
            yield env.timeout(1)

    env.process(process())  # type: ignore[arg-type]
    env.run()


def big_mesh() -> tuple[list[int], list[NDArray[np.int64]]]:
    """tp 8, dp 128, pp 16 on 16,384 ranks: labels by pipeline stage, and for every axis the group of each rank."""
    tp, dp, pp = 8, 128, 16
    ranks = np.arange(tp * dp * pp, dtype=np.int64)
    stages = ranks // (tp * dp)
    return stages.tolist(), [ranks // tp, stages * tp + ranks % tp, ranks % (tp * dp)]


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of some runs."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    write = sys.stdout.write
    for layers, micro_batches, interference in ((80, 14, 0.0), (80, 14, 0.05), (32, 1, 0.05)):
        program = sharded_step(layers, micro_batches, interference=interference)
        count = len(program.ops)
        took, bare = seconds(partial(run, [program])), seconds(partial(bare_timeouts, count))
        write(
            f"engine, {count} ops, interference {interference}: {took * 1e3:.1f} ms, "
            f"{took / count * 1e6:.1f} us an op, {took / bare:.1f} x bare timeouts\n"
        )
    program = sharded_step(80, 14, interference=0.05)
    tracemalloc.start()
    timeline = run([program])
    write(
        f"engine, peak of Python memory: {tracemalloc.get_traced_memory()[1] / 1e6:.1f} MB, {len(timeline.spans)} spans\n"
    )
    tracemalloc.stop()
    write(f"timeline.breakdown: {seconds(timeline.breakdown) * 1e3:.1f} ms\n")
    labels, groups = big_mesh()
    write(f"refine, {len(labels)} ranks: {seconds(partial(refine_partitions, labels, groups)) * 1e3:.1f} ms\n")
    slow_nic = [(1 if rank == 5 else 0, label) for rank, label in enumerate(labels)]
    write(f"refine, one slow NIC: {seconds(partial(refine_partitions, slow_nic, groups)) * 1e3:.1f} ms, ")
    write(f"{len(set(refine_partitions(slow_nic, groups).tolist()))} classes\n")


if __name__ == "__main__":
    main()
