"""The published table in plain columns: the bytes that the project carries, and what a row keeps on its way there."""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import replace
from pathlib import Path

import fabrics_in_runs
import pytest
from convert_runs import CARRIED, PLAIN, RAW, _cells, converted, zipped
from hypothesis import settings
from runs_table import meaning
from runs_table.frameworks import framework_rule

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.spec.model import Model
from simulator.studies.backtest.measured import step_seconds
from simulator.studies.backtest.resolve import resolve
from tests.examples import USUAL

LLAMA2_7B = RunRow(
    line=2,
    id="row",
    framework="somebody",
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=32,
    d_ff=11008,
    mlp_kind="swiglu",
    vocab=32000,
    seq_len=4096,
    gpu="H100",
    n_gpus=8,
    zero_or_fsdp="fsdp_full",
    micro_batch=4,
    global_batch=32,
    precision="bf16",
    act_ckpt="full",
    metric="tokens_per_s_per_gpu",
    value=512.0,
)


@pytest.mark.parametrize(("raw", "plain"), CARRIED, ids=lambda path: path.name)
def test_a_carried_table_is_what_the_converter_writes(raw: Path, plain: Path) -> None:
    """The first row of each source and software, and every seventh; all of them in nightly runs."""
    text = gzip.decompress(plain.read_bytes()).decode()
    assert zipped(text) == plain.read_bytes()
    lines = list(csv.DictReader(io.StringIO(text)))
    rows = [row for row in read_runs(raw) if isinstance(row, RunRow)]
    assert [line["id"] for line in lines] == [row.id for row in rows]
    first = {(row.source, row.framework): number for number, row in reversed(list(enumerate(rows)))}
    step = 1 if settings.default.max_examples > USUAL else 7
    for number in sorted({*first.values(), *range(0, len(rows), step)}):
        written = _cells(converted(rows[number]))
        assert {name: cell for name, cell in lines[number].items() if cell} == written


def test_a_row_means_the_same_when_it_is_read_back() -> None:
    """Every 40th row: model, plan, cluster and stack of the written cells are those of the table's own rules."""
    told = [row for row in read_runs(RAW) if isinstance(row, RunRow)][::40]
    plain = {row.id: row for row in read_runs(PLAIN) if isinstance(row, RunRow)}
    checked = 0
    for row in told:
        if plain[row.id].excluded:
            continue
        its, mine = meaning.resolve(row), resolve(plain[row.id])
        assert (mine.plan, mine.cluster, mine.micro_batches) == (its.plan, its.cluster, its.micro_batches)
        assert mine.model.num_parameters == its.model.num_parameters
        checked += 1
    assert checked > 40


def test_the_cluster_figure_in_the_notes_has_more_digits() -> None:
    row = replace(LLAMA2_7B, notes="cluster tokens/s=4099 (int-truncated)")
    assert (converted(row).metric, converted(row).value) == ("tokens_per_s", 4099)
    contradicts = converted(replace(row, notes="cluster tokens/s=9000"))
    assert (contradicts.metric, contradicts.value) == ("tokens_per_s_per_gpu", 512)


def test_maxtext_counted_half_of_attention_and_all_parameters_before_may_2024() -> None:
    """maxtext_utils.py of efb6d9e4a: 6 P tokens + 6 L H C s tokens; llama2-7b has 6,738,415,616 parameters."""
    noted = '"Expected performance results" A3 VMs (h100-80gb-8)'
    row = replace(LLAMA2_7B, framework="MaxText (JAX/XLA)", metric="model_tflops_per_gpu", value=492.0, notes=noted)
    flop = 32 * 4096 * (6 * 6_738_415_616 + 6 * 32 * 32 * 128 * 4096)
    convention = converted(row).flop_convention
    assert convention is not None
    found = step_seconds(row, 8, convention, Model.load("llama2-7b"))
    assert found == pytest.approx(flop / (8 * 492e12), rel=1e-12)
    assert framework_rule(replace(row, notes="")).flop_convention == "full_attention"


def test_what_a_job_measured_of_its_fabric_stays_with_its_row() -> None:
    settings = (("fabric.inter.all_reduce", 92.2), ("fabric.size_bytes", 2**28), ("stack.nccl.version", "2.18.6"))
    row = replace(LLAMA2_7B, framework="PyTorch FSDP2", n_gpus=32, global_batch=128, settings=settings)
    plain = converted(row)
    assert dict(settings).items() <= dict(plain.settings).items()
    cells = _cells(plain)
    assert (cells["inter_allreduce_gbps"], cells["fabric_message_bytes"], cells["nccl_version"]) == (
        "92.2",
        str(2**28),
        "2.18.6",
    )
    assert [one.bus_bytes_per_s for one in resolve(plain).cluster.fabric.measured] == [92.2e9]


def test_rows_with_a_fabric_are_told_by_node_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        replace(LLAMA2_7B, id=str(n), framework="PyTorch FSDP2", n_gpus=8 * n, global_batch=32 * n, source="ours",
                settings=(("fabric.inter.all_gather", 20.0),))
        for n in (2, 4)
    ]  # fmt: skip
    written = [_cells(converted(row)) for row in rows]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(written[0]))
        writer.writeheader()
        writer.writerows(written)
    assert fabrics_in_runs.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["2 nodes", "4 nodes", "one stage", "all"]
    without, with_numbers = (lines[3].split("|")[column] for column in (4, 6))
    assert without != with_numbers


FRAMEWORKS = {
    "foundation-model-stack/fms-acceleration": "HF Trainer + FSDP1/accelerate 1.0.1, torch 2.4.1",
    "QwenLM/Qwen README": "HF Trainer + peft<0.8 / DeepSpeed (finetune.py)",
}


@pytest.mark.parametrize(
    ("source", "notes", "said"),
    [
        (
            "foundation-model-stack/fms-acceleration",
            "framework_config=accelerated-peft-bnb-foak; PEFT LoRA r=16",
            {"peft": "qlora", "base": "nf4_double", "rank": 16, "targets": ("attention",), "dropout": 0.1},
        ),
        (
            "foundation-model-stack/fms-acceleration",
            "framework_config=none; full fine-tuning; foak = fused triton kernels (LoRA QKV/MLP)",
            {"peft": "full", "base": None, "rank": 16, "targets": ("all",), "dropout": 0.0},
        ),
        (
            "QwenLM/Qwen README",
            "method=LoRA (emb); s/it",
            {"peft": "lora", "base": None, "rank": 64, "targets": ("all",), "dropout": 0.05},
        ),
    ],
)
def test_fine_tuning_runs_say_what_is_trained(source: str, notes: str, said: dict[str, object]) -> None:
    """What the notes mean stands in columns; the row keeps its text, and its plan what the columns say."""
    row = replace(LLAMA2_7B, source=source, notes=notes, n_gpus=1, global_batch=4, framework=FRAMEWORKS[source])
    plain = converted(row)
    assert (plain.notes, plain.framework, plain.excluded) == (row.notes, row.framework, "")
    peft = resolve(plain).plan.peft
    assert {
        "peft": peft.method, "base": peft.base, "rank": peft.rank, "targets": peft.targets, "dropout": peft.dropout
    } == said  # fmt: skip
