"""Where candidates run: in this process, on this machine's cores, or on a dask cluster. All give results in order of asking."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from threading import get_ident
from typing import Any, Final, Protocol

from simulator.base.errors import Fault, InputError
from simulator.base.processes import RETRIES, pool
from simulator.studies.search.evaluate import evaluate
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.space import Branch
from simulator.studies.search.study import SearchBrokenError, SearchStudy, software_version
from simulator.studies.search.survey import Survey, Surveyor


class Task(Protocol):
    """A pending result: a future of any library."""

    def result(self) -> Any: ...  # noqa: ANN401  of the task's own type


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs surveys and evaluations of one study. width: how many it keeps busy."""

    width: int

    def survey(self, branches: list[Branch], limit: float, *, scouts: bool = False) -> Task: ...
    def evaluate(self, key: str, together: int = 1) -> Task:
        """A plan's outcome. together: as many plans as one task may have, which waits for them until a result is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class _Here:
    """A task that runs when its result is asked for, so that progress is shown between two."""

    result: Callable[[], Any]


class _Batch:
    """Plans of one task, which starts when it is full or the first result is asked for."""

    def __init__(self, start: Callable[[list[str]], Task]) -> None:
        self._start, self.keys = start, list[str]()
        self.task: Task | None = None

    def start(self) -> Task:
        self.task = self.task or self._start(self.keys)
        return self.task

    @cached_property
    def outcomes(self) -> list[PlanOutcome]:
        """When they are there."""
        found: list[PlanOutcome] = self.start().result()
        return found


class _Batches:
    """Plans that are sent together. start: a task of some."""

    def __init__(self, start: Callable[[list[str]], Task]) -> None:
        self._start = start
        self._last = _Batch(start)

    def add(self, key: str, together: int) -> Task:
        """The outcome of one, in a task of at most so many."""
        if self._last.task is not None:
            self._last = _Batch(self._start)
        batch = self._last
        index = len(batch.keys)
        batch.keys.append(key)
        if len(batch.keys) >= together:
            batch.start()
        return _Here(lambda: batch.outcomes[index])


class Serial(AbstractContextManager["Serial"]):
    """This process: nothing is started."""

    def __init__(self, study: SearchStudy) -> None:
        self.width = 1
        self._study, self._surveyor = study, Surveyor(study)

    def survey(self, branches: list[Branch], limit: float, *, scouts: bool = False) -> Task:
        return _Here(partial(_surveyed, self._surveyor, branches, limit, scouts=scouts))

    def evaluate(self, key: str, together: int = 1) -> Task:  # noqa: ARG002  nothing is sent
        return _Here(partial(evaluate, self._study, key))

    def __exit__(self, *_: object) -> None:
        pass


class Processes(AbstractContextManager["Processes"]):
    """A pool of processes, each making its study once. If one dies, a new pool runs what was lost."""

    def __init__(self, study: SearchStudy, jobs: int) -> None:
        self.width = jobs
        self._study = study
        self._pool = self._start()
        self._batches = _Batches(lambda keys: _Retried(self, _evaluate_here, keys))

    def _start(self) -> ProcessPoolExecutor:
        return pool(self.width, _begin, (self._study,))

    def survey(self, branches: list[Branch], limit: float, *, scouts: bool = False) -> Task:
        return _Retried(self, _survey_here, (branches, limit, scouts))

    def evaluate(self, key: str, together: int = 1) -> Task:
        return self._batches.add(key, together)

    def submit(self, run: Callable[[Any], Any], argument: object) -> tuple[ProcessPoolExecutor, Future[Any]]:
        """A task, and the pool that it is in."""
        try:
            return self._pool, self._pool.submit(run, argument)
        except BrokenProcessPool:
            self.replace(self._pool)
            return self._pool, self._pool.submit(run, argument)

    def replace(self, broken: ProcessPoolExecutor) -> None:
        """A new pool for a broken one, unless somebody has made it already."""
        if self._pool is broken:
            broken.shutdown(wait=False, cancel_futures=True)
            self._pool = self._start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)  # nothing runs at a search's end: no race at exit


class _Retried:
    """A task that survives the death of the process it runs in, a few times."""

    def __init__(self, engine: Processes, run: Callable[[Any], Any], argument: object) -> None:
        self._engine, self._run, self._argument = engine, run, argument
        self._pool, self._future = engine.submit(run, argument)

    def result(self) -> Any:  # noqa: ANN401  of the task's own type
        for _ in range(RETRIES):
            try:
                return self._future.result()
            except BrokenProcessPool:
                self._engine.replace(self._pool)
                self._pool, self._future = self._engine.submit(self._run, self._argument)
        return self._future.result()


_LOOK_S: Final = 5.0  # between two looks at who is there
_ALONE_S: Final = 30.0  # that a search waits for a worker


class Dask(AbstractContextManager["Dask"]):
    """A dask.distributed cluster. A task of a worker that died runs again on another: outcomes do not depend on where."""

    def __init__(self, study: SearchStudy, scheduler: str) -> None:
        try:
            _quieten()
            from distributed import Client
        except ImportError:
            remedy = "pip install 'shardwise[distributed]', or --engine processes"
            raise InputError.at("--engine dask", "dask.distributed is missing", remedy) from None
        try:
            self._client: Any = Client(scheduler, timeout="10s", set_as_default=False)
        except Exception as exc:  # noqa: BLE001  whatever the library makes of an address, a name or a certificate
            remedy = "the address that `dask scheduler` prints, as tcp://HOST:8786; for tls://, dask's own configuration names certificates"
            raise InputError.at("--scheduler", f"{scheduler}: {exc}", remedy) from None
        _refuse_other_workers(self._client, scheduler)
        self._study = pickle.dumps(study)  # with each task: what one worker alone holds is lost with it
        self._batches = _Batches(lambda keys: _There(self._client, partial(_evaluate_there, self._study, keys)))
        threads = self._client.scheduler_info().get("workers", {}).values()
        self.width = max(1, sum(worker["nthreads"] for worker in threads))

    def survey(self, branches: list[Branch], limit: float, *, scouts: bool = False) -> Task:
        task = (self._study, branches, limit, scouts)
        return _There(self._client, partial(_survey_there, *task))

    def evaluate(self, key: str, together: int = 1) -> Task:
        return self._batches.add(key, together)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, TimeoutError):
            self._client.close(timeout=5)


def _quieten() -> None:
    """What is lost is reported by us, not in the library's log. Raises ImportError."""
    from dask import config

    if not config.get("logging", None):  # a user's own settings hold
        names = ("distributed", "distributed.client", "tornado", "tornado.application")
        config.set({"logging": dict.fromkeys(names, "critical")})


