"""A 20B model on two NVLink GPUs, embedding and head on both: 40 to 45 % of the model a GPU, and p99 within its SLO?

    python experiments/two_gpu_inference.py [--requests N] [--plot OUT.png]

Prints what a GPU holds with the ends split and replicated, what a step costs, and the highest rate of Poisson arrivals at
which the 99th percentiles of time to first token and per output token stay within the SLO. docs/guides/inference.md reads
the figures. What the claim leaves open is assumed below.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from simulator import Cluster, Model, Stack
from simulator.base.units import format_bytes, format_seconds
from simulator.studies.serving import (
    InferencePlan,
    Lognormal,
    Serving,
    Slo,
    Uniform,
    Workload,
    highest_rate,
    serve,
    with_defaults,
)

MODEL = "gpt-neox-20b"
# Two GPUs of a node on NVLink; of 40 GB each one alone does not hold the model, of 80 GB it does
MACHINES = ("hgx-a100-40-8", "hgx-a100-80-8")
SLO = Slo(ttft_s=0.5, tpot_s=0.05)  # the claim names none
PROMPTS = Lognormal(distribution="lognormal", median=400, sigma=0.8, high=1500)
ANSWERS = Uniform(distribution="uniform", low=20, high=300)
SEED = 0

VARIANTS = {
    "split": InferencePlan(tp=2),
    "embedding on both": InferencePlan(tp=2, replicate=("embedding",)),
    "head on both": InferencePlan(tp=2, replicate=("head",)),
    "embedding and head on both": InferencePlan(tp=2, replicate=("embedding", "head")),
    "two engines of one GPU": InferencePlan(tp=1, dp=2),
}


@dataclass(frozen=True)
class Found:
    """One variant on one machine: the answer at half its capacity and at the highest rate within the SLO, if any."""

    half: Serving
    rate: float
    highest: Serving | None


def played(plan: InferencePlan, cluster: Cluster, rate: float, requests: int) -> Serving:
    """The same requests at another rate."""
    workload = Workload(rate=rate, num_requests=requests, prompt_tokens=PROMPTS, output_tokens=ANSWERS, seed=SEED)
    known = with_defaults(plan, Stack.of(plan), cluster.device)
    return serve(Model.load(MODEL), known, cluster, workload.requests(), slo=SLO)


def search(plan: InferencePlan, cluster: Cluster, requests: int) -> Found | None:
    """None where the plan does not fit."""
    first = played(plan, cluster, 1.0, requests)
    if first.load is None:
        return None
    rate, best = highest_rate(lambda tried: played(plan, cluster, tried, requests), first)
    return Found(half=played(plan, cluster, first.load.capacity_per_s / 2, requests), rate=rate, highest=best)


def report(name: str, found: Found | None) -> str:
    """A line a variant."""
    if found is None or found.half.latencies is None or found.half.load is None or found.half.latencies.tpot is None:
        return f"{name:28} does not fit"
    memory, step, load = found.half.memory, found.half.decode_steps[0], found.half.load
    exclusive = memory.weight_bytes - memory.embedding_bytes - memory.head_bytes
    capacity = memory.weight_bytes / memory.model_fraction
    cells = (
        f"{memory.model_fraction:6.1%} held, {exclusive / capacity:6.1%} in layers",
        f"cache {memory.kv_tokens:7,} tokens ({format_bytes(memory.kv_bytes)})",
        f"step of one {format_seconds(step.step_s)} ({format_seconds(step.parts['collectives'])} in collectives)",
        f"capacity {load.capacity_per_s:5.2f}/s",
        f"at half: p99 ttft {format_seconds(found.half.latencies.ttft.p99_s)}",
        f"tpot {format_seconds(found.half.latencies.tpot.p99_s)}",
        f"within the SLO up to {found.rate:5.2f}/s",
    )
    return f"{name:28} {'; '.join(cells)}"


def draw(curves: dict[str, list[tuple[float, float, float]]], out: Path) -> None:
    """p99 against the rate of arrivals, a line a variant."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, points in curves.items():
        rates, first, each = zip(*points, strict=True)
        left.plot(rates, first, marker="o", label=name)
        right.plot(rates, each, marker="o", label=name)
    for axes, limit, title in ((left, SLO.ttft_s, "time to first token"), (right, SLO.tpot_s, "time per output token")):
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
        axes.set(xlabel="requests/s", ylabel=f"p99 {title}, s", yscale="log")
    left.legend()
    figure.suptitle(f"{MODEL}, two A100-40 on NVLink")
    figure.savefig(out, dpi=120)


def curve(plan: InferencePlan, cluster: Cluster, requests: int) -> list[tuple[float, float, float]]:
    """(rate, p99 of time to first token, p99 per output token) up to a little below capacity."""
    first = played(plan, cluster, 1.0, requests)
    if first.load is None:
        return []
    points = []
    for tenth in range(1, 10):
        rate = tenth / 10 * first.load.capacity_per_s
        found = played(plan, cluster, rate, requests).latencies
        if found is not None and found.tpot is not None:
            points.append((rate, found.ttft.p99_s, found.tpot.p99_s))
    return points


def main() -> None:
    """Print the table; draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    model = Model.load(MODEL)
    ends = 2 * model.vocab_size * model.d_model / model.num_parameters
    print(f"{MODEL}: embedding and head are {ends:.1%} of {model.num_parameters:,} parameters")
    for machine in MACHINES:
        cluster = Cluster.load(machine)
        print(f"\ntwo GPUs of {machine}; SLO: p99 ttft {SLO.ttft_s} s, tpot {SLO.tpot_s} s")
        for name, plan in VARIANTS.items():
            print(report(name, search(plan, cluster, arguments.requests)), flush=True)
    if arguments.plot:
        cluster = Cluster.load(MACHINES[0])
        names = ("split", "embedding and head on both")
        draw({name: curve(VARIANTS[name], cluster, arguments.requests) for name in names}, arguments.plot)
        print(f"\ndrawn in {arguments.plot}")


if __name__ == "__main__":
    main()
