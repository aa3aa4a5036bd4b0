"""What all tests share: reproducible hypothesis runs, reference data that not every checkout has, processes with torch loaded."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from simulator.base.garbage import COLLECT
from simulator.predict import MemoryUse, Prediction, Source
from simulator.work.trace import MemoryTrace, Timeline
from tests import examples, warm
from validate.machine import KEEP_FREED_MEMORY
from validate.players import guard

IN_MEMORY = Path("/dev/shm")  # noqa: S108  each run has a folder of its own there


def _has_room(folder: Path) -> bool:
    """Whether a run's files, some hundred MB, can be written there and executed."""
    if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(folder).free > 4 * 2**30


if "TMPDIR" not in os.environ and _has_room(IN_MEMORY):  # a disk takes milliseconds for every file that is synced
    os.environ["TMPDIR"] = str(IN_MEMORY)
    tempfile.tempdir = None
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: every core has a worker of xdist's already
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start take what the first of them compiled
sys.dont_write_bytecode = False  # and the next run takes the tests as this one compiled them
multiprocessing.set_forkserver_preload(  # pools of processes are forked from one that has loaded what their tasks need
    [
        "simulator.studies.search",
        "simulator.studies.serving_search",
        "simulator.studies.backtest",
        "simulator.cli.explore",
    ]
)
os.environ["SHARDWISE_CALIBRATIONS"] = ""  # what this machine's user keeps is no test's
examples.load()  # before hypothesis reads its own option, --hypothesis-profile

ROOT = Path(__file__).resolve().parents[1]


# Files and tests whose fixtures cost seconds, by what they share: one worker makes it and runs all that asks for it
TOGETHER = {
    "tests/unit/test_pages.py": "pages",
    "tests/unit/test_pages_browser.py": "pages",
    **dict.fromkeys(
        (
            f"tests/validate/test_{name}.py"
            for name in ("bench_cpu", "burn_in", "run_cpu", "spread_runs", "tensor_parallel")
        ),
        "ranks",
    ),
    "tests/programs/test_programs.py": "captures",
    "tests/unit/test_guides.py::test_a_page_runs_and_shows_what_is_printed[capture]": "captures",
    "tests/unit/test_guides.py::test_a_page_runs_and_shows_what_is_printed[validate]": "captures",
    **dict.fromkeys(
        (
            f"tests/validate/test_{name}.py"
            for name in ("capture", "capture_ranks", "capture_studies", "capture_compiled")
        ),
        "captures",
    ),
    "tests/validate/test_program_run.py": "captures",
    "tests/validate/test_plain_torch.py": "captures",
    "tests/validate/test_run_fake.py": "captures",
    "tests/validate/test_bench_gpu.py": "a GPU's samples",
    **{f"tests/validate/test_{name}.py": name for name in ("launch", "rehearse")},  # long, so not the last
    "tests/unit/test_remedy_search.py": "searches for remedies",
    "tests/unit/test_search.py": "searches",
    **dict.fromkeys(
        (f"tests/unit/test_{name}.py" for name in ("imports", "no_publishers", "script", "stack_traits")), "sources"
    ),
}


class _ByCost(LoadScopeScheduling):
    """Tests one by one to whichever worker is free, but those of `TOGETHER` whole, and first of all."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(nodeid) or TOGETHER.get(nodeid.split("::", 1)[0], nodeid)

    @override
    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """What is done is forgotten: xdist looks after each test through all that its worker has had."""
        work, nodeid = self.assigned_work[node], self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        work[scope][nodeid] = True
        if all(work[scope].values()):
            del work[scope]
        self._reschedule(node)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded and collected lives to the end: nobody looks for garbage among it, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*COLLECT)  # as in the command line


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByCost:
    """Not xdist's own loadgroup: xdist 3.8 writes groups where pytest 9.2 does not read them."""
    return _ByCost(config, log)


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of published measurements beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the reference data {folder} is not on this machine")
    return folder


@pytest.fixture
def made_prediction() -> Prediction:
    """A prediction written by hand, its parts in sum with its wholes."""
    memory = MemoryUse(
        peak_allocated_bytes=50 * 2**30,
        peak_reserved_bytes=54 * 2**30,
        low_reserved_bytes=52 * 2**30,
        high_reserved_bytes=57 * 2**30,
        outside_torch_bytes=2 * 2**30,
        capacity_bytes=80 * 2**30,
        resident_bytes=20 * 2**30,
        by_category={"activations": 30 * 2**30, "parameters": 20 * 2**30},
        peak_moment="backward loss mb0",
    )
    return Prediction(
        model="tiny",
        cluster="one-node",
        num_devices=8,
        step_s=2.0,
        low_s=1.9,
        high_s=2.1,
        lower_s=1.5,
        upper_s=3.0,
        tokens_per_step=65_536,
        model_flop_per_step=8 * 10**15,
        hardware_flop_per_step=10 * 10**15,
        peak_flop_per_s=1e15,
        breakdown={"gemm": 1.25, "attention": 0.5, "exposed:all_gather": 0.25},
        communication={"all_gather": (0.25, 0.5)},
        memory=memory,
        cause="24.0 GiB free",
        suggestion="micro_batch_size = 2",
        extrapolated=("gemm m=1",),
        sources=(Source(what="calibration", kind="calibrated", detail="h100-sxm"),),
        timeline=Timeline(spans=(), step_s=2.0),
        memory_trace=MemoryTrace(samples=(), peak_index=0, by_category={}),
    )


# --- ranks that tests start by the dozen, without loading torch for each


# What every rank would load when it comes to it
LATE = "simulator.work.script", "validate.players.guard", "validate.spanfile"


@pytest.fixture(scope="session")
def torch_server() -> Iterator[warm.Server]:
    """One process that has loaded what ranks on a CPU load."""
    modules = "validate.players.real", "validate.players.fake", "torch.distributed.pipelining"
    with warm.server(*modules, *LATE, **KEEP_FREED_MEMORY) as made:
        yield made


@pytest.fixture
def warm_ranks(torch_server: warm.Server) -> Iterator[warm.Server]:
    """Supervised ranks are forked, in this test."""
    with warm.forked_ranks(torch_server) as made:
        yield made


@pytest.fixture(scope="session")
def kept_guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the device guard: compiled by the first that needs it, found by the others of this worker."""
    if guard.needs_guard() and guard.compiler() is None:
        pytest.skip("needs a CUDA build of torch, or a C++ compiler for the device guard")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SHARDWISE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def guarded_server(kept_guard: Path) -> Iterator[warm.Server]:
    """One process that has loaded the guard and what captures load."""
    with warm.server("tests.validate.guarded", SHARDWISE_CACHE=str(kept_guard)) as made:
        yield made


@pytest.fixture(scope="module")
def warm_captures(guarded_server: warm.Server) -> Iterator[warm.Server]:
    """Captures, and other ranks on fake CUDA tensors, are forked in this file."""
    with warm.forked_ranks(guarded_server) as made:
        yield made
