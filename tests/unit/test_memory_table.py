"""Tables of tracked memory: rows typed or refused by name, and what torch's tracker read, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.base.errors import TableError
from simulator.formats.readers.measured_table import TRACKED, read_measured, read_memory
from simulator.studies.backtest.evaluate import run as judged
from simulator.studies.backtest.memory_rows import resolve_memory
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.report import BacktestReport
from simulator.studies.backtest.rows import BadRow, MemoryRow

GOOD = {
    "row": "0",
    "model": "tiny",
    "n_layers": "2",
    "d_model": "64",
    "n_heads": "4",
    "d_ff": "128",
    "vocab": "256",
    "seq_len": "32",
    "micro_batch": "2",
    "world": "4",
    "strategy": "fsdp2_full",
    "replicate": "1",
    "tp": "1",
    "ac": "none",
    "store_dtype": "fp32",
    "param_dtype": "bf16",
    "reduce_dtype": "fp32",
    "opt_dtype": "fp32",
    "amp": "none",
    "opt_impl": "adamw_foreach",
    "attn": "flash_gqa",
    "ddp_bucket_view": "",
    "device": "cuda",
    "peak_bytes": "1000",
    "start_bytes": "0",
}


def line(**changes: str) -> str:
    return ",".join({**GOOD, **changes}.values())


def table(tmp_path: Path, *lines: str, header: str = ",".join(GOOD)) -> Path:
    path = tmp_path / "memory.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def row(tmp_path: Path, **changes: str) -> MemoryRow | BadRow:
    return next(read_memory(table(tmp_path, line(**changes))))


def good(tmp_path: Path, **changes: str) -> MemoryRow:
    found = row(tmp_path, **changes)
    assert isinstance(found, MemoryRow)
    return found


def test_a_row_is_typed(tmp_path: Path) -> None:
    found = good(tmp_path, ddp_bucket_view="True", reduce_dtype="")
    assert (found.row, found.line, found.n_layers, found.start_bytes) == ("0", 2, 2, 0)
    assert (found.ddp_bucket_view, found.reduce_dtype) == (True, None)


def test_tables_are_told_apart_by_their_header(tmp_path: Path) -> None:
    assert TRACKED.matches(table(tmp_path))
    assert not TRACKED.matches(table(tmp_path, header="id,metric,value"))
    assert not TRACKED.matches(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"world": "four"}, {"world"}),
        ({"strategy": "fsdp3", "device": "tpu", "peak_bytes": "-1"}, {"strategy", "device", "peak_bytes"}),
        ({"d_ff": "", "ac": ""}, {"d_ff", "ac"}),
        ({"ddp_bucket_view": "maybe"}, {"ddp_bucket_view"}),
    ],
)
def test_a_bad_row_lists_all_its_faults(tmp_path: Path, changes: dict[str, str], faults: set[str]) -> None:
    found = row(tmp_path, **changes)
    assert isinstance(found, BadRow)
    assert {fault.place for fault in found.faults} == {f"line 2: {column}" for column in faults}


def test_a_bad_row_costs_itself_only(tmp_path: Path) -> None:
    report = judged(read_measured(table(tmp_path, line(world="x"), line(row="1"), line(row="1"), line(row="2"))))
    assert [(o.id, o.status) for o in report.outcomes] == [("0", "bad"), ("1", "ok"), ("1", "bad"), ("2", "ok")]


def test_a_header_that_lacks_columns_is_refused_with_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(TableError) as caught:
        list(read_memory(table(tmp_path, header="row,strategy,peak_bytes")))
    assert len(caught.value.faults) == len(TRACKED.required) - 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "single"}, "single on 4 ranks"),
        ({"strategy": "hsdp", "replicate": "3"}, "3 replicas on 4 ranks"),
        ({"amp": "bf16"}, "autocast over sharded parameters"),
        ({"strategy": "ddp"}, "whole parameters in two dtypes"),
        ({"attn": "sdpa_repeat"}, "another attention kernel"),
    ],
)
def test_what_no_plan_expresses_is_refused_by_name(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        resolve_memory(good(tmp_path, **changes))


def test_another_model_of_the_same_sizes_is_refused(tmp_path: Path) -> None:
    header = ",".join([*GOOD, "n_params"])
    path = table(tmp_path, f"{line()},12345", header=header)
    (outcome,) = judged(read_measured(path)).outcomes
    assert outcome.status == "refused"
    assert "12,345" in (outcome.reason or "")


def test_what_a_rank_starts_with_is_a_sum_over_tensors(tmp_path: Path) -> None:
    """By hand: a tensor's quarter in fp32, three times (parameter, two moments), in blocks of 512 bytes."""
    (outcome,) = judged(read_measured(table(tmp_path, line()))).outcomes
    d, f, v, s = 64, 128, 256, 32
    matrices = [v * d, v * d] + 2 * [d * d] * 4 + 2 * [f * d] * 3
    norms = [d] * (2 * 2 + 1)
    blocks = sum(-(-numel // 4 * 4 // 512) * 512 for numel in matrices + norms)
    tables, inputs = 2 * s * 16 * 4, 2 * 512  # cosines and sines of 16 channels; two tensors of 64 ids of 8 bytes
    assert outcome.moments["start"].predicted_bytes == 3 * blocks + tables + inputs


@pytest.fixture(scope="module")
def tracked(reference_data: Path) -> BacktestReport:
    path = reference_data / "memory.csv"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return judged(read_measured(path))


def test_every_moment_of_every_row_equals_the_tracker(tracked: BacktestReport) -> None:
    wrong = [
        (outcome.id, name, moment.predicted_bytes, moment.measured_bytes)
        for outcome in tracked.outcomes
        if outcome.status == "ok"
        for name, moment in outcome.moments.items()
        if moment.predicted_bytes != moment.measured_bytes
    ]
    assert not wrong
    assert tracked.count("ok") == len(tracked.outcomes)


def test_the_report_has_the_keys_of_a_table_of_runs(tracked: BacktestReport) -> None:
    data = tracked.as_json()
    first = data["rows"][0]
    assert (first["id"], first["status"], first["mem_metric"]) == ("0", "ok", "tracked_peak_bytes")
    assert first["predicted_memory_bytes"] == first["measured_memory_bytes"]
    assert set(first["moments"]) == {"start", "after_fwd", "after_bwd", "peak_fwd", "peak_bwd", "peak_opt", "peak"}
    assert sum(score["exact"] for group in data["groups"] for score in group["memory"]) == tracked.count("ok")


# What torch's MemTracker said of tensor parallelism over 8 ranks in FakeTensorMode (torch 2.13, CPU): a Llama of 4 layers, width 512,
# 8 heads, MLP of 1,536 and 2 x 512 tokens, whose optimizer has a group of split parameters and one of the others.
SPLIT = {"n_layers": "4", "d_model": "512", "n_heads": "8", "d_ff": "1536", "seq_len": "512", "tp": "8", "attn": "sdpa_repeat",
         "device": "cpu"}  # fmt: skip
MOMENTS = ("start", "after_fwd", "after_bwd", "peak_fwd", "peak_bwd", "peak_opt")


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        (
            {"vocab": "32000", "world": "8", "strategy": "tp", "param_dtype": "fp32"},
            (413997212, 618522788, 551903388, 749594788, 880666788, 682993820),
        ),
        ({"vocab": "1024", "world": "64"}, (4414364, 66858916, 5792924, 73150372, 75247524, 6644892)),
        (
            {"vocab": "128256", "world": "16", "ac": "full"},
            (798534812, 1596506276, 1064620188, 2384511140, 2647179428, 1327297692),
        ),
    ],
)
def test_tensor_parallelism_over_eight_ranks_is_exact(
    tmp_path: Path, changes: dict[str, str], measured: tuple[int, ...]
) -> None:
    names = [f"{name}_bytes" if name.startswith(("start", "after")) else name for name in MOMENTS]
    cells = {**SPLIT, **changes, **dict(zip(names, map(str, measured), strict=True)), "peak_bytes": str(measured[4])}
    merged = {**GOOD, **cells}
    path = table(tmp_path, ",".join(merged.values()), header=",".join(merged))
    (outcome,) = judged(read_measured(path)).outcomes
    assert outcome.status == "ok", outcome.reason
    found = {name: moment.predicted_bytes for name, moment in outcome.moments.items()}
    assert [found[name] for name in MOMENTS] == list(measured)
