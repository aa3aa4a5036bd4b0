"""What all tests share: reproducible hypothesis runs, and the reference data that not every checkout has."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from simulator.predict import MemoryUse, Prediction, Source
from simulator.work.trace import MemoryTrace, Timeline
from tests import examples

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: every core has a worker of xdist's already
examples.load()  # before hypothesis reads its own option, --hypothesis-profile

ROOT = Path(__file__).resolve().parents[1]


# Files whose fixtures cost seconds, by what they share: one worker makes it and runs all that asks for it
TOGETHER = {
    "tests/validate/test_bench_cpu.py": "ranks",
    "tests/validate/test_run_cpu.py": "ranks",
    "tests/validate/test_tensor_parallel.py": "ranks",
    "tests/validate/test_bench_gpu.py": "a GPU's samples",
    "tests/validate/test_run_fake.py": "fake plays",
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
        return TOGETHER.get(nodeid.split("::", 1)[0], nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded and collected lives to the end: nobody looks for garbage among it, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
