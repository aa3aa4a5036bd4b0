"""This CPU as a machine: calibrate it, predict small plans that the fit never saw, run them, compare.

    PYTHONPATH=. python experiments/cpu_loop.py --minutes 0.5 --out FOLDER

Runs on gloo with two processes of one thread. Says the load of the machine before each part: on a busy machine the
ratio to the measured spread is what counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from simulator import Calibration, Cluster, Model, Plan, Stack, predict
from validate.fit.machine import fit_machine, write_cluster, write_stack
from validate.measure import Job, measure
from validate.run_plan import deadlines, play
from validate.samples import read_samples
from validate.task import Task

RANKS = 2
MODELS = {
    "3M": Model(name="3M", num_layers=4, d_model=192, num_heads=6, num_kv_heads=3, d_ff=512, vocab_size=4096),
    "10M": Model(name="10M", num_layers=6, d_model=256, num_heads=8, num_kv_heads=4, d_ff=1024, vocab_size=8192),
}
SHAPES = (("3M", 128, 2), ("10M", 128, 2), ("10M", 512, 1))  # model, sequence, micro-batch
STRATEGIES = {
    "ddp": {"dp_replicate": RANKS, "zero": 0},
    "zero1": {"dp_shard": RANKS, "zero": 1},
    "fsdp2": {"dp_shard": RANKS, "zero": 3},
}


def main() -> None:
    """Calibrate (unless the folder has a calibration), then a line a plan and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("cpu-loop"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    calibrate(options.out, options.minutes)
    errors, ratios = [], []
    for name, seq, batch in SHAPES:
        for strategy, degrees in STRATEGIES.items():
            error, ratio = one(options.out, MODELS[name], seq, batch, strategy, degrees, options.steps)
            errors.append(error)
            ratios.append(ratio)
    print(
        f"median |error| {statistics.median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}; "
        f"median |error| over the measured spread {statistics.median(ratios):.2f}"
    )


def calibrate(folder: Path, minutes: float) -> None:
    """samples.jsonl and the machine's three files, if they are not there."""
    samples = folder / "samples.jsonl"
    if not samples.exists():
        print(f"load {os.getloadavg()[0]:.1f}: calibrating for {minutes} minutes", flush=True)
        print(measure(Job(out=samples, minutes=minutes, device="cpu", num_ranks=RANKS, threads=1)))
    found = fit_machine(read_samples([samples]), "here")
    assert found.cluster is not None
    assert found.stack is not None
    found.calibration.save(folder / "here.calibration.json")
    write_cluster(found.cluster, folder / "here.toml")
    write_stack(found.stack, folder / "here.stack.toml")
    print("\n".join(found.report.lines))
    print(
        f"uncertainty {found.calibration.uncertainty}; host {found.stack.host_launch_s:.2e} s a launch, "
        f"{found.stack.host_collective_s:.2e} s a collective"
    )


def one(
    folder: Path, model: Model, seq: int, batch: int, strategy: str, degrees: dict[str, int], steps: int
) -> tuple[float, float]:
    """Predict and run one plan; (relative error, |error| over the spread)."""
    path = folder / "here.stack.toml"
    plan = Plan(**degrees, seq_len=seq, micro_batch_size=batch, precision="fp32", stack=str(path))
    stack = Stack.load(path)
    said = predict(model, plan, Cluster.load(folder / "here.toml"), Calibration.load(folder / "here.calibration.json"))
    task = Task(mode="cpu", model=model, plan=plan, stack=stack, num_steps=steps, num_warm_up=3, profile=False)
    record = play(task, deadlines(3))
    if record["verdict"] != "ok":
        print(strategy, model.name, record["verdict"], record.get("cause") or record.get("detail"))
        return 1.0, 99.0
    times = record["time"]["times_s"]
    measured = statistics.median(times)
    spread = max(1e-9, statistics.quantiles(times, n=10)[-1] - statistics.quantiles(times, n=10)[0])
    error = said.step_s / measured - 1
    parts = " ".join(f"{k} {1e3 * v:.1f}" for k, v in said.breakdown.items() if v > 0.02 * said.step_s)
    print(
        f"{model.name} s{seq} b{batch} {strategy:6s} load {os.getloadavg()[0]:.1f}: predicted {1e3 * said.step_s:.1f} ms "
        f"[{1e3 * said.low_s:.0f}, {1e3 * said.high_s:.0f}], measured {1e3 * measured:.1f} ms (spread {1e3 * spread:.1f}), "
        f"error {error:+.1%}; {parts}",
        flush=True,
    )
    return error, abs(said.step_s - measured) / spread


if __name__ == "__main__":
    main()
