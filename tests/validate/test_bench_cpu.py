"""`calibrate run` on this machine's CPU, with gloo and two processes: the whole way, with the smallest shapes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from simulator import Calibration, Cluster, Model, Plan, predict
from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from tests import warm
from validate import faults
from validate.benches import spread
from validate.benches.collectives import OPS
from validate.benches.memory import MIB, storage
from validate.benches.products import COLD_BYTES, _kept
from validate.measure import Job, measure
from validate.samples import read_samples

TINY = Model(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
LEAST_S = 0.3  # of a rank's measuring, the first items of each phase apart, which are enough to fit
PLANS = {
    "ddp": {"dp_replicate": 2, "zero": 0},
    "zero1": {"dp_shard": 2, "zero": 1},
    "fsdp2": {"dp_shard": 2, "zero": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torch_server: warm.Server) -> Path:
    """A folder with samples.jsonl and the machine's files, made by the command line."""
    folder = tmp_path_factory.mktemp("machine")
    run = ["calibrate", "run", "--device", "cpu", "--minutes", "0.005", "--out", str(folder / "samples.jsonl")]
    with warm.forked_ranks(torch_server), pytest.MonkeyPatch.context() as patch:
        patch.setattr("validate.measure._LEAST_S", LEAST_S)
        assert main(run) == ExitCode.OK
    fit = ["calibrate", "fit", "--noisy", str(folder / "samples.jsonl"), "-o", str(folder / "here.calibration.json")]
    assert main(fit) == ExitCode.OK
    return folder


def test_every_phase_leaves_samples_of_both_ranks(folder: Path) -> None:
    found = read_samples([folder / "samples.jsonl"])
    assert not found.faults
    assert not found.failures
    kinds = {s.kind for s in found.samples}
    assert {"gemm", "stream", "attention_forward", "attention_backward", "adamw", "collective", "overlap"} <= kinds
    assert {"eager_block", "fsdp2_group", "host_dispatch", "hbm_copy", "storage_write", "storage_read"} <= kinds
    assert {(s["source"], s["target"], s.rank) for s in found.of("pair")} == {
        (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1),
    }  # fmt: skip
    assert {s.rank for s in found.samples} == {0, 1}
    assert all(s.mean_s for s in found.of("collective", "collective_burst", "overlap", "fsdp2_group"))
    assert {s["behind"] for s in found.of("collective")} == {"products"}
    facts = found.machine.facts
    assert facts["num_ranks"] == 2
    assert all(facts[name] for name in ("device", "torch", "date", "command", "hostname"))


