"""Fits recover what made the samples; what is too little is refused in words."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.base.errors import CalibrationError
from simulator.base.kernels import Attention, Gemm
from simulator.spec.calibration import AttentionCurve, Calibration, GemmCurve, Quality
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.calibration.datasheet import TILES
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import Stack
from validate.fit import attention, gemm, nccl_tests, published
from validate.fit.gloo import fit_gloo
from validate.fit.host import host_costs
from validate.fit.line import fit_line
from validate.fit.machine import fit_machine, write_cluster, write_stack
from validate.fit.pace import at_one_pace, reference_of
from validate.fit.ranks import slow_ranks
from validate.samples import Sample, read_samples

H200 = Device.load("h200-sxm")
SIZES = [2**p for p in range(10, 31, 2)]
RUNS = 8


def sample(kind: str, time_s: float, rank: int = 0, **shape: Any) -> Sample:
    return Sample(
        kind=kind, time_s=time_s, p10_s=None, p90_s=None, reps=5, sustained=False, rank=rank, host="", machine="m",
        line=1, shape=shape,
    )  # fmt: skip


# -- a line: 3 % noise, 20 % outliers of 1.5 to 4 times --------------------------------------------------------------


def trial(seed: int) -> tuple[float, float, bool, bool]:
    """(bandwidth error, latency error, bandwidth inside its interval, latency inside its interval)."""
    rng = np.random.default_rng(seed)
    latency, speed = 10 ** rng.uniform(-5.3, -3), 10 ** rng.uniform(9, 11.5)
    size = np.tile(np.array(SIZES, float), RUNS)
    runs = [str(run) for run in range(RUNS) for _ in SIZES]
    time = (latency + size / speed) * np.exp(0.03 * rng.standard_normal(size.size))
    time = np.where(rng.random(size.size) < 0.2, time * rng.uniform(1.5, 4, size.size), time)
    found = fit_line(list(size), list(time), runs)
    a, b = found.latency_s, found.bytes_per_s
    return b.value / speed - 1, a.value / latency - 1, b.low <= speed <= b.high, a.low <= latency <= a.high


def test_bandwidth_and_latency_survive_noise_and_outliers() -> None:
    trials = [trial(seed) for seed in range(60)]  # tests/bench/bench_fit.py runs 500
    assert max(abs(t[0]) for t in trials) <= 0.03
    assert max(abs(t[1]) for t in trials) <= 0.05
    # nominal 90 %; 60 trials of two coefficients: three standard errors of the binomial are 0.08
    assert 0.82 <= np.mean([t[2:] for t in trials]) <= 0.98


@pytest.mark.parametrize(
    ("sizes", "says"), [([1e3, 1e6], "2 different sizes"), ([1e3, 1.1e3, 1.2e3, 1.3e3], "1000 to 1300")]
)
def test_too_few_sizes_are_refused_with_the_reason(sizes: list[float], says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        fit_line(sizes, [1.0] * len(sizes), noun="link")


# -- the columns are the curves -------------------------------------------------------------------------------------

GEMM_TRUTH = {"e_burst": 0.82, "e_sust": 0.69, "f0": 1.2, "bw_frac": 0.8, "t0": 3.5, "k_ramp": 120.0, "p": 3.0}
GEMM_TRUTH |= {"alpha": 0.2, "tile_pen": 0.5}


def gemm_curve(**other: Any) -> GemmCurve:
    c = GEMM_TRUTH
    fields = {k: c[k] for k in ("e_burst", "e_sust", "bw_frac", "k_ramp", "p", "alpha", "tile_pen")}
    units = {"f0_flop": c["f0"] * 1e12, "t0_s": c["t0"] * 1e-6, "peak_flop_per_s": H200.peak("bf16")}
    return GemmCurve(**fields, **units, tiles=TILES, quality=Quality(basis="prior"), **other)


def test_products_as_columns_are_the_curve() -> None:
    shapes = [(64, 4096, 4096), (8192, 14336, 4096), (777, 130, 5000), (16, 64, 64)]
    curve, peak = gemm_curve(), H200.peak("bf16")
    columns = gemm.Products(*np.array([[*s, 1.0] for s in shapes], float).T)
    found = gemm.seconds(GEMM_TRUTH, columns, H200, peak=peak, element=2, burst=True)
    for (m, n, k), time_s in zip(shapes, found, strict=True):
        kernel = Gemm(m=m, n=n, k=k, dtype="bf16")
        speed = peak * curve.efficiency(kernel.flop)
        assert time_s == pytest.approx(curve.seconds(kernel, speed, H200.memory_bytes_per_s, H200.num_sms), rel=1e-9)


@pytest.mark.parametrize("tail", [None, 1.5])
def test_attention_as_columns_is_the_curve(tail: float | None) -> None:
    c = {"e64": 0.45, "e128": 0.65, "s0": 300.0, "noncausal": 1.1, "sustained": 1.0, "t0": 8.0}
    c |= {} if tail is None else {"tail": tail}
    cases = [(4, 2048, 32, 8, 128, 128, True), (1, 512, 12, 12, 96, 96, False), (1, 4096, 16, 16, 192, 128, True)]
    x = attention.Calls(*np.array([[*map(float, case), 1e-4] for case in cases]).T)
    for direction in ("forward", "backward"):
        found = attention.seconds(c, x, H200, direction, peak=1e15, element=2, waves=True)  # type: ignore[arg-type]
        curve = AttentionCurve(
            kernels=("cudnn",), direction=direction, peak_flop_per_s=1e15, e_max={"64": 0.45, "128": 0.65}, s0=300.0,
            t0_s=8e-6, noncausal=1.1, tail_waves=tail, quality=Quality(basis="prior"),
        )  # fmt: skip
        for (b, s, h, kv, d, v, causal), time_s in zip(cases, found, strict=True):
            kernel = Attention(
                batch=b, seq_q=s, seq_kv=s, num_heads=h, num_kv_heads=kv, head_dim=d, v_head_dim=v, causal=causal,
                direction=direction, dtype="bf16",
            )  # fmt: skip
            assert time_s == pytest.approx(curve.seconds(kernel, 1e15, H200.memory_bytes_per_s, H200.num_sms))


# -- products -------------------------------------------------------------------------------------------------------


def gemm_samples(noise: float, seed: int = 0) -> list[Sample]:
    rng, peak = np.random.default_rng(seed), H200.peak("bf16")
    sides = product((512, 2048, 8192, 16384), (1024, 4096, 14336), (512, 2048, 4096, 8192))
    found = []
    for layout in ("tn", "nn", "nt"):
        shapes = np.array([[*s, 1.0] for s in sides], float) if layout == "tn" else shapes  # noqa: F821
        time = gemm.seconds(GEMM_TRUTH, gemm.Products(*shapes.T), H200, peak=peak, element=2, burst=True)
        time = time * np.exp(noise * rng.standard_normal(len(time))) * {"tn": 1.0, "nn": 1.0, "nt": 1.04}[layout]
        for (m, n, k, _), t in zip(shapes, time, strict=True):
            row = {"m": int(m), "n": int(n), "k": int(k), "dtype": "bf16", "layout": layout, "graph": True}
            found.append(sample("gemm", float(t), **row))
    return found


def test_products_give_back_what_made_them() -> None:
    result = gemm.fit_gemm(gemm_samples(0.02), "bf16", H200)
    curve, errors = result.curve, result.curve.quality.standard_errors
    assert curve.e_sust == pytest.approx(GEMM_TRUTH["e_sust"], abs=3 * errors["e_sust"])
    assert curve.e_burst == pytest.approx(GEMM_TRUTH["e_burst"], abs=3 * errors["e_burst"])
    assert curve.layout["nt"] / curve.layout["tn"] == pytest.approx(1.04, abs=0.015)
    assert result.sigma < 0.04


def test_outliers_are_left_out_and_named() -> None:
    good = gemm_samples(0.02)
    bad = [sample("gemm", 3 * s.time_s, **s.shape) for s in good[::7]]
    result = gemm.fit_gemm([*bad, *(s for i, s in enumerate(good) if i % 7)], "bf16", H200)
    assert {id(s) for s in bad} <= {id(s) for s in result.outliers}
    clean = gemm.fit_gemm(good, "bf16", H200)
    assert result.curve.e_sust == pytest.approx(clean.curve.e_sust, rel=0.01)
    assert result.curve.e_burst == pytest.approx(clean.curve.e_burst, rel=0.01)


def test_too_few_shapes_are_refused() -> None:
    with pytest.raises(CalibrationError, match="3 different shapes"):
        gemm.fit_gemm(gemm_samples(0.0)[:3], "bf16", H200)


# -- ranks ----------------------------------------------------------------------------------------------------------


def ranks(slow: float, count: int = 4) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        sample(
            "hbm_copy",
            size * 1e-12 * (slow if rank == 2 else 1.0) * (1 + 0.01 * rng.standard_normal()),
            rank,
            size=size,
        )
        for size in (1e6, 1e7, 1e8, 1e9, 1e10)
        for rank in range(count)
    ]


def test_a_slow_rank_is_named_and_an_even_machine_is_not() -> None:
    assert slow_ranks(ranks(1.3)) == {("", 2): pytest.approx(1.3, rel=0.05)}
    assert slow_ranks(ranks(1.0)) == {}
    assert slow_ranks(ranks(1.3, count=2)) == {}  # of two nobody can say which is wrong


# -- a whole machine ------------------------------------------------------------------------------------------------


def gloo_samples() -> list[Sample]:
    """Latency 200 µs, 1 GB/s; all-gather half as fast; beside a collective compute loses 0.6."""
    made = [
        sample("collective", 2e-4 + size / speed, op=op, size_bytes=size, num_ranks=2, num_nodes=1)
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
        for op, speed in (("all_reduce", 1e9), ("all_gather", 1e9), ("reduce_scatter", 1e9), ("broadcast", 2e9))
    ]
    for what, time_s in (("compute", 1.0), ("collective", 0.5), ("both", 1.3)):
        made.append(sample("overlap", time_s, what=what, op="all_reduce", size_bytes=2**22, num_ranks=2))
    return made


def test_gloo_gets_a_mode_for_each_kind() -> None:
    result = fit_gloo(gloo_samples(), "here")
    assert result.links is not None
    (port,) = result.links.ports
    speed = {name: port.bytes_per_s * mode.efficiency for name, mode in port.modes.items()}
    # bytes on the port over the tensor's, two ranks: all-reduce 1, all-gather 1/2, broadcast 1
    assert speed["ring/all_reduce"] == pytest.approx(1e9, rel=0.01)
    assert speed["ring/all_gather"] == pytest.approx(0.5e9, rel=0.01)
    assert speed["ring/broadcast"] == pytest.approx(2e9, rel=0.01)
    assert port.modes["ring/all_reduce"].base_s == pytest.approx(2e-4, rel=0.01)
    assert result.links.compute_share == pytest.approx(0.6)
    assert "ring/reduce" in port.priors


def test_gloo_is_fitted_to_means_for_a_step_takes_the_sum_of_its_calls() -> None:
    """Seven calls of ten take their time, three wait 4 ms more for a core; nobody's median shows it."""
    waited = [replace(s, mean_s=s.time_s + 0.3 * 4e-3) if s.kind == "collective" else s for s in gloo_samples()]
    found, medians = fit_gloo(waited, "here").links, fit_gloo(gloo_samples(), "here").links
    assert found is not None
    assert medians is not None
    mode, plain = found.ports[0].modes["ring/all_reduce"], medians.ports[0].modes["ring/all_reduce"]
    assert mode.base_s == pytest.approx(plain.base_s + 1.2e-3, rel=0.01)
    assert found.ports[0].bytes_per_s * mode.efficiency == pytest.approx(1e9, rel=0.01)


