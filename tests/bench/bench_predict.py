"""How long predictions take: python tests/bench/bench_predict.py

In process: the median of several calls after a first one. Cold: a whole command, its peak memory as the system counts it.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from simulator import Cluster, Model, Plan, predict
from simulator.spec.cluster.exceptions import Deviation

COLD = {
    "--help": ["--help"],
    "llama3-8b, 8 GPUs": ["predict"],
    "llama3-70b, 4,096 GPUs": ["predict", "--model", "llama3-70b", "--nodes", "512"],
}


UNEVEN = {  # 16,384 GPUs of which one node differs
    "FSDP": {"dp_shard": 16384, "seq_len": 8192},
    "HSDP 64 × 256": {"dp_shard": 64, "dp_replicate": 256, "seq_len": 8192},
    "tp 8 · pp 16 · dp 128": {
        "tp": 8,
        "pp": 16,
        "dp_shard": 128,
        "zero": 1,
        "data_parallel": "megatron",
        "num_micro_batches": 32,
    },
}


def in_process(model: str, nodes: int, runs: int = 7, exceptions: Sequence[Deviation] = (), **fields: Any) -> float:
    """Median seconds of one prediction."""
    cluster = Cluster.load("hgx-h100-8", nodes).model_copy(update={"exceptions": tuple(exceptions)})
    inputs = Model.load(model), Plan.model_validate(fields or {"dp_shard": 8 * nodes, "seq_len": 8192}), cluster
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        predict(*inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def cold(arguments: list[str], runs: int = 5) -> float:
    """Median seconds of a whole command."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "simulator.cli", *arguments], check=False, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Say all of it."""
    lines = [
        f"in process  {name}, {8 * nodes:,} GPUs: {1e3 * in_process(name, nodes):.0f} ms"
        for name, nodes in (("llama3-8b", 1), ("llama3-70b", 512))
    ]
    slow = [Deviation(nodes="77", speed=0.9)]
    for name, fields in UNEVEN.items():
        even, uneven = (in_process("llama3-70b", 2048, 3, exceptions, **fields) for exceptions in ((), slow))
        lines.append(
            f"in process  llama3-70b, 16,384 GPUs, {name}: {1e3 * even:.0f} ms; one slow node: {1e3 * uneven:.0f} ms"
        )
    lines += [f"cold        {name}: {cold(arguments):.2f} s" for name, arguments in COLD.items()]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    lines.append(f"peak memory of the largest command: {peak / 1024:.0f} MiB")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