class _There:
    """A task on a worker. Where the scheduler is gone, that is said; what was done before stands in the journal."""

    def __init__(self, client: Any, run: Callable[[], Any]) -> None:  # noqa: ANN401  of an extra
        self._client, self._run, self._deaths = client, run, 0
        self._future = self._submitted()

    def _submitted(self) -> Any:  # noqa: ANN401  of an extra
        try:
            return self._client.submit(self._run, pure=False, retries=RETRIES)
        except Exception as exc:  # noqa: BLE001  a client that is closed says so in a type of its own
            raise _gone(str(exc)) from None

    def result(self) -> Any:  # noqa: ANN401  of the task's own type
        from distributed import KilledWorker

        alone_since = time.monotonic()
        while True:
            try:
                return self._future.result(timeout=_LOOK_S)
            except KilledWorker as exc:  # of four workers that died one after another, the task is suspected
                self._deaths += 1
                if self._deaths > RETRIES:
                    raise _gone(f"each worker that takes a task dies: {exc}") from None
                self._future = self._submitted()
            except TimeoutError:  # a future that was asked for when the scheduler went is never cancelled
                if _has_workers(self._client):
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > _ALONE_S:
                    raise _gone(f"no worker for {_ALONE_S:.0f} s") from None
            except (CancelledError, OSError) as exc:  # distributed's own errors of this kind derive from these
                raise _gone(str(exc)) from None


def _has_workers(client: Any) -> bool:  # noqa: ANN401  of an extra
    try:
        return client.status == "running" and bool(client.nthreads())
    except (CancelledError, OSError, ValueError):
        return False


def _gone(why: str) -> SearchBrokenError:
    remedy = "start them, and run the same command again: with --journal it goes on where it was"
    return SearchBrokenError(Fault("--scheduler", f"the scheduler or all its workers are gone: {why}", remedy))


def _versions(client: Any) -> set[str]:  # noqa: ANN401  of an extra
    """What each worker runs. Of those that are lost while they are asked, the others count. Raises what a worker raises."""
    while True:
        client.wait_for_workers(1, timeout=10)
        found = client.run(software_version, on_error="return").values()
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, OSError):
                raise one
        if versions := {one for one in found if isinstance(one, str)}:
            return versions


def _refuse_other_workers(client: Any, scheduler: str) -> None:  # noqa: ANN401  of an extra
    """Raises InputError: no worker, or one that has not this shardwise, whose outcomes would be others."""
    problem, remedy = "", "this version of shardwise on every worker: pip install 'shardwise[distributed]'"
    try:
        found = _versions(client)
    except TimeoutError:
        problem = "has no worker"
    except OSError as exc:
        problem, remedy = f"is gone: {exc}", "start it, and run the same command again"
    except Exception as exc:  # noqa: BLE001  whatever a worker says, in the words that it came in
        problem = f"a worker cannot run a search: {exc}"
    else:
        others = found - {software_version()}
        if others:
            problem = f"workers run shardwise {', '.join(sorted(others))}, and this is {software_version()}"
    if problem:
        with suppress(OSError, TimeoutError):
            client.close(timeout=5)
        raise InputError.at("--scheduler", f"{scheduler}: {problem}", remedy)


_HERE: dict[str, Any] = {}  # of a worker process


def _begin(study: SearchStudy) -> None:
    _HERE.update(study=study, surveyor=Surveyor(study))


def _survey_here(task: tuple[list[Branch], float, bool]) -> Survey:
    branches, limit, scouts = task
    return _surveyed(_HERE["surveyor"], branches, limit, scouts=scouts)


def _evaluate_here(keys: list[str]) -> list[PlanOutcome]:
    return [evaluate(_HERE["study"], key) for key in keys]


@cache
def _study_there(data: bytes) -> SearchStudy:
    """The study of this machine's own client, as it was pickled: once a worker."""
    study: SearchStudy = pickle.loads(data)  # noqa: S301  dask sends code as well
    return study


@cache
def _surveyor_there(data: bytes, thread: int) -> Surveyor:  # noqa: ARG001  a worker may have several, and surveyors remember
    return Surveyor(_study_there(data))


def _survey_there(data: bytes, branches: list[Branch], limit: float, scouts: bool) -> Survey:  # noqa: FBT001  dask's
    return _surveyed(_surveyor_there(data, get_ident()), branches, limit, scouts=scouts)


def _evaluate_there(data: bytes, keys: list[str]) -> list[PlanOutcome]:
    return [evaluate(_study_there(data), key) for key in keys]


def _surveyed(surveyor: Surveyor, branches: list[Branch], limit: float, *, scouts: bool) -> Survey:
    found = Survey()
    for branch in branches:
        found.merge(surveyor.survey(branch, limit, scouts=scouts))
    return found
