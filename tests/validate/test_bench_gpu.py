"""The GPU's side of the benches on a machine without one: real arithmetic on the CPU, torch.cuda played by a stand-in."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from validate.benches import libraries
from validate.benches.worker import ITEMS
from validate.fit.ranks import SHARED
from validate.phases import SHARES, phases_of
from validate.samples import REQUIRED
from validate.stopwatch import Session, SessionSettings

# But those of several ranks (test_bench_cpu.py) and of older files.
EVERY_KIND = set(REQUIRED) - SHARED - {"membound_forward", "membound_backward"}

UNFITTED = {"decode_attention", "gemm_long", "gemm_scaled"}


BLOCK_OF = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}  # MXFP8's and NVFP4's scales


class Event:
    """Everything is done when the host gets here."""

    def __init__(self, **_: object) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


class Stream:
    def wait_stream(self, _: object) -> None: ...
    def synchronize(self) -> None: ...


class Graph:
    """A graph that remembers nothing."""

    def replay(self) -> None:
        time.sleep(1e-5)


class Cuda:
    """What the benches ask of torch.cuda."""

    Event, Stream, CUDAGraph = Event, Stream, Graph

    def __init__(self) -> None:
        self.threads_devices: list[int] = []

    @staticmethod
    @contextlib.contextmanager
    def graph(_: Graph) -> Iterator[None]:
        yield

    @staticmethod
    @contextlib.contextmanager
    def stream(_: Stream) -> Iterator[None]:
        yield

    def current_stream(self) -> Stream:
        return Stream()

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        self.threads_devices.append(index)

    def get_device_capability(self) -> tuple[int, int]:
        return 9, 0

    def mem_get_info(self) -> tuple[int, int]:
        return 2**30, 2**31

    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...


class Torch:
    """torch with another torch.cuda, and memory that nothing can pin."""

    def __init__(self) -> None:
        self.cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: int, pin_memory: bool = False, **more: Any) -> Any:  # noqa: ARG004
        return torch.empty(*size, **more)

    @staticmethod
    def _scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any, use_fast_accum: bool) -> Any:
        assert isinstance(use_fast_accum, bool)
        assert b.stride(0) == 1, "the second operand must be column-major"
        per_byte = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
        (m, packed), (_, n) = a.shape, b.shape
        k = per_byte * packed
        if scale_a.dtype in BLOCK_OF:  # numbers that share a scale; the tiles of scales are flat
            assert [scale_a.shape, scale_b.shape] == [(rows * k // BLOCK_OF[scale_a.dtype],) for rows in (m, n)]
            return torch.zeros(m, n, dtype=out_dtype)
        if scale_a.shape == (m, k // 128):
            assert scale_a.stride(0) == 1, "scales of rows lie with rows innermost"
            assert scale_b.shape == (k // 128, n // 128)
            scale_a = scale_a.repeat_interleave(128, 1)
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


class Rows:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.phases: list[str] = []

    def phase(self, name: str, seconds: float | None = None) -> None:
        assert seconds is not None
        self.phases.append(name)

    def sample(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


class OnGpu(Session):
    """Tensors lie on the CPU; everything else believes in a GPU."""

    @property
    def gpu(self) -> bool:
        return True


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    """Every item of every phase that a single GPU plays, once."""
    setting = SessionSettings(
        device="cpu",
        rank=0,
        num_ranks=1,
        threads=1,
        until_s=time.monotonic() + 60,
        least_s=60,
        phases=phases_of("cuda", 1),
        folder="",
        out=str(tmp_path_factory.mktemp("bench") / "samples.jsonl"),
        tiny=True,
    )
    told: Any = Rows()
    session = OnGpu(setting=setting, torch=Torch(), report=told)
    session.end_s = session.budget_s = 0.0  # the least time a call
    for phase in setting.phases:
        session.begin(phase, 1.0)
        for item in ITEMS[phase](session):
            item()
    assert told.phases == list(setting.phases)
    return list(told.rows)


def test_every_item_of_a_gpu_runs(rows: list[Mapping[str, Any]]) -> None:
    assert not [row for row in rows if "error" in row]


def test_what_no_fit_reads_is_kept_under_kinds_of_its_own(rows: list[Mapping[str, Any]]) -> None:
    """Decoding, products scaled by row and without fast accumulation, and one that runs into the power limit for seconds."""
    found = {kind: [row for row in rows if row["kind"] == kind] for kind in UNFITTED}
    assert {(row["scaled_by"], row["fast_accumulation"]) for row in found["gemm_scaled"]} == {
        *((by, fast) for by in ("tensor", "row") for fast in (True, False)),
        ("blocks of 128", True),
    }
    assert all(row["seq_q"] == 1 < row["seq_kv"] for row in found["decode_attention"])
    assert [row["sustained"] for row in found["gemm_long"]] == [True]


def test_every_kind_is_measured(rows: list[Mapping[str, Any]]) -> None:
    kinds = {row["kind"] for row in rows}
    assert kinds >= EVERY_KIND
    assert {"graph_kernel_200", "overlap_gemm_alone", "overlap_copy_alone", "overlap_both"} <= kinds


def test_every_sample_says_what_its_kind_must(rows: list[Mapping[str, Any]]) -> None:
    for row in rows:
        assert not set(REQUIRED.get(row["kind"], ())) - set(row), row


def test_products_come_in_every_dtype_and_layout(rows: list[Mapping[str, Any]]) -> None:
    gemms = [row for row in rows if row["kind"] == "gemm"]
    assert {row["dtype"] for row in gemms} == {"bf16", "fp16", "tf32", "fp32", "fp8"}
    assert {row["layout"] for row in gemms} == {"tn", "nn", "nt"}
    sustained = Counter(row["dtype"] for row in gemms if row.get("sustained"))
    assert sustained == {"bf16": 3, "tf32": 1, "fp8": 1}


def test_fp8_is_left_out_where_no_hardware_has_it(tmp_path: Path) -> None:
    setting = SessionSettings(
        device="cpu", rank=0, num_ranks=1, threads=1, until_s=0, least_s=0,
        phases=(), folder="", out=str(tmp_path / "s.jsonl"), tiny=True,
    )  # fmt: skip
    library = Torch()
    library.cuda.get_device_capability = lambda: (8, 0)  # type: ignore[method-assign]
    told: Any = Rows()
    session = OnGpu(setting=setting, torch=library, report=told)
    for item in (*ITEMS["gemm"](session), *ITEMS["sustained"](session)):
        item()
    assert not [row for row in told.rows if row.get("dtype") == "fp8" or "error" in row]


def played(items: Any, capability: tuple[int, int] = (9, 0)) -> list[Mapping[str, Any]]:
    """What items write on a GPU of that capability."""
    setting = SessionSettings(
        device="cpu", rank=0, num_ranks=1, threads=1, until_s=0, least_s=0, phases=(), folder="", out="", tiny=True
    )
    library = Torch()
    library.cuda.get_device_capability = lambda: capability  # type: ignore[method-assign]
    told: Any = Rows()
    session = OnGpu(setting=setting, torch=library, report=told)
    session.end_s = session.budget_s = 0.0
    for item in items(session):
        item()
    return list(told.rows)


class Experts(torch.nn.Module):
    """Transformer Engine's operators, as far as shapes go: grouped products take the rows of each expert."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any, first: Any, weights: Any, second: Any) -> Any:
        assert int(first.sum()) == int(second.sum()) == len(x) == len(weights)
        for layer, extra in zip(self.layers, (first, weights, second), strict=True):
            x = layer(x, extra)
        return x


