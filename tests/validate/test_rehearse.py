"""A cluster's faults, rehearsed: each is named by rank, host and cause, and nothing is left of the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from validate.faults import FAULTS
from validate.rehearse.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@LINUX
def test_one_fault_of_each_kind_is_named_and_leaves_nothing() -> None:
    """The rest takes minutes: `shardwise validate rehearse`. In a process of its own, which loads torch once for all ranks."""
    command = [sys.executable, "-m", "simulator.cli", "validate", "rehearse", "--quick", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)["scenarios"]
    assert [one for one in told if one["problems"]] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert {one["expected"] for one in told} == {"killed", "out_of_memory", "hung", "refused"}
    assert len(told) == sum(one.quick for one in SCENARIOS)


def test_the_whole_rehearsal_has_forty_faults_of_every_kind_under_both_launchers() -> None:
    assert len(SCENARIOS) >= 40
    assert len({one.name for one in SCENARIOS}) == len(SCENARIOS)
    assert {one.fault for one in SCENARIOS if not one.at_start} == set(FAULTS) - {"corrupt"}  # a burn-in's
    assert {one.launcher for one in SCENARIOS} == {"torchrun", "srun"}
    assert {one.kind for one in SCENARIOS} >= {"killed", "out_of_memory", "storage_full", "hung", "refused", "slow"}
