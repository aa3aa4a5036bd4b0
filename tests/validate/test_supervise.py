"""Injected faults: each has a clear verdict, leaves no process, no open pipe and no file, and keeps what was known."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.base.errors import Fault, InputError, PlanError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import run_plan
from validate.records import read_records
from validate.report import kind_of
from validate.supervise import Deadlines, SupervisedOutcome, scratch_folder, supervise
from validate.task import Task

ROOT = Path(__file__).resolve().parents[2]
# A machine may be as busy as it likes: what no test is about may take minutes, so only a test that fails meets it.
GUARD_S = 300.0
QUICK = Deadlines(by_phase_s={"short": 0.3}, other_s=GUARD_S, total_s=GUARD_S, settle_s=0.05, grace_s=0.3)
# Ranks that all end by themselves are waited for: whose trouble is told must not hang on who was first.
ENDING = replace(QUICK, settle_s=GUARD_S)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
sys.path.insert(0, {root!r})
descriptor = int(os.environ["SHARDWISE_REPORT_FD"])
def say(**message):
    os.write(descriptor, (json.dumps(message) + "\\n").encode())
def sleeper(**how):
    child = subprocess.Popen(["sleep", "60"], close_fds=False, **how)
    say(partial={{"child": child.pid}})
say(partial={{"pid": os.getpid(), "known": 1}})
"""
GOOD = 'say(phase="work"); say(result={"fine": True})'
WAITING = 'say(phase="work"); time.sleep(60)'


