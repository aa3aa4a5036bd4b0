"""A GPU node's samples, made from a known calibration: the fit gives it back, links and driver included."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.kernels import Attention, Gemm
from simulator.cli import main
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration import Calibration, Interference
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.work.collectives import collective_s
from validate.fit.interference import compute_losses, fit_interference
from validate.fit.ranks import named, slow_ranks
from validate.fit.transfers import copies, driver_call
from validate.samples import Sample

MIB = 2**20
H100 = Device.load("h100-sxm5-80gb")
TRUTH = Calibration.load("h100-sxm")
NODE = Cluster.load("hgx-h100-8")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")


def sample(kind: str, time_s: float, rank: int = 0, host: str = "", **shape: Any) -> Sample:
    return Sample(
        kind=kind, time_s=time_s, p10_s=None, p90_s=None, reps=5, sustained=False, rank=rank, host=host, machine="m",
        line=1, shape=shape,
    )  # fmt: skip


# -- what collectives take from compute -----------------------------------------------------------------------------


def overlap(share: float, compute_s: float = 2e-2, collective_s: float = 1e-2) -> list[Sample]:
    """Compute loses `share` of its speed while the collective lasts: both = compute + share · collective."""
    times = {"compute": compute_s, "collective": collective_s, "both": compute_s + share * collective_s}
    shape = {"op": "all_gather", "size_bytes": 2**28, "num_ranks": 8}
    return [sample("overlap", time_s, what=what, **shape) for what, time_s in times.items()]


def test_what_compute_loses_beside_a_collective_becomes_its_channels() -> None:
    prior = Interference(num_channels=1, hbm_weight=0.0, memory_passes=2.0)
    found = fit_interference(overlap(16 / H100.num_sms), H100, prior)
    assert found.num_channels == 16
    assert "1 collectives" in found.sources["num_channels"]


def test_memory_traffic_is_not_counted_as_channels() -> None:
    prior = Interference(num_channels=1, hbm_weight=0.5, memory_passes=2.0)
    wire_bytes_per_s = 7 / 8 * 2**28 / 1e-2
    memory = 0.5 * 2.0 * wire_bytes_per_s / H100.memory_bytes_per_s
    assert fit_interference(overlap(16 / H100.num_sms + memory), H100, prior).num_channels == 16


def test_a_copy_beside_a_product_is_the_weight_of_memory() -> None:
    times = {"overlap_gemm_alone": 2e-3, "overlap_copy_alone": 1e-3, "overlap_both": 2.4e-3}
    prior = Interference(num_channels=7, hbm_weight=0.0)
    found = fit_interference([sample(kind, time_s) for kind, time_s in times.items()], H100, prior)
    assert found.hbm_weight == pytest.approx(0.4)
    assert found.num_channels == 7  # nobody measured it


def test_a_pair_that_is_not_whole_says_nothing() -> None:
    prior = Interference(num_channels=7, hbm_weight=0.3)
    assert fit_interference(overlap(0.2)[:2], H100, prior) == prior
    assert compute_losses(overlap(3.0))[0][0] == 0.9  # the engine slows compute no further
    assert compute_losses(overlap(-0.5))[0][0] == 0.0


# -- copies and the driver ------------------------------------------------------------------------------------------


def line(kind: str, latency_s: float, bytes_per_s: float, sizes: tuple[int, ...], key: str = "bytes") -> list[Sample]:
    return [sample(kind, latency_s + size * MIB / bytes_per_s, **{key: size * MIB}) for size in sizes]


def test_copies_become_speeds_and_keys_of_a_cluster_file() -> None:
    measured = line("h2d_pinned", 1e-5, 55e9, (1, 16, 256, 1024)) + line(
        "hbm_copy", 3e-6, 3e12, (1, 16, 256), "bytes_moved"
    )
    found = copies(measured)
    assert found.tier == {"h2d_bytes_per_s": pytest.approx(55e9, rel=1e-3)}
    assert len(found.lines) == 1
    assert "[tier] h2d_bytes_per_s" in found.lines[0]
    assert [text.partition(":")[0] for text in found.refused] == ["hbm_copy"]


def test_the_drivers_allocations_are_a_call_and_its_bytes() -> None:
    call = driver_call(line("device_malloc", 2e-4, 2e12, (2, 20, 200, 1024, 4096)), "device_malloc")
    assert call is not None
    assert call.call_s == pytest.approx(2e-4, rel=0.01)
    assert call.s_per_byte == pytest.approx(5e-13, rel=0.01)
    assert driver_call([], "device_free") is None


# -- who is slow ----------------------------------------------------------------------------------------------------


def test_a_host_all_of_whose_ranks_are_slow_is_named_itself() -> None:
    rng = np.random.default_rng(2)
    measured = [
        sample(
            "gemm", 1e-3 * side * factor * (1 + 0.005 * rng.standard_normal()), 2 * node + gpu, f"node-{node}", m=side
        )
        for side in range(1, 6)
        for node, factor in enumerate((1.0, 1.0, 1.4, 1.0))
        for gpu in range(2)
    ]
    lines = named(slow_ranks(measured), measured)
    assert len(lines) == 1
    assert lines[0].startswith("host node-2: 1.4")
    assert "10 samples" in lines[0]


def ranks(count: int) -> GroupShape:
    return GroupShape(num_ranks=count, num_nodes=1, ranks_per_node=count, num_groups_per_node=1, spans_domain=False)


# -- a whole node ---------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    """What eight H100 would write, with 2 % of noise."""
    rng = np.random.default_rng(0)

    def noisy(time_s: float) -> float:
        return float(time_s * np.exp(0.02 * rng.standard_normal()))

    made: list[dict[str, Any]] = [
        {"kind": "machine", "device": "NVIDIA H100 80GB HBM3", "architecture": "hopper", "num_ranks": 8,
         "driver": "570", "torch": "2.11", "nccl": "2.27.3", "settings": {"NCCL_UNHEARD_OF": "1"}, "date": "2026-01-01T00:00:00Z"}
    ]  # fmt: skip
    for t, n, k, layout in product((512, 4096, 8192), (2048, 14336), (2048, 8192), ("tn", "nn", "nt")):
        kernel = Gemm(m=t, n=n, k=k, dtype="bf16", layout=layout)
        time_s = noisy(TRUTH.kernel_s(kernel, H100))
        made.append({"kind": "gemm", "m": t, "n": n, "k": k, "dtype": "bf16", "layout": layout, "time_s": time_s})
    for direction, seq, causal in product(("forward", "backward"), (1024, 2048, 4096, 8192, 16384), (True, False)):
        shape = {"batch": 2, "seq_q": seq, "seq_kv": seq, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        kernel_s = TRUTH.kernel_s(Attention(direction=direction, dtype="bf16", causal=causal, **shape), H100)
        row = {"kind": f"attention_{direction}", **shape, "causal": causal, "dtype": "bf16"}
        made.append({**row, "time_s": noisy(kernel_s)})
    for size in (2**27, 2**28, 2**29, 2**30):
        row = {"kind": "stream", "op": "add", "stream_op": "elementwise", "launches": 1, "dtype": "bf16"}
        made.append({**row, "read_bytes": 2 * size, "write_bytes": size, "time_s": noisy(3 * size / 2.8e12)})
    for op, count, power in product(KINDS, (2, 4, 8), range(12, 31, 3)):
        if op == "send_recv" and count > 2:
            continue
        time_s = noisy(float(collective_s(op, 2**power, ranks(count), NODE)))
        made += [
            {"kind": "collective", "op": op, "size_bytes": 2**power, "num_ranks": count, "num_nodes": 1,
             "rank": rank, "time_s": time_s}
            for rank in range(count)
        ]  # fmt: skip
    for s in overlap(16 / H100.num_sms):
        made.append({"kind": s.kind, "time_s": s.time_s, **s.shape})
    return made


def test_a_nodes_samples_become_its_calibration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "samples.jsonl", tmp_path / "node.calibration.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    assert main(["calibrate", "fit", str(path), "--cluster", "hgx-h100-8", "-o", str(out)]) == ExitCode.OK, (
        capfd.readouterr().err
    )
    found = Calibration.load(out)
    kernel = Gemm(m=8192, n=14336, k=4096, dtype="bf16")
    assert found.kernel_s(kernel, H100) == pytest.approx(TRUTH.kernel_s(kernel, H100), rel=0.05)
    assert found.links is not None
    assert found.links.provenance["nccl"] == "2.27.3"
    assert "NCCL_UNHEARD_OF" in capfd.readouterr().err
    for op, power in product(("all_reduce", "all_gather", "reduce_scatter"), (21, 27, 30)):
        shape = ranks(8)
        ours = float(collective_s(op, 2**power, shape, NODE, found.links))
        assert ours == pytest.approx(float(collective_s(op, 2**power, shape, NODE)), rel=0.15), (op, power)
    assert found.uncertainty["communication"] == Calibration.datasheet(H100).uncertainty["communication"]


def test_without_a_cluster_the_links_stay_as_shipped_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "samples.jsonl", tmp_path / "node.calibration.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    assert main(["calibrate", "fit", str(path), "-o", str(out)]) == ExitCode.OK
    assert "--cluster NAME|FILE" in capfd.readouterr().err
    assert Calibration.load(out).links is None
