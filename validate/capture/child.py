"""The process that runs the program: `python -m validate.capture.child JOB.json ARGS`. Supervised by `validate.capture.command`.

It is the user's own code with the user's rights, on fake tensors: nothing is computed, no GPU is needed, nothing is sent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from validate.capture.channel import Channel, NeverSentError
from validate.capture.path import begin_at
from validate.capture.ranks import FailedError, Ranks, RefusedError
from validate.players import guard
from validate.report import RankReport


class Finished(BaseException):
    """The steps asked for are over."""


def main(job_file: str, arguments: list[str]) -> int:
    """Run the target on each rank until its recorded step ends, and leave what was captured in the job's folder."""
    report = RankReport.to_parent()
    folder = Path(job_file).parent
    try:
        job = json.loads(Path(job_file).read_text(encoding="utf-8"))
        report.phase("load")
        _load()
        ranks = Ranks(folder, partial(_captured, job, arguments), partial(_explained, folder), report)
        report.result({"ranks": ranks.run(job["ranks"])})
    except FailedError as exc:
        report.fault(*exc.args)
        return 1
    except BaseException as exc:  # noqa: BLE001  the parent must be told
        report.fault(*_explained(folder, exc))
        return 1
    return 0


def _load() -> None:
    """What every rank needs, once: the ranks are forked from this process."""
    if guard.needs_guard():
        try:
            guard.stand_in(Path(os.environ.get("SHARDWISE_SCRATCH", ".")))
        except (OSError, subprocess.SubprocessError) as exc:  # nothing of the program has run
            said = (getattr(exc, "stderr", None) or b"").decode("utf-8", "replace").strip().splitlines()
            why = next((line for line in said if "error" in line), said[-1] if said else str(exc))
            raise RefusedError(f"what stands for a GPU cannot be built here: {why}") from exc
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    from validate.capture import answers, collectives, mode, triton_absent  # noqa: F401

    triton_absent.install()
    gc.collect()
    gc.freeze()  # the ranks share these pages


def _explained(folder: Path, error: BaseException) -> tuple[str, str]:
    """The kind of a fault and its text; the program's own traceback is left in the folder."""
    causes = list(_causes(error))
    for one in causes:
        if isinstance(one, RefusedError | NeverSentError):
            return "bad_plan", str(one)
    from validate.capture.refusals import in_a_line

    parts = [_users_part(one) for one in reversed(causes)]
    text = "\nThe above exception was the direct cause of the following exception:\n\n".join(parts)
    (folder / "traceback.txt").write_text(text, encoding="utf-8")
    return "failed", in_a_line(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: torch's pipelines, for one, raise anew what a stage raises."""
    while error is not None:
        yield error
        error = error.__cause__


def _captured(
    job: dict[str, Any], arguments: list[str], rank: int, channel: Channel, tell: Callable[[str], None]
) -> dict[str, Any]:
    import torch

    from validate.capture import answers, loaders
    from validate.capture.collectives import Collectives
    from validate.capture.compiled import Compilers
    from validate.capture.log import Log
    from validate.capture.mode import CaptureMode
    from validate.capture.modules import Modules
    from validate.capture.refusals import without_children
    from validate.capture.steps import Steps
    from validate.capture.storages import Storages
    from validate.capture.streams import Recorder
    from validate.capture.triton_absent import Kernel

    log = Log()
    storages, modules = Storages(log), Modules()
    Recorder.begin(log, storages.used)
    collectives = Collectives(log, storages, channel)
    mode = CaptureMode(log, storages, modules, collectives, job["expert_imbalance"])
    Kernel.launched = mode.launched
    machine = answers.Machine(**{**job["machine"], "capability": tuple(job["machine"]["capability"]), "rank": rank})
    answers.install(machine, log, storages, mode, collectives)
    empty = loaders.install(log)
    Compilers(mode, log, storages, modules).install()
    _without_network()
    without_children()
    _threads()
    torch.autograd.set_multithreading_enabled(False)  # two threads free what they share in an order of chance
    steps = Steps(log, storages, modules, Finished, job["warm_up"], tell)
    tell("begin")
    with mode:
        try:
            _target(job["target"], arguments)()
        except Finished:
            pass
        except SystemExit as exc:
            if exc.code not in (None, 0):
                raise RefusedError(f"the program ended with exit code {exc.code} after {steps.count} steps") from exc
    if not steps.done:
        raise RefusedError(_no_step(steps.count, job["warm_up"], empty))
    if job["expert_imbalance"] > 1 and not mode.routing.is_uneven:
        log.answer("--expert-imbalance: nothing; the program makes no counts of a router's choices")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if given := os.environ.get(name):
            log.answer(f"{name}={given}: predict takes it as --alloc-conf")
    return {"torch": torch.__version__, "rank": rank, "steady": steps.begin, **log.as_json()}


def _no_step(count: int, warm_up: int, empty: Sequence[str]) -> str:
    """empty: data sets of loaders that gave no batches."""
    if count == 0 and empty:
        return f"the program ended without an optimizer's step: a data loader over {empty[0]} has nothing to load"
    if count == 0:
        return "the program ended without an optimizer's step: a step ends with torch.optim's step()"
    return (
        f"the program ended after {count} optimizer steps, and the one behind {warm_up} of warm-up is recorded: "
        f"let it run {warm_up + 1} steps" + f", or give --warm-up {count - 1}" * (count > 1)
    )


def _target(name: str, arguments: list[str]) -> Callable[[], Any]:
    """A script, or module:function."""
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        begin_at(Path(name).resolve().parent)
        return lambda: runpy.run_path(name, run_name="__main__")
    module, _, function = name.partition(":")
    begin_at(Path.cwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as exc:
        raise RefusedError(f"{name}: {exc}; a target is a script.py, or module:function from this folder") from exc
    if not callable(found):
        raise RefusedError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def _without_network() -> None:
    """Programs may look for data or report elsewhere: a capture does neither."""
    original = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"no network in a capture: {address[0]}")
        original(self, address)

    socket.socket.connect = connect  # type: ignore[method-assign, assignment]
    os.environ.update({"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "HF_DATASETS_OFFLINE": "1"})
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = (
        "1"  # of values: whether there are as many image tokens as features
    )


def _threads() -> None:
    """A capture follows one thread: one that fails at tensors of the GPU ends it, as the program may wait for it for ever."""
    start, failed = threading.Thread.start, list[RefusedError]()

    def started(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            try:
                run()
            except Exception as exc:
                if "'CUDA' backend" in str(exc) or "FakeTensor" in f"{type(exc).__name__} {exc}":
                    failed.append(RefusedError(_THREAD))
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                raise

        setattr(thread, "run", watched)  # noqa: B010  mypy lets nobody assign it
        start(thread)

    def interrupted(*_: object) -> None:
        raise failed[0] if failed else KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    setattr(threading.Thread, "start", started)  # noqa: B010


_THREAD = (
    "a thread of the program's own uses the GPU, and a capture follows one thread: load and move batches in the loop"
)


def _users_part(error: BaseException) -> str:
    """The traceback from the first frame of the user's own code on, without this project's frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).resolve().parent)
    own_frames = [one for one in frames if not one.filename.startswith((own, "<frozen runpy>"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(own_frames)]
    text, *more = "".join(traceback.format_exception_only(error)).splitlines(keepends=True)
    return "".join([*lines, text, *more[:_MOST_LINES]])


_MOST_LINES = 20  # of an exception's text: torch's own lists every kernel of an operator


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(status)  # threads and loaders of the program must not hold it back
