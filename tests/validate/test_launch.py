"""Started by torchrun: every rank has a parent of its own, and rank 0 keeps the record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from simulator.base.errors import InputError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import launch, run_plan
from validate.launch import LOOPBACK, Launch
from validate.records import read_records
from validate.supervise import SupervisedOutcome, Verdict
from validate.task import Task

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "name": "tiny",
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 128,
    "vocab_size": 256,
}
STACK = "torch-2.13-cpu"
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def task(mode: Any = "full", device: Any = "cpu", **plan: Any) -> Task:
    asked = Plan(seq_len=32, precision="fp32", stack=STACK, **plan)
    return Task(mode=mode, device=device, model=Model.model_validate(TINY), plan=asked, stack=Stack.load(STACK))


def test_a_process_alone_is_launched_by_nobody() -> None:
    alone = Launch.of_environment({})
    assert alone == Launch(outside=False)
    assert alone.device(8) == 0


def test_torchruns_variables_are_taken() -> None:
    found = Launch.of_environment(TORCHRUN)
    assert found == Launch(outside=True, rank=3, size=8, local_rank=1, local_size=2)
    assert found.num_nodes == 4


SRUN = {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[07-08],other", "SLURM_JOB_ID": "991"}


def test_sruns_variables_are_taken() -> None:
    found = Launch.of_environment(SRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 7, 1, 3)
    assert found.address == "gpu07"
    told = found.environment
    assert Launch.of_environment(told) == found  # torch reads the same
    assert Launch.of_environment(SRUN | {"SLURM_PROCID": "0"}).port == found.port  # every task comes to the same port
    assert Launch.of_environment(SRUN | TORCHRUN).size == 8  # torchrun inside of srun
    assert not Launch.of_environment({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}).outside


def test_the_rank_that_a_launcher_made_has_one_of_the_visible_gpus() -> None:
    rank = Launch(outside=True, rank=4, size=8, local_rank=4, local_size=8)
    assert rank.device(8) == 4
    assert rank.device(1) == 0  # SLURM shows each task its own
    with pytest.raises(InputError, match="local rank 4 sees 2 GPUs"):
        rank.device(2)


def test_gloo_goes_by_the_interface_that_reaches_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    two_nodes = Launch(outside=True, size=4, local_size=2, address="127.0.0.1")
    assert two_nodes.gloo_interface == Launch(outside=False).gloo_interface == {"GLOO_SOCKET_IFNAME": LOOPBACK}
    monkeypatch.setattr(launch, "interface_to", {"10.0.0.1": "ib0"}.get)
    assert Launch(outside=True, size=4, local_size=2, address="10.0.0.1").gloo_interface == {
        "GLOO_SOCKET_IFNAME": "ib0"
    }
    assert Launch(outside=True, size=4, local_size=2, address="10.0.0.9").gloo_interface == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert two_nodes.gloo_interface == {}


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 64)
    monkeypatch.delenv("RANK", raising=False)
    assert (launch.threads_each(8), launch.threads_each(100)) == (8, 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert launch.threads_each(8) == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "x"}, "RANK: 'x' is not a whole number"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "2"}, "local rank 2"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changes: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Launch.of_environment(TORCHRUN | changes)


def test_two_ranks_under_torchrun_make_one_record(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in TINY.items()), encoding="utf-8"
    )
    plan = f'[plan]\ndp_shard = 2\nseq_len = 32\nprecision = "fp32"\nstack = "{STACK}"\n'
    (tmp_path / "study.toml").write_text(f'model = "tiny.toml"\ncluster = "hgx-h100-8"\n{plan}', encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "simulator.cli", "validate", "run", "study.toml", "--mode", "full"]
    command += ["--device", "cpu", "--steps", "3", "--warm-up", "1", "-o", "runs.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (record,), faults = read_records(tmp_path / "runs.jsonl")
    assert not faults
    assert record["verdict"] == "ok"
    assert len(record["memory_by_rank"]) == 2
    assert len(record["time"]["times_s"]) == 3
    assert (tmp_path / record["files"]["spans.json.gz"]).is_file()


def test_another_world_than_the_plans_is_refused_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="started 8 ranks, and the plan has 2"):
        run_plan.check(task(dp_shard=2))


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "running_jobs", lambda _: [])
    monkeypatch.setattr(run_plan, "count_gpus", lambda: 8)
    run_plan.check(task(device="cuda", dp_shard=8))
    with pytest.raises(InputError, match=r"needs 16 of 8 GPUs.*torchrun"):
        run_plan.check(task(device="cuda", dp_shard=16))
    run_plan.check(task(mode="solo", device="cuda", dp_shard=512))
    monkeypatch.setattr(run_plan, "count_gpus", lambda: 0)
    with pytest.raises(InputError, match="--mode fake needs no GPU"):
        run_plan.check(task(mode="solo", device="cuda", dp_shard=512))


def test_a_rank_that_its_launcher_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SupervisedOutcome(
        verdict=Verdict(kind="interrupted", detail="SIGTERM"),
        results={},
        partials={0: {"step_times_s": [1.0]}},
        stderr={},
    )
    assert run_plan._in_a_launched_job(task(dp_shard=8), ended) == ended  # alone it was a person
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    told = run_plan._in_a_launched_job(task(dp_shard=8), ended)
    assert told.verdict.kind == "peer_lost"
    assert "launcher" in told.verdict.detail
    record = run_plan.record(task(dp_shard=8), told)
    assert record["partial"]
    assert record["time"]["times_s"] == [1.0]


def test_a_torch_without_something_private_is_told_which_versions_have_it() -> None:
    from validate import torch_private
    from validate.report import kind_of

    told = torch_private.missing("the memory tracker", "3.0.1", "no module named x")
    assert told.startswith("torch 3.0.1 has the memory tracker otherwise than torch 2.8 to 2.15")
    assert told.endswith("install torch 2.15")
    assert "install torch 2.11 or newer" in torch_private.missing("fake tensors", "2.6.0", "")
    with pytest.raises(ModuleNotFoundError, match="profiler's raw events") as raised:
        torch_private.raw_events(object())
    assert kind_of(raised.value) == "missing"


def test_private_names_of_torch_stand_in_one_module() -> None:
    """Captures, which are torch's own machinery seen from inside, have theirs."""
    private = re.compile(r"torch(\.\w+)*\._[a-z]|from torch(\.\w+)*\._")
    folder = ROOT / "validate"
    found = {
        path.name
        for path in folder.rglob("*.py")
        if "capture" not in path.parts and private.search(path.read_text(encoding="utf-8"))
    }
    assert found <= {
        "torch_private.py",
        "products.py",
        "variants.py",
        "libraries.py",
    }  # products of benches that may fail by themselves
