"""One supervised rank: `python -m validate.players.rank TASK.json`. Loads torch, plays, reports, and says what failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from validate.players import guard
from validate.report import RankReport, describe, kind_of
from validate.task import Task


def main(path: str) -> int:
    """Exit status: 0 with a result, 1 with a fault reported."""
    report = RankReport.to_parent()
    try:
        task = Task.model_validate_json(Path(path).read_bytes())
        report.phase("load")
        report.result(_player(task)(task, report))
    except BaseException as exc:  # noqa: BLE001  whatever it is, the parent must be told
        report.fault(kind_of(exc), describe(exc))
        return 1
    return 0


def _player(task: Task) -> Any:  # noqa: ANN401  the players share a signature
    if task.mode == "fake" and task.device == "cuda" and guard.needs_guard():
        guard.stand_in(Path(os.environ.get("SHARDWISE_SCRATCH", ".")))
    import torch

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    if task.plan.precision.compute == "tf32":
        torch.set_float32_matmul_precision("high")
    if task.mode == "fake":
        from validate.players.fake import run
    else:
        from validate.players.real import run
    return run


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # a half-dead process group must not hold a finished rank back
