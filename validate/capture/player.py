"""The process that plays one rank of a program for real: `python -m validate.capture.player JOB.json ARGS`.

Steps end with the first optimizer's `step()`, as in a capture. The one behind the warm-up is recorded by torch's profiler,
which ran since the program began, so that its account of the allocator is whole; then steps are timed without it, and the
program is stopped. The profiler keeps all that wrappers of torch.func (vmap, grad) hold where it notes shapes, so it notes none
of a program that uses them.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from validate.capture.child import Finished, _target, _users_part
from validate.capture.ranks import RefusedError
from validate.capture.refusals import in_a_line
from validate.every_thread import count_every_thread, wait_for_threads
from validate.report import RankReport, kind_of

_KEPT = (
    "cpu_op",
    "user_annotation",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "gpu_user_annotation",
    "cuda_runtime",
    "cuda_driver",
    "cuda_sync",
)


def main(job_file: str, arguments: list[str]) -> int:
    """Exit status: 0 with a result, 1 with a fault told."""
    report = RankReport.to_parent()
    try:
        job = json.loads(Path(job_file).read_text(encoding="utf-8"))
        report.phase("load")
        report.result(_played(job, arguments, report))
    except RefusedError as exc:
        report.fault("bad_plan", str(exc))
        return 1
    except BaseException as exc:  # noqa: BLE001  whatever the program raises, the parent must be told
        Path(job_file).with_name(f"traceback-{os.environ['RANK']}.txt").write_text(_users_part(exc), encoding="utf-8")
        report.fault(kind_of(exc), in_a_line(exc))
        return 1
    return 0


def _played(job: dict[str, Any], arguments: list[str], report: RankReport) -> dict[str, Any]:
    import torch

    from validate.machine import describe

    on_cpu = job["device"] == "cpu"
    torch.set_num_threads(job["threads"])
    machine = describe(
        torch, job["device"], num_ranks=job["ranks"], threads=job["threads"], command=job["command"].split()
    )
    report.partial(machine=machine)
    steps = _Steps(job, report)
    with ExitStack() as stack:
        if on_cpu:
            from validate.capture.on_cpu import install

            stack.enter_context(install(job["ranks"]))
        stack.enter_context(nullcontext() if on_cpu else torch.cuda.device(int(os.environ["LOCAL_RANK"])))
        report.phase("begin")
        steps.begin()
        try:
            _target(job["target"], arguments)()
        except Finished:
            pass
        except SystemExit as exc:
            if exc.code not in (None, 0):
                raise RefusedError(f"the program ended with exit code {exc.code} after {steps.count} steps") from exc
        finally:
            steps.stop()
    if not steps.recorded:
        wanted = job["warm_up"] + 1
        raise RefusedError(
            f"the program ended after {steps.count} optimizer steps, and the {wanted}th is recorded: let it run longer"
        )
    return {"machine": machine, "memory": steps.memory, "step_times_s": steps.times_s, "shapes": not steps.wraps}


class _Steps:
    """Counts an optimizer's steps: marks them, records one, times those behind it, and ends the program."""

    def __init__(self, job: dict[str, Any], report: RankReport) -> None:
        import torch

        self._torch, self._job, self._report = torch, job, report
        self._first: object = None
        self._mark: Any = None
        self._profiler: Any = None
        self._last_s = 0.0
        self.count, self.recorded, self.wraps = 0, False, False
        self.times_s: list[float] = []
        self.memory: dict[str, Any] = {}

    def begin(self) -> None:
        """Follow the optimizer, and the allocator, from here on."""
        from torch._functorch import eager_transforms, vmap
        from torch.optim.optimizer import register_optimizer_step_post_hook

        for owner, kind in ((vmap, "vmap"), (eager_transforms, "grad"), (eager_transforms, "jvp")):
            name = f"{kind}_increment_nesting"
            setattr(owner, name, self._noting(getattr(owner, name)))
        self._counted = self._job["device"] == "cuda" or count_every_thread()
        register_optimizer_step_post_hook(self._ended)

    def _noting(self, wrapping: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.wraps = True
            return wrapping(*args, **kwargs)

        return noted

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([] if self._job["device"] == "cpu" else [ProfilerActivity.CUDA])]
        self._profiler = profile(activities=activities, record_shapes=not self.wraps, profile_memory=True)
        self._profiler.start()
        self._mark = self._torch.profiler.record_function(f"ProfilerStep#{self.count}")
        self._mark.__enter__()

    def _ended(self, optimizer: object, *_: object) -> None:
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        self.count += 1
        self._report.phase(f"step {self.count}")
        if self.count == self._job["warm_up"]:
            self._begin_recorded()
        elif self.count == self._job["warm_up"] + 1:
            self._mark.__exit__(None, None, None)
            self._record()
        elif self.recorded:
            self._time()

    def _begin_recorded(self) -> None:
        if self._job["device"] != "cpu":
            self._torch.cuda.synchronize()
            self._torch.cuda.reset_peak_memory_stats()
        elif self._job["ranks"] > 1:
            wait_for_threads()
        self._start()

    def _record(self) -> None:
        """The recorded step is over: keep its trace, and what the allocator did."""
        cuda = self._job["device"] != "cpu"
        if cuda:
            self._torch.cuda.synchronize()
            stats = self._torch.cuda
            self.memory = {
                "peak_allocated_bytes": stats.max_memory_allocated(),
                "peak_reserved_bytes": stats.max_memory_reserved(),
            }
        self.stop()
        self.recorded = True
        self.memory |= self._trace(Path(self._job["scratch"]) / f"rank{os.environ['RANK']}.json", kind=1 if cuda else 0)
        self._report.partial(memory=self.memory)
        if not self._job["steps"]:
            raise Finished
        self._last_s = time.perf_counter()

    def _trace(self, path: Path, *, kind: int) -> dict[str, int]:
        """Leave the recorded step's events beside; bytes at its begin and end, and the most in between."""
        self._exported.export_chrome_trace(str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        events = data["traceEvents"]
        name = f"ProfilerStep#{self._job['warm_up']}"
        begin, end = next(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == name and e.get("cat") == "user_annotation"
        )
        data["traceEvents"] = [e for e in events if e.get("cat") in _KEPT and begin <= e["ts"] <= end]
        identity = {"rank": int(os.environ["RANK"]), "world_size": self._job["ranks"]}
        data["distributedInfo"] = {**(data.get("distributedInfo") or {}), **identity}
        path.with_suffix(".json.gz").write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
        return _bytes(events, begin, end, kind)

    def _time(self) -> None:
        if self._job["device"] != "cpu":
            self._torch.cuda.synchronize()
        now = time.perf_counter()
        self.times_s.append(now - self._last_s)
        self._last_s = now
        self._report.partial(memory=self.memory, step_times_s=self.times_s)
        if len(self.times_s) == self._job["steps"]:
            raise Finished

    def stop(self) -> None:
        """End the profile, if it still runs."""
        if self._profiler is not None:
            wait_for_threads()
            self._profiler.stop()
            self._exported, self._profiler = self._profiler, None


def _bytes(events: list[dict[str, Any]], begin: float, end: float, kind: int) -> dict[str, int]:
    """Live bytes by the allocator's own events."""
    rows = [
        (e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == kind
    ]
    rows.sort(key=lambda row: row[0])
    inside = [size for at, size, _ in rows if begin <= at <= end]
    start = next(
        (
            size if at < begin else size - change
            for at, size, change in [*[r for r in rows if r[0] < begin][-1:], *rows]
        ),
        0,
    )
    return {"start_bytes": start, "peak_bytes": max([start, *inside]), "end_bytes": inside[-1] if inside else start}


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(status)  # threads of the program, and half-dead groups, must not hold it back
