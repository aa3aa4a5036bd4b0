"""How fast the search decides plans: surveys with bounds, and whole searches.

    python tests/bench/bench_search.py [--full | --cpu | --cases [NAME ...]]

A sixteenth of the branches of Llama-3-70B on 512 H100 is surveyed in this process, and the time of the whole follows
from it. --full: the whole search runs on all cores. --cpu: the whole search runs in this process, and its seconds of CPU
are counted, which tell more on a machine that others use. --cases: ten searches as the command line makes them, from 8 to
4,096 GPUs under four stacks, each in this process; on N cores a search takes little more than an N-th of it. --cases
further: five more, of other models, sizes and stacks.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

from simulator.base.garbage import COLLECT
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.search import Processes, SearchReport, SearchStudy, Serial, Space, search
from simulator.studies.search.space import Pruned
from simulator.studies.search.survey import Survey, Surveyor

STRIDE = 16
# name: model, cluster, nodes, sequences a step, tokens a sequence, stack
CASES = {
    "8-eager": ("llama3-8b", "hgx-h100-8", 1, 64, 8192, "torch-2.6-eager"),
    "8-megatron": ("llama3-8b", "hgx-h100-8", 1, 1024, 4096, "megatron-core-2025"),
    "32-moe-compiled": ("qwen3-30b-a3b", "hgx-h100-8", 4, 256, 4096, "torch-2.11-compiled"),
    "64-moe-megatron": ("mixtral-8x7b", "hgx-h100-8", 8, 256, 4096, "megatron-core-2025"),
    "64-a100-deepspeed": ("llama2-13b", "hgx-a100-80-8", 8, 512, 4096, "deepspeed-0.14"),
    "512-eager": ("llama3-70b", "hgx-h100-8", 64, 1024, 8192, "torch-2.6-eager"),
    "512-megatron": ("llama3-70b", "hgx-h100-8", 64, 1024, 8192, "megatron-core-2025"),
    "512-deepspeed": ("llama3-70b", "hgx-h100-8", 64, 1024, 8192, "deepspeed-0.14"),
    "2048-moe-megatron": ("deepseek-v3", "hgx-h100-8", 256, 15360, 4096, "megatron-core-2025"),
    "4096-compiled": ("llama3.1-405b", "hgx-h100-8", 512, 4096, 8192, "torch-2.11-compiled"),
}
# Made up after the budget was set, to see that it was not set for the ten
FURTHER = {
    "16-pcie-eager": ("qwen2.5-14b", "pcie-a100-80-8", 2, 128, 4096, "torch-2.11-eager"),
    "24-megatron": ("gemma2-27b", "hgx-h100-8", 3, 192, 8192, "megatron-core-2025"),
    "128-moe-compiled": ("gpt-oss-120b", "hgx-h100-8", 16, 512, 8192, "torchtitan-2025-compiled"),
    "256-nemo": ("nemotron4-340b", "dgx-h100-8", 32, 768, 4096, "nemo-24"),
    "1024-moe-deepspeed": ("mixtral-8x22b", "hgx-a100-80-8", 128, 2048, 4096, "deepspeed-0.14"),
}


def study() -> SearchStudy:
    """Llama-3-70B on 64 nodes of 8 H100, 1,024 sequences of 8,192 tokens."""
    clusters = (Cluster.load("hgx-h100-8", 64),)
    space = Space(model=Model.load("llama3-70b"), clusters=clusters, global_batch=1024, seq_len=8192)
    return SearchStudy(space=space)


def survey() -> None:
    """Plans bounded in a second of one core. Every STRIDE-th branch shares less than neighbours would: a low figure."""
    asked = study()
    surveyor, found = Surveyor(asked), Survey()
    start = time.process_time()
    for number, branch in enumerate(asked.space.branches(Pruned())):
        if number % STRIDE == 0:
            found.merge(surveyor.survey(branch))
    seconds = time.process_time() - start
    rate = found.num_legal / seconds
    sys.stdout.write(f"bounds: {found.num_legal:,} legal plans in {seconds:.1f} s of a core, {rate:,.0f}/s" + "\n")


def full() -> None:
    """Plans decided in a second, the simulations among them."""
    start = time.monotonic()
    asked, jobs = study(), len(os.sched_getaffinity(0))
    with Processes(asked, jobs) as engine:
        report = search(asked, engine)
    seconds = time.monotonic() - start
    say(report, seconds, f"on {jobs} cores")


def alone() -> None:
    """The same in this process."""
    gc.set_threshold(*COLLECT)  # as in a worker
    start, asked = time.process_time(), study()
    with Serial(asked) as engine:
        report = search(asked, engine)
    say(report, time.process_time() - start, "of a core")


def cases(names: list[str]) -> None:
    """Searches for the best layouts."""
    gc.set_threshold(*COLLECT)
    for name in FURTHER if names == ["further"] else names or CASES:
        model, cluster, nodes, batch, seq_len, stack = (CASES | FURTHER)[name]
        clusters, fixed = (Cluster.load(cluster, nodes),), {"stack": (stack,)}
        space = Space(model=Model.load(model), clusters=clusters, global_batch=batch, seq_len=seq_len, fixed=fixed)
        asked, start = SearchStudy(space=space, layouts=True), time.process_time()
        with Serial(asked) as engine:
            report = search(asked, engine)
        say(report, time.process_time() - start, f"of a core, at most {report.gain or 0:.1%} from the best, {name}")


def say(report: SearchReport, seconds: float, where: str) -> None:
    """One line."""
    counts = report.counts
    decided = counts.legal + counts.unchecked
    rate, simulated = decided / seconds, sum(counts.simulated.values())
    text = f"search: {decided:,} plans in {seconds:.0f} s {where}, {rate:,.0f}/s; {simulated} simulated"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print what is seen."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--full", action="store_true")
    arguments.add_argument("--cpu", action="store_true")
    arguments.add_argument("--cases", nargs="*", choices=[*CASES, *FURTHER, "further"], metavar="NAME")
    asked = arguments.parse_args()
    if asked.cases is not None:
        cases(asked.cases)
    elif asked.full:
        full()
    elif asked.cpu:
        alone()
    else:
        survey()


if __name__ == "__main__":
    main()