def test_a_speed_is_that_of_the_largest_messages() -> None:
    """Messages of up to a megabyte travel in caches, at eight times the speed; of the large ones one was disturbed."""
    made = [
        sample(
            "collective", 2e-4 + size / (8e9 if size <= 2**20 else 1e9), op="all_reduce", size_bytes=size, num_ranks=2
        )
        for size in [2**p for p in range(10, 25)]
        for _ in range(3)
    ]
    made[-1] = replace(made[-1], time_s=10 * made[-1].time_s)
    result = fit_gloo(made, "here")
    assert result.links is not None
    (port,) = result.links.ports
    assert port.bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert port.modes["ring/all_reduce"].base_s == pytest.approx(2e-4, rel=0.1)
    assert result.outliers == (made[-1],)


def test_groups_of_several_sizes_show_a_step_of_the_ring() -> None:
    """2 (n - 1) steps of 50 us each on n ranks (two halves of an all-reduce); 2 (n - 1) / n of the bytes on each port."""
    made = [
        sample(
            "collective", 1e-4 + 2 * (n - 1) * (5e-5 + size / n / 1e9), op="all_reduce", size_bytes=size, num_ranks=n
        )
        for size in (2**10, 2**14, 2**20, 2**24)
        for n in (2, 4, 8)
    ]
    links = fit_gloo(made, "here").links
    assert links is not None
    mode = links.ports[0].modes["ring/all_reduce"]
    assert (mode.base_s, mode.hop_s) == (pytest.approx(1e-4, rel=0.01), pytest.approx(5e-5, rel=0.01))
    assert links.ports[0].bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_few_sizes_of_a_collective_are_refused_by_name() -> None:
    few = [s for s in gloo_samples() if s.shape.get("op") != "broadcast" or s.shape.get("size_bytes", 0) <= 2**14]
    assert any("broadcast" in text and "2 different sizes" in text for text in fit_gloo(few, "here").refused)


