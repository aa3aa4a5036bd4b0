"""Ranks forked from a process that has loaded torch: they do what `python -m` would, without its seconds of imports.

For tests of what ranks compute. Tests of the processes themselves, and one test of each command, start real ones.
A forked process that forks again leaves `torch.set_num_threads` to the child: torch's pool of threads does not outlive a fork.
A request is one line of JSON on a socket, with the descriptors of the new process beside it; so is the answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final, Literal, NoReturn

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
ABOVE: Final = 512  # received descriptors are moved out of the way of the numbers that they are to have


class Server:
    """The process that forks, seen from the tests."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """modules: what it loads first, in this order. environment: what must hold when they are loaded."""
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
        told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=told,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.started: list[int] = []

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """The answer to one request. Raises EOFError if the server has ended."""
        socket.send_fds(self._channel, [json.dumps(request).encode() + b"\n"], descriptors)
        return _received(self._channel)[0]

    def popen(self, command: Sequence[str], **how: Any) -> Process:
        """In `subprocess.Popen`'s place."""
        process = Process(self, command, **how)
        self.started.append(process.pid)
        return process

    def close(self) -> None:
        """It ends when nobody can ask any more."""
        self._channel.close()
        self._process.wait()


class Process:
    """What `validate.supervise` uses of a `subprocess.Popen`: pipes to stdin and from stderr, nothing from stdout."""

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        **_: Any,
    ) -> None:
        program, *rest = (word for word in command if word != "-P")  # it is forked where our modules are loaded
        filters = rest[1:2] if rest[0] == "-W" else []
        flag, module, *arguments = rest[2:] if filters else rest
        assert (program, flag) == (sys.executable, "-m")
        reads, stdin = os.pipe()
        stderr, writes = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(stderr, "rb", buffering=0)
        request = {
            "module": module,
            "arguments": arguments,
            "environment": dict(env),
            "numbers": [0, 2, *pass_fds],
            "folder": str(cwd or Path.cwd()),
            "filters": filters,
        }
        self._server = server
        self.returncode: int | None = None
        try:
            self.pid: int = server.ask(request, [reads, writes, *pass_fds])
        finally:
            os.close(reads)
            os.close(writes)

    def poll(self) -> int | None:
        """The exit status, or minus the signal's number; None while it lives."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status of a process that ends in time."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(0.02)
        return status

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Nothing, and what it wrote to stderr (no more than a pipe holds). It has ended."""
        self.wait(timeout)
        with self.stdin, self.stderr:
            return b"", self.stderr.read()

    def kill(self) -> None:
        """With all that it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()
        self.wait(60)
        self.stdin.close()
        self.stderr.close()


@contextmanager
def server(*modules: str, **environment: str) -> Iterator[Server]:
    """One that is gone afterwards."""
    made = Server(modules, environment)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def forked_ranks(made: Server, **others: Server) -> Iterator[Server]:
    """What `validate.supervise` starts meanwhile is forked. others: servers of modules, by the last part of their names."""
    made.started.clear()

    def popen(command: Sequence[str], **how: Any) -> Process:
        module = command[list(command).index("-m") + 1]
        return others.get(module.rpartition(".")[2], made).popen(command, **how)

    subprocess_of_ranks = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("validate.supervise.processes.subprocess", subprocess_of_ranks)
        yield made


# --- the other side


def serve(channel: socket.socket) -> None:
    """Answer until nobody asks: fork a process, or say how one has ended."""
    while True:
        try:
            request, descriptors = _received(channel)
        except EOFError:
            return
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                channel.close()
                _become(descriptors=descriptors, **request)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(json.dumps(answer).encode() + b"\n")


def _received(channel: socket.socket) -> tuple[Any, list[int]]:
    """One line and the descriptors that came with it. Raises EOFError where the other side is gone."""
    data, descriptors = b"", []
    while not data.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(channel, 65536, 16)
        descriptors += found
        if not part:
            raise EOFError("the other side of the server's socket is closed")
        data += part
    return json.loads(data), descriptors


def _become(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    numbers: list[int],
    descriptors: list[int],
    folder: str,
    filters: list[Literal["ignore"]],
) -> NoReturn:
    """What `python -m module arguments` is, in a session of its own."""
    status = 1
    try:
        os.setsid()
        above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
        for number, descriptor in zip(numbers, above, strict=True):
            os.dup2(descriptor, number)
        os.closerange(ABOVE, ABOVE + len(above))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for action in filters:
            warnings.simplefilter(action)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:  # noqa: BLE001  a process that Python ends tells why, and so does this one
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
