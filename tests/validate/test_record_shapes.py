"""Lines of a results file that are no records of a run."""

from __future__ import annotations

import pytest

from validate.records import faults_of_run

LINE = {"kind": "run", "schema_version": 1, "mode": "cpu", "verdict": "ok"}


@pytest.mark.parametrize("machine", ["a node", 1, ["clock"]])
def test_a_machine_is_a_table(machine: object) -> None:
    assert faults_of_run({**LINE, "machine": {"name": "a node"}}) == faults_of_run(LINE) == ""
    assert faults_of_run({**LINE, "machine": machine}).startswith("machine: ")


@pytest.mark.parametrize("name", ["after_forward_bytes", "after_backward_bytes", "peak_bytes"])
def test_a_null_states_no_bytes(name: str) -> None:
    sizes = {"start_bytes": 1, "after_forward_bytes": 2, "after_backward_bytes": 2, "peak_bytes": 3}
    memory = {**sizes, "peak_phase": "backward", "peak_by_phase_bytes": {"backward": 3}}
    assert not faults_of_run({**LINE, "memory": memory})
    assert f"start_bytes stands without {name}" in faults_of_run({**LINE, "memory": {**memory, name: None}})
