"""Studies of captured programs: what a remedy would change against the program changed, other sizes, costs of own kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.predict.program import predict_program
from simulator.spec.cluster import Cluster
from simulator.work.captured.changed import checkpointed
from simulator.work.captured.scaled import scaled
from simulator.work.captured.script import captured_script
from tests import warm

pytestmark = pytest.mark.usefixtures("warm_captures")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "data" / "capture" / "llama.py"
SIZES = ["4", "2048", "32768", "2048"]  # layers, width, vocabulary, sequence
TOKENS = 8 * 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


def captured(folder: Path, name: str, *flags: str, words: tuple[str, ...] = (), script: Path = SCRIPT) -> Path:
    out = folder / f"{name}.capture.gz"
    if not out.exists():
        assert main(["capture", str(script), "-o", str(out), *flags, "--", *words]) == ExitCode.OK
    return out


@pytest.fixture(scope="module")
def fsdp(folder: Path, warm_captures: warm.Server) -> Path:  # noqa: ARG001
    return captured(folder, "fsdp", f"--tokens-per-step={TOKENS}", words=tuple(SIZES))


def test_a_checkpoint_that_is_estimated_is_the_one_that_is_written(folder: Path, fsdp: Path) -> None:
    """The same script with torch.utils.checkpoint around its blocks, captured: memory within 1 %, the step too."""
    written = read_capture(captured(folder, "checkpointed", words=(*SIZES, "checkpoint")))
    estimated = checkpointed(read_capture(fsdp))
    assert estimated is not None
    cluster = Cluster.load("hgx-h100-8")
    plain, ours, theirs = (predict_program(one, cluster) for one in (read_capture(fsdp), estimated, written))
    assert ours.memory.peak_allocated_bytes == pytest.approx(theirs.memory.peak_allocated_bytes, rel=0.01)
    assert ours.memory.peak_allocated_bytes < plain.memory.peak_allocated_bytes
    assert ours.step_s == pytest.approx(theirs.step_s, rel=0.01)
    assert captured_script(estimated).flop == captured_script(written).flop


def test_sizes_at_other_ranks_are_those_of_a_capture_there(folder: Path) -> None:
    """8 and 16 ranks say what 512 do, instruction by instruction."""
    files = [captured(folder, f"ranks{n}", f"--ranks={n}", words=tuple(SIZES)) for n in (16, 512)]
    finer, real = map(read_capture, files)
    found = scaled(read_capture(captured(folder, "ranks8", "--ranks=8", words=tuple(SIZES))), finer, 512)
    assert captured_script(found).step == captured_script(real).step
    assert captured_script(found).before == captured_script(real).before


def test_scale_with_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coarse = captured(folder, "ranks8", "--ranks=8", words=tuple(SIZES))
    finer = captured(folder, "ranks16", "--ranks=16", words=tuple(SIZES))
    flags = ["--program", str(coarse), "--scale-with", str(finer), "--nodes", "64", "--json"]
    capsys.readouterr()
    assert main(["predict", *flags]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["num_devices"] == 512
    assert any("from captures at 8 and 16" in source["detail"] for source in found["sources"])
    assert main(["predict", "--program", str(coarse), "--nodes", "64"]) == ExitCode.BAD_INPUT
    assert "--scale-with" in capsys.readouterr().err


def test_compare_sensitivity_and_goodput_take_programs(
    folder: Path, fsdp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = folder / "described.toml"
    study.write_text('model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\nzero = 3\nseq_len = 2048\n')
    capsys.readouterr()
    what_if = ["--what-if", "kernels.gemm=2", "--no-ablations", "--json"]
    assert main(["compare", str(fsdp), str(study), *what_if]) == ExitCode.OK
    first, described, faster = json.loads(capsys.readouterr().out)["subjects"]
    assert first["tokens_per_s"] == pytest.approx(TOKENS / first["step_s"])
    assert described["model"] == "llama3-8b"
    assert faster["step_s"] < first["step_s"]
    assert faster["against_first"]["high"] < 1
    vary = ["--vary", "device.memory_bytes_per_s=x0.5..x1", "--samples", "8", "--jobs", "1", "--json"]
    assert main(["sensitivity", str(fsdp), *vary]) == ExitCode.OK
    assert "device.memory_bytes_per_s" in capsys.readouterr().out
    assert main(["goodput", "--program", str(fsdp), "--tokens", "1T", "--json"]) == ExitCode.OK
    run = json.loads(capsys.readouterr().out)
    assert run["steps"] == -(-(10**12) // TOKENS)


def test_a_program_whose_tokens_nobody_knows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(captured(folder, "ranks8", "--ranks=8", words=tuple(SIZES)))
    for command in (
        ["compare", program, "--what-if", "kernels.gemm=2"],
        ["goodput", "--program", program, "--tokens", "1T"],
    ):
        assert main(command) == ExitCode.BAD_INPUT
        assert "--tokens-per-step" in capsys.readouterr().err


def test_a_kernel_of_ones_own_with_its_cost(folder: Path) -> None:
    """The example of the guide: four layers of 8192 x 14336 values, three tensors forward, five backward."""
    example = ROOT / "docs" / "examples" / "custom_kernel.py"
    capture = read_capture(captured(folder, "custom", "--ranks=1", script=example))
    size = 8 * 1024 * 14336 * 2
    assert sorted(cost.bytes for cost in capture.costs.values()) == [3 * size, 5 * size]
    assert not any("swiglu" in name for name in captured_script(capture).unpriced)


WRONG_COST = """
import torch
import shardwise

@torch.library.custom_op("wrong::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, g: 2 * g)
shardwise.kernel_cost("wrong::double")(lambda x: x.numel() / 0)

w = torch.nn.Parameter(torch.ones(8, device="cuda"))
optimizer = torch.optim.SGD([w], 0.1)
while True:
    double(w).sum().backward()
    optimizer.step()
"""


def test_a_cost_that_fails_is_told_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "wrong.py").write_text(WRONG_COST)
    out = folder / "wrong.capture.gz"
    assert main(["capture", str(folder / "wrong.py"), "-o", str(out), "--ranks", "1"]) == ExitCode.BAD_INPUT
    assert "kernel_cost of wrong::double raised ZeroDivisionError" in capsys.readouterr().err
    assert not out.exists()
