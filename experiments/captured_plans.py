"""Captured plain PyTorch programs beside what one H200 measured of the same plans, and beside the described road.

    python experiments/captured_plans.py --captures FOLDER [--only REGEX] [--write]

Each plan of `experiments/measured/h200-solo-2026-11-20` and `h200-2026-11-20` is `experiments/programs/llama.py` under its
options, captured for the plan's ranks. Both samples ran one rank with collectives that cost nothing, so predictions stand
without communication and without waiting for slower GPUs. Captures are kept in FOLDER and used again (some 20 s each).
--write puts the tables into docs/guides/capture.md. Nothing is fitted here; five plans of the earlier sample, on which `gemm_factor` of the eager stack
was fitted (its `calibration_runs`), stand in the table but count in no median.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from simulator.formats.readers.capture import read_capture  # noqa: E402
from simulator.predict.anchored import anchored, shared_kernels  # noqa: E402
from simulator.predict.prediction import Prediction  # noqa: E402
from simulator.predict.program import predict_program  # noqa: E402
from simulator.spec.calibration import Calibration  # noqa: E402
from simulator.spec.calibration.collective_curves import LinkCurves  # noqa: E402
from simulator.spec.cluster import Cluster  # noqa: E402
from simulator.spec.software.stack import Stack  # noqa: E402
from simulator.work.captured.capture import Capture, Kind  # noqa: E402
from simulator.work.captured.cost import KernelCost  # noqa: E402
from validate.capture.command import Job, captured_json  # noqa: E402
from validate.capture.written import write_capture  # noqa: E402

MEASURED = ROOT / "experiments" / "measured"
PROGRAM = "experiments/programs/llama.py"
PAGE = ROOT / "docs" / "guides" / "capture.md"
BEGIN, END = "<!-- experiments/captured_plans.py writes from here -->", "<!-- to here -->"
SAMPLES = ("h200-solo-2026-11-20", "h200-2026-11-20")
_NEAR = 0.05  # what a what-if may be off
_ABSENT = ("interference", "stragglers")  # of one GPU whose collectives cost nothing but the host's time


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan as options of the program, and what was measured. fitted: the eager stack has seen its step."""

    name: str
    options: tuple[str, ...]
    ranks: int
    step_s: float
    allocated_bytes: int
    reserved_bytes: int
    expandable: bool
    compiled: bool
    sample: str
    fitted: bool = False

    @property
    def copies(self) -> bool:
        """The process group copied for each all-gather, as the later sample's README says; the earlier one's says nothing."""
        return self.sample == SAMPLES[0]


Found = tuple[Case, Prediction, Capture]