def rank(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", PRELUDE.format(root=str(ROOT)) + textwrap.dedent(code)]


def play(*codes: str, deadlines: Deadlines = QUICK, memory_bytes: int | None = None) -> SupervisedOutcome:
    return supervise([rank(code) for code in codes], deadlines, memory_bytes=memory_bytes)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # an orphan that init has not yet reaped is dead all the same
    return not (status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z")


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def pids(outcome: SupervisedOutcome) -> list[int]:
    return [part[key] for part in outcome.partials.values() for key in ("pid", "child") if key in part]


FAULTS = {
    "killed": ('say(phase="step 3"); os.kill(os.getpid(), signal.SIGKILL)', "killed", "SIGKILL"),
    "segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "killed", "SIGSEGV"),
    "bad exit": ('sys.stderr.write("boom: it broke\\n"); sys.exit(3)', "failed", "boom: it broke"),
    "exception": ('raise RuntimeError("no luck")', "failed", "no luck"),
    "no result": ("pass", "no_result", "without a result"),
    "hung": ('say(phase="short 1"); time.sleep(60)', "hung", "0.3 s"),
    "hung, deaf to SIGTERM": (
        'signal.signal(signal.SIGTERM, signal.SIG_IGN); say(phase="short"); time.sleep(60)', "hung", "0.3 s",
    ),
    "stopped": ('say(phase="short"); os.kill(os.getpid(), signal.SIGSTOP)', "hung", "0.3 s"),
    "busy": ('say(phase="short")\nwhile True: pass', "hung", "0.3 s"),
    "out of memory, told": ('say(fault={"kind": "out_of_memory", "detail": "CUDA out of memory"})', "out_of_memory", "CUDA"),
    "wrong world size": ('say(fault={"kind": "wrong_world", "detail": "2 here, 4 planned"}); sys.exit(1)', "wrong_world", "4"),
    "garbage": ('os.write(descriptor, b"\\x00\\xffhello\\n"); time.sleep(60)', "bad_report", "not a report"),
    "not a number": ('os.write(descriptor, b\'{"partial": {"step_s": NaN}}\\n\'); time.sleep(60)', "bad_report", "NaN"),
    "unknown words": ("say(nonsense=1); time.sleep(60)", "bad_report", "nonsense"),
    "endless line": (
        'chunk = b"x" * 65536\nfor _ in range(200): os.write(descriptor, chunk)\ntime.sleep(60)', "bad_report", "bytes",
    ),
    "two results": ("say(result={}); say(result={}); time.sleep(60)", "bad_report", "not a report"),
    "child left behind": ("sleeper(); os._exit(7)", "failed", "status 7"),
    "child in a session of its own": ("sleeper(start_new_session=True); os._exit(7)", "failed", "status 7"),
    "pipes closed, still running": (
        'say(phase="short"); os.close(descriptor); os.close(2); time.sleep(60)', "hung", "0.3 s",
    ),
    "flood on stderr": ('sys.stderr.write("noise\\n" * 200_000 + "the end\\n"); sys.exit(1)', "failed", "the end"),
}  # fmt: skip


@LINUX
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_a_verdict_and_leaves_nothing(name: str) -> None:
    code, kind, words = FAULTS[name]
    before = open_descriptors()
    outcome = play(WAITING, code)
    assert outcome.verdict.kind == kind, outcome
    assert words in str(outcome.verdict)
    assert outcome.verdict.rank == 1
    assert not any(map(alive, pids(outcome)))
    assert open_descriptors() == before
    assert all(part["known"] == 1 for part in outcome.partials.values()), "what was known is kept"


def test_all_well() -> None:
    outcome = play(GOOD, GOOD)
    assert outcome.verdict.ok
    assert outcome.results == {0: {"fine": True}, 1: {"fine": True}}


@LINUX
def test_a_child_that_holds_the_pipes_does_not_hold_the_run() -> None:
    outcome = play("sleeper(); " + GOOD)
    assert outcome.verdict.ok
    assert not any(map(alive, pids(outcome)))


def test_an_abort_is_an_echo() -> None:
    abort = "time.sleep(0.1); os.kill(os.getpid(), signal.SIGABRT)"
    cause = 'say(fault={"kind": "out_of_memory", "detail": "CUDA out of memory"}); sys.exit(1)'
    assert play(abort, cause, deadlines=ENDING).verdict.kind == "out_of_memory"
    assert play(abort).verdict.kind == "failed"


def test_the_cause_is_told_and_not_its_echo() -> None:
    echo = 'say(fault={"kind": "peer_lost", "detail": "Connection closed by peer"}); sys.exit(1)'
    late = 'say(phase="step 1"); time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)'
    outcome = play(echo, late, deadlines=ENDING)
    assert (outcome.verdict.kind, outcome.verdict.rank, outcome.verdict.phase) == ("killed", 1, "step 1")


def test_a_result_of_one_rank_survives_the_death_of_another() -> None:
    outcome = play(GOOD, 'say(partial={"steps": [1, 2]}); time.sleep(0.2); os._exit(9)', deadlines=ENDING)
    assert outcome.verdict.kind == "failed"
    assert outcome.results == {0: {"fine": True}}
    assert outcome.partials[1]["steps"] == [1, 2]


def test_the_whole_run_has_a_deadline() -> None:
    ticking = 'i = 0\nwhile True:\n    say(phase=f"step {i}"); i += 1; time.sleep(0.05)'
    outcome = play(ticking, deadlines=Deadlines(total_s=0.5, grace_s=0.3))
    assert outcome.verdict.kind == "hung"
    assert "0.5 s" in outcome.verdict.detail


@LINUX
def test_ranks_that_would_exhaust_the_machine_are_ended() -> None:
    hungry = (
        'say(phase="build"); held = bytearray(300_000_000); held[::4096] = b"x" * len(held[::4096]); time.sleep(60)'
    )
    outcome = play(WAITING, hungry, memory_bytes=200_000_000)
    assert (outcome.verdict.kind, outcome.verdict.rank) == ("out_of_memory", 1)


def test_a_program_that_does_not_exist() -> None:
    outcome = supervise([rank(WAITING), ["/no/such/program"]], QUICK)
    assert (outcome.verdict.kind, outcome.verdict.rank) == ("missing", 1)
    assert not any(map(alive, pids(outcome)))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (
            "first = socket.socket(); first.bind(('127.0.0.1', 0)); socket.socket().bind(first.getsockname())",
            "port_taken",
        ),
        ("open('/dev/full', 'w').write('x' * 100_000)", "storage_full"),
        ("bytearray(1 << 62)", "out_of_memory"),
        ("import no_such_library", "missing"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "out_of_memory"),
        ("raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')", "peer_lost"),
        ("raise ValueError('world size is 4 here, and the plan has 2 ranks')", "wrong_world"),
    ],
)
def test_exceptions_are_told_by_kind(code: str, kind: str) -> None:
    if "/dev/full" in code and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    told = f"""
        from validate.report import RankReport, describe, kind_of
        report = RankReport.to_parent()
        try:
            {code}
        except BaseException as exc:
            report.fault(kind_of(exc), describe(exc)); os._exit(1)
    """
    outcome = play(told)
    assert outcome.verdict.kind == kind


def test_unknown_exceptions_are_failures() -> None:
    assert kind_of(ZeroDivisionError("division by zero")) == "failed"


# --- the parent itself

# A shell without job control starts what runs in the background with SIGINT ignored, and children inherit that.
PARENT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from validate.supervise import Deadlines, scratch_folder, supervise
with scratch_folder() as folder:
    print(folder, flush=True)
    outcome = supervise([{rank!r}] * 2, Deadlines(grace_s=0.3), scratch=folder, progress=lambda r, p: print(p, flush=True))