def test_the_h200_samples_agree_with_the_shipped_calibration() -> None:
    path = Path(__file__).parents[2] / "experiments/measured/h200-2026-11-20/kernels.jsonl.gz"
    found = fit_machine(read_samples([path]), "h200")
    shipped = Calibration.load("h200-sxm")
    assert found.device.name == "h200-sxm"
    # the shipped one also saw published sweeps; sustained speed comes from the same loops
    assert found.calibration.gemms["bf16"].e_sust == pytest.approx(shipped.gemms["bf16"].e_sust, rel=0.03)
    for mine, theirs in zip(found.calibration.attention, shipped.attention[:2], strict=True):
        assert mine.e_max["128"] == pytest.approx(theirs.e_max["128"], rel=0.1)
    assert any("softmax: not measured" in text for text in found.report.refused)


# -- nccl-tests -----------------------------------------------------------------------------------------------------

TEXT = """# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6900 on node-a device  1 [0000:0b:00] NVIDIA H100 80GB HBM3
#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float     sum      -1    12.00    0.09    0.09      0    11.00    0.09    0.09      0
     1048576        262144     float     sum      -1    20.00   52.43   52.43      0    20.00   52.43   52.43      0
"""


def test_text_logs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(TEXT, encoding="utf-8")
    found = nccl_tests.read_logs([path]).samples
    assert [(s["op"], s["size_bytes"], s["num_ranks"], s["num_nodes"]) for s in found] == [
        ("all_reduce", 1024, 2, 1),
        ("all_reduce", 1048576, 2, 1),
    ]
    assert [s.time_s for s in found] == pytest.approx([12e-6, 20e-6])  # microseconds, out of place


