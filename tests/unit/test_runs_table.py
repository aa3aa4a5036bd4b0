"""The reader of tables of measured runs: good rows typed, bad rows reported with every fault, the rest goes on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from simulator.base.errors import TableError
from simulator.formats.readers import measured_table
from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import COLUMNS, REQUIRED, BadRow, RunRow, read_runs

GOOD = {
    "id": "a",
    "framework": "PyTorch",
    "n_layers": "2",
    "d_model": "64",
    "n_heads": "4",
    "d_ff": "256",
    "mlp_kind": "gelu",
    "vocab": "100",
    "seq_len": "128",
    "gpu": "H100",
    "n_gpus": "8",
    "zero_or_fsdp": "fsdp_full",
    "micro_batch": "1",
    "global_batch": "8",
    "precision": "bf16",
    "metric": "step_time_s",
    "value": "0.5",
}
HEADER = ",".join(GOOD)


def line(**changes: str) -> str:
    return ",".join({**GOOD, **changes}.values())


def table(tmp_path: Path, *lines: str, header: str = HEADER, end: str = "\n") -> Path:
    path = tmp_path / "runs.csv"
    path.write_bytes(end.join([header, *lines, ""]).encode("utf-8", "surrogateescape"))
    return path


def read(tmp_path: Path, *lines: str) -> list[RunRow | BadRow]:
    return list(read_runs(table(tmp_path, *lines)))


def problems(row: RunRow | BadRow) -> list[str]:
    assert isinstance(row, BadRow)
    return [str(fault) for fault in row.faults]


def test_a_good_row_is_typed(tmp_path: Path) -> None:
    (row,) = read(tmp_path, line())
    assert isinstance(row, RunRow)
    assert (row.line, row.id, row.n_layers, row.value, row.metric) == (2, "a", 2, 0.5, "step_time_s")
    assert row.tp is None
    assert row.notes == ""


def test_every_fault_of_a_row_is_named_with_its_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    bad, good = read(tmp_path, line(id="x", n_layers="two", vocab="-3", precision="bf61", value="fast"), line(id="y"))
    assert isinstance(good, RunRow)
    faults = problems(bad)
    assert len(faults) == 4
    assert all(fault.startswith("line 2: ") for fault in faults)
    assert any("precision" in fault and "did you mean bf16" in fault for fault in faults)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "1e999", "1_000", "٣", "0x10", "1,5", "--1"])
def test_what_is_no_positive_finite_number_is_bad(tmp_path: Path, value: str) -> None:
    (row,) = read(tmp_path, line(value=f'"{value}"'))
    assert "value" in problems(row)[0]


@pytest.mark.parametrize("value", ["1.5", "8.01", "0", "0.0", "-1", "9" * 16, "1e3", "²", '"1,0"', '"1,0000"', "8k"])
def test_what_is_no_count_is_bad(tmp_path: Path, value: str) -> None:
    (row,) = read(tmp_path, line(n_gpus=value))
    assert "n_gpus" in problems(row)[0]


@pytest.mark.parametrize(("cell", "count"), [("4096.0", 4096), ('"4,096"', 4096), ('"1,048,576"', 2**20)])
def test_counts_as_programs_and_people_write_them(tmp_path: Path, cell: str, count: int) -> None:
    """pandas reads a column with blanks as floats, and writes it so."""
    (row,) = read(tmp_path, line(d_model=cell, n_gpus=cell, seq_len=cell))
    assert isinstance(row, RunRow)
    assert (row.d_model, row.n_gpus, row.seq_len) == (count, count, count)


def test_a_sequence_may_be_so_many_k(tmp_path: Path) -> None:
    (row,) = read(tmp_path, line(seq_len="128K"))
    assert isinstance(row, RunRow)
    assert row.seq_len == 131_072


@pytest.mark.parametrize("cell", ["-", "—", "n/a", "NaN", "unknown"])
def test_signs_of_what_is_unknown_are_blank_where_no_free_text_is_due(tmp_path: Path, cell: str) -> None:
    unknown = ("tp", "act_ckpt", "zero_or_fsdp", "micro_batch", "precision", "notes")
    cells = GOOD | dict.fromkeys(unknown, cell)
    (row,) = read_runs(table(tmp_path, ",".join(cells.values()), header=",".join(cells)))
    assert isinstance(row, RunRow)
    assert (row.tp, row.act_ckpt, row.zero_or_fsdp, row.micro_batch, row.precision) == (None, "", "", None, "")
    assert row.notes == cell


def test_ragged_rows_are_bad(tmp_path: Path) -> None:
    short, long, good = read(tmp_path, "a,b", line(id="c") + ",1", line(id="d"))
    width = len(GOOD)
    assert problems(short) == [f"line 2: 2 cells where the header has {width} columns"]
    assert problems(long) == [f"line 3: {width + 1} cells where the header has {width} columns"]
    assert isinstance(good, RunRow)


def test_an_id_stands_once(tmp_path: Path) -> None:
    first, second = read(tmp_path, line(), line())
    assert isinstance(first, RunRow)
    assert problems(second) == ["line 3: id: 'a' appears on line 2 too (one id a run)"]


def test_metric_and_value_come_together(tmp_path: Path) -> None:
    no_value, no_metric, nothing = read(
        tmp_path, line(value=""), line(id="b", metric=""), line(id="c", metric="", value="")
    )
    assert "come together" in problems(no_value)[0]
    assert "come together" in problems(no_metric)[0]
    assert "nothing was measured" in problems(nothing)[0]


def test_a_quote_that_never_closes_costs_one_row(tmp_path: Path) -> None:
    lines = [line(id="a", gpu='"H100'), *(line(id=f"r{i}") for i in range(100))]
    first, *rest = read(tmp_path, *lines)
    assert problems(first) == ["line 2: a quote is opened and never closed"]
    assert [row.id for row in rest if isinstance(row, RunRow)] == [f"r{i}" for i in range(100)]


def test_two_stray_quotes_do_not_swallow_what_lies_between(tmp_path: Path) -> None:
    rows = read(tmp_path, line(id="a", gpu='"H100'), line(id="b"), line(id="c", gpu='"H100'), line(id="d"))
    assert [type(row) for row in rows] == [BadRow, RunRow, BadRow, RunRow]


def test_a_quoted_cell_may_span_lines(tmp_path: Path) -> None:
    first, second = read(tmp_path, line(framework='"a ""b""\n, c"'), line(id="b"))
    assert isinstance(first, RunRow)
    assert first.framework == 'a "b"\n, c'
    assert second.line == 4


def test_text_behind_a_closing_quote_is_bad(tmp_path: Path) -> None:
    bad, good = read(tmp_path, line(gpu='"H100"x'), line(id="b"))
    assert "wrong quoting" in problems(bad)[0]
    assert isinstance(good, RunRow)


def test_bom_crlf_blank_lines_and_spaces(tmp_path: Path) -> None:
    path = table(tmp_path, "", line(gpu="  H100 "), "", header="\ufeff" + HEADER, end="\r\n")
    (row,) = read_runs(path)
    assert isinstance(row, RunRow)
    assert (row.gpu, row.line) == ("H100", 3)


def test_nul_bytes_and_bytes_that_are_not_utf8_cost_their_row(tmp_path: Path) -> None:
    nul, broken, good = read(tmp_path, line(gpu="H1\x0000"), line(id="b", gpu="H\udcff"), line(id="c"))
    assert "gpu: holds a NUL byte" in problems(nul)[0]
    assert "gpu: is not UTF-8" in problems(broken)[0]
    assert isinstance(good, RunRow)


def test_a_line_too_long_to_be_a_row_costs_itself(tmp_path: Path) -> None:
    long, good = read(tmp_path, line(gpu="x" * (2**20 + 10)), line(id="b"))
    assert "more than" in problems(long)[0]
    assert isinstance(good, RunRow)
    assert good.line == 3


def test_memory_metrics_carry_their_detail(tmp_path: Path) -> None:
    header = f"{HEADER},mem_metric,mem_value"
    rows = read_runs(
        table(tmp_path, line() + ",peak_allocated_gib(last rank),3.5", line(id="b") + ",oom,", header=header)
    )
    first, second = rows
    assert isinstance(first, RunRow)
    assert isinstance(second, RunRow)
    assert (first.mem_metric, first.mem_metric_detail, first.mem_value) == ("peak_allocated_gib", "last rank", 3.5)
    assert (second.mem_metric, second.mem_value) == ("oom", None)


def test_a_compressed_table_reads_the_same(tmp_path: Path) -> None:
    plain = table(tmp_path, line())
    packed = tmp_path / "runs.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_runs(packed)) == list(read_runs(plain))


def test_a_compressed_table_that_ends_early_keeps_its_rows(tmp_path: Path) -> None:
    text = "\n".join([HEADER, *(line(id=f"r{i}") for i in range(5000)), ""])
    packed = gzip.compress(text.encode())
    path = tmp_path / "runs.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    *rows, last = read_runs(path)
    assert rows
    assert "the file ends early" in problems(last)[0]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\n\n", "is blank"),
        (b"1,2,3\n", "names no known column"),
        (b"\x1f\x8bnonsense", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=word):
        list(read_runs(path))


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        list(read_runs(tmp_path / "none.csv"))
    with pytest.raises(TableError, match="cannot be read"):
        list(read_runs(tmp_path))


def test_every_fault_of_the_header_is_named(tmp_path: Path) -> None:
    header = HEADER.replace("n_layers", "n_lyers").replace("framework", "id")
    with pytest.raises(TableError) as caught:
        list(read_runs(table(tmp_path, header=header)))
    text = str(caught.value)
    assert "unknown column 'n_lyers' (did you mean n_layers" in text
    assert "column 'id' appears 2 times" in text
    assert "column 'n_layers' is missing" in text


def test_required_columns_are_columns() -> None:
    assert set(REQUIRED) <= set(COLUMNS)


def test_the_published_table_has_no_bad_row() -> None:
    path = Path(__file__).parents[2] / "experiments" / "measured" / "runs.csv.gz"
    rows = list(read_runs(path))
    assert len(rows) == 1878
    assert [row for row in rows if isinstance(row, BadRow)] == []


@pytest.mark.parametrize(
    ("column", "cell", "word"),
    [
        ("zero_or_fsdp", "FULL_SHARD", "fsdp_full"),
        ("zero_or_fsdp", "ZeRO-3", "zero3"),
        ("zero_or_fsdp", "SHARD_GRAD_OP", "fsdp_grad_op"),
        ("zero_or_fsdp", "HYBRID_SHARD", "hsdp"),
        ("zero_or_fsdp", "distributed optimizer", "zero1"),
        ("zero_or_fsdp", "DeepSpeed ZeRO Stage 2", "zero2"),
        ("zero_or_fsdp", "FSDP2 + TP + PP", "fsdp_full"),
        ("zero_or_fsdp", "TP / ZeRO-1", "zero1"),
        ("zero_or_fsdp", "3D parallelism", ""),
        ("zero_or_fsdp", "DP", "ddp"),
        ("mlp_kind", "geglu", "swiglu"),
        ("precision", "bfloat16", "bf16"),
        ("precision", "MXFP8", "fp8_mx"),
        ("precision", "FP8-CS", "fp8"),
        ("precision", "float8 (rowwise)", "fp8_rowwise"),
        ("precision", "FP8 blockwise", "fp8_blockwise"),
        ("precision", "BF16 + FP8", "fp8"),
        ("precision", "mixed", ""),  # in which 16 bits the GPU says
        ("zero_or_fsdp", "FSDP-TP", "fsdp_full"),
        ("zero_or_fsdp", "FSDP / tensor parallel", "fsdp_full"),
        ("mlp_kind", "squared ReLU", "squared_relu"),
    ],
)
def test_other_spellings_of_a_word(tmp_path: Path, column: str, cell: str, word: str) -> None:
    (row,) = read(tmp_path, line(**{column: cell}))
    assert getattr(row, column) == word


def test_a_sharding_that_is_two_is_no_word(tmp_path: Path) -> None:
    (row,) = read(tmp_path, line(zero_or_fsdp="DDP + ZeRO-3"))
    assert isinstance(row, BadRow)
    assert "unknown word" in row.faults[0].problem


@pytest.mark.parametrize(
    ("column", "cell", "word"),
    [
        ("flash_attn", "FlashAttention-2", "y"),
        ("flash_attn", "eager", "n"),
        ("compile", "torch.compile", "y"),
        ("compile", "max-autotune", "y"),
        ("act_ckpt", "✓", "full"),
        ("act_ckpt", "per-layer", "full"),
        ("act_ckpt", "core_attn", "selective"),
        ("act_ckpt", "w/o", "none"),
        ("act_ckpt", "partial", ""),
    ],
)
def test_other_spellings_of_yes(tmp_path: Path, column: str, cell: str, word: str) -> None:
    (row,) = read_runs(table(tmp_path, f"{line()},{cell}", header=f"{HEADER},{column}"))
    assert isinstance(row, RunRow), row
    assert getattr(row, column) == word


@pytest.mark.parametrize(
    ("columns", "metric", "value"),
    [
        ({"Throughput (tokens/s/GPU)": "3000"}, "tokens_per_s_per_gpu", 3000.0),
        ({"Avg step time (s)": "2", "Median step time (s)": "3"}, "step_time_s", 2.0),  # the first
        ({"Avg step time (s)": "2", "Step time (s)": "3"}, "step_time_s", 3.0),  # what says nothing else
        ({"Time per iteration (ms)": "2500"}, "step_time_s", 2.5),
    ],
)
def test_results_whose_names_say_how_they_were_measured(
    tmp_path: Path, columns: dict[str, str], metric: str, value: float
) -> None:
    cells = {name: cell for name, cell in GOOD.items() if name not in ("metric", "value")} | columns
    (row,) = read_runs(table(tmp_path, ",".join(cells.values()), header=",".join(cells)))
    assert isinstance(row, RunRow), row
    assert (row.metric, row.value) == (metric, value)


@pytest.mark.parametrize(
    ("gpu", "gpus", "counts"),
    [
        ("8xH100", "", (8, None)),
        ("4 × A100", "4", (4, None)),
        ("8xH100", "64", (64, 8)),  # of a node
    ],
)
def test_a_gpus_name_may_begin_with_their_count(
    tmp_path: Path, gpu: str, gpus: str, counts: tuple[int, int | None]
) -> None:
    (row,) = read(tmp_path, line(gpu=gpu, n_gpus=gpus))
    assert isinstance(row, RunRow)
    assert (row.gpu, row.n_gpus, row.gpus_per_node) == (gpu[-4:], *counts)


def test_a_table_in_another_encoding_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(HEADER.encode("utf-16"))
    with pytest.raises(TableError, match=r"header: is not UTF-8 text \(save the table as UTF-8\)"):
        list(read_runs(tmp_path / "runs.csv"))


def test_a_table_of_more_rows_than_anybody_measures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "runs.csv"
    header, row, *_ = example.read_text(encoding="utf-8").splitlines(keepends=True)
    table = tmp_path / "runs.csv"
    table.write_text(header + 30 * row)
    assert measured_table._MOST_ROWS == 20_000
    monkeypatch.setattr(measured_table, "_MOST_ROWS", 30)
    assert len(read_measured(table).rows) == 30
    table.write_text(header + 31 * row)
    with pytest.raises(TableError, match="has more than 30 rows"):
        read_measured(table)
