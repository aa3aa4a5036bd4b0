"""Plays one scenario: starts the ranks as a launcher does, waits, and says what was named and what was left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import InputError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import faults, joined, measure, run_plan
from validate.measure import Job
from validate.rehearse.forked import fork, left_behind, ranks_are_forked
from validate.rehearse.scenarios import NODES, RANKS, Scenario
from validate.supervise import PlaceInJob
from validate.task import Task

LIMIT_S: Final = 120.0  # a scenario that takes longer has not been named in time
_STACK: Final = "torch-2.13-cpu"
_MODEL: Final = Model(name="rehearsal", num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=64, vocab_size=128)
_REFUSED: Final = 3
_LOOKS_S: Final = 0.1  # torchrun looks for ranks that have ended so often (its --monitor-interval)
_DISK_S: Final = 0.3  # rank 0 writes on a slow disk, while the launcher ends it because another rank has failed
_QUICK_PHASES: Final = ("host", "gemm", "collectives", "storage")
_CLEARED: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One scenario and what came of it. problems: empty where the fault was named and nothing was left."""

    scenario: Scenario
    seconds: float
    said: str
    problems: tuple[str, ...]


def play(scenario: Scenario, folder: Path) -> Played:
    """Start, wait, judge. folder: empty, this scenario's own."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    port, started = _free_port(), time.monotonic()
    there = [rank for rank in range(RANKS) if scenario.fault != "never comes" or rank != scenario.rank]
    pids = {_start(scenario, rank, port, folder): rank for rank in there}
    statuses, late = _waited(pids, started, kills=scenario.launcher == "torchrun")
    seconds = time.monotonic() - started
    problems = [f"not over after {LIMIT_S:g} s"] if late else []
    answer = _said(scenario, folder)
    problems += [*_judge(scenario, answer, statuses, folder), *_left(scratch, port)]
    return Played(scenario=scenario, seconds=seconds, said=answer.get("text", ""), problems=tuple(problems))


# --- starting


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _start(scenario: Scenario, rank: int, port: int, folder: Path) -> int:
    out = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    null = os.open(os.devnull, os.O_RDONLY)
    pid = fork(
        lambda: _parent(scenario, rank, folder), _environment(scenario, rank, port, folder), {0: null, 1: out, 2: out}
    )
    os.close(out)
    os.close(null)
    return pid


def _environment(scenario: Scenario, rank: int, port: int, folder: Path) -> dict[str, str]:
    """As a launcher sets it; both nodes are this machine under two names."""
    plain = {name: value for name, value in os.environ.items() if name not in _CLEARED and not name.startswith("SLURM")}
    local = RANKS // NODES
    variables = {"TMPDIR": str(folder / "tmp"), "SLURMD_NODENAME": f"node{rank // local}", "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not scenario.at_start:
        variables[faults.NAME] = f"{scenario.rank},{scenario.phase},{scenario.fault}"
    if scenario.launcher == "srun":
        variables |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % local), "SLURM_STEP_NUM_TASKS": str(RANKS)}
        variables |= {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_TASKS_PER_NODE": f"{local}(x{NODES})",
            "SLURM_NODEID": str(rank // local),
        }
    else:
        variables |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
        }
    return plain | variables


def _parent(scenario: Scenario, rank: int, folder: Path) -> int:
    """A rank's parent: what the command line does, its answer in a file."""
    ranks_are_forked()
    if scenario.fault == "other version" and rank == scenario.rank:
        usual = joined.versions
        joined.versions = lambda: {**usual(), "torch": "2.6.0"}
    try:
        job: Callable[[Scenario, int, Path], dict[str, Any]] = {"run": _run, "calibrate": _calibrate}[scenario.job]
        task = job(scenario, rank, folder)
    except InputError as exc:
        sys.stderr.write(f"{exc}\n")
        return _REFUSED
    if rank == 0:
        time.sleep(_DISK_S)
    (folder / f"{rank}.json").write_text(json.dumps(task), encoding="utf-8")
    return 0 if task["verdict"] in ("ok", "complete") else 5


def _run(scenario: Scenario, rank: int, _: Path) -> dict[str, Any]:
    odd = scenario.fault == "other study" and rank == scenario.rank
    fields = {"dp_shard": RANKS, "seq_len": 16 if odd else 32, "precision": "fp32", "stack": _STACK}
    plan = Plan.model_validate(fields)
    task = Task(
        mode="full", device="cpu", model=_MODEL, plan=plan, stack=Stack.load(_STACK), num_steps=2, num_warm_up=1,
        profile=scenario.phase == "profile" or scenario.fault == "slow",
    )  # fmt: skip
    limits = run_plan.deadlines(2.0, task, scenario.patience)
    record = run_plan.play(task, limits, patience=scenario.patience)
    trouble = record["trouble"] or {}
    slow = record["slow_ranks"][:1]
    text = f"{record['verdict']} {trouble}" if trouble else f"{record['verdict']} {slow}"
    return {
        "verdict": record["verdict"],
        "rank": trouble.get("rank"),
        "host": trouble.get("host"),
        "slow": slow,
        "text": text,
    }


