"""The launch kit of a search's best plan, with its ranks placed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.base.fit import Fit
from simulator.base.units import format_seconds
from simulator.cli.export import head_of, job_of
from simulator.cli.launch_kit import host_of, kit_files
from simulator.cli.options import print_status, write_files
from simulator.formats.study import Study
from simulator.studies.place import place
from simulator.studies.search import SearchReport


def write_winner(report: SearchReport, folder: Path, options: Mapping[str, Any]) -> None:
    """Write the launch kit of the best plan, with a faster rank order if there is one. options: hosts, topology.

    Raises InputError with every fault.
    """
    best, study = report.rows[0], report.study
    cluster, host = study.cluster(best.nodes), host_of(options["topology"])
    found = place(study.space.model, best.plan, cluster, study.calibration, study.stack)
    chosen = Study(
        model=study.space.model,
        plan=found.plan,
        cluster=found.cluster,
        calibration=study.calibration,
        stack=study.stack,
        sources=(),
    )
    write_files(kit_files(chosen, job_of(chosen), head_of(chosen), options["hosts"], host), folder)
    if best.outcome.status is not Fit.FITS:
        print_status(f"the best plan is {best.outcome.status} in memory: `shardwise predict` says why")
    steps = (
        f"{format_seconds(found.placed.step_s)} a step, {format_seconds(found.default.step_s)} in the order of ranks"
    )
    print_status(f"its ranks are placed: {steps}" if found.cluster.seats else "its ranks keep their order")