def json_log(sizes: Sequence[int], speed: float, ranks: int = 8) -> dict[str, Any]:
    """As nccl-tests writes it with -J and -I 1: two processes, of which the second is late in the first iteration."""

    def row(size: int) -> dict[str, Any]:
        time_us = 20.0 + 1.75 * size / speed * 1e6
        each = [[time_us + 500, time_us, time_us], [time_us, time_us, time_us]]
        per_iter = {"times_us": [time_us + 500, time_us, time_us], "per_process_max_times_us": each}
        whole = {"out_of_place": {"time": time_us + 170, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0}}
        return {
            "size": size,
            "count": size // 4,
            "experiment_name": "all_reduce_perf",
            "out_of_place_per_iter": per_iter,
        } | whole

    devices = [{"rank": i, "hostname": "node-a", "device": i} for i in range(ranks)]
    config = {"nthreads": 1, "ngpus": 1, "devices": devices}
    return {
        "version": 2,
        "args": ["/opt/all_reduce_perf", "-J", "x"],
        "config": config,
        "results": list(map(row, sizes)),
    }


def test_single_iterations_of_json_logs_wait_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(json_log([1024], 3e11)), encoding="utf-8")
    found = nccl_tests.read_logs([path]).samples
    assert [s["iteration"] for s in found] == [0, 1, 2]
    assert [s.time_s for s in found] == pytest.approx([20e-6 + 1.75 * 1024 / 3e11] * 3)


