"""One rank's measuring session: what is timed, how long, and where its lines go. Loads torch when it starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from validate.report import RankReport
from validate.samples import sample_key

DeviceKind = Literal["cuda", "cpu"]
MEMORY_SHARE = 0.9  # of what is free when the session starts
FEWEST_REPS, MIN_REPS, MAX_REPS = 3, 5, 50  # the fewest of calls that take long
REFERENCE_SIDE, REFERENCE_REPS = 256, 16  # a core that has just waited needs some milliseconds to reach its pace
SHORT_S = 1e-4  # shorter calls wait for the host between two events
_MEMINFO = Path("/proc/meminfo")


class WrongResultError(Exception):
    """A measured call ended, and its result is not what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a worker is told. tiny: the smallest shapes only, for tests of the machinery."""

    device: DeviceKind
    rank: int
    num_ranks: int
    threads: int
    until_s: float  # on this machine's monotonic clock: when everything is to be over,
    least_s: float  # but this long is measured in any case
    phases: tuple[str, ...]
    folder: str  # a scratch folder that the parent removes
    out: str  # the samples file: storage is measured beside it
    done: tuple[str, ...] = ()  # keys that an interrupted run has measured already
    tiny: bool = False
    command: str = ""
    memory_fraction: float = MEMORY_SHARE  # of what is free when the session starts
    attempt: int = 0  # after a trouble the ranks of a launcher meet again under another number
    join_s: float = 120.0


@dataclass(slots=True)
class Session:
    """Timers, budget and output of one rank. `torch` is the module, loaded by the worker.

    control: a gloo group over all ranks, None for one rank: what one decides, all must. host: written into every sample
    where ranks sit on several machines.
    """

    setting: SessionSettings
    torch: Any
    report: RankReport
    control: Any = None
    host: str = ""
    phase: str = ""
    phase_end_s: float = 0.0
    end_s: float = 0.0
    budget_s: float = 0.0
    free_bytes: int = 0
    _done: Collection[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        now = time.monotonic()
        self.end_s = max(self.setting.until_s, now + self.setting.least_s)
        self.budget_s = self.end_s - now
        free = self.setting.memory_fraction * free_memory(self.torch, self.gpu) / (1 if self.gpu else self.num_ranks)
        self.free_bytes = int(-self.agreed(-free))
        self._done = frozenset(self._everybody_has(self.setting.done))

    def _everybody_has(self, keys: Sequence[str]) -> Sequence[str]:
        """What every rank's file has: a rank that skipped a collective alone would leave the others waiting for it."""
        if self.control is None:
            return keys
        gathered: list[Any] = [None] * self.num_ranks
        self.torch.distributed.all_gather_object(gathered, list(keys), group=self.control)
        return sorted(set.intersection(*map(set, gathered)))

    @property
    def gpu(self) -> bool:
        return self.setting.device == "cuda"

    @property
    def num_ranks(self) -> int:
        return self.setting.num_ranks

    @property
    def slice_s(self) -> float:
        """Seconds that one measurement may take: a thousandth of the budget, between 5 and 300 ms."""
        return min(0.3, max(0.005, self.budget_s / 1000))

    # -- budget --------------------------------------------------------------------------------------------------

    def begin(self, phase: str, share: float) -> None:
        """Start a phase that may take `share` of what is left of the budget."""
        now = time.monotonic()
        self.phase, self.phase_end_s = phase, now + share * max(0.0, self.end_s - now)
        seconds = round(self.phase_end_s - now, 3)
        self.report.phase(phase, seconds)
        self.report.sample({"kind": "section", "name": phase, "state": "begins", "seconds": seconds})

    def end(self, clocks: Mapping[str, object]) -> None:
        """The phase is over. clocks: of this rank's GPU while it ran, for the file."""
        if clocks:
            self.report.sample({"kind": "section", "name": self.phase, "state": "ends", **self._who(), **clocks})

    def left_s(self) -> float:
        """Seconds that the phase still has, for items that can be cut short."""
        return max(0.0, self.phase_end_s - time.monotonic())

    def go(self) -> bool:
        """Whether the phase has time left: one answer for all ranks, which start the next item together."""
        mine = time.monotonic() < self.phase_end_s
        if self.control is None:
            return mine
        vote = self.torch.tensor([int(mine)])
        self.torch.distributed.all_reduce(vote, op=self.torch.distributed.ReduceOp.MIN, group=self.control)
        return bool(vote.item())

    def agreed(self, seconds: float, control: Any = None) -> float:  # noqa: ANN401  torch's group
        """The longest of the ranks' values: collectives need equal repetitions everywhere.

        control: the gloo group of those who take part, if that is not everybody.
        """
        group = control or self.control
        if group is None:
            return seconds
        value = self.torch.tensor([seconds], dtype=self.torch.float64)
        self.torch.distributed.all_reduce(value, op=self.torch.distributed.ReduceOp.MAX, group=group)
        return float(value.item())

    def fits(self, num_bytes: float) -> bool:
        """Whether this much memory may be taken: the same answer on every rank."""
        return num_bytes <= self.free_bytes

    # -- timing --------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def times(
        self,
        call: Callable[[int], object],
        *,
        together: Any = False,  # noqa: ANN401  a bool or torch's group
        by_host: bool = False,
        before: Callable[[], object] | None = None,
    ) -> list[float]:
        """Seconds of single calls; `call` gets the repetition's number, to rotate buffers by.

        together: the call is a collective, so that its ranks repeat it equally often: True for all, or their gloo group.
        by_host: the call ends when the device is done, and work of several threads is not between two events.
        before: on a CPU, what comes before each call and is not timed.
        """
        call(0)
        self.sync()
        started = time.perf_counter()
        if before:
            before()
        call(1)
        self.sync()
        one = time.perf_counter() - started
        if together:
            one = self.agreed(one, None if together is True else together)
        least = MIN_REPS if MIN_REPS * one < 4 * self.slice_s else FEWEST_REPS
        reps = max(least, min(MAX_REPS, int(self.slice_s / max(one, 1e-7))))
        return self._events(call, reps) if self.gpu and not by_host else _clocked(call, reps, before)

    def short_times(self, call: Callable[[int], object], count: int = 20) -> list[float] | None:
        """Times of a call too short to launch one by one: `count` of them in a CUDA graph. None where that fails."""
        cuda = self.torch.cuda
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                for i in range(count):
                    call(i)
        except Exception:  # noqa: BLE001  what synchronises cannot be captured: the single calls stand
            self.sync()
            return None
        return [time_s / count for time_s in self._events(lambda _: graph.replay(), MIN_REPS * 2)]

    def _events(self, call: Callable[[int], object], reps: int) -> list[float]:
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(reps)]
        for i, (before, after) in enumerate(pairs):
            before.record()
            call(i)
            after.record()
        self.sync()
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]

    def is_measured(self, kind: str, shape: Mapping[str, object]) -> bool:
        """Whether an interrupted run has it, on every rank."""
        return sample_key(kind, shape) in self._done

    def record(
        self,
        kind: str,
        call: Callable[[int], object],
        shape: Mapping[str, object],
        *,
        together: Any = False,  # noqa: ANN401  a bool or torch's group
        per: float = 1.0,
        graph: bool = False,
        by_host: bool = False,
        before: Callable[[], object] | None = None,
    ) -> float | None:
        """Time `call` and write a line; None where it failed or an interrupted run has it.

        per: calls inside one. graph: a short call may be timed in a CUDA graph, without the host's part. before: as in `times`.
        """
        if self.is_measured(kind, shape):
            return None
        try:
            if not self.gpu:
                shape = {**shape, "reference_s": reference_s(self.torch)}
            found = sorted(t / per for t in self.times(call, together=together, by_host=by_host, before=before))
            if self.gpu and graph and found[len(found) // 2] < SHORT_S and (quick := self.short_times(call)):
                found, shape = sorted(quick), {**shape, "graph": True}
        except Exception as exc:  # noqa: BLE001  an unsupported kernel is an answer too
            self.failed(kind, exc, shape)
            return None
        return self.emit(kind, found, shape)

    def emit(self, kind: str, found: Sequence[float], shape: Mapping[str, object]) -> float:
        """Write the line of measured times, sorted; the median is returned."""
        median = statistics.median(found)
        tenth = len(found) // 10
        spread = {"p10_s": found[tenth], "p90_s": found[-1 - tenth], "reps": len(found)}
        times = {"time_s": median, "mean_s": statistics.fmean(found), **spread}
        self.report.sample({"kind": kind, **times, **self._who(), **shape})
        return median

    def _who(self) -> dict[str, object]:
        return {"rank": self.setting.rank} | ({"host": self.host} if self.host else {})

    def sustained(
        self, kind: str, call: Callable[[int], object], shape: Mapping[str, object], *, seconds: float
    ) -> None:
        """Mean time of a call while the device stays busy; the second half counts, when the power limit is reached.

        Results are dropped as they come, and the queue is drained every tenth of the time.
        """
        if not self.gpu or sample_key(kind, {**shape, "sustained": True}) in self._done:
            return
        try:
            one = statistics.median(self.times(call))
            chunk = max(1, int(seconds / 10 / one))
            halves = [self._chunks(call, chunk, 5) for _ in range(2)]
        except Exception as exc:  # noqa: BLE001
            self.failed(kind, exc, {**shape, "sustained": True})
            return
        more = {"sustained": True, "first_half_s": statistics.fmean(halves[0])}
        self.emit(kind, sorted(halves[1]), {**shape, **more})

    def _chunks(self, call: Callable[[int], object], size: int, count: int) -> list[float]:
        event, found = self.torch.cuda.Event, []
        for _ in range(count):
            before, after = event(enable_timing=True), event(enable_timing=True)
            before.record()
            for i in range(size):
                call(i)
            after.record()
            after.synchronize()
            found.append(before.elapsed_time(after) * 1e-3 / size)
        return found

    def failed(self, kind: str, exc: BaseException, shape: Mapping[str, object]) -> None:
        """A measurement that did not work is a line too."""
        error = f"{type(exc).__name__}: {exc}"[:200]
        self.report.sample({"kind": kind, "error": error, **self._who(), **shape})
        if self.gpu:
            self.torch.cuda.empty_cache()

    # -- data ----------------------------------------------------------------------------------------------------

    def random(self, *shape: int, dtype: str = "fp32") -> Any:  # noqa: ANN401  a tensor
        """Random numbers: constant inputs draw less power and run faster than training does."""
        torch = self.torch
        made = torch.randn(*shape, device=self.setting.device, dtype=torch.float32)
        return made.to(torch_dtype(torch, dtype))


def reference_s(torch: Any) -> float:  # noqa: ANN401
    """Seconds of one fixed small product, the best of many: how fast this core runs at the moment.

    A virtual machine's cores change their pace from minute to minute with their neighbours. With the pace beside every
    measurement, samples of different minutes can be fitted together, and a run says at which pace it was played.
    """
    side = torch.ones(REFERENCE_SIDE, REFERENCE_SIDE)
    return min(_clocked(lambda _: side @ side, REFERENCE_REPS))


def _clocked(call: Callable[[int], object], reps: int, before: Callable[[], object] | None = None) -> list[float]:
    found = []
    for i in range(reps):
        if before:
            before()
        started = time.perf_counter()
        call(i)
        found.append(time.perf_counter() - started)
    return found


def torch_dtype(torch: Any, name: str) -> Any:  # noqa: ANN401
    """The dtype of torch by our name; tf32 is fp32 in memory."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
    return getattr(torch, names.get(name, "float32"))


def free_memory(torch: Any, gpu: bool) -> int:  # noqa: ANN401, FBT001
    """Bytes that nobody uses, of the current GPU or of the host."""
    if gpu:
        return int(torch.cuda.mem_get_info()[0])
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else 4 * 2**30