def cases() -> Iterator[Case]:
    """Both samples, in their order."""
    for line in (MEASURED / SAMPLES[0] / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        yield _of_record(json.loads(line))
    seen = Stack.load("torch-2.11-eager").fitted.calibration_runs
    for line in (MEASURED / SAMPLES[1] / "plans.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if "error" not in one:
            yield _of_plan(one, fitted=one["name"] in seen)


def _of_record(record: dict[str, Any]) -> Case:
    """A record of `shardwise validate run --mode solo`."""
    plan, memory = record["plan"], record["memory"]
    ranks = plan["dp_shard"] * plan["dp_replicate"]
    kind = "fsdp" if plan["zero"] == 3 else "ddp" if ranks > 1 else "single"
    flags = ["--sync-last"] * (plan["sync_every_micro_batch"] is False)
    flags += ["--keep-gathered"] * (plan["reshard_after_forward"] is False)
    compiled = "compiled" in plan["stack"]
    settings = str(record.get("allocator_settings") or "")
    sizes = record["model"]["name"], plan["seq_len"], plan["micro_batch_size"], plan["num_micro_batches"]
    return Case(
        name=_name(*sizes[:3], ranks, kind, plan["recompute"], [*flags, *["--compile"] * compiled], sizes[3])
        + ", expandable" * ("expandable" in settings),
        options=_options(*sizes, kind, plan["recompute"], plan["optimizer_impl"], flags, compiled=compiled),
        ranks=ranks,
        step_s=record["time"]["median_s"],
        allocated_bytes=memory["peak_allocated_bytes"],
        reserved_bytes=memory["peak_reserved_bytes"],
        expandable="expandable" in settings,
        compiled=compiled,
        sample=SAMPLES[0],
    )


def _of_plan(one: dict[str, Any], *, fitted: bool) -> Case:
    """A line of the earlier sample, whose models repeat K and V to all heads."""
    kind = {"fsdp2": "fsdp"}.get(one["strategy"], one["strategy"])
    flags = [*["--keep-gathered"] * (not one["reshard"]), "--repeat-kv"]
    flags += ["--sync-last"] * (kind == "ddp" and one["accum"] > 1)
    flags += ["--eager-loss"] * one["compile"]  # whose blocks alone were compiled: the peak is the eager loss's
    if kind == "hsdp":
        flags += ["--shards", str(one["shards"])]
    sizes = one["model"], one["seq"], one["mb"], one["accum"]
    options = [flag for flag in flags if flag == "--keep-gathered"] + ["--compile"] * one["compile"]
    return Case(
        name=_name(*sizes[:3], one["world"], kind, one["ac"], options, sizes[3]) + ", expandable" * bool(one["conf"]),
        options=_options(*sizes, kind, one["ac"], one["opt"], flags, compiled=one["compile"]),
        ranks=one["world"],
        step_s=one["step_s"],
        allocated_bytes=one["peak_allocated_bytes"],
        reserved_bytes=one["peak_reserved_bytes"],
        expandable=bool(one["conf"]),
        compiled=one["compile"],
        sample=SAMPLES[1],
        fitted=fitted,
    )


def _name(
    model: str, seq: int, batch: int, ranks: int, kind: str, recompute: str, flags: Sequence[str], times: int
) -> str:
    more = [flag.removeprefix("--") for flag in flags]
    return ", ".join([model, f"{batch} x {seq} x {times}", f"{kind} {ranks}", recompute, *more])


def _options(  # noqa: PLR0913  an option each
    model: str,
    seq: int,
    batch: int,
    times: int,
    kind: str,
    recompute: str,
    optimizer: str,
    flags: list[str],
    *,
    compiled: bool,
) -> tuple[str, ...]:
    named = {"model": model, "seq-len": seq, "batch": batch, "accumulate": times, "parallel": kind}
    named |= {"recompute": recompute, "optimizer": optimizer}
    return (*(f"--{name}={value}" for name, value in named.items()), *flags, *["--compile"] * compiled)


def predicted(case: Case, folder: Path) -> Found:
    """The case captured, unless it was before, and predicted with links that cost nothing."""
    nodes = max(1, case.ranks // 8)
    cluster = Cluster.load("hgx-h200-8", nodes)
    if case.ranks < 8:
        cluster = cluster.model_copy(update={"gpus_per_node": case.ranks, "nvlink_domain_size": case.ranks})
    path = folder / (re.sub(r"[^\w.]+", "-", " ".join(case.options)) + f"-{case.ranks}.capture.gz")
    if not path.exists():
        job = Job(
            target=PROGRAM, arguments=case.options, world_size=case.ranks, gpus_per_node=min(8, case.ranks),
            device=cluster.device,
        )  # fmt: skip
        write_capture(path, captured_json(job))
    stack = Stack.load("torch-2.11-compiled" if case.compiled else "torch-2.11-eager")
    capture = read_capture(path)
    found = predict_program(
        without_wires(as_played(capture, cluster) if case.copies else capture),
        cluster,
        stack=stack,
        curves=LinkCurves.ideal(),
        expandable_segments=case.expandable,
    )
    return case, found, capture


def without_wires(capture: Capture) -> Capture:
    """The capture with collectives of a byte: the host issues them, and nothing travels."""
    events = [[*one[:4], 1, *one[5:]] if one[0] == Kind.COLLECTIVE else one for one in capture.events]
    return replace(capture, events=events)


def as_played(capture: Capture, cluster: Cluster) -> Capture:
    """The capture with what the runs' process group did for an all-gather: this rank's part copied once for each rank.

    By torch's C++, on the gathering stream, each copy an operator; copies beside other kernels take the memory from them.
    """
    signatures, costs, events = list(capture.signatures), dict(capture.costs), list(capture.events[: capture.steady])
    known: dict[int, int] = {}
    bandwidth = cluster.device.memory_bytes_per_s
    for event in capture.events[capture.steady :]:
        if event[0] == Kind.COLLECTIVE and capture.names[event[2]] == "all_gather":
            size = event[4]
            if size not in known:
                known[size] = len(signatures)
                seconds = 2 * size / bandwidth  # one of FSDP2's by name: the hook around the gather goes on
                costs[known[size]] = KernelCost(seconds=seconds, launches=capture.world_size, category="copies")
                signatures.append(("fsdp.copies.default", ((), ()), ()))
            events.append([Kind.OPERATOR, known[size], event[5], 0, 0])
        events.append(event)
    return replace(capture, signatures=signatures, costs=costs, events=events)


def without_others_s(prediction: Prediction) -> float:
    """The step without what collectives take from kernels, and without waiting for slower GPUs."""
    return sum(seconds for name, seconds in prediction.breakdown.items() if not name.startswith(_ABSENT))


def beside_copies_s(prediction: Prediction) -> float:
    """What kernels lose to the copies beside them, which take the memory: the calibration's `hbm_weight` of their time."""
    cluster = Cluster.load("hgx-h200-8")
    copies = (span for span in prediction.timeline.spans if ": copies #" in span.label)
    taken_s = sum(float(span.nominal_s) for span in copies)
    return Calibration.for_device(cluster.device).interference.hbm_weight * taken_s


def step_s(prediction: Prediction) -> float:
    """The step as it was played: one GPU, collectives without links, and the copies that stood for them."""
    return without_others_s(prediction) + beside_copies_s(prediction)


def table(found: Sequence[Found]) -> Iterator[str]:
    """Markdown, a table a sample: a line a plan, and medians of those that nothing was fitted on."""
    for sample in SAMPLES:
        of_sample = [each for each in found if each[0].sample == sample]
        if of_sample:
            yield from (f"`{sample}`:", "", *_table(of_sample), "")


def _table(found: Sequence[Found]) -> Iterator[str]:
    yield "| program | measured step | captured | peak allocated | peak reserved |"
    yield "|---|--:|--:|--:|--:|"
    errors: dict[str, list[float]] = {"step": [], "allocated": [], "reserved": []}
    for case, one, _ in found:
        misses = {
            "step": step_s(one) / case.step_s - 1,
            "allocated": one.memory.peak_allocated_bytes / case.allocated_bytes - 1,
            "reserved": one.memory.peak_reserved_bytes / case.reserved_bytes - 1,
        }
        for name, value in misses.items():
            if not case.fitted:
                errors[name].append(abs(value))
        cells = " | ".join(f"{100 * value:+.2f} %" for value in misses.values())
        yield f"| {case.name}{' (fitted on)' if case.fitted else ''} | {case.step_s:.4f} s | {cells} |"
    texts = [f"{100 * statistics.median(e):.2f} % (worst {100 * max(e):.2f} %)" for e in errors.values()]
    yield f"| median of the absolute error | | {' | '.join(texts)} |"
    misses_of_pairs = [_of_pair(*pair) for pair in permutations(found, 2)]
    near = sum(abs(miss) <= _NEAR for miss, _ in misses_of_pairs)
    held = sum(one for _, one in misses_of_pairs)
    within = f"{near} of {len(misses_of_pairs)} pairs are within {100 * _NEAR:g} %, and {held} in their 90 % interval"
    yield from ("", f"From one plan's measured step to another's, as `predict --measured … --of` has it: {within}.")


def _of_pair(here: Found, there: Found) -> tuple[float, bool]:
    """By one plan's measured step: what the other's is off by, and whether its interval holds it."""
    (case, before, measured), (other, alone, capture) = here, there
    before, alone = (replace(one, step_s=step_s(one)) for one in (before, alone))
    cluster = Cluster.load("hgx-h200-8")
    timer = Calibration.for_device(cluster.device).timer(cluster.device)
    shared = shared_kernels(capture, measured, timer)
    found = anchored(alone, before, case.step_s, shared)
    return found.step_s / other.step_s - 1, found.low_s <= other.step_s <= found.high_s


def main(argv: Sequence[str] | None = None) -> int:
    """Capture, predict, print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=Path, required=True, help="a folder to keep captures in")
    parser.add_argument("--only", default="", help="names of plans that match")
    parser.add_argument("--parts", action="store_true", help="where each step goes")
    parser.add_argument("--write", action="store_true", help="into docs/guides/capture.md")
    options = parser.parse_args(argv)
    options.captures.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases():
        if re.search(options.only, case.name):
            found.append(predicted(case, options.captures))
            one = found[-1][1]
            print(f"{case.name}: {step_s(one) / case.step_s - 1:+.2%}", file=sys.stderr, flush=True)
            if options.parts:
                print({name: round(1e3 * s, 1) for name, s in one.breakdown.items()}, file=sys.stderr)
    text = "\n".join(table(found)).rstrip()
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
