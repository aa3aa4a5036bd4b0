"""Captured ranks that differ: pipelines of torch and by hand, and the same programs run for real over gloo."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.predict.program import predict_program
from simulator.spec.cluster import Cluster
from simulator.work.captured.capture import Capture, Kind
from tests import warm

pytestmark = pytest.mark.usefixtures("warm_captures")

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "docs" / "examples" / "llama.py"
DATA = ROOT / "tests" / "data" / "capture"
ROTATED = 2 * 8 * 2 * 16 * 4  # k and v of eight tokens, two heads of 16, four bytes: as much as of both ranks in bf16
SIZES = ["--layers=4", "--width=64", "--hidden=128", "--heads=4", "--kv-heads=2", "--vocab=128", "--seq=16"]


def captured(tmp_path: Path, script: Path, ranks: int, *arguments: str, flags: tuple[str, ...] = ()) -> Capture:
    out = tmp_path / "one.capture.gz"
    assert (
        main(["capture", str(script), "-o", str(out), "--ranks", str(ranks), *flags, "--", *arguments]) == ExitCode.OK
    )
    return read_capture(out)


def calls(one: Capture) -> list[list[object]]:
    """Kind, bytes and ranks of a rank's collectives and messages, in order."""
    found: list[list[object]] = []
    for event in one.events[one.steady :]:
        if event[0] == Kind.COLLECTIVE:
            found.append([one.names[event[2]], event[4], list(one.groups[event[3]])])
        elif event[0] == Kind.MESSAGE:
            found.append([("send", "receive")[event[2]], event[5], list(one.groups[event[3]])])
    return found


def waited_for(one: Capture) -> bool:
    """The program waits for every collective and message: nothing computes on what has not arrived."""
    events = one.events[one.steady :]
    called = {event[1] for event in events if event[0] in (Kind.COLLECTIVE, Kind.MESSAGE)}
    return called == {event[2] for event in events if event[0] == Kind.WAIT_WORK}


def for_real(
    server: warm.Server, tmp_path: Path, script: Path, ranks: int, *arguments: str
) -> list[list[list[object]]]:
    """The same of every rank, as torch's dispatcher tells it of a run over gloo."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    started = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        surroundings = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-W", "ignore", "-m", "tests.data.capture.gloo"]
        started.append(server.popen([*command, str(tmp_path / "real"), str(script), *arguments], env=surroundings))
    try:
        statuses = [each.wait(timeout=300) for each in started]
        assert statuses == [0] * ranks, [each.stderr.read()[-2000:] for each in started]
    finally:
        for each in started:
            each.close()
    return [json.loads((tmp_path / f"real.{rank}").read_text()) for rank in range(ranks)]


def test_tensor_and_pipeline_parallel_ranks_call_what_a_real_run_calls(
    tmp_path: Path, torch_server: warm.Server
) -> None:
    """FSDP2 or its like over nobody, tensor parallelism over two, 1F1B over two stages: each of four ranks."""
    flags = ["--tp=2", "--pp=2", "--micro-batches=3", *SIZES]
    one = captured(tmp_path, LLAMA, 4, *flags, flags=("--check",))
    every = {each.rank: each for each in (one, *one.others)}
    assert sorted(every) == [0, 1, 2, 3]  # the first rank's column and the last one's
    real = for_real(torch_server, tmp_path, LLAMA, 4, *flags)
    for rank, each in every.items():
        assert calls(each) == real[rank], rank
        assert waited_for(each)
    kinds = Counter(kind for kind, *_ in calls(one))
    assert kinds["send"] == kinds["receive"] == 3
    found = predict_program(one, Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 4}))
    assert [each.kind for each in found.kinds] == ["rank 0", "rank 2"]
    assert any(each.what == "rank 1, 3" and "the same collectives" in each.detail for each in found.sources)
    assert found.memory.used_bytes == max(each.memory.used_bytes for each in found.kinds)


def test_interleaved_stages_meet(tmp_path: Path, torch_server: warm.Server) -> None:
    flags = ["--pp=2", "--schedule=InterleavedZeroBubble", "--chunks=2", "--micro-batches=4", *SIZES]
    one = captured(tmp_path, LLAMA, 2, *flags)
    real = for_real(torch_server, tmp_path, LLAMA, 2, *flags)
    for each in (one, *one.others):
        assert calls(each) == real[each.rank]
    assert predict_program(one, Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 2})).step_s > 0


def test_a_pipeline_by_hand_sends_shapes_before_tensors(tmp_path: Path, torch_server: warm.Server) -> None:
    """Only the first stage knows that the second micro-batch has twice the rows: the others must receive it."""
    one = captured(tmp_path, DATA / "stages.py", 3)
    assert [each.rank for each in (one, *one.others)] == [0, 1, 2]
    row = 64 * 4
    sizes = [16, 32 * row, 16, 64 * row]  # a shape is two whole numbers of eight bytes
    received = [size for kind, size, _ in calls(one.others[0]) if kind == "receive"]
    assert received == [*sizes, *sizes]  # forward from 0, backward from 2
    real = for_real(torch_server, tmp_path, DATA / "stages.py", 3)
    for each in (one, *one.others):
        assert calls(each) == real[each.rank]


@pytest.mark.parametrize("how", ["by hand", "functional"])
def test_tokens_go_to_their_experts_and_back(how: str, tmp_path: Path, torch_server: warm.Server) -> None:
    """Two all-to-alls in each direction and a reduction of each of the router's gradients, as in a real run."""
    one = captured(tmp_path, DATA / "experts.py", 2, how)
    assert Counter(kind for kind, *_ in calls(one)) == {"all_to_all": 4, "all_reduce": 2}
    assert calls(one) == for_real(torch_server, tmp_path, DATA / "experts.py", 2, how)[0]