@pytest.mark.parametrize("strategy", PLANS)
def test_small_plans_are_predicted_from_it(folder: Path, strategy: str) -> None:
    plan = Plan(
        **PLANS[strategy], seq_len=64, micro_batch_size=2, precision="fp32", stack=str(folder / "here.stack.toml")
    )
    cluster = Cluster.load(folder / "here.toml")
    calibration = Calibration.load(folder / "here.calibration.json")
    found = predict(TINY, plan, cluster, calibration)
    assert found.lower_s <= found.step_s <= found.upper_s
    assert found.low_s < found.step_s < found.high_s
    assert found.communication  # two ranks talk
    # products alone cannot beat the fastest product that was measured
    flop = TINY.model_flop_per_sequence(64) * 2
    assert found.step_s > flop / cluster.device.peak("fp32") * 0.9


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("strategy", PLANS)
def test_the_same_plans_are_run_and_compared_with_their_predictions(
    folder: Path, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole loop from the command line: calibrated, predicted, played by two ranks, compared. No time is asserted."""
    model, study, runs = (folder / f"{strategy}{end}" for end in (".model.toml", ".toml", ".jsonl"))
    sizes = TINY.model_dump(include={"num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size"})
    model.write_text("".join(f"{key} = {value}\n" for key, value in sizes.items()), encoding="utf-8")
    plan = {**PLANS[strategy], "seq_len": 64, "micro_batch_size": 2, "precision": "fp32"}
    told = {"model": str(model), "cluster": str(folder / "here.toml")}
    told["calibration"] = str(folder / "here.calibration.json")
    plan["stack"] = str(folder / "here.stack.toml")
    lines = [*(f"{k} = {json.dumps(v)}" for k, v in told.items()), "[plan]"]
    study.write_text("\n".join([*lines, *(f"{k} = {json.dumps(v)}" for k, v in plan.items())]), encoding="utf-8")
    run = ["validate", "run", str(study), "--mode", "cpu", "--steps", "3", "--warm-up", "1", "-o", str(runs)]
    assert main(run) == ExitCode.OK
    capfd.readouterr()
    assert main(["validate", "compare", str(runs), "--json"]) == ExitCode.OK
    (found,) = json.loads(capfd.readouterr().out)["runs"]
    step, forward, backward, optimizer = (
        next(row for row in found["time"] if row["name"] == f"{name}_s")
        for name in ("step", "forward", "backward", "optimizer")
    )
    for row in (step, forward, backward, optimizer):
        assert row["predicted"] > 0
        assert row["measured"] > 0
        assert row["u_val"] >= row["u_input"] > 0
    assert forward["predicted"] + backward["predicted"] + optimizer["predicted"] == pytest.approx(step["predicted"])
    assert any(row["name"] == "step at the calibrated pace_s" for row in found["time"])
    assert found["explains"]["time"]
    assert {row["name"] for row in found["parts"]} >= {"gemm_s", "attention_s", "optimizer_s"}
    peak = next(row for row in found["memory"] if row["name"] == "peak_bytes")
    assert abs(peak["relative_error"]) <= 0.01


def test_wider_samples_give_wider_intervals(folder: Path, tmp_path: Path) -> None:
    """What the fit is unsure of reaches the prediction: noise of a factor two on products widens its interval.

    Beside the products a machine needs one kind of pass; what else was measured would be fitted here to no purpose.
    """
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    fits = []
    for name, noise in (("calm", 1.0), ("noisy", 2.0)):
        rows = [row for row in map(json.loads, lines) if row["kind"] in ("machine", "gemm") or row.get("op") == "clone"]
        for index, row in enumerate(rows):
            if row["kind"] == "gemm":  # a core of 50 GFLOP/s, whatever this one did meanwhile
                row.pop("reference_s", None)
                row["time_s"] = (5e-6 + row["flop"] / 5e10) * (noise if index % 2 else 1 / noise)
        samples, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.calibration.json"
        samples.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        assert main(["calibrate", "fit", "--noisy", str(samples), "-o", str(out)]) == ExitCode.OK
        fits.append(Calibration.load(out))
    sure, unsure = fits
    assert unsure.uncertainty["gemm"] > sure.uncertainty["gemm"]


def test_a_file_with_samples_is_not_overwritten(folder: Path) -> None:
    job = Job(out=folder / "samples.jsonl", minutes=0.1, device="cpu", num_ranks=1, threads=1)
    with pytest.raises(InputError, match="holds samples already"):
        measure(job)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks measure the first items of each phase."""
    monkeypatch.setattr("validate.measure._LEAST_S", LEAST_S)


# The smallest shapes, and as long as a busy machine needs for them.
BRIEF: dict[str, Any] = {"minutes": 0.005, "device": "cpu", "num_ranks": 2, "threads": 1, "tiny": True}
BRIEF |= {"start_s": 900, "grace_s": 900}
KILLED_IN = "attention"
# The parent says who its workers are and dies in the middle of a phase, wherever the clock stands.
PARENT = f"""
import os, signal, sys
from pathlib import Path
from tests.validate.test_bench_cpu import BRIEF, LEAST_S, _children
from validate import measure as measuring
from validate.measure import Job, measure

measuring._LEAST_S = LEAST_S

def say(text):
    if text.startswith({KILLED_IN!r}):
        print(*_children(os.getpid()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

measure(Job(out=Path(sys.argv[1]), **BRIEF), say)
"""


@pytest.mark.usefixtures("brief")
def test_a_killed_run_keeps_whole_lines_leaves_nobody_and_is_resumed(tmp_path: Path, torch_server: warm.Server) -> None:
    out = tmp_path / "samples.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PARENT, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = [int(pid) for pid in done.stdout.split()]
    assert len(children) == 2
    _until(lambda: not any(_alive(pid) for pid in children))
    before = read_samples([out]).samples
    ranks: dict[str, set[int]] = {}
    for s in before:
        ranks.setdefault(s.key, set()).add(s.rank)
    repeated = {key for (key, _), count in Counter((s.key, s.rank) for s in before).items() if count > 1}
    with out.open("a", encoding="utf-8") as file:
        file.write('{"kind": "gemm", "m": 6')  # as if the last write had been cut
    job = Job(out=out, resume=True, **BRIEF)
    with warm.forked_ranks(torch_server):
        outcome = measure(job)
    assert outcome.verdict == "complete", outcome.problems
    found = read_samples([out])
    assert not found.faults
    assert len(found.samples) == len(before) + outcome.num_samples
    lines = Counter((s.key, s.rank) for s in found.samples)
    twice = {key for (key, _), count in lines.items() if count > 1 and key not in repeated}
    assert all(len(ranks.get(key, ())) < 2 for key in twice), "only what one rank alone had written is measured again"


@pytest.mark.usefixtures("brief")
def test_a_rank_that_dies_costs_its_phase_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_ranks: warm.Server
) -> None:
    monkeypatch.setattr("validate.measure.phases_of", lambda *_: ("gemm", "attention", "collectives"))
    out = tmp_path / "samples.jsonl"
    killed: list[int] = []

    def kill_one(text: str) -> None:
        if text.startswith("attention") and not killed:
            killed.append(warm_ranks.started[-1])
            os.kill(killed[0], signal.SIGKILL)

    job = Job(out=out, **BRIEF)
    outcome = measure(job, kill_one)
    assert outcome.verdict == "partial"
    assert len(outcome.problems) == 1
    assert "SIGKILL" in outcome.problems[0]
    found = read_samples([out])
    assert {"gemm", "collective"} <= {s.kind for s in found.samples}  # before and after it
    assert len(warm_ranks.started) >= 4
    assert not any(_alive(pid) for pid in warm_ranks.started)


