"""Where a captured program's prediction comes from: the program, what was answered for it, and what priced its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from simulator.predict.prediction import Source
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture
from simulator.work.captured.script import CapturedScript
from simulator.work.captured.solvers import SOLVERS


def listed(ranks: Sequence[int]) -> str:
    """The first of the ranks, and the last."""
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} … {ranks[-1]}"


def sources_of(capture: Capture, scripts: Mapping[int, CapturedScript]) -> list[Source]:
    """Facts of the program, and the answers that it was given for unknown values."""
    launched = sum(each.launches for each in scripts.values())
    ranks = tuple(scripts)
    who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} of {capture.world_size:,}"
    detail = f"{launched:,} operators with kernels a step, {who}, torch {capture.torch}"
    found = [Source(what="program", kind="given", detail=detail)]
    answers, unpriced, unmodelled = Counter[str](), Counter[str](), Counter[str]()
    for one in (capture, *capture.others):
        answers |= Counter(one.answers)
    for each in scripts.values():
        unpriced, unmodelled = unpriced + each.unpriced, unmodelled + each.unmodelled
    for question, times in sorted(answers.items()):
        found.append(
            Source(what="answered", kind="assumed", detail=f"{question}{f' ({times} times)' if times > 1 else ''}")
        )
    for counts, how in (unpriced, ""), (unmodelled, "no cost model: takes no time here"):
        for name, count in sorted(counts.items()):
            detail = f"{name}, {count} times a step: {how or _priced_by(name)}"
            found.append(Source(what="no rule", kind="assumed", detail=detail))
    return found


def _priced_by(operator: str) -> str:
    name = operator.partition(".")[2].partition(".")[0]
    if name in SOLVERS:
        return "priced by LAPACK's count, a column after another"
    return "priced by a step after another" if name.startswith("_ctc_loss") else "priced by its bytes"


def input_sources(cluster: Cluster, calibration: Calibration, stack: Stack) -> list[Source]:
    """Where the prices of a program's kernels come from."""
    machine = f"{calibration.name}: {calibration.provenance.machine}"
    return [
        Source(what="device", kind="datasheet", detail=cluster.device.name),
        Source(what="kernels", kind=calibration.kind, detail=machine),
        Source(what="stack", kind="assumed", detail=f"{stack.name}: what the host takes to launch"),
    ]
