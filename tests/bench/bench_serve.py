"""How long serving takes: python tests/bench/bench_serve.py

CPU seconds of `serve` with 10,000 requests, lognormal prompts and even answers, far below capacity (many small steps) and near it;
and of a search over serving plans of 70B on four nodes, in one process.
"""

from __future__ import annotations

import sys
import time

from simulator import Cluster, Model, Slo, search_serving
from simulator.studies.serving import InferencePlan, Lognormal, Uniform, Workload, serve


def cpu_s(rate: float) -> tuple[float, int]:
    """CPU seconds of one answer, and its steps that count."""
    workload = Workload(
        rate=rate,
        num_requests=10_000,
        prompt_tokens=Lognormal(distribution="lognormal", median=400, sigma=0.8, high=1500),
        output_tokens=Uniform(distribution="uniform", low=20, high=300),
    )
    begun = time.process_time()
    cluster = Cluster.load("hgx-a100-40-8")
    found = serve(Model.load("gpt-neox-20b"), InferencePlan(tp=2), cluster, workload.requests())
    assert found.load is not None
    return time.process_time() - begun, found.load.num_steps


def search_s() -> tuple[float, int]:
    """CPU seconds of a search, and its plays."""
    begun = time.process_time()
    cluster = Cluster.load("hgx-h100-8").with_nodes(4)
    found = search_serving(
        Model.load("llama3-70b"), cluster, Workload(rate=10), Slo(ttft_s={95: 0.5}, tpot_s={95: 0.05})
    )
    return time.process_time() - begun, found.counts.plays


def main() -> None:
    """Say all."""
    for rate in (2.0, 4.5):
        seconds, steps = cpu_s(rate)
        sys.stdout.write(f"gpt-neox-20b on two GPUs, {rate} requests/s: {seconds:.1f} s for {steps:,} steps\n")
    seconds, plays = search_s()
    sys.stdout.write(
        f"search over plans of llama3-70b on four nodes, 10 requests/s: {seconds:.1f} s for {plays} plays\n"
    )


if __name__ == "__main__":
    main()
