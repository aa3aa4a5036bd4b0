"""One case: a command line in a process of its own or in one that plays many, and what is wrong with how it ended."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.campaign.seeds import Seed

HANG_S: Final = 10.0  # of the processor
STUCK_S: Final = 180.0  # of the clock, on a machine that may be very busy
MOST_BYTES: Final = 2**30
LONGEST: Final = 2_000  # characters of a line of an error
# for as many minutes as they are told, or as the ranks take that they start
_MEASURES: Final = {("calibrate", "run"), ("calibrate", "burn-in"), ("validate", "rehearse")}
CODES: Final = frozenset({0, 1, 2, 3, 4, 5, 130, 141})
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASKING: Final = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"}  # fmt: skip
_AT_WORK: Final = re.compile(
    rb"^(?:[\d,]+ of [\d,]+ |\w+: [\d,]+ of [\d,]+ |shardwise: (?:playing|memory of|writing) |memory of [\d,]+ layers, |.*(?:listing|survey|simulation) of ).* left$",
    re.MULTILINE,
)  # it was asked for much, and says how long it takes
_WARNED: Final = re.compile(rb"^\S+\.py:\d+: \w*Warning: ", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    stdout: bytes
    stderr: bytes


def laid(case: Seed, folder: Path) -> None:
    """Put the case's files into an empty folder, and what is no file where it asks for that."""
    for name, data in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match case.special.get(name):
            case None | "kept":
                path.write_bytes(data)
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "loop":
                path.symlink_to(path.name)
            case "missing":
                pass
            case device:
                path.symlink_to(device)


def played(case: Seed, folder: Path) -> Ended:
    """Run the case in a fork of this process, which has loaded what commands need, inside an empty folder."""
    laid(case, folder)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(case, folder)
    status, usage = _waited(pid, started)
    return _ended(folder, status, started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _ended(folder: Path, status: int, started: float, cpu_s: float, peak_bytes: int) -> Ended:
    out, err = (folder.with_suffix(suffix) for suffix in (".out", ".err"))
    return Ended(
        status=status, seconds=time.monotonic() - started, cpu_s=cpu_s, peak_bytes=peak_bytes,
        stdout=out.read_bytes() if out.is_file() else b"", stderr=err.read_bytes() if err.is_file() else b"",
    )  # fmt: skip


def _child(case: Seed, folder: Path) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * HANG_S), int(2 * HANG_S) + 2))
    try:
        status = _called(case, folder)
    finally:
        os._exit(int(status))


def _called(case: Seed, folder: Path) -> int:
    """The exit code of the case's command; its words go into files beside the folder."""
    from simulator.cli import main

    os.chdir(folder)
    for suffix, descriptor in ((".out", 1), (".err", 2)):
        file = os.open(folder.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, 4 * MOST_BYTES))
    signal.alarm(int(STUCK_S))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a campaign in the background has it ignored
    os.environ["HOME"] = str(folder.with_suffix(".home"))  # what is kept there goes with the case
    if "ui" in case.argv[:1]:
        threading.Thread(target=_interrupt, args=(folder.with_suffix(".out"),), daemon=True).start()
    if not case.alone:
        _without_network()
    sys.argv = ["shardwise", *case.argv]
    try:
        return main(list(case.argv))
    except BaseException:  # noqa: BLE001  what the interpreter would print
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _interrupt(out: Path) -> None:
    """Ctrl-C, once the address stands there; a command that is refused has ended before."""
    while not out.read_bytes().startswith(b"http"):
        time.sleep(0.02)
    time.sleep(0.1)  # it serves
    os.kill(os.getpid(), signal.SIGINT)


@cache
def _without_network() -> None:
    """No command has anybody to talk to, from here to the end of this process. Those that run alone may listen."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        local = event in ("socket.connect", "socket.bind") and isinstance(arguments[1], str | bytes)  # a path
        if event in _ASKING and not local:
            msg = f"asks the network: {event}"
            raise RuntimeError(msg)

    sys.addaudithook(refuse)


def _waited(pid: int, started: float) -> tuple[int, resource.struct_rusage]:
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() - started > STUCK_S + 5:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


# --- many cases in one process


def in_company(cases: Iterable[tuple[int, Seed]], scratch: Path) -> Iterator[tuple[int, Ended, str]]:
    """Play cases one after another in one fork: without starting a process for each, and with what the ones before left in
    memory. It ends early where a case ends the process; whoever asks plays that one alone."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _company(cases, scratch, write)
    os.close(write)
    with os.fdopen(read, "rb") as results:
        while True:
            try:
                yield pickle.load(results)  # noqa: S301  our own child's
            except EOFError:
                break
    os.waitpid(pid, 0)


def _company(cases: Iterable[tuple[int, Seed]], scratch: Path, write: int) -> NoReturn:
    try:
        with os.fdopen(write, "wb") as results:
            for index, case in cases:
                ended, fault = _one_of_many(case, scratch / str(index))
                pickle.dump((index, ended, fault), results)
                results.flush()
                if ended.peak_bytes > MOST_BYTES / 2:  # what earlier cases left there is not this one's
                    break
    finally:
        os._exit(0)


