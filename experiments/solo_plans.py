"""One rank of sharded Llama jobs on one GPU: step times, memory, spans and allocator events of a list of plans.

usage: python experiments/solo_plans.py OUTDIR [--minutes 8] [--only REGEX]

Writes OUTDIR/runs.jsonl, a record a plan (`shardwise validate compare` reads it), and the files beside the records.
The plans are ordered so that what is learned first is worth most; the run ends with the minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulator.base.errors import InputError
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import run_plan
from validate.task import Task

EAGER, COMPILED = "torch-2.11-eager", "torch-2.11-compiled"
EXPANDABLE = "expandable_segments:True"


def case(
    model: str,
    seq_len: int,
    micro_batch_size: int,
    world: int,
    recompute: str = "none",
    **more: Any,  # noqa: ANN401  fields of Plan
) -> dict[str, Any]:
    """A plan by its usual numbers; `more` are fields of Plan, `record` and `settings` (of the allocator) apart."""
    apart: dict[str, Any] = {name: more.pop(name) for name in ("record", "settings") if name in more}
    degrees = {"dp_shard": world} if "zero" not in more or more["zero"] else {"dp_replicate": world}
    sizes = {"seq_len": seq_len, "micro_batch_size": micro_batch_size, "recompute": recompute}
    return {"model": model, "plan": {"stack": EAGER, **degrees, **sizes, **more}, **apart}


CASES = [
    case("llama3.2-1b", 2048, 4, 1, zero=0, record=True),
    case("llama3-8b", 8192, 1, 64, "full", record=True),
    case("llama3.2-3b", 4096, 2, 8, "selective"),
    case("llama3-8b", 4096, 2, 512, "none", record=True),
    case("llama3.2-1b", 2048, 8, 8, zero=0),
    case("llama3-8b", 8192, 1, 8, "full", stack=COMPILED),
    case("llama3.2-3b", 16384, 1, 64, "full"),
    case("llama3-8b", 8192, 2, 64, "none"),  # the most that fits
    case("llama3.2-1b", 4096, 4, 8, "none", stack=COMPILED),
    case("llama3-8b", 2048, 4, 64, "selective", num_micro_batches=2, sync_every_micro_batch=False),
    case("llama3.2-3b", 2048, 8, 64, "none", optimizer_impl="foreach"),
    case("llama3-8b", 8192, 1, 64, "full", settings=EXPANDABLE, record=True),
    case("llama3.2-1b", 8192, 1, 512, "none", reshard_after_forward=False),
    case("llama3-8b", 16384, 1, 512, "selective"),
    case("llama3.2-3b", 4096, 2, 8, zero=1),
    case("llama3-8b", 4096, 1, 8, "none", dp_shard=8, dp_replicate=8),
]


def label(given: dict[str, Any]) -> str:
    """A name for files."""
    p = given["plan"]
    parts = [given["model"], f"s{p['seq_len']}", f"b{p['micro_batch_size']}", p["recompute"]]
    parts += [f"{k}{v}" for k, v in p.items() if k in ("dp_shard", "dp_replicate", "zero", "num_micro_batches")]
    parts += ["compiled"] if p["stack"] == COMPILED else []
    return "-".join([*parts, *(["expandable"] if "settings" in given else [])])


def main() -> None:
    """Play the list."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("outdir", type=Path)
    options.add_argument("--minutes", type=float, default=8)
    options.add_argument("--only", default="")
    arguments = options.parse_args()
    arguments.outdir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    for given in CASES:
        if re.search(arguments.only, label(given)):
            left = end - time.monotonic()
            if left < 20:
                print("out of time before", label(given), flush=True)
                break
            play(given, arguments.outdir, min(left, 100))


def _cluster(plan: Plan) -> dict[str, Any]:
    """As many H200 as the plan has ranks, eight a node."""
    nodes = max(1, plan.num_devices // 8)
    data = Cluster.load("hgx-h200-8", nodes).model_dump(mode="json")
    per_node = plan.num_devices // nodes
    return {**data, "gpus_per_node": per_node, "nvlink_domain_size": per_node}


def play(given: dict[str, Any], outdir: Path, seconds: float) -> None:
    """Run one plan and keep its record."""
    if "settings" in given:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given["settings"]
    else:
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    plan = Plan(**given["plan"])
    task = Task(
        mode="solo", device="cuda", model=Model.load(given["model"]), plan=plan, stack=Stack.load(plan.stack),
        num_steps=6, num_warm_up=3, record=given.get("record", False), memory_fraction=0.95,
        command=f"experiments/solo_plans.py --only {label(given)}",
    )  # fmt: skip
    study = {"cluster": _cluster(plan), "calibration": None}
    begun = time.monotonic()
    try:
        record = run_plan.play(task, run_plan.deadlines(seconds / 60), files=outdir / label(given), study=study)
    except InputError as exc:
        print(label(given), exc, flush=True)
        return
    run_plan.append(outdir / "runs.jsonl", record)
    step = f"{record['time']['median_s']:.4f} s" if record["time"] else str(record["trouble"])
    memory = record["memory"] or {}
    held = f"{memory.get('peak_reserved_bytes', 0) / 2**30:.2f} GiB reserved"
    print(label(given), record["verdict"], step, held, f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
