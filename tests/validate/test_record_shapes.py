"""Lines of a results file that are no records of a run."""

from __future__ import annotations

import pytest

from validate.records import faults_of_run

LINE = {"kind": "run", "schema_version": 1, "mode": "cpu", "verdict": "ok"}


@pytest.mark.parametrize("machine", ["a node", 1, ["clock"]])
def test_a_machine_is_a_table(machine: object) -> None:
    assert faults_of_run({**LINE, "machine": {"name": "a node"}}) == faults_of_run(LINE) == ""
    assert faults_of_run({**LINE, "machine": machine}).startswith("machine: ")