@pytest.mark.usefixtures("brief", "warm_ranks")
def test_a_collective_with_a_wrong_result_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of every result of rank 1: each is named, none is timed."""
    monkeypatch.setenv(faults.NAME, "1,collectives,corrupt")
    outcome = measure(Job(out=tmp_path / "s.jsonl", **BRIEF, only=("host", "collectives")))
    assert outcome.verdict == "partial"
    named = {re.match(r"collective (\w+), rank 1: WrongResultError: 1 of ", one) for one in outcome.problems}
    assert {one and one[1] for one in named} >= set(OPS[:4])
    assert outcome.num_failures == len(outcome.problems)
    assert not read_samples([tmp_path / "s.jsonl"]).of("collective")


@pytest.mark.usefixtures("brief")
def test_a_silent_rank_is_ended_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_ranks: warm.Server
) -> None:
    monkeypatch.setattr("validate.measure.phases_of", lambda *_: ("host", "loss", "optimizer"))

    def stop_one(text: str) -> None:
        if text.startswith("loss"):
            os.kill(warm_ranks.started[-1], signal.SIGSTOP)

    job = Job(out=tmp_path / "s.jsonl", **{**BRIEF, "grace_s": 1.0})
    outcome = measure(job, stop_one)
    assert outcome.verdict == "partial"
    assert "hung" in outcome.problems[0]


def test_every_prefix_of_a_spread_covers_the_range() -> None:
    assert spread([0, 1, 2, 3, 4, 5, 6, 7, 8])[:5] == [0, 8, 4, 2, 6]
    assert [spread(list(range(n))) for n in (0, 1, 2)] == [[], [0], [0, 1]]
    assert all(sorted(spread(list(range(n)))) == list(range(n)) for n in range(30))


def _until(holds: Callable[[], bool]) -> None:
    """Waits for what must happen; a machine may be as busy as it likes, so only a test that fails meets the end."""
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen")


def _children(pid: int) -> list[int]:
    """Workers that this process started (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and b"validate.benches.worker" in command:
            found.append(int(path.parent.name))
    return sorted(found)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_file_that_is_measured_has_no_name_that_could_stay(tmp_path: Path) -> None:
    seen: list[tuple[str, list[Path]]] = []
    session: Any = SimpleNamespace(
        setting=SimpleNamespace(rank=0, out=str(tmp_path / "samples.jsonl")),
        left_s=lambda: 60.0,
        emit=lambda kind, *_: seen.append((kind, list(tmp_path.iterdir()))),
    )
    storage(session, MIB, [])
    assert seen == [("storage_write", []), ("storage_read", [])]


def test_a_product_s_results_lie_in_memory_that_no_cache_holds() -> None:
    """As a step keeps them; the gradient of an input is gone before the next one."""
    made: list[int] = []

    def multiply(_: int) -> Any:
        result = torch.zeros(512, 512)
        made.append(result.data_ptr())
        return result

    num_bytes = 4 * 512 * 512
    call = _kept(multiply, num_bytes, "tn")
    made.clear()
    turns = COLD_BYTES // num_bytes
    for i in range(turns):
        call(i)
    assert len(set(made)) == turns
    assert _kept(multiply, num_bytes, "nn") is multiply