class Grouped(torch.nn.Module):
    def __init__(self, experts: int, d: int, f: int, *, bias: bool, device: str, dtype: Any) -> None:
        super().__init__()
        assert not bias
        self.weight = torch.nn.Parameter(torch.zeros(experts, d, f, device=device, dtype=dtype))

    def forward(self, x: Any, counts: Any) -> Any:
        return torch.cat([part @ w for part, w in zip(x.split(counts.tolist()), self.weight, strict=True)])


class ScaledSwiGLU(torch.nn.Module):
    def forward(self, x: Any, weights: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b * weights[:, None].to(x.dtype)


def libraries_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the calls that the benches make, and their arguments' shapes checked."""

    def linear(d: int, f: int, *, bias: bool, params_dtype: Any, device: str) -> Any:
        return torch.nn.Linear(d, f, bias=bias, dtype=params_dtype, device=device)

    def scan(x: Any, dt: Any, *, A: Any, B: Any, C: Any, chunk_size: int, dt_softplus: bool) -> Any:  # noqa: N803
        assert x.shape[1] % chunk_size == 0
        assert dt_softplus
        assert (dt.shape, A.shape, B.shape[:2]) == (x.shape[:3], x.shape[2:3], x.shape[:2])
        return x * dt[..., None] * A[:, None] + (B * C).sum((2, 3))[..., None, None]

    def convolve(x: Any, taps: Any, *, activation: str) -> Any:
        assert activation == "silu"
        return torch.nn.functional.silu(x * taps.sum(1)[:, None])

    class Norm(torch.nn.RMSNorm):
        def __init__(self, width: int, *, norm_before_gate: bool, group_size: int, device: str) -> None:
            assert width % group_size == 0
            assert not norm_before_gate
            super().__init__(width, device=device, dtype=torch.bfloat16)

        def forward(self, x: Any, z: Any) -> Any:
            return super().forward(x * torch.nn.functional.silu(z))

    ops = SimpleNamespace(GroupedLinear=Grouped, ScaledSwiGLU=ScaledSwiGLU, Sequential=Experts)
    narrow = lambda enabled: contextlib.nullcontext(enabled)  # noqa: E731, PLW0108  called by name
    te = {"Linear": linear, "fp8_autocast": narrow, "ops": ops}
    stubs: dict[str, dict[str, Any]] = {
        "transformer_engine.pytorch": te | {"NVFP4Quantizer": lambda: lambda x: x.half()},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": scan},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": Norm},
        "causal_conv1d": {"causal_conv1d_fn": convolve},
    }
    for name, what in stubs.items():
        *above, last = name.split(".")
        packages = [".".join(above[: n + 1]) for n in range(len(above))]
        for package in packages:
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**what))
        if packages:
            monkeypatch.setattr(sys.modules[packages[-1]], last, sys.modules[name], raising=False)
    monkeypatch.setattr(libraries, "installed", lambda _: True)