def _one_of_many(case: Seed, folder: Path) -> tuple[Ended, str]:
    folder.mkdir(parents=True)
    laid(case, folder)
    used_s = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + 2 * HANG_S), resource.getrlimit(resource.RLIMIT_CPU)[1]))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
    started = time.monotonic()
    status = _called(case, folder)
    ended = _ended(folder, status, started, time.process_time() - used_s, _peak_bytes())
    fault = wrong(case, ended, folder)
    os.chdir(folder.parent)
    cleared(folder)
    return replace(ended, stdout=b"", stderr=b""), fault


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def cleared(folder: Path) -> None:
    """Remove a case's folder and what lies beside it."""
    for one in (folder, folder.with_suffix(".home")):
        shutil.rmtree(one, ignore_errors=True)
    for suffix in (".out", ".err"):
        folder.with_suffix(suffix).unlink(missing_ok=True)


# --- judging


def measures(case: Seed) -> bool:
    """It measures this machine, for as long as it is told."""
    return case.argv[:2] in _MEASURES


def wrong(case: Seed, ended: Ended, folder: Path) -> str:
    """What is wrong, in one line; empty where nothing is."""
    found: Iterator[str] = filter(None, _faults(case, ended, folder))
    if measures(case) and ended.status in (0, 5, -signal.SIGXCPU, -signal.SIGALRM):
        found = (one for one in found if one.startswith("traceback"))
    return next(found, "")


def _faults(case: Seed, ended: Ended, folder: Path) -> Iterator[str]:
    """Every fault of a case, worst first."""
    error, refused = ended.stderr, ended.status in (2, 3)
    own = case.argv[:1] == ("capture",) and b" in the program\n" in error  # the user's program raised it
    if b"Traceback (most recent call last)" in error and not own:
        yield f"traceback: {_last_line(error)}"
    stopped = ended.status in (-signal.SIGXCPU, -signal.SIGALRM, -signal.SIGKILL)
    if (ended.cpu_s > HANG_S or stopped) and not _AT_WORK.search(error):
        yield f"hang: {ended.cpu_s:.0f} s of the processor, {ended.seconds:.0f} s"
    if ended.status not in CODES and not stopped:
        yield f"exit status {ended.status}"
    if ended.peak_bytes > MOST_BYTES:
        yield f"memory: {ended.peak_bytes / 2**20:.0f} MiB"
    if _WARNED.search(error):
        yield f"warning: {_last_line(error)}"
    if refused:
        yield _refusal(case, error)
    if found := _CONTROL.search(error) or _CONTROL.search(ended.stdout):
        yield f"control character {found.group()!r} on the terminal"
    if ended.status in (0, 4) and _asks_json(case.argv) and not {"-o", "--out"} & set(case.argv):
        yield _not_json(ended.stdout)
    yield _damaged(case, folder)
    yield _left(case, folder)


def _refusal(case: Seed, error: bytes) -> str:
    if not error.strip():
        return "an error without a word"
    if (longest := max(map(len, error.splitlines()))) > LONGEST:
        return f"an error of {longest} bytes in a line"
    return f"a valid input is refused: {error[-200:].decode('utf-8', 'replace')}" if case.valid else ""


def _last_line(error: bytes) -> str:
    lines = [
        line for line in error.decode("utf-8", "replace").splitlines() if line.strip() and not line.startswith(" ")
    ]
    return (lines or ["?"])[-1][:200]


def _asks_json(argv: tuple[str, ...]) -> bool:
    """--json, not as another option's value, not behind --, and no help."""
    argv = argv[: argv.index("--")] if "--" in argv else argv
    has_json = any(word == "--json" and not before.startswith("-") for before, word in pairwise(argv))
    return has_json and not {"--help", "-h"} & set(argv)


def _not_json(text: bytes) -> str:
    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        answer = json.loads(text, parse_constant=refuse)
    except ValueError as exc:
        return f"stdout is not JSON: {str(exc)[:80]}"
    return _below_zero(answer) if isinstance(answer, dict) else ""


def _below_zero(answer: dict[str, Any]) -> str:
    """A time or a size of a prediction that is none."""
    found = {key: answer.get(key) for key in ("step_s", "low_s", "high_s")}
    for table in ("breakdown_s", "memory"):
        found |= answer[table] if isinstance(answer.get(table), dict) else {}
    below = [key for key, value in found.items() if isinstance(value, int | float) and value < 0]
    return f"{below[0]} is negative" if below else ""


def _damaged(case: Seed, folder: Path) -> str:
    """An input that is no longer what it was; a journal is written to, and what the command is told to write."""
    outputs = [after for option, after in pairwise(case.argv) if option in ("-o", "--trace", "--snapshot", "--plot")]
    for name, data in case.files.items():
        others = sum(name.encode() in text for other, text in case.files.items() if other != name)
        kept = case.special.get(name) == "kept"  # it is read, and named as what is written
        if kept and others + sum(name in word for word in case.argv) < 2:  # no longer: its option has been cut
            continue
        if not kept and (name in case.special or name.endswith(".journal") or name in outputs):
            continue
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            return f"{name} was changed"
    return ""


def _left(case: Seed, folder: Path) -> str:
    """A temporary file that stayed: files are written beside their name, with a dot."""
    given = {name.partition("/")[0] for name in case.files}
    found = [one.name for one in folder.iterdir() if one.name.startswith(".") and one.name not in given]
    return f"left {found[0]}" if found else ""