print(json.dumps([outcome.verdict.kind, outcome.verdict.detail, dict(outcome.partials)]), flush=True)
"""
LIFELINE = """
from validate.report import RankReport
report = RankReport.to_parent()
report.partial(pid=os.getpid())
report.phase(str(os.getpid()))
time.sleep(60)
"""


def parent(code: str) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A parent of two ranks that have begun: itself, its folder, the ranks' ids."""
    source = PARENT.format(root=str(ROOT), rank=rank(code))
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    return process, folder, [int(process.stdout.readline()) for _ in range(2)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_parent_cleans_up_and_keeps_the_parts(number: signal.Signals) -> None:
    process, folder, ranks = parent(LIFELINE)
    process.send_signal(number)
    out, _ = process.communicate(timeout=GUARD_S)
    kind, detail, partials = json.loads(out.splitlines()[-1])
    assert kind == "interrupted"
    assert detail == ("Ctrl-C" if number == signal.SIGINT else number.name)
    assert [part["pid"] for part in partials.values()]
    assert not any(map(alive, ranks))
    assert not folder.exists()


def test_ranks_end_with_a_parent_that_was_killed() -> None:
    process, folder, ranks = parent(LIFELINE)
    process.kill()
    process.communicate(timeout=GUARD_S)
    until = time.monotonic() + GUARD_S
    while (any(map(alive, ranks)) or folder.exists()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, ranks))
    assert not folder.exists()


def test_the_scratch_folder_is_gone_after_an_exception() -> None:
    with contextlib.suppress(ZeroDivisionError), scratch_folder() as folder:
        (folder / "deep").mkdir()
        raise ZeroDivisionError
    assert not folder.exists()


# --- before and after the ranks


def task(**changes: object) -> Task:
    model = Model(name="tiny", num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=32)
    plan = Plan.model_validate({"dp_shard": 2, "seq_len": 8, **changes})
    return Task(mode="cpu", model=model, plan=plan, stack=Stack.load("torch-2.13-cpu"))


def test_a_plan_that_torch_cannot_play_is_refused_with_every_reason() -> None:
    with pytest.raises(PlanError) as caught:
        run_plan.play(task(pp=2, dp_shard=4, precision="fp8", data_parallel="fsdp1", optimizer="adam8bit"))
    places = {fault.place for fault in caught.value.faults}
    assert {"plan: precision", "plan: data_parallel", "plan: optimizer", "plan"} <= places


def test_a_device_at_work_for_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "running_jobs", lambda _: [Fault(place="GPU 0", problem="process 1 holds 9 MiB")])
    solo = task().model_copy(update={"mode": "solo", "device": "cuda"})
    with pytest.raises(InputError, match="process 1 holds"):
        run_plan.play(solo)


def test_a_full_disk_leaves_the_results_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.jsonl"
    run_plan.append(file, {"kind": "run", "schema_version": 1, "n": 1})
    before = file.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_plan.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_plan.append(file, {"kind": "run", "schema_version": 1, "n": 2})
    assert file.read_bytes() == before


def test_a_damaged_results_file_tells_its_lines_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    run_plan.append(file, {"kind": "run", "schema_version": 1, "mode": "cpu", "verdict": "ok"})
    with file.open("a") as out:
        out.write('{"kind": "run", "step_s": NaN}\n[1, 2]\n{"kind": "ru')
    records, faults = read_records(file)
    assert len(records) == 1
    assert [fault.place.rsplit(" ", 1)[1] for fault in faults] == ["2", "3", "4"]


def test_a_record_of_a_failed_run_is_marked_partial() -> None:
    outcome = play('say(partial={"step_times_s": [2.0, 4.0, 3.0], "phase_times_s": {}}); os._exit(3)')
    record = run_plan.record(task().model_copy(update={"mode": "solo"}), outcome)
    assert record["partial"]
    assert record["verdict"] == "failed"
    assert record["time"]["median_s"] == 3.0
    assert record["trouble"]["detail"].startswith("exit status 3")


def test_a_file_of_something_else_is_refused_without_its_every_line(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"kind": "gemm"}\n' * 500, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_records(file)
    assert len(refused.value.faults) < 20
    assert "490 more lines" in refused.value.faults[-1].problem
    file.write_text('{"kind": "machine"}\n{"kind": "gemm", "time_s": 1}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1: is a line of calibrate run.*\n.*line 2: is a line of calibrate run"):
        read_records(file)