def test_ring_attention_sends_keys_and_values_around(tmp_path: Path) -> None:
    """By hand: a layer gathers k and v of both ranks in bf16 in each direction, and rotates their gradients in fp32 twice.

    torch has no ring attention on a CPU to run for real.
    """
    one = captured(tmp_path, LLAMA, 2, "--cp=2", *SIZES)
    among = Counter((kind, size) for kind, size, ranks in calls(one) if kind != "reduce_scatter" and size == ROTATED)
    layers = 4
    assert among == {("all_gather", ROTATED): 2 * layers, ("send_recv", ROTATED): 2 * layers}
    found = predict_program(one, Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 2}))
    assert found.communication["send_recv"][0] > 0


def test_ranks_that_wait_for_one_another_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.capture.gz"
    arguments = [str(DATA / "stages.py"), "-o", str(out), "--ranks", "2", "--", "lost"]
    assert main(["capture", *arguments]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "rank 0 waits for message 0 from rank 1" in told
    assert "rank 1 waits for message 2 from rank 0" in told
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_raises_ends_all_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(DATA / "stages.py"), "-o", str(tmp_path / "one.capture.gz"), "--ranks", "2", "--", "raises"]
    assert main(["capture", *arguments]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "rank 1: the program raised ValueError: no labels" in told
    assert 'stages.py", line' in told  # its own traceback, before ours
    assert list(tmp_path.iterdir()) == []


def test_messages_that_would_hang_on_gpus_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks send a large tensor before they receive one; as a batch it goes both ways at once."""
    captured(tmp_path, DATA / "stages.py", 2, "crossed")
    flags = ["--program", str(tmp_path / "one.capture.gz"), "--set", "cluster.gpus_per_node=2"]
    assert main(["predict", *flags]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "rank0: op" in told
    assert "'send to 1" in told
    assert "batch_isend_irecv" in told
    captured(tmp_path, DATA / "stages.py", 2, "batched")
    assert main(["predict", *flags]) == ExitCode.OK