@pytest.mark.parametrize("text", [True, False])
def test_a_split_communicator_has_the_ranks_of_one_group(tmp_path: Path, text: bool) -> None:  # noqa: FBT001
    """nccl-tests with NCCL_TESTS_SPLIT lists all ranks, each with its group's colour (src/common.cu): four pairs here."""
    ranks = [(rank, rank % 4, f"node-{rank // 4}", rank % 4) for rank in range(8)]
    path = tmp_path / ("all_reduce.log" if text else "all_reduce_perf.json")
    if text:
        listed = "".join(
            f"#  Rank {rank:2} Group {group:2} Pid 6899 on {host} device {device:2} [0000:04:00] NVIDIA H100\n"
            for rank, group, host, device in ranks
        )
        row = "     1048576        262144     float     sum      -1    20.00   52.43   52.43      0    20.00   52.43   52.43      0\n"
        path.write_text(f"# Collective test starting: all_reduce_perf\n{listed}{row}")
    else:
        keys = ("rank", "group", "hostname", "device")
        config = {"nthreads": 1, "ngpus": 1, "devices": [dict(zip(keys, one, strict=True)) for one in ranks]}
        rows = [{"size": 2**20, "out_of_place": {"time": 20.0}}]
        path.write_text(json.dumps({"config": config, "results": rows}))
    (found,) = nccl_tests.read_logs([path]).samples
    assert (found.shape["num_ranks"], found.shape["num_nodes"], found.time_s) == (2, 2, pytest.approx(20e-6))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "no table", '{"config": {"devices": [{}]}, "results": [{"size": -1}]}']
)
def test_a_log_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match="log"):
        nccl_tests.read_logs([path])


def test_a_clusters_own_log_replaces_its_port(tmp_path: Path) -> None:
    log, out = tmp_path / "all_reduce.json", tmp_path / "own.calibration.json"
    # 8 ranks move 2·7/8 = 1.75 S over their ports: the log is of a machine whose ring reaches 300 GB/s
    log.write_text(json.dumps(json_log([2**p for p in range(12, 34, 2)], 3e11)), encoding="utf-8")
    published.fit_logs([log], out, "hgx-a100-80-8")
    links = Calibration.load(out).links
    assert links is not None
    assert links.port("nvlink3", 300e9).source == "all_reduce.json"
    assert {p.name for p in links.ports} == {p.name for p in LinkCurves.load().ports}
    with pytest.raises(CalibrationError, match="--cluster"):
        published.fit_logs([log], out, None)
    with pytest.raises(CalibrationError, match="do not fit"):
        published.fit_logs([log], out, "pcie-rtx4090-4")


def test_files_are_told_apart(tmp_path: Path) -> None:
    for name, head, kind in (
        ("a.jsonl", '{"kind": "machine"}', "samples"),
        ("b.json", '{"version": 2}', "log"),
        ("c.csv", "source,collective,n_gpus,n_nodes,size_bytes,time_us", "table"),
        ("d.txt", "# nccl-tests", "log"),
    ):
        path = tmp_path / name
        path.write_text(head + "\n", encoding="utf-8")
        assert published.kind_of(path) == kind