def test_libraries_that_are_installed_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries_stub(monkeypatch)
    rows = played(libraries.library_items, capability=(10, 0))
    assert not [row for row in rows if "error" in row]
    assert {row["scaled_by"] for row in rows if row["kind"] == "gemm_scaled"} == {"blocks of 128", "mxfp8", "nvfp4"}
    told = {(row["kind"], row.get("op"), row.get("dtype"), row.get("phase")) for row in rows}
    both = ("forward", "forward and backward")
    assert told >= {("host_module", "te.Linear", dtype, phase) for dtype in ("bf16", "fp8") for phase in both}
    assert told >= {("te_experts", None, "bf16", phase) for phase in both}
    mamba = ("mamba_scan", "mamba_convolution", "mamba_norm")
    assert told >= {(kind, None, "bf16", phase) for kind in mamba for phase in ("forward", "backward")}
    assert {row["kind"] for row in rows} >= {"graph_module", "te_cast"}


def test_a_library_that_does_not_load_is_said_and_one_that_is_not_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "installed", lambda name: name == "mamba_ssm")
    rows = played(libraries.library_items)
    assert {row["kind"] for row in rows if "error" in row} == {"mamba_scan", "mamba_convolution", "mamba_norm"}
    monkeypatch.setattr(libraries, "installed", lambda _: False)
    assert not [row for row in played(libraries.library_items) if "error" in row]


def test_phases_of_one_gpu_leave_out_what_needs_two() -> None:
    assert set(SHARES) - set(phases_of("cuda", 1)) == {"collectives", "pairs", "groups"}


def test_attention_says_which_kernel_ran(rows: list[Mapping[str, Any]]) -> None:
    kernels = {row.get("kernel") for row in rows if row["kind"].startswith("attention")}
    assert kernels <= {"flash_attention", "efficient_attention", "math"}
    assert kernels


@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_step_is_taken_by_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step has collectives: rank 0's alone would wait for the others for ever."""
    from validate.players import real

    steps: list[str] = []
    monkeypatch.setenv("SHARDWISE_SCRATCH", str(tmp_path))
    monkeypatch.setattr(real, "recorded_step", lambda *_: steps.append("recorded"))
    monkeypatch.setattr(real, "wait", lambda _: None)

    class Asked:
        record, profile = True, False

    class Step:
        run = staticmethod(lambda: steps.append("plain"))

    class Report:
        phase = staticmethod(steps.append)

    told: Any = (Asked, Report, Step, torch.device("cuda"), rank, lambda: steps.append("barrier"))
    real._extras(*told)
    assert steps == ["record", "barrier", "recorded" if rank == 0 else "plain"]
