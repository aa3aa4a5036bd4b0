"""Plans on fake tensors hold what plain torch's allocator counts: some of `python -m tests.plain_torch`, and how it counts."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests import warm
from tests.plain_torch.__main__ import HERE, both, row
from validate.players.allocated import changes, phases_bytes
from validate.torch_private import is_kernel

CPU = ["ddp, tied table, bf16, accumulated", "tp, tied table, short", "ep"]
CUDA = ["ddp, tied table, bf16, accumulated", "fsdp2, half rotary", "cp, ring"]


@pytest.mark.parametrize(("device", "names"), [("cpu", CPU), ("cuda", CUDA)])
def test_fake_plans_are_plain_ones_to_the_byte(
    device: str, names: list[str], torch_server: warm.Server, request: pytest.FixtureRequest
) -> None:
    """Both ways are forked from processes that have loaded torch, with the guard for fake tensors of a GPU."""
    fakes: warm.Server = request.getfixturevalue("guarded_server") if device == "cuda" else torch_server
    with ExitStack() as stack:

        def start(way: str, command: list[str], environment: dict[str, str]) -> warm.Process:
            process = (fakes if way == "fake" else torch_server).popen(command, env=environment, cwd=HERE)
            stack.callback(process.close)
            return process

        for name, fake, plain in both(names, device, start):
            cells, equal = row(fake, plain)
            assert equal, f"{name}: {cells}"


def test_threads_are_set_in_the_process_that_plays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set before a fork, torch's pool is made anew by whichever of autograd's threads comes first, and others find none."""
    monkeypatch.setattr("sys.argv", ["rank", "plain", "cpu"])
    from tests.plain_torch import rank

    done: list[str] = []
    for place, name in ((os, "fork"), (rank.torch, "set_num_threads"), (rank, "_played"), (os, "_exit")):
        monkeypatch.setattr(place, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(os, "wait", lambda: None)
    rank.main("plain", "cpu", str(tmp_path / "out"), "ep")
    assert done == ["fork", "set_num_threads", "_played", "_exit"]


def test_a_table_says_what_differs_and_what_did_not_end() -> None:
    memory = {"start_bytes": 1, "after_forward_bytes": 2, "after_backward_bytes": 1, "peak_bytes": 3}
    one: dict[str, Any] = {"memory": {**memory, "peak_by_phase_bytes": {"forward": 3}}}
    other: dict[str, Any] = {"memory": {**memory, "peak_by_phase_bytes": {"forward": 5}}}
    assert row(one, one) == (["3", "3", "0", ""], True)
    assert row(one, other) == (["3", "3", "-2", "peak of forward"], False)
    assert row(one, {"error": "no answer"}) == (["", "", "", "no answer"], False)


def operator(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "ts": begin, "dur": end - begin, "tid": 1}


def memory(at: float, address: int, size: int, total: int) -> dict[str, Any]:
    told = {"Device Type": 0, "Addr": address, "Bytes": size, "Total Allocated": total}
    return {"name": "[memory]", "ts": at, "tid": 1, "args": told}


def test_what_a_kernel_takes_and_gives_back_is_not_counted() -> None:
    events = [
        {"name": "shardwise phase forward", "ts": 0.5},
        operator("aten::mm", 1, 4),
        memory(2, 16, 100, 100),  # its result
        memory(2.5, 32, 40, 140),  # its scratch
        memory(3, 32, -40, 100),
        memory(5, 16, -100, 0),
    ]
    assert [one.scratch for one in changes(events)] == [False, True, True, False]
    assert phases_bytes(events)["peak_by_phase_bytes"]["forward"] == 100


def test_a_subclass_s_operator_is_no_kernel() -> None:
    """DTensor's exchanges what it needs, then calls the one of its own name."""
    events = [
        operator("aten::mm", 1, 9),
        memory(2, 16, 100, 100),  # gathered
        operator("aten::mm", 3, 5),
        memory(4, 32, 40, 140),
        memory(6, 16, -100, 40),
    ]
    assert not any(one.scratch for one in changes(events))


@pytest.mark.parametrize(
    ("name", "whole"), [("aten::mm", True), ("aten::to", False), ("aten::_to_copy", True), ("c10d::send", False)]
)
def test_operators_that_are_made_of_others_are_no_kernels(name: str, *, whole: bool) -> None:
    assert is_kernel(name) is whole