def _calibrate(scenario: Scenario, rank: int, folder: Path) -> dict[str, Any]:
    here = folder / "nowhere" if scenario.fault == "no folder" and rank == scenario.rank else folder
    job = Job(
        out=here / f"samples.rank{rank}.jsonl", minutes=0.01, device="cpu", num_ranks=RANKS, threads=1, tiny=True,
        patience=scenario.patience,
    )  # fmt: skip
    if scenario.quick:
        setattr(measure, "phases_of", lambda *_: _QUICK_PHASES)  # noqa: B010  of a name that the module does not export
    found = measure.measure(job)
    return {
        "verdict": found.verdict,
        "problems": found.problems,
        "samples": found.num_samples,
        "text": "; ".join(found.problems),
    }


# --- waiting and judging


def _waited(pids: dict[int, int], started: float, *, kills: bool) -> tuple[dict[int, int], bool]:
    """Exit statuses by rank. kills: as torchrun, end the others when one has failed; srun leaves them alone."""
    statuses: dict[int, int] = {}
    signalled = late = False
    while len(statuses) < len(pids):
        for pid in [pid for pid, rank in pids.items() if rank not in statuses]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pids[pid]] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > started + LIMIT_S
        if late or (kills and not signalled and any(statuses.values())):
            signalled = True
            time.sleep(_LOOKS_S)
            for pid in (pid for pid, rank in pids.items() if rank not in statuses):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
    return statuses, late


def _said(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """What rank 0 says; where its own parent is what was lost, rank 1."""
    rank = 1 if scenario.rank == 0 and scenario.fault == "parent" else 0
    if scenario.kind == "refused":
        return {"verdict": "refused", "text": (folder / f"{rank}.err").read_text(encoding="utf-8")}
    path = folder / f"{rank}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _judge(scenario: Scenario, answer: dict[str, Any], statuses: dict[int, int], folder: Path) -> Iterator[str]:
    """What is wrong with what was said, or with how the ranks ended."""
    text, who = answer.get("text", ""), f"rank {scenario.rank}"
    if not answer:
        yield f"no rank says anything; {(folder / '0.err').read_text(encoding='utf-8')[-300:]}"
    elif scenario.kind == "refused":
        if who not in text or set(statuses.values()) - {_REFUSED, -signal.SIGTERM}:
            yield f"not refused by {who}: {text[-300:]} {statuses}"
    elif scenario.kind == "slow":
        if answer["verdict"] != "ok" or [one["rank"] for one in answer["slow"]] != [scenario.rank]:
            yield f"not named slow: {text}"
    elif scenario.job == "run":
        if (answer["verdict"], answer["rank"], answer["host"]) != (scenario.kind, scenario.rank, scenario.host):
            yield f"is {scenario.kind} of {who} on {scenario.host}, and was said: {text}"
    else:
        yield from _judge_calibration(scenario, answer, folder)
    if scenario.kind not in ("refused", "slow") and 0 in statuses.values():
        yield f"a rank ended as if all were well: {statuses}"


def _judge_calibration(scenario: Scenario, answer: dict[str, Any], folder: Path) -> Iterator[str]:
    named = f"{scenario.kind} (rank {scenario.rank} on {scenario.host}"
    lost = f"{scenario.phase}: {named}"
    if not any(problem.startswith((lost, named)) for problem in answer["problems"]):
        yield f"{lost}) is not among {answer['problems']}"
    if not answer["samples"]:
        yield "no samples were kept"
    lines = (folder / "samples.rank0.jsonl").read_bytes()
    if not lines.endswith(b"\n"):
        yield "the samples end in a broken line"
    if scenario.fault != "parent" and scenario.phase != "storage" and b'"storage_write"' not in lines:
        yield "the phases after it were not measured"


def _left(scratch: Path, port: int) -> Iterator[str]:
    """Processes, files and ports of a job that is over."""
    if pids := left_behind():
        yield f"processes are left: {pids}"
    if files := sorted(path.name for path in scratch.iterdir()):
        yield f"files are left: {', '.join(files[:5])}"
    place = PlaceInJob(rank=0, size=RANKS, host="", address="127.0.0.1", port=port)
    for number in (port, *place.ports):
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                yield f"port {number} is still open"


def cleared(folder: Path) -> None:
    """The scenario's files are gone, what was said is in the report."""
    shutil.rmtree(folder, ignore_errors=True)


def patient(scenario: Scenario, factor: float) -> Scenario:
    """The same with longer deadlines, for a machine that is busy."""
    return replace(scenario, patience=scenario.patience * factor)
