"""`validate run --program`: a script of the user's own played for real by gloo, beside its capture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.recording import read_recording
from tests import warm

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "capture" / "llama.py"
SIZES = ["1", "256", "512", "64"]  # layers, width, vocabulary, sequence


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, guarded_server: warm.Server, torch_server: warm.Server
) -> Iterator[Path]:
    with warm.forked_ranks(guarded_server, player=torch_server):
        yield tmp_path_factory.mktemp("programs")


def played(folder: Path, script: Path, *words: str, ranks: int = 1, steps: int = 1) -> tuple[int, dict[str, Any]]:
    out = folder / "runs.jsonl"
    flags = ["--ranks", str(ranks), "--steps", str(steps), "--device", "cpu", "-o", str(out)]
    code = main(["validate", "run", "--program", str(script), *flags, "--", *words])
    return code, json.loads(out.read_text().splitlines()[-1]) if out.exists() else {}


def compared(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["validate", "compare", str(folder / "runs.jsonl"), "--json", *flags]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)["runs"][-1]  # type: ignore[no-any-return]


def by_name(found: dict[str, Any], table: str) -> dict[str, tuple[float, float]]:
    return {line["name"]: (line["predicted"], line["measured"]) for line in found[table]}


def test_fsdp_of_two_ranks_does_what_was_captured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Collectives by the profiler of the real run: as many, in the same order, of the same bytes as captured."""
    code, record = played(folder, SCRIPT, *SIZES, ranks=2, steps=2)
    assert (code, record["verdict"], record["mode"]) == (ExitCode.OK, "ok", "program")
    assert len(record["time"]["times_s"]) == 2
    assert record["collectives"] == record["captured"]["collectives"]
    assert {kind for kind, _ in record["collectives"]} == {"all_gather", "reduce_scatter"}
    found = compared(folder, capsys)
    assert any("equal in kind, order and bytes" in note for note in found["notes"])
    predicted, measured = by_name(found, "memory")["start_bytes"]
    assert predicted == pytest.approx(measured, abs=1024)  # small tensors that stay on a CPU
    trace, capture = (folder / record["files"][name] for name in ("trace.json.gz", "capture"))
    capsys.readouterr()
    assert main(["import", str(trace), "--program", str(capture), "--json"]) == ExitCode.OK
    lined = json.loads(capsys.readouterr().out)
    assert (
        lined["operators"]["mm"]["matched"] == 24
    )  # 8 products (7 of the layer, the head), forward and twice backward
    assert lined["collectives"]["captured"] == lined["collectives"]["recorded"]
    assert "mm" not in lined["captured_only"]
    assert read_recording(trace).world_size == 2
    assert main(["predict", "--program", str(trace), "--json"]) == ExitCode.OK
    again = json.loads(capsys.readouterr().out)
    assert again["replayed_s"] == pytest.approx(again["recorded_s"], rel=0.01)


def test_a_program_without_collectives_holds_what_was_captured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "plain.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 512, bias=False).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "x = torch.ones(64, 256, device='cuda')\n"
        "while True:\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    code, record = played(folder, script)
    assert (code, record["collectives"]) == (ExitCode.OK, [])
    weight, x, y = 256 * 512 * 4, 64 * 256 * 4, 64 * 512 * 4
    assert record["memory"]["start_bytes"] == 2 * weight + x  # the gradient, too: it is freed behind the step
    assert record["memory"]["peak_bytes"] >= weight + x + y
    found = compared(folder, capsys)
    lines = by_name(found, "memory")
    for name in ("start_bytes", "end_bytes"):
        assert lines[name][0] == lines[name][1]
    assert lines["peak_bytes"][1] - lines["peak_bytes"][0] in (
        0,
        y,
    )  # a CPU's product may copy the sum's broadcast gradient
    assert any("--cluster names the machine" in note for note in found["notes"])
    found = compared(folder, capsys, "--cluster", "hgx-h100-8")
    assert any("ran on a cpu" in note for note in found["notes"])


def test_what_transforms_wrap_is_freed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient for each of 16 rows, which the profiler would keep with the shapes that it notes, goes with their mean."""
    script = folder / "by_row.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 512, bias=False).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "x = torch.ones(16, 256, device='cuda')\n"
        "loss = lambda weight, row: (weight @ row).square().sum()\n"
        "by_row = torch.func.vmap(torch.func.grad(loss), (None, 0))\n"
        "for _ in range(6):\n"
        "    model.weight.grad = by_row(model.weight.detach(), x).mean(0)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    code, record = played(folder, script)
    weight, x = 256 * 512 * 4, 16 * 256 * 4
    assert (code, record["collectives"]) == (ExitCode.OK, [])
    assert record["memory"]["start_bytes"] == record["memory"]["end_bytes"] == 2 * weight + x
    peak = by_name(compared(folder, capsys), "memory")["peak_bytes"]
    assert peak[0] == pytest.approx(peak[1], abs=weight)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no data here')", "ValueError: no data here"),
        ("print('done')", "ended after 0 optimizer steps"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_what_fails_says_why(folder: Path, text: str, said: str) -> None:
    script = folder / "wrong.py"
    script.write_text(text)
    code, record = played(folder, script)
    assert code == ExitCode.RUN_FAILED
    assert said in record["trouble"]["detail"]
    assert record["captured"] is None
    assert any(note.startswith("not captured: ") for note in record["notes"])


def test_what_a_program_decides_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["validate", "run", "--program", str(SCRIPT)]
    assert main([*run, "--model", "llama3-8b"]) == ExitCode.USAGE
    assert "a --program has its own model and plan" in capsys.readouterr().err
    assert main([*run, "--ranks", "99", "--device", "cpu"]) == ExitCode.BAD_INPUT
    assert "there are 4 processes here" in capsys.readouterr().err
    assert main(["validate", "run", "study.toml", "more"]) == ExitCode.USAGE
