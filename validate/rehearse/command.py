"""`shardwise validate rehearse`: play the scenarios, say of each whether it was named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from simulator.base.errors import Fault, InputError
from simulator.base.exit_codes import ExitCode
from validate.rehearse.forked import adopt_orphans
from validate.rehearse.scenarios import SCENARIOS, Scenario
from validate.rehearse.stage import Played, cleared, patient, play
from validate.supervise import scratch_folder


def rehearse(*, quick: bool, only: str, patience: float, as_json: bool) -> int:
    """Exit code 0 where every fault was named within its deadline and nothing was left behind."""
    if not Path("/proc/self/fd").is_dir():
        fault = Fault(place="validate rehearse", problem="needs Linux: it looks into /proc", remedy="a Linux machine")
        raise InputError(fault)
    chosen = [one for one in SCENARIOS if (one.quick or not quick) and only in one.name]
    if not chosen:
        raise InputError(
            Fault(place=f"--only {only}", problem="is in no scenario's name", remedy="run, calibrate, srun")
        )
    _load()
    adopt_orphans()
    found = [_played(patient(one, patience), as_json) for one in chosen]
    wrong = sum(bool(one.problems) for one in found)
    if as_json:
        _print(json.dumps({"schema_version": 1, "scenarios": [_json(one) for one in found]}, indent=2))
    else:
        _print(f"{len(found) - wrong} of {len(found)} faults named, in {sum(one.seconds for one in found):.0f} s")
    return ExitCode.RUN_FAILED if wrong else ExitCode.OK


def _load() -> None:
    """What parents and ranks load, once: they are forked from this process."""
    import torch

    import simulator.work.script  # noqa: F401
    from validate.benches import worker  # noqa: F401
    from validate.players import fake, rank, real  # noqa: F401

    torch.set_num_threads(1)


def _played(scenario: Scenario, as_json: bool) -> Played:  # noqa: FBT001
    with scratch_folder() as folder:
        found = play(scenario, folder / "job")
        cleared(folder / "job")
    if not as_json:
        _print(f"{'WRONG' if found.problems else 'named'}  {scenario.name}: {found.seconds:.1f} s")
        for problem in found.problems:
            _print(f"       {problem}")
    return found


def _json(found: Played) -> dict[str, object]:
    return {
        "name": found.scenario.name,
        "expected": found.scenario.kind,
        "seconds": round(found.seconds, 2),
        "said": found.said,
        "problems": found.problems,
    }


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
