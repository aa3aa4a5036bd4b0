"""Programs that others wrote: a captured step has the collectives and the live bytes of a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.programs.comparing import PROGRAMS, beyond_scalars, captured, real


@pytest.mark.usefixtures("warm_captures")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_captured_step_is_the_real_one(name: str, tmp_path: Path, torch_server: warm.Server) -> None:
    program = PROGRAMS[name]
    if missing := program.missing():
        pytest.skip(f"needs {', '.join(missing)}: pip install 'shardwise[programs]'")
    one = captured(program, tmp_path)
    if not program.real:
        assert {kind for kind, _ in one.collectives} >= {"all_gather", "reduce_scatter"}
        return
    other = real(program, tmp_path, torch_server.popen)
    assert one.collectives == other.collectives
    if program.memory:
        assert beyond_scalars(one.at_peak) == beyond_scalars(other.at_peak)