def test_a_cpus_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    machine = {"kind": "machine", "device": "cpu", "architecture": "cpu", "num_ranks": 2, "threads": 1}
    machine |= {"memory_bytes": 8 * 2**30}
    rows: list[dict[str, Any]] = [machine]
    for m, n, k in product((64, 128, 512), (64, 256, 1024), (64, 512)):
        for layout in ("tn", "nn", "nt"):
            row = {"kind": "gemm", "m": m, "n": n, "k": k, "dtype": "fp32", "layout": layout}
            rows.append(row | {"time_s": 3e-6 + 2 * m * n * k / 1e11})
    for size in (2**14, 2**18, 2**22):
        row = {"kind": "stream", "op": "add", "stream_op": "elementwise", "launches": 1, "dtype": "fp32"}
        rows.append(row | {"read_bytes": 2 * size, "write_bytes": size, "time_s": 2e-6 + 3 * size / 2e10})
    rows += [{"kind": s.kind, "time_s": s.time_s, **s.shape} for s in gloo_samples()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = fit_machine(read_samples([path]), "box")
    assert found.cluster is not None
    assert found.stack is not None
    write_cluster(found.cluster, tmp_path / "box.toml")
    write_stack(found.stack, tmp_path / "box.stack.toml")
    found.calibration.save(tmp_path / "box.calibration.json")
    cluster = Cluster.load(tmp_path / "box.toml")
    assert cluster.num_devices == 2
    assert cluster.device.memory_bytes == 4 * 2**30
    assert type(found.stack).load(tmp_path / "box.stack.toml") == found.stack
    again = Calibration.load(tmp_path / "box.calibration.json")
    assert again == found.calibration
    kernel = Gemm(m=512, n=1024, k=512, dtype="fp32")
    assert again.kernel_s(kernel, cluster.device) == pytest.approx(3e-6 + kernel.flop / 1e11, rel=0.03)


def test_a_checkpoint_costs_what_its_block_takes_beyond_two_forwards_and_a_backward() -> None:
    blocks = [("forward", 2e-4), ("backward", 5e-4), ("checkpointed", 19e-4)]
    device = H200.model_copy(update={"architecture": "cpu"})
    stack = Stack.load("torch-2.13-cpu")
    made = [sample("eager_block", time_s, phase=phase) for phase, time_s in blocks]
    costs = host_costs(made, device, Calibration.datasheet(device), stack)
    assert costs.checkpoint_s == pytest.approx(1e-3)
    assert host_costs(made[:2], device, Calibration.datasheet(device), stack).checkpoint_s is None


# -- the pace of a CPU -----------------------------------------------------------------------------------------------


def test_samples_of_a_slow_minute_are_brought_to_the_pace_of_the_others() -> None:
    """A neighbour slows a core by half for a while: the product beside each sample says so, and the times agree again."""
    found = [sample("gemm", 3e-3 * slow, reference_s=1e-3 * slow, m=i) for i, slow in enumerate((1.0, 1.5, 1.0))]
    assert reference_of(found) == 1e-3
    assert [s.time_s for s in at_one_pace(found)] == pytest.approx([3e-3, 3e-3, 3e-3])


def test_a_reference_that_was_interrupted_changes_nothing() -> None:
    found = [sample("gemm", 3e-3, reference_s=value) for value in (1e-3, 1e-3, 50e-3)] + [sample("adamw", 1.0)]
    assert [s.time_s for s in at_one_pace(found)] == [3e-3, 3e-3, 3e-3, 1.0]


def test_broadcasts_in_a_row_set_the_floor_of_a_broadcast() -> None:
    """ZeRO-1 waits for its last broadcast only: what one costs in a row, less the caller's own part."""
    sizes = [2**p for p in range(12, 23)]
    alone = [
        sample("collective", 400e-6 + size / 4e9, op=op, size_bytes=size, num_ranks=2, num_nodes=1)
        for op in ("all_reduce", "broadcast")
        for size in sizes
    ]
    burst = [
        sample("collective_burst", 150e-6, op="broadcast", size_bytes=4096, num_ranks=2, count=32),
        sample("collective_issue", 40e-6, op="broadcast", num_ranks=2),
    ]
    plain, together = (fit_gloo(samples, "made up").links for samples in (alone, alone + burst))
    assert plain is not None
    assert together is not None
    modes = plain.ports[0].modes, together.ports[0].modes
    assert modes[0]["ring/broadcast"].base_s == pytest.approx(400e-6, rel=0.05)
    assert modes[1]["ring/broadcast"].base_s == pytest.approx(110e-6, rel=0.01)
    assert modes[1]["ring/all_reduce"] == modes[0]["ring/all_reduce"]
